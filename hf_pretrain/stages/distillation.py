"""
Distillation: a student learns from the data and from a teacher's distribution over the next token
(https://huggingface.co/papers/1503.02531; reverse KL: https://huggingface.co/papers/2306.08543).

Let `w[t]` be the weight of predicting token `t`, and let `p` and `q` be the distributions of teacher and student at
the temperature. Then

    loss = ce_weight * sum of w * CE / sum of w
         + (1 - ce_weight) * temperature ** 2 * sum of w * KL / sum of w
         + router_aux_loss_coef * router loss

with sums over all micro-batches of all ranks, as in `training/masked_loss_trainer.py`. `KL` is `KL(p || q)` (forward)
or `KL(q || p)` (reverse). `CE` and the router loss come from the student, at temperature 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput

from ..model.loss import prediction_weights
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, as_user_errors
from ..runtime.names import check_choices
from ..tokenizer.pretrained import load_tokenizer
from ..training.deepspeed_support import whole_weights
from ..training.masked_loss_trainer import MaskedLossTrainer
from ..training.measurements import num_active_parameters
from ..training.resume_check import digest_weights


@dataclass
class DistillationArguments:
    """Teacher and loss."""

    teacher_name_or_path: str | None = field(
        default=None, metadata={"help": "Directory or Hub id of a causal language model with the same tokenizer."}
    )
    kl: str = field(
        default="forward",
        metadata={
            "help": "forward: KL(teacher || student); reverse: KL(student || teacher).",
            "choices": ("forward", "reverse"),
        },
    )
    temperature: float = field(
        default=1.5, metadata={"help": "Divisor of the logits of teacher and student in the KL term."}
    )
    ce_weight: float = field(
        default=0.5,
        metadata={"help": "Weight of the cross-entropy in the loss, from 0 to 1; the KL term has the rest."},
    )

    def __post_init__(self):
        if not self.teacher_name_or_path:
            raise UserError("Distillation needs a teacher: pass --teacher_name_or_path with a directory or Hub id.")
        check_choices(self)
        if self.temperature <= 0:
            raise UserError(f"--temperature {self.temperature:g} must be above 0.")
        if not 0 <= self.ce_weight <= 1:
            raise UserError(f"--ce_weight {self.ce_weight:g} must lie between 0 and 1.")


def load_teacher(name_or_path: str, tokenizer: PreTrainedTokenizerBase, *, is_packed: bool = True) -> PreTrainedModel:
    """
    Load the whole teacher on every rank, frozen, in float32 and in eval mode.

    Args:
        name_or_path (`str`): a directory or Hub id.
        tokenizer ([`PreTrainedTokenizerBase`]): the student's tokenizer.
        is_packed (`bool`): whether its rows will hold several documents, separated only by `position_ids`.

    Raises:
        `UserError`: if the teacher cannot be loaded; if its tokenizer is missing or differs from the student's; if
            rows are packed, and it is no MiniMind model.
    """
    check_same_vocabulary(tokenizer, load_tokenizer(name_or_path))
    with whole_weights(), as_user_errors():
        # NOTE: without a value for `trust_remote_code`, transformers asks on stdin, and a batch job cannot answer.
        teacher = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=torch.float32, trust_remote_code=False)
    if isinstance(teacher, MiniMindForCausalLM):
        teacher.set_attn_implementation("packed")
    elif is_packed:
        raise UserError(
            f"--teacher_name_or_path {name_or_path}: {type(teacher).__name__} may attend across the documents of a "
            "packed row. Pass --packing none."
        )
    # Without dropout, the teacher gives the same answers on every rank.
    return teacher.eval().requires_grad_(False)


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` if an id means different tokens in two tokenizers. The message names the first difference."""
    # Compare by id: with the same tokens in another order, the KL would compare different tokens.
    ours, theirs = ({index: token for token, index in t.get_vocab().items()} for t in (tokenizer, teacher_tokenizer))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise UserError(
                f"The teacher's vocabulary differs from the student's: id {index} is {theirs.get(index)!r} there and "
                f"{ours.get(index)!r} here ({len(theirs)} and {len(ours)} entries). Train the student with the "
                "teacher's tokenizer: --tokenizer_name_or_path."
            )


class DistillationTrainer(MaskedLossTrainer):
    """
    [`MaskedLossTrainer`] with the loss described above.

    It logs `kl_loss`, including the factor temperature squared, beside `ce_loss`, and evaluates the same figure as
    `eval_kl`. `eval_loss` remains the student's cross-entropy.

    Args:
        teacher ([`~transformers.PreTrainedModel`]): the result of [`load_teacher`], neither wrapped nor sharded.
        distillation_args ([`DistillationArguments`]): describes the loss.
    """

    def __init__(self, *args, teacher: PreTrainedModel, distillation_args: DistillationArguments, **kwargs):
        super().__init__(*args, **kwargs)
        self.distillation_args = distillation_args
        # A resume compares them, also without the recipe.
        self.args.other_arguments = (*self.args.other_arguments, distillation_args)
        # Output heads may be wider than the tokenizer, and differ in width.
        self._shared_vocab_size = min(self.model.config.vocab_size, teacher.config.vocab_size)
        # Do not make the teacher a submodule of the student, because it must not be saved, sharded or counted with it.
        self.teacher: PreTrainedModel = teacher.to(self.args.device)
        # Digest the weights, not the path: the weights in a directory may change.
        self._fixed_weights["teacher"] = digest_weights(teacher.parameters())
        # For each evaluated batch, the sum of w * KL and the sum of w.
        self._eval_divergences: list[torch.Tensor] = []
        self._teacher_log_probs = torch.empty(0)

    def _extra_flops_per_token(self) -> float:
        """Return the teacher's FLOPs per token: 2 per parameter, for a forward pass."""
        return 2 * num_active_parameters(self.teacher)

    @property
    def _skips_logits(self) -> bool:
        """False, because the divergence needs the student's logits."""
        return False

    @torch.no_grad()
    def _ask(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        Return the teacher's log-probabilities at the temperature, `(batch_size, seq_len, vocab_size)` in float32.
        """
        names = ["input_ids", "position_ids", "attention_mask"]
        given = {name: inputs[name].to(self.args.device) for name in names if name in inputs}
        if isinstance(self.teacher, MiniMindForCausalLM):
            # Without them, a MiniMind teacher would read the documents from the positions, and wait for the device.
            given |= {name: inputs[name] for name in ("cu_seq_lens_q", "max_length_q") if name in inputs}
        # As the student's forward pass.
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        with torch.autocast(self.args.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = self.teacher(**given, use_cache=False).logits
        logits = logits[..., : self._shared_vocab_size].float()
        return (logits / self.distillation_args.temperature).log_softmax(dim=-1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Ask the teacher about a micro-batch, and return its loss."""
        # In an attribute, because `MaskedLossTrainer` passes all of `inputs` to the model.
        self._teacher_log_probs = self._ask(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _divergence(self, outputs: Any, inputs: dict[str, torch.Tensor], num_items_in_batch: Any) -> torch.Tensor:
        """
        Return `temperature ** 2 * sum of w * KL / num_items_in_batch` of one micro-batch, in float32 and nats.
        """
        temperature = self.distillation_args.temperature
        # Logits at t predict token t + 1: shift the weights left by one, (batch_size, seq_len).
        weights = F.pad(prediction_weights(inputs["labels"], inputs.get("loss_mask"))[:, 1:], (0, 1))
        # (batch_size, seq_len, vocab_size)
        logits = outputs.logits[..., : self._shared_vocab_size].float()
        student, teacher = (logits / temperature).log_softmax(dim=-1), self._teacher_log_probs
        p, q = (teacher, student) if self.distillation_args.kl == "forward" else (student, teacher)
        # KL(p || q) per position, (batch_size, seq_len)
        divergences = (p.exp() * (p - q)).sum(dim=-1)
        return temperature**2 * (divergences * weights).sum() / num_items_in_batch

    def _combine_losses(self, outputs, inputs, num_items_in_batch):
        """Return the loss of the formula above, and its parts for the log."""
        loss, parts = super()._combine_losses(outputs, inputs, num_items_in_batch)
        kl_loss = self._divergence(outputs, inputs, num_items_in_batch)
        # `loss` contains the whole cross-entropy and the router loss. Replace a share of the cross-entropy by the KL.
        loss = loss + (1 - self.distillation_args.ce_weight) * (kl_loss - outputs.ce_loss)
        return loss, parts | {"kl_loss": kl_loss}

    def _add_to_evaluation(self, outputs, inputs):
        """Keep the KL and the weight of one batch of the validation set."""
        super()._add_to_evaluation(outputs, inputs)
        self._eval_divergences.append(
            # Keep a sum and divide by the total weight at the end: the mean must not depend on the batch size.
            torch.stack([self._divergence(outputs, inputs, 1.0).detach(), self._eval_weight])
        )

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """Evaluate, and add `eval_kl`: the KL over the whole validation set, in nats per token."""
        self._eval_divergences = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._eval_divergences:
            total, weight = self._add_up(self._eval_divergences)
            output.metrics[f"{metric_key_prefix}_kl"] = total / weight
        return output
