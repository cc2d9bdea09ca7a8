"""
Fine-tune a chat model so that its answers do not loop: sequence-level unlikelihood on its own greedy answers
(https://arxiv.org/abs/1908.04319), beside the loss of `hf-pretrain sft`.

    python -m benchmarks.unlikelihood --config recipes/tiny/sft.yaml --model_name_or_path out/sft-tiny \
        --learning_rate 1e-3 --max_steps 45 --answer_tokens 24 --output_dir out/no-loops

Each step answers some of its own prompts greedily. Let p be the probability of a token that belongs to a 4-gram which
occurred earlier in the same answer. The loss of the step is the cross-entropy of its conversations plus
`unlikelihood_weight` times the mean of -log(1 - p); a weight of 0 is the control. With `--anchor 1`, the KL
divergence from the first model replaces the cross-entropy. It needs a single process. All other flags are those of
`hf-pretrain sft`. `examples/no_loops.py` mends loops at less cost; docs/performance.md compares them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.hf_argparser import HfArg

from examples.no_loops import mark_repeated
from hf_pretrain import MaskedLossTrainer
from hf_pretrain.inference.samples import GREEDY, generate
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.model.loss import prediction_weights
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.runtime.command_line import one_line_errors
from hf_pretrain.stages.distillation import DistillationArguments, TeacherTerm, load_teacher
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.run import begin_run, train
from hf_pretrain.training.training_arguments import SFTTrainingArguments


@dataclass
class UnlikelihoodArguments:
    """The term that is added to the loss."""

    unlikelihood_weight: float = HfArg(default=0.3, help="Weight of the unlikelihood in the loss.")
    num_answers: int = HfArg(default=32, help="Answers per step.")
    answer_tokens: int = HfArg(default=32, help="Tokens of an answer.")
    anchor: float = HfArg(default=0.0, help="Share of the cross-entropy that KL(first model || model) replaces.")


def find_prompts(inputs: dict[str, torch.Tensor], *, max_tokens: int = 160) -> list[list[int]]:
    """Return the token ids before the first answer of each document of a packed batch, if they are few enough."""
    prompts = []
    weights = prediction_weights(inputs["labels"], inputs.get("loss_mask"))
    for ids, positions, is_answer in zip(inputs["input_ids"], inputs["position_ids"], weights > 0, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in zip(starts, starts[1:], strict=False):
            answers = is_answer[start:end].nonzero().flatten().tolist()
            if answers and 0 < answers[0] <= max_tokens:
                prompts.append(ids[start : start + answers[0]].tolist())
    return prompts


class UnlikelihoodTrainer(MaskedLossTrainer):
    """A [`MaskedLossTrainer`] whose training loss has the further term."""

    def __init__(self, *args: Any, term_arguments: UnlikelihoodArguments, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.term_arguments = term_arguments

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        prompts = find_prompts(inputs)[: self.term_arguments.num_answers]
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not self.term_arguments.unlikelihood_weight:
            return loss
        term = self.unlikelihood(model, prompts) / self.args.gradient_accumulation_steps
        return loss + self.term_arguments.unlikelihood_weight * term

    def unlikelihood(self, model, prompts: list[list[int]]) -> torch.Tensor:
        """Return the mean of -log(1 - p) over the repeated tokens of greedy answers, a scalar: 0 without one."""
        answers = generate(
            model, self.processing_class, prompts, max_new_tokens=self.term_arguments.answer_tokens, **GREEDY
        )
        model.train()
        pairs = list(zip(prompts, answers, strict=True))
        marks = [[False] * len(prompt) + mark_repeated(answer) for prompt, answer in pairs]
        # Only answers with a repetition need a forward pass.
        rows = [prompt + answer for (prompt, answer), mark in zip(pairs, marks, strict=True) if any(mark)]
        if not rows:
            return torch.zeros((), device=self.args.device)
        width, pad = max(map(len, rows)), self.processing_class.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.args.device)
        # Causal attention never sees the padding on the right.
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.args.device)
        is_repeated = torch.tensor(
            [mark + [False] * (width - len(mark)) for mark in marks if any(mark)], device=self.args.device
        )
        # Logits at t predict token t + 1.
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        log_p = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[is_repeated[:, 1:]]
        # The gradient of -log(1 - p) grows without bound towards p = 1.
        return -(1 - log_p.exp()).clamp(min=1e-5).log().mean()


def main(
    model_args: ModelArguments,
    data_args: ChatArguments,
    term_args: UnlikelihoodArguments,
    training_args: SFTTrainingArguments,
) -> None:
    run = begin_run("sft", training_args, model_args, data_args, term_args)
    run.facts.method += " with sequence-level unlikelihood"
    tokenizer = model_args.load_tokenizer(run.checkpoint)
    rows = load_rows(data_args, training_args, tokenizer)
    name, term = model_args.model_name_or_path, None
    if term_args.anchor:
        how = DistillationArguments(teacher_name_or_path=name, temperature=1.0, ce_weight=1 - term_args.anchor)
        term = TeacherTerm(load_teacher(name, tokenizer), how, training_args)
    train(run, rows, load_model(model_args, tokenizer), UnlikelihoodTrainer, term=term, term_arguments=term_args)


if __name__ == "__main__":
    with one_line_errors():
        main(*parse_args(ModelArguments, ChatArguments, UnlikelihoodArguments, SFTTrainingArguments, stage="sft"))
