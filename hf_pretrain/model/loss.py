"""
The masked, weighted cross-entropy, and the head that computes it without all logits in memory.

Let `w[t]` be the weight of predicting token `t` from the tokens before it. Then the loss of a step is

    sum of w * CE / sum of w   +   router_aux_loss_coef * sum of aux_d over documents / number of documents

The sums run over all micro-batches of all ranks. With `router_aux_loss_level="batch"`, `aux` (`router_loss.py`) is one
product of means over each micro-batch instead, and depends on its size. This file travels to the Hub with every
checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .packed_attention import compute_dtype


IGNORE_INDEX = -100
# Number of logits per chunk on a GPU and on a CPU: enough for an efficient matrix product, few enough for the cache.
MAX_LOGITS = (2**26, 2**22)
# Number of logits that a CPU turns into a loss at a time: few enough for the cache of a core.
LOGITS_IN_CACHE = 2**18
# Minimum number of tokens per chunk for any vocabulary: each chunk costs a pass over the head's gradient.
MIN_CHUNK = 256


def prediction_weights(labels: torch.Tensor, loss_mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    Return the weight of predicting each token from the tokens before it.

    Args:
        labels (`torch.LongTensor` of shape `(batch_size, seq_len)`): token ids, -100 where nothing is trained.
        loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): non-negative weights.

    Returns:
        `torch.FloatTensor` of shape `(batch_size, seq_len)`, float32. Column 0 is zero: no token comes before it.

    Raises:
        `ValueError`: if the shapes differ.
    """
    weights = (labels != IGNORE_INDEX).float()
    if loss_mask is not None:
        if loss_mask.shape != labels.shape:
            raise ValueError(
                f"loss_mask has shape {tuple(loss_mask.shape)}, labels {tuple(labels.shape)}: they must be equal. "
                "loss_mask[:, t] is the weight of predicting labels[:, t]."
            )
        weights = weights * loss_mask
    return torch.cat([torch.zeros_like(weights[:, :1]), weights[:, 1:]], dim=1)


def masked_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    Compute `sum of w * CE / num_items_in_batch` in float32; the labels are shifted inside.

    Args:
        logits (`torch.Tensor` of shape `(batch_size, seq_len, vocab_size)`): `logits[:, t]` predicts token `t + 1`.
        labels (`torch.LongTensor` of shape `(batch_size, seq_len)`): unshifted, -100 where nothing is trained.
        loss_mask (`torch.Tensor` of the shape of `labels`, *optional*): weights, aligned with `labels`.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): the divisor; the sum of the weights by default.

    Returns:
        `torch.FloatTensor`: a scalar in nats. Zero, with zero gradients, where all weights are zero.

    Raises:
        `ValueError`: if `loss_mask` and `labels` differ in shape.
    """
    targets, weights = _targets(labels, loss_mask)
    # (batch_size, seq_len, vocab_size) -> (batch_size * seq_len, vocab_size)
    token_losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return (token_losses * weights).sum() / _divisor(weights, num_items_in_batch)


class LossParts(NamedTuple):
    """A loss and its parts, scalars in nats. The parts have no gradients if there are two."""

    loss: torch.Tensor
    ce_loss: torch.Tensor
    token_loss: torch.Tensor | None = None


def whole_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, token_loss: "TokenLoss | None" = None, **weighting
) -> LossParts:
    """Compute the loss of [`linear_loss`] from all logits, of shape `(batch_size, seq_len, vocab_size)`."""
    ce_loss = masked_cross_entropy(logits, labels, **weighting)
    if token_loss is None:
        return LossParts(ce_loss, ce_loss)
    divisor = _divisor(_targets(labels, weighting.get("loss_mask"))[1], weighting.get("num_items_in_batch"))
    part = token_loss.loss(logits.flatten(0, 1)[token_loss.tokens].float(), slice(None)) / divisor
    return LossParts((1 - token_loss.share) * ce_loss + token_loss.share * part, ce_loss, part)


def linear_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    token_loss: "TokenLoss | None" = None,
    compute: "Callable[..., torch.Tensor] | None" = None,
) -> LossParts:
    """
    Compute `masked_cross_entropy(hidden_states @ weight.T, ...)` without holding the logits of all tokens in memory.

    The logits of a chunk of tokens become a loss and, if autograd needs them, gradients; then they are freed.

    NOTE: torch's `linear_cross_entropy` and Liger's accept weights per class, not per token. torch's can return a loss
    per token, but then it computes the logits twice: 2.4 to 3 times as long as this on a CPU in bfloat16.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`): output of the last norm.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): matrix of the language-modelling head.
        labels, loss_mask, num_items_in_batch: as in [`masked_cross_entropy`].
        token_loss ([`TokenLoss`], *optional*): a loss that replaces a share of the cross-entropy.
        compute (`Callable`, *optional*): [`cross_entropy`], compiled.

    Raises:
        `ValueError`: if `loss_mask` and `labels` differ in shape.
    """
    targets, weights = _targets(labels, loss_mask)
    tokens, share = (weighted_tokens(weights), 0.0) if token_loss is None else (token_loss.tokens, token_loss.share)
    own = _CrossEntropy(targets[tokens], weights[tokens], 1 - share, compute or cross_entropy)
    losses = [own] if token_loss is None else [own, token_loss]
    if not torch.is_grad_enabled():
        # NOTE: inside `autograd.Function.forward` gradients are always disabled, and `ctx.needs_input_grad` ignores
        # `torch.no_grad()` around the call. Detached inputs set `needs_input_grad` to False.
        hidden_states, weight = hidden_states.detach(), weight.detach()
    divisor = _divisor(weights, num_items_in_batch)
    sums = _LinearLoss.apply(hidden_states.flatten(0, 1)[tokens], weight, losses)
    loss, *parts = (each / divisor for each in sums)
    return LossParts(loss, loss) if token_loss is None else LossParts(loss, *parts)


def weighted_tokens(weights: torch.Tensor) -> torch.Tensor | slice:
    """
    Return an index of the tokens whose weight, in a tensor of shape `(num_tokens,)`, is not 0. Most tokens of
    conversations have no weight.

    This is for CPUs. On a GPU, the host would wait for the number of tokens, so there the index is that of all tokens.
    """
    waits = weights.device.type != "cpu" or torch.compiler.is_compiling()
    return slice(None) if waits else weights.nonzero().squeeze(-1)


def _targets(labels: torch.Tensor, loss_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the token that each position predicts and its weight, both of shape `(batch_size * seq_len,)`.

    This shifts the labels by one. Shifting the logits instead would copy them.
    """
    # The last position of a row predicts nothing: its weight is 0 and its target is ignored.
    weights = F.pad(prediction_weights(labels, loss_mask)[:, 1:], (0, 1)).flatten()
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten(), weights


def _divisor(weights: torch.Tensor, num_items_in_batch: torch.Tensor | float | None) -> torch.Tensor | float:
    """Return `num_items_in_batch`, or the sum of `weights` `(batch_size * seq_len,)` where the caller gave none."""
    if num_items_in_batch is not None:
        return num_items_in_batch
    # A batch whose weights are all zero contributes 0 instead of 0 / 0. An `if` would wait for the GPU; `where` does
    # not.
    return torch.where(weights.sum() > 0, weights.sum(), 1.0)


@dataclass
class TokenLoss:
    """
    A loss that replaces a share of the cross-entropy, such as a teacher's. The head computes both in chunks of tokens.

    Args:
        tokens (`torch.LongTensor` or `slice`): index, among the `batch_size * seq_len` tokens of a micro-batch, of
            those that have a weight ([`weighted_tokens`]).
        loss (`Callable`): takes logits of shape `(num_tokens, vocab_size)` in float32 and the index of these tokens
            among `tokens`, and returns the sum of their weighted losses, a scalar in float32.
        share (`float`): the share, from 0 to 1.
    """

    tokens: torch.Tensor | slice
    loss: Callable[[torch.Tensor, slice], torch.Tensor]
    share: float

    def differentiate(self, logits: torch.Tensor, part: slice, gradient: torch.Tensor | None) -> torch.Tensor:
        """
        Return the sum of the losses of logits `(num_tokens, vocab_size)`, and add the share of its gradient by the
        logits to `gradient`, if there is one.
        """
        logits = logits.float().requires_grad_(gradient is not None)
        with torch.set_grad_enabled(gradient is not None):
            total = self.loss(logits, part)
        if gradient is not None:
            gradient.add_(torch.autograd.grad(total, logits)[0], alpha=self.share)
        return total.detach()


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor | None
) -> torch.Tensor:
    """
    Return `sum of weights * CE(logits, targets)` in float32, and write its gradient by the logits into `gradient`.

    Args:
        logits (`torch.Tensor` of shape `(num_tokens, vocab_size)`), targets, weights (of shape `(num_tokens,)`)
        gradient (`torch.Tensor` of the shape of `logits`, *optional*): of any float dtype.
    """
    # A label of -100 has weight 0, so any valid index may replace it.
    targets, weights = targets.masked_fill(targets == IGNORE_INDEX, 0).unsqueeze(-1), weights.unsqueeze(-1)
    logits = logits.float()
    logits = logits - logits.amax(dim=-1, keepdim=True)
    chosen = logits.gather(-1, targets)
    # In place, and one exponential for both results: each pass over the logits costs as much as computing with them.
    exponentials = logits.exp_()
    sums = exponentials.sum(dim=-1, keepdim=True)
    if gradient is not None:
        # d CE / d logits = softmax - one_hot
        gradient.copy_(exponentials.mul_(weights / sums))
        gradient.scatter_(-1, targets, ((chosen.exp() / sums - 1) * weights).to(gradient.dtype))
    return ((sums.log() - chosen) * weights).sum()


class _CrossEntropy(NamedTuple):
    """The cross-entropy of tokens, whose targets and weights have the shape `(num_tokens,)`."""

    targets: torch.Tensor
    weights: torch.Tensor
    share: float
    compute: Callable[..., torch.Tensor]

    def differentiate(self, logits: torch.Tensor, part: slice, gradient: torch.Tensor | None) -> torch.Tensor:
        """As [`TokenLoss.differentiate`], but replace what stands in `gradient`."""
        # What is compiled is one pass over the logits anyway, and each call checks its guards.
        in_blocks = logits.device.type == "cpu" and self.compute is cross_entropy
        size = max(1, LOGITS_IN_CACHE // logits.shape[-1]) if in_blocks else len(logits)
        columns = [logits, self.targets[part], self.weights[part], *([] if gradient is None else [gradient])]
        blocks = zip(*(column.split(size) for column in columns), strict=True)
        total = sum(self.compute(*block, *([None] if gradient is None else [])) for block in blocks)
        if gradient is not None and self.share != 1:
            gradient.mul_(self.share)
        return total


class _LinearLoss(torch.autograd.Function):
    """
    The sum of losses of the logits `hidden_states @ weight.T`, each times its share, and the sum of each loss. The
    gradient of the first result is computed in the forward pass; the others have none.

    Loss and gradients need the same logits, so computing both at once saves a second matrix product per chunk.
    Backward multiplies the stored gradients by the gradient of the sum.

    Shapes: `hidden_states` `(num_tokens, hidden_size)`, `weight` `(vocab_size, hidden_size)`, the results are scalars.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, losses: list["_CrossEntropy | TokenLoss"]):
        device = hidden_states.device.type
        # Cast as autocast would, once instead of once per chunk.
        hidden, matrix = (part.to(compute_dtype(part)) for part in (hidden_states, weight))
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        chunk_size = max(MIN_CHUNK, MAX_LOGITS[1 if device == "cpu" else 0] // len(weight))
        num_tokens = len(hidden)
        if device == "cpu":
            # NOTE: oneDNN keeps a primitive, about 1 MB, for each new shape. Zeros fill up the last chunk to a
            # size with three leading bits: at most 4 sizes between two powers of two.
            last = num_tokens % chunk_size
            hidden = F.pad(hidden, (0, 0, 0, -last % (1 << max(0, last.bit_length() - 3))))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # The sum over chunks needs float32: in bfloat16 small terms would be rounded away.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        sums = [hidden.new_zeros((), dtype=torch.float32) for _ in losses]
        with torch.autocast(device, enabled=False):
            for start in range(0, num_tokens, chunk_size):
                chunk, part = slice(start, start + chunk_size), slice(start, min(start + chunk_size, num_tokens))
                size = part.stop - start
                logits, grad_logits = hidden[chunk] @ matrix.T, None
                if wants_hidden or wants_weight:
                    # Two gradients are summed before they are rounded.
                    dtype = hidden.dtype if len(losses) == 1 else torch.float32
                    grad_logits = torch.empty_like(logits, dtype=dtype)
                    grad_logits[size:] = 0
                grad_part = None if grad_logits is None else grad_logits[:size]
                for total, loss in zip(sums, losses, strict=True):
                    total += loss.differentiate(logits[:size], part, grad_part)
                if grad_logits is None:
                    continue
                grad_logits = grad_logits.to(hidden.dtype)
                if wants_hidden:
                    # Write into the result, so that no second buffer of this size is needed.
                    torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
                if wants_weight and hidden.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[chunk])  # one pass over the sum instead of two
                elif wants_weight:
                    grad_weight += grad_logits.T @ hidden[chunk]
        ctx.save_for_backward(None if grad_hidden is None else grad_hidden[:num_tokens], grad_weight)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        ctx.mark_non_differentiable(*sums)
        return sum(loss.share * total for loss, total in zip(losses, sums, strict=True)), *sums

    @staticmethod
    def backward(ctx, grad_total, *_):
        # A saved gradient is None where its input needed none.
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(g if g is None else (g * grad_total).to(dtype) for g, dtype in gradients), None


class MiniMindLMHead(nn.Linear):
    """Language-modelling head: returns logits or, given labels, the loss without all logits in memory."""

    # Compiled, or `None` for [`cross_entropy`] itself.
    _cross_entropy: Callable[..., torch.Tensor] | None = None

    def compile(self, **options: Any) -> None:
        """Compile the cross-entropy, which is then one pass over the logits."""
        self._cross_entropy = torch.compile(cross_entropy, **options)

    def __getstate__(self) -> dict[str, Any]:
        # As torch does with compiled layers: what is compiled cannot be pickled.
        return {name: value for name, value in super().__getstate__().items() if name != "_cross_entropy"}

    def forward(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, **kwargs
    ) -> torch.Tensor | LossParts:
        """
        Return logits or, given labels, the loss and its parts.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`)
            labels (`torch.LongTensor` of shape `(batch_size, seq_len)`, *optional*): as in [`linear_loss`], which
                takes `kwargs` and computes the loss.
        """
        if labels is None:
            return super().forward(hidden_states)
        return linear_loss(hidden_states, self.weight, labels, compute=self._cross_entropy, **kwargs)
