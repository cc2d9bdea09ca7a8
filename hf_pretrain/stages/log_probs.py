"""
Log-probabilities of answers on a CPU, for TRL's trainers.

TRL's head takes its own fused kernels on a GPU. On a CPU it computes logits of all tokens, although prompts and
padding have no labels. This head leaves them out, and computes the others in chunks. Weights in half precision, and
`--precompute_ref_log_probs`, still take TRL's.
"""

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..loading.adapters import base_model_of
from ..model.loss import IGNORE_INDEX, MAX_LOGITS, MIN_CHUNK
from ..runtime.errors import needing_extra


with needing_extra("trl", "This head needs TRL"):
    from trl.trainer.utils import FusedCausalLMOutput

# Figures of TRL's head. Arguments: logits `(num_tokens, vocab_size)`, their `logsumexp` and labels `(num_tokens,)`.
FIGURES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "log_probs": lambda logits, log_z, labels: logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_z,
    "entropy": lambda logits, log_z, labels: log_z - ((logits - log_z.unsqueeze(-1)).exp() * logits).sum(-1),
    "log_sum_sq_probs": lambda logits, log_z, labels: ((2 * logits).logsumexp(-1) - 2 * log_z).detach(),
    "mean_logits": lambda logits, log_z, labels: logits.detach().mean(-1),
    "is_top1": lambda logits, log_z, labels: logits.argmax(-1) == labels,
}


def score_labels(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    figures: Sequence[str],
) -> tuple[torch.Tensor, ...]:
    """
    Return figures of the logits `hidden_states @ weight.T / temperature` of each token. Only one chunk of the logits
    is in memory; the backward pass computes them again.

    Args:
        hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`): output of the last norm.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): matrix of the language-modelling head.
        labels (`torch.LongTensor` of shape `(num_tokens,)`): ids of the next tokens.
        temperature (`float`): divisor of the logits.
        figures (`Sequence[str]`): names in `FIGURES`. Each result has the shape `(num_tokens,)`.
    """

    def score(hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = (hidden_states @ weight.T).float() / temperature
        log_z = logits.logsumexp(-1)
        return tuple(FIGURES[name](logits, log_z, labels) for name in figures)

    size = max(MIN_CHUNK, MAX_LOGITS[1] // len(weight))
    chunks = zip(hidden_states.split(size), labels.split(size), strict=True)
    scored = [
        checkpoint(score, hidden, weight, chosen, use_reentrant=False, preserve_rng_state=False)
        for hidden, chosen in chunks
    ]
    return tuple(map(torch.cat, zip(*scored, strict=True)))


def replace_heads(trainer: Any, *figures: str, temperature: float = 1.0) -> None:
    """
    Replace TRL's head of policy and reference model by [`score_labels`] on a CPU, unless their weights are sharded.

    Args:
        trainer ([`RunTrainer`]): the trainer, after TRL's constructor.
        figures (`str`): what the trainer reads from the policy's head, beside log-probabilities.
        temperature (`float`): divisor of the logits.
    """
    if trainer.args.device.type != "cpu" or trainer.args.shards_weights:
        return
    options = {"accelerator": trainer.accelerator, "temperature": temperature}
    replace_head(base_model_of(trainer.model), figures=("log_probs", *figures), **options)
    if trainer.ref_model is not None:
        replace_head(trainer.accelerator.unwrap_model(trainer.ref_model), figures=("log_probs",), **options)


def replace_head(model: PreTrainedModel, *, accelerator: Accelerator, temperature: float, figures: Sequence[str]):
    """Let `model(..., labels=labels, fused_lm_head=True)` use [`score_labels`]."""
    forward = model.forward

    # `generate` reads the signature of the method.
    @functools.wraps(type(model).forward)
    def scoring_forward(model: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        weight = model.get_output_embeddings().weight
        # TRL's head adds up the gradients of weights in half precision in float32.
        if not fused_lm_head or weight.dtype != torch.float32:
            return forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        labels = kwargs.pop("labels")[:, 1:]
        with accelerator.autocast():
            states = model.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state[:, :-1]
            mask = labels != IGNORE_INDEX
            options: dict[str, Any] = {"temperature": temperature, "figures": figures}
            scored = score_labels(states[mask], weight, labels[mask], **options)
        # (num_tokens,) -> (batch_size, seq_len - 1), zero where there is no label
        whole = (figure.new_zeros(mask.shape).masked_scatter(mask, figure) for figure in scored)
        return FusedCausalLMOutput(**dict(zip(figures, whole, strict=True)))

    model.forward = MethodType(scoring_forward, model)
