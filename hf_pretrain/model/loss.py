"""
The masked, weighted cross-entropy, the router loss, and the documents that the router loss averages over.

Let `w[t]` be the weight of predicting token `t` from the tokens before it. Then the loss of a step is

    sum of w * CE / sum of w   +   router_aux_loss_coef * sum of aux_d over documents / number of documents

The sums run over all micro-batches of all ranks. With `router_aux_loss_level="batch"`, `aux` is one product of means
over each micro-batch instead, and depends on its size. This file travels to the Hub with every checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .packed_attention import compute_dtype


IGNORE_INDEX = -100
# Number of logits per chunk on a GPU and on a CPU: enough for an efficient matrix product, few enough for the cache.
MAX_LOGITS = (2**26, 2**22)
# Minimum number of tokens per chunk for any vocabulary: each chunk costs a pass over the head's gradient.
MIN_ROWS = 256


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
    row_loss: torch.Tensor | None = None


def whole_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, row_loss: "RowLoss | None" = None, **weighting
) -> LossParts:
    """Compute the loss of [`linear_loss`] from all logits, of shape `(batch_size, seq_len, vocab_size)`."""
    ce_loss = masked_cross_entropy(logits, labels, **weighting)
    if row_loss is None:
        return LossParts(ce_loss, ce_loss)
    divisor = _divisor(_targets(labels, weighting.get("loss_mask"))[1], weighting.get("num_items_in_batch"))
    part = row_loss.loss(logits.flatten(0, 1)[row_loss.rows].float(), slice(None)) / divisor
    return LossParts((1 - row_loss.share) * ce_loss + row_loss.share * part, ce_loss, part)


def linear_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
    row_loss: "RowLoss | None" = None,
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
        row_loss ([`RowLoss`], *optional*): a loss that replaces a share of the cross-entropy.

    Raises:
        `ValueError`: if `loss_mask` and `labels` differ in shape.
    """
    targets, weights = _targets(labels, loss_mask)
    rows, share = (weighted_rows(weights), 0.0) if row_loss is None else (row_loss.rows, row_loss.share)
    losses = [_CrossEntropy(targets[rows], weights[rows], 1 - share), *([] if row_loss is None else [row_loss])]
    if not torch.is_grad_enabled():
        # NOTE: inside `autograd.Function.forward` gradients are always disabled, and `ctx.needs_input_grad` ignores
        # `torch.no_grad()` around the call. Detached inputs set `needs_input_grad` to False.
        hidden_states, weight = hidden_states.detach(), weight.detach()
    divisor = _divisor(weights, num_items_in_batch)
    sums = _LinearLoss.apply(hidden_states.flatten(0, 1)[rows], weight, losses)
    loss, *parts = (each / divisor for each in sums)
    return LossParts(loss, loss) if row_loss is None else LossParts(loss, *parts)


def weighted_rows(weights: torch.Tensor) -> torch.Tensor | slice:
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
class RowLoss:
    """
    A loss that replaces a share of the cross-entropy, such as a teacher's. The head computes both in chunks of tokens.

    Args:
        rows (`torch.LongTensor` or `slice`): index, among the `batch_size * seq_len` tokens of a micro-batch, of those
            that have a weight ([`weighted_rows`]).
        loss (`Callable`): takes logits of shape `(num_tokens, vocab_size)` in float32 and the index of these tokens
            among `rows`, and returns the sum of their weighted losses, a scalar in float32.
        share (`float`): the share, from 0 to 1.
    """

    rows: torch.Tensor | slice
    loss: Callable[[torch.Tensor, slice], torch.Tensor]
    share: float

    def differentiate(self, logits: torch.Tensor, part: slice, wants_gradient: bool) -> tuple:
        """Return the sum of the losses, and its gradient by the logits if it is wanted."""
        with torch.set_grad_enabled(wants_gradient):
            total = self.loss(logits.requires_grad_(wants_gradient), part)
        return total.detach(), torch.autograd.grad(total, logits)[0] if wants_gradient else None


class _CrossEntropy(NamedTuple):
    """`sum of weights * CE(logits, targets)`, whose targets and weights have the shape `(num_tokens,)`."""

    targets: torch.Tensor
    weights: torch.Tensor
    share: float

    def differentiate(self, logits: torch.Tensor, part: slice, wants_gradient: bool) -> tuple:
        targets, weights = self.targets[part], self.weights[part]
        log_probs = logits.log_softmax(dim=-1)
        del logits
        # A label of -100 has weight 0, so any valid index may replace it.
        chosen = targets.masked_fill(targets == IGNORE_INDEX, 0).unsqueeze(-1)
        total = -(log_probs.gather(-1, chosen).squeeze(-1) * weights).sum()
        if not wants_gradient:
            return total, None
        # d CE / d logits = softmax - one_hot, computed in place.
        gradient = log_probs.exp_()
        gradient.scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=torch.float32))
        return total, gradient.mul_(weights.unsqueeze(-1))


class _LinearLoss(torch.autograd.Function):
    """
    The sum of losses of the logits `hidden_states @ weight.T`, each times its share, and the sum of each loss. The
    gradient of the first result is computed in the forward pass; the others have none.

    Loss and gradients need the same logits, so computing both at once saves a second matrix product per chunk.
    Backward multiplies the stored gradients by the gradient of the sum.

    Shapes: `hidden_states` `(num_tokens, hidden_size)`, `weight` `(vocab_size, hidden_size)`, the results are scalars.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, losses: list["_CrossEntropy | RowLoss"]):
        device = hidden_states.device.type
        # Cast as autocast would, once instead of once per chunk.
        hidden, matrix = (part.to(compute_dtype(part)) for part in (hidden_states, weight))
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # The sum over chunks needs float32: in bfloat16 small terms would be rounded away.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        sums = [hidden.new_zeros((), dtype=torch.float32) for _ in losses]
        num_rows = max(MIN_ROWS, MAX_LOGITS[1 if device == "cpu" else 0] // len(weight))
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), num_rows):
                rows = slice(start, start + num_rows)
                logits, grad_logits = (hidden[rows] @ matrix.T).float(), None
                for total, loss in zip(sums, losses, strict=True):
                    part, gradient = loss.differentiate(logits, rows, wants_hidden or wants_weight)
                    total += part
                    if gradient is not None:
                        gradient = gradient if loss.share == 1 else gradient.mul_(loss.share)
                        grad_logits = gradient if grad_logits is None else grad_logits.add_(gradient)
                if grad_logits is None:
                    continue
                grad_logits = grad_logits.to(hidden.dtype)
                if wants_hidden:
                    # Write into the result, so that no second buffer of this size is needed.
                    torch.mm(grad_logits, matrix, out=grad_hidden[rows])
                if wants_weight and hidden.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[rows])  # one pass over the sum instead of two
                elif wants_weight:
                    grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        ctx.mark_non_differentiable(*sums)
        return sum(loss.share * total for loss, total in zip(losses, sums, strict=True)), *sums

    @staticmethod
    def backward(ctx, grad_total, *_):
        # A saved gradient is None where its input needed none.
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(g if g is None else (g * grad_total).to(dtype) for g, dtype in gradients), None


class Documents(NamedTuple):
    """
    The document that each token of a batch belongs to.

    Attributes:
        index (`torch.LongTensor` of shape `(batch_size * seq_len,)`): number of the document, counted through the
            batch.
        token_mask (`torch.BoolTensor` of shape `(batch_size * seq_len,)`): true for tokens that are not padding and
            belong to a document with at least one trained token.
        count (`torch.LongTensor`, scalar): number of documents with a true entry in `token_mask`.
    """

    index: torch.Tensor
    token_mask: torch.Tensor
    count: torch.Tensor


def find_documents(
    shape: torch.Size | tuple[int, int],
    *,
    device: torch.device | None = None,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
) -> Documents:
    """
    Find the documents of a batch.

    A document begins with each row and wherever `position_ids` do not increase by one. If an `attention_mask` is
    given, padding may hold any position, so there a document begins only at position 0. Padding does not count. If
    `labels` are given, a document without a trained token does not count either. The padding of a packed sequence and
    a padding row are such documents.

    Args:
        shape (`tuple` of `batch_size, seq_len`): shape of the batch.
        device (`torch.device`, *optional*): device of the result.
        position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)` or `(1, seq_len)`, *optional*)
        attention_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): 1 for tokens, 0 for padding.
        labels, loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): as in
            [`masked_cross_entropy`].

    Returns:
        [`Documents`]
    """
    # (batch_size, seq_len): true at the first token of each document
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    starts[:, 0] = True
    if position_ids is not None and attention_mask is None:
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    elif position_ids is not None:
        starts[:, 1:] = position_ids[:, 1:] == 0
    # (batch_size * seq_len,): each row starts a document, so no document spans two rows
    index = starts.flatten().cumsum(0) - 1

    token_mask = torch.ones_like(starts).flatten()
    # A 4D mask says which tokens see each other, not which of them are padding.
    if attention_mask is not None and attention_mask.dim() == 2:
        # The mask covers the tokens in the cache, too.
        token_mask = attention_mask[:, -shape[1] :].bool().flatten()
    if labels is not None:
        trained = (prediction_weights(labels, loss_mask) > 0).flatten()
        token_mask = token_mask & (_sum_by(index, trained.float())[index] > 0)
    count = (_sum_by(index, token_mask.float()) > 0).sum()
    return Documents(index, token_mask, count)


def _sum_by(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum `values` of shape `(num_tokens, ...)` per document; row `d` of the result belongs to document `d`."""
    # The result has as many rows as there are tokens, most of them zero: to allocate one row per document, the CPU
    # would wait for the GPU to learn their number.
    return torch.zeros_like(values).index_add_(0, index, values)


def router_loss(
    router_logits: tuple[torch.Tensor, ...], top_k: int, documents: Documents, *, level: str = "sequence"
) -> torch.Tensor:
    """
    Compute the load-balancing loss of Switch Transformers (https://huggingface.co/papers/2101.03961, equations 4 to
    6).

    The loss of a document is `E * sum over experts of f_e * P_e`, where `f_e` is the share of the document's top-k
    choices that went to expert `e`, and `P_e` is the mean probability that its tokens give to `e`. The result is the
    sum over layers and the mean over documents. An even load gives 1 per layer.

    Args:
        router_logits (`tuple` of `torch.Tensor` of shape `(batch_size * seq_len, num_experts)`): one tensor per layer.
        top_k (`int`): number of experts per token.
        documents ([`Documents`]): from [`find_documents`].
        level (`str`): `"sequence"`, or `"batch"` for one loss over all tokens in `token_mask`.

    Returns:
        `torch.FloatTensor`: a scalar, not multiplied by the coefficient; zero where no document counts.
    """
    mask = documents.token_mask.float().unsqueeze(-1)
    # With `"batch"`, all tokens count as one document.
    index = documents.index if level == "sequence" else torch.zeros_like(documents.index)
    num_tokens = _sum_by(index, mask)
    total = router_logits[0].new_zeros((), dtype=torch.float32)
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        # (batch_size * seq_len, num_experts): 1 for the experts that the token chose
        chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        # Indices past the last document have no tokens; `clamp` keeps them at 0 instead of 0 / 0.
        load = _sum_by(index, chosen * mask) / (num_tokens * top_k).clamp(min=1)
        mean_probability = _sum_by(index, probabilities * mask) / num_tokens.clamp(min=1)
        total = total + logits.shape[-1] * (load * mean_probability).sum()
    num_groups = documents.count if level == "sequence" else documents.count.clamp(max=1)
    return total / num_groups.clamp(min=1)


class MiniMindLMHead(nn.Linear):
    """Language-modelling head: returns logits or, given labels, the loss without all logits in memory."""

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
        return linear_loss(hidden_states, self.weight, labels, **kwargs)
