"""
The report at the end of a run: validation metrics beside a baseline, samples and the next command. The model card
shows the same figures on the Hub.
"""

import itertools
import json
import shlex
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..hub.model_card import RunFacts
from ..model.presets import PRESETS
from ..reports.run_files import RECORD_NAME, REPORT_NAME, Run, read_launches
from ..runtime.metrics import HEADLINES, named_figures
from ..tokenizer.control_tokens import encode_prompt
from .run_directory import RunDirectory
from .training_arguments import LMTrainingArguments, optimizer_name


logger = logging.get_logger(__name__)

# The usual next stage after each stage.
NEXT_STAGES = {"pretrain": "sft", "sft": "dpo", "distill": "dpo", "dpo": "grpo"}


def unigram_loss(train_rows: datasets.Dataset, eval_rows: datasets.Dataset, *, vocab_size: int) -> float:
    """
    Return the validation loss in nats per token of a unigram model, the baseline that a language model has to beat.

    The unigram model predicts each token by its frequency in the training rows, with add-one smoothing. As in
    training, the first token of a document is not predicted.

    Args:
        train_rows, eval_rows ([`~datasets.Dataset`]): packed rows with `input_ids` and `seq_lengths`.
        vocab_size (`int`): number of tokens in the vocabulary.
    """
    # Delete the first token of each document.
    train_tokens, eval_tokens = (np.delete(*_tokens_and_starts(rows)) for rows in (train_rows, eval_rows))
    counts = 1 + np.bincount(train_tokens, minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[eval_tokens].mean())


def _tokens_and_starts(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens of packed rows, shape `(num_tokens,)`, and the index of each document's first token."""
    # Arrow columns flatten without a Python object per token.
    table = rows.with_format("arrow")[:]
    tokens, lengths = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "seq_lengths"))
    return tokens, np.cumsum(lengths, dtype=np.int64) - lengths


def sample_continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eval_rows: datasets.Dataset, *, num_samples: int = 3
) -> list[tuple[str, str]]:
    """
    Return pairs of prompt and continuation for documents of the validation set. All ranks of a sharded model must call
    this function with the same arguments.

    Args:
        eval_rows ([`~datasets.Dataset`]): packed rows of the validation set.
        num_samples (`int`): number of documents. A prompt has 16 tokens, or half the document if that is shorter.
    """
    tokens, starts = _tokens_and_starts(eval_rows)
    ends = np.append(starts[1:], len(tokens))
    samples = []
    # Evenly spaced documents come from different sources: the set follows the order of `--dataset_name`.
    for number in np.linspace(0, len(starts) - 1, num_samples).astype(int):
        length = max(2, min(16, (ends[number] - starts[number]) // 2))
        prompt = tokens[starts[number] : starts[number] + length]
        (continuation,) = generate(model, tokenizer, [prompt], max_new_tokens=48)
        samples.append(tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, continuation)))
    return samples


def format_preview(rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> str:
    """
    Return rows as text for a terminal. Tokens of weight 1 are green, tokens of another positive weight are yellow, and
    tokens without loss have no colour.

    Args:
        rows (`Iterable[dict]`): rows with `input_ids`, `seq_lengths` and optionally `loss_mask`.
        num_rows (`int`): number of rows to show.
    """
    lines = []
    for row in itertools.islice(rows, num_rows):
        lines.append(f"--- a row of {len(row['input_ids'])} tokens, {len(row['seq_lengths'])} documents\n")
        # An entry of `loss_mask` weighs the prediction of the token at the same index.
        weights = row.get("loss_mask", [1] * len(row["input_ids"]))
        runs = itertools.groupby(zip(weights, row["input_ids"], strict=True), key=lambda pair: pair[0])
        for weight, run in runs:
            text = tokenizer.decode([token for _, token in run])
            colour = "\033[32m" if weight == 1 else "\033[33m"
            lines[-1] += f"{colour}{text}\033[0m" if weight else text
    return "\n".join(lines)


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: datasets.Dataset,
    *,
    num_samples: int = 3,
) -> list[tuple[str, str]]:
    """
    Return pairs of question and answer for questions of validation conversations or preferences. An answer includes
    its stop token, which shows whether the model learnt to stop. All ranks of a sharded model must call this function
    with the same arguments.

    Args:
        conversations ([`~datasets.Dataset`]): the conversations or preferences, as JSON in the column `text`.
        num_samples (`int`): number of conversations.
    """
    return [
        (question, tokenizer.decode(generate(model, tokenizer, [prompt], max_new_tokens=64)[0]))
        for question, prompt in choose_questions(tokenizer, conversations, num_samples)
    ]


def choose_questions(
    tokenizer: PreTrainedTokenizerBase, conversations: datasets.Dataset, number: int, *, max_tokens: int = 512
) -> list[tuple[str, list[int]]]:
    """
    Return questions of at most `number` evenly spaced conversations with the prompts of their answers. A prompt of
    more than `max_tokens` loses its beginning.
    """
    questions = []

    def says(message: dict[str, Any]) -> bool:
        return message["role"] == "assistant"

    # Fewer conversations are not asked twice: repeated answers would count as repetition.
    for index in np.unique(np.linspace(0, len(conversations) - 1, number).astype(int)):
        record = json.loads(conversations[int(index)]["text"])
        # A preference has a prompt. The prompt of a conversation ends before the first answer, after any greeting.
        messages = record.get("prompt") or list(
            itertools.takewhile(lambda message: not says(message), itertools.dropwhile(says, record["messages"]))
        )
        questions.append((messages[-1]["content"], encode_prompt(tokenizer, messages)[-max_tokens:]))
    return questions


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int] | np.ndarray],
    *,
    max_new_tokens: int,
    **settings: Any,
) -> list[list[int]]:
    """
    Return the token ids that follow each prompt, up to the stop token. By default they are sampled; the same prompts,
    model and `settings` of `generate` always give the same ids.
    """
    model.eval()
    settings = settings or {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    # Shorter prompts begin with padding, so that all answers begin at the same position.
    width = max(map(len, prompts))
    rows = [[*[tokenizer.pad_token_id] * (width - len(prompt)), *prompt] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long().to(model.device)
    # `generate` draws only torch's random numbers. The training must not depend on the texts.
    device_type = model.device.type
    kept_random = torch.random.fork_rng([] if device_type == "cpu" else [model.device], device_type=device_type)
    # A compiled layer would be compiled again for each length of the growing text.
    with kept_random, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        # Seed each call, so that its texts do not depend on earlier calls. This seeds the generators of all devices.
        torch.manual_seed(0)
        output = model.generate(
            torch.tensor(rows, device=model.device).long(),
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    answers = output[:, width:].tolist()
    eos = tokenizer.eos_token_id
    return [answer[: answer.index(eos) + 1] if eos in answer else answer for answer in answers]


def format_report(
    args: LMTrainingArguments,
    facts: RunFacts,
    metrics: dict[str, float],
    samples: list[tuple[str, str]],
    *,
    start: dict[str, float] | None = None,
    push_report: str | None = None,
) -> str:
    """
    Return the report that a training recipe prints at its end.

    Args:
        args ([`LMTrainingArguments`]), facts ([`~hub.model_card.RunFacts`]): the arguments and facts of the run.
        metrics (`dict[str, float]`): validation metrics.
        samples (`list[tuple[str, str]]`): prompts and generated texts.
        start (`dict[str, float]`, *optional*): validation metrics from before the first step, shown beside the others.
        push_report (`str`, *optional*): one line about the push.
    """
    rows = [
        ("Checkpoint", str(args.output_dir)),
        ("Optimizer", f"{optimizer_name(args)}, learning rate {args.learning_rate:g}"),
    ]
    for metric in HEADLINES:
        if metric.key in metrics:
            figure = f"{metrics[metric.key]:.4f} {metric.unit_in(facts.loss_unit)}".rstrip()
            if metric.key == "eval_loss" and facts.unigram_loss is not None:
                figure += f" (a unigram model: {facts.unigram_loss:.4f})"
            elif start and metric.key in start:
                figure += f" ({start[metric.key]:.4f} before)"
            rows.append((metric.label[0].upper() + metric.label[1:], figure))
    rows += [(label[0].upper() + label[1:], f"{metrics[key]:.4f}") for key, label in named_figures(metrics).items()]
    rows += [("Sample", f"{prompt!r} -> {continuation!r}") for prompt, continuation in samples]
    rows += next_commands(args, facts)
    if push_report is not None:
        rows.append(("Hub", push_report))
    width = max(18, *(len(label) for label, _ in rows))
    return "\n".join(["", *(f"{label:<{width}} {text}" for label, text in rows)])


def next_commands(args: LMTrainingArguments, facts: RunFacts) -> list[tuple[str, str]]:
    """
    Return the commands that a user may run next with the trained model, as pairs of label and command.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        facts ([`~hub.model_card.RunFacts`]): the recipe and the kind of data decide the next stage.
    """
    # A distillation on text gives a base model, as pretraining does.
    stage = NEXT_STAGES.get("pretrain" if facts.data_kind == "text" else facts.recipe)
    output_dir = str(args.output_dir).rstrip("/")
    if facts.recipe == "reward":
        policy = ["--model_name_or_path", facts.base_model] if facts.base_model else []
        return [("Next stage", shlex.join(["hf-pretrain", "grpo", "--rewards", output_dir, *policy]))]
    model = ["--model_name_or_path", output_dir]
    commands = [("Talk to it", ["hf-pretrain", "chat", *model])]
    if stage is not None:
        preset = Path(args.config).parent.name if args.config else None
        words = ["--preset", preset] if preset in PRESETS else []
        commands.append(
            ("Next stage", ["hf-pretrain", stage, *words, *model, "--output_dir", f"{output_dir}-{stage}"])
        )
    return [(label, shlex.join(words)) for label, words in commands]


def write_run_page(args: LMTrainingArguments, state: TrainerState, *, stopped: str | None = None) -> None:
    """
    Write `report.html` of a run of a recipe. Only the main process calls it. No failure ends the run.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        state ([`~transformers.TrainerState`]): the state with the log.
        stopped (`str`, *optional*): why the run stops, for its record.
    """
    output_dir = Path(args.output_dir)
    try:
        if not (output_dir / RECORD_NAME).is_file():
            return
        if stopped is not None:
            RunDirectory(args).record(stopped=f"after step {state.global_step}: {stopped}")
        from ..reports.page import write_page

        run = Run(output_dir.resolve().name, read_launches(output_dir), state.log_history)
        write_page([run], output_dir / REPORT_NAME)
    except Exception as error:
        # The run matters more than its page.
        logger.warning(f"The page of {output_dir} could not be written: {error}. `hf-pretrain compare` writes it.")


def describe_training(args: LMTrainingArguments, state: TrainerState, layout: str) -> list[tuple[str, str]]:
    """
    Return rows `(name, value)` that describe how a run was trained, for a table in its model card. `layout` is the
    layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
    """
    not_sharded = "DDP" if args.world_size > 1 else "one process"
    sharding = {"FSDP": "FSDP2", "one file": not_sharded}.get(layout, f"DeepSpeed {layout}")
    schedule = SchedulerType(args.lr_scheduler_type).value
    schedule_kwargs = args.lr_scheduler_kwargs or {}
    return [
        ("tokens seen", f"{state.num_input_tokens_seen:,}"),
        ("optimizer steps", f"{state.global_step:,}"),
        ("sequences per step", f"{args.rows_per_step}"),
        ("learning rate", f"{args.learning_rate:g}, warmup {args.warmup_steps:g}, {schedule} {schedule_kwargs or ''}"),
        (
            "optimizer",
            f"{optimizer_name(args)}, betas ({args.adam_beta1:g}, {args.adam_beta2:g}), weight decay "
            f"{args.weight_decay:g}, largest norm of the gradients {args.max_grad_norm:g} (0: not clipped)",
        ),
        ("seed", f"{args.seed}"),
        ("launcher", f"{args.launcher}, {sharding}"),
        ("hardware", args.launch_description),
        ("versions", ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hf_pretrain"))),
    ]
