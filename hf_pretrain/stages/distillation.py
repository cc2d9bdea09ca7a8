"""
Distillation: a student learns from the data and from a teacher's distribution over the next token
(https://huggingface.co/papers/1503.02531; reverse KL: https://huggingface.co/papers/2306.08543).

Let `w[t]` be the weight of predicting token `t`, and let `p` and `q` be the distributions of teacher and student at
the temperature. Then

    loss = ce_weight * sum of w * CE / sum of w
         + (1 - ce_weight) * temperature ** 2 * sum of w * KL / sum of w
         + router_aux_loss_coef * router loss

with sums over all micro-batches of all ranks, as in `training/step_loss.py`. `KL` is `KL(p || q)` (forward)
or `KL(q || p)` (reverse). `CE` and the router loss come from the student, at temperature 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..loading.model import load_any_model
from ..model.loss import TokenLoss, prediction_weights, weighted_tokens
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.flags import check_flags, content_flag, flag
from ..tokenizer.pretrained import load_tokenizer
from ..training.deepspeed_support import whole_weights
from ..training.measurements import num_active_parameters
from ..training.training_arguments import LMTrainingArguments


logger = logging.get_logger(__name__)


@dataclass
class DistillationArguments:
    """Teacher and loss."""

    teacher_name_or_path: str | None = content_flag(
        None,
        "Directory or Hub id of a causal language model with the same tokenizer.",
        names="model",
        form="What to train: Teacher",
    )
    kl: str = flag(
        "forward", "forward: KL(teacher || student); reverse: KL(student || teacher).", choices=("forward", "reverse")
    )
    temperature: float = flag(1.5, "Divisor of the logits of teacher and student in the KL term.", bounds="above 0")
    ce_weight: float = flag(
        0.5,
        "Weight of the cross-entropy in the loss, from 0 to 1; the KL term has the rest.",
        bounds="at least 0 and at most 1",
    )

    def __post_init__(self):
        if not self.teacher_name_or_path:
            raise UserError("Distillation needs a teacher: pass --teacher_name_or_path with a directory or Hub id.")
        check_flags(self)


def load_teacher(name_or_path: str, tokenizer: PreTrainedTokenizerBase, *, is_packed: bool = True) -> PreTrainedModel:
    """
    Load the whole teacher on every rank, frozen, in float32 and in eval mode.

    Args:
        name_or_path (`str`): a directory, Hub id, GGUF file or model of the package index.
        tokenizer ([`PreTrainedTokenizerBase`]): the student's tokenizer.
        is_packed (`bool`): whether its rows will hold several documents, separated only by `position_ids`.

    Raises:
        `UserError`: if the teacher cannot be loaded; if its tokenizer is missing or differs from the student's; if
            rows are packed, and it is no MiniMind model.
    """
    check_same_vocabulary(tokenizer, load_tokenizer(name_or_path))
    with whole_weights():
        teacher = load_any_model(name_or_path, dtype=torch.float32)
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
    """Raise `UserError` if an id means different tokens in two tokenizers. The message names the first difference."""
    # Compare by id: with the same tokens in another order, the KL would compare different tokens.
    ours, theirs = ({index: token for token, index in t.get_vocab().items()} for t in (tokenizer, teacher_tokenizer))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise UserError(
                f"The teacher's vocabulary differs from the student's: id {index} is {theirs.get(index)!r} there and "
                f"{ours.get(index)!r} here ({len(theirs)} and {len(ours)} entries). Train the student with the "
                "teacher's tokenizer: --tokenizer_name_or_path."
            )


def ask(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], tokens: torch.Tensor | slice, dtype: torch.dtype
) -> Callable[[slice], torch.Tensor]:
    """
    Ask a model about a micro-batch, without gradients.

    Args:
        model ([`~transformers.PreTrainedModel`]): neither wrapped nor sharded.
        inputs (`dict[str, torch.Tensor]`): the micro-batch.
        tokens (`torch.LongTensor` or `slice`): index among its `batch_size * seq_len` tokens.
        dtype (`torch.dtype`): dtype of the matrix products.

    Returns:
        `Callable`: takes an index of some of `tokens`, and returns their logits, `(num_tokens, vocab_size)`.
    """
    names = ["input_ids", "position_ids", "attention_mask"]
    is_ours = isinstance(model, MiniMindForCausalLM)
    if is_ours:
        # Without them, a MiniMind model would read the documents from the positions, and wait for the device.
        names += ["cu_seq_lens_q", "max_length_q"]
    given = {name: inputs[name] for name in names if name in inputs}
    with torch.no_grad(), torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if not is_ours:
            # Others may scale or cap their logits, so these are computed whole.
            logits = model(**given, use_cache=False).logits.flatten(0, 1)[tokens]
            return lambda part: logits[part]
        states = model.model(**given, use_cache=False).last_hidden_state.flatten(0, 1)[tokens]
        # Cast once, not once per chunk.
        states, matrix = states.to(dtype), model.lm_head.weight.to(dtype)
        return lambda part: states[part] @ matrix.T


def divergence_loss(
    tokens: torch.Tensor | slice,
    weights: torch.Tensor,
    other_logits: Callable[[slice], torch.Tensor],
    *,
    share: float,
    temperature: float = 1.0,
    kl: str = "forward",
) -> TokenLoss:
    """
    Return `temperature ** 2 * sum of w * KL` of one micro-batch, in nats, for the model to compute.

    Args:
        tokens, share: as in [`~model.loss.TokenLoss`].
        weights (`torch.Tensor` of shape `(num_tokens,)`): the weight of each of `tokens`.
        other_logits (`Callable`): the result of [`ask`] for the other model.
        temperature, kl: as in [`DistillationArguments`].
    """

    def divergence(logits: torch.Tensor, part: slice) -> torch.Tensor:
        with torch.no_grad():
            other = other_logits(part)
        # Output heads may be wider than the tokenizer, and differ in width.
        vocab_size = min(logits.shape[-1], other.shape[-1])
        # (num_tokens, vocab_size)
        own, other = ((each[:, :vocab_size].float() / temperature).log_softmax(dim=-1) for each in (logits, other))
        p, q = (other, own) if kl == "forward" else (own, other)
        # KL(p || q) per token, (num_tokens,)
        divergences = (p.exp() * (p - q)).sum(dim=-1)
        return temperature**2 * (divergences * weights[part]).sum()

    return TokenLoss(tokens, divergence, share)


class TeacherTerm:
    """
    The KL term of the loss described above ([`~training.step_loss.Term`]), which asks the teacher about each
    micro-batch. Its logs are `kl_loss` and `eval_kl`, including the factor temperature squared.

    Args:
        teacher ([`~transformers.PreTrainedModel`]): the result of [`load_teacher`], neither wrapped nor sharded.
        arguments ([`DistillationArguments`]): describes the loss.
        args ([`LMTrainingArguments`]): gives the device and the precision.
    """

    name = "kl_loss"

    def __init__(self, teacher: PreTrainedModel, arguments: DistillationArguments, args: LMTrainingArguments):
        self.arguments = arguments
        # Do not make the teacher a submodule of the student, because it must not be saved, sharded or counted with it.
        self.teacher = teacher.to(args.device)
        # 2 per parameter, for a forward pass.
        self.flops_per_token = 2 * num_active_parameters(teacher)
        # The weights, not the path: the weights in a directory may change.
        self.weights = {"teacher": list(teacher.parameters())}
        # As the student's forward pass.
        self.dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32

    def __call__(self, inputs: dict[str, torch.Tensor]) -> TokenLoss:
        """Return the divergence from the teacher in one micro-batch."""
        # Logits at t predict token t + 1: shift the weights left by one, (batch_size * seq_len,).
        weights = F.pad(prediction_weights(inputs["labels"], inputs.get("loss_mask"))[:, 1:], (0, 1)).flatten()
        tokens, about = weighted_tokens(weights), self.arguments
        logits = ask(self.teacher, inputs, tokens, self.dtype)
        return divergence_loss(
            tokens,
            weights[tokens],
            logits,
            share=1 - about.ce_weight,
            temperature=about.temperature,
            kl=about.kl,
        )
