"""
The masked, weighted cross-entropy, and the bookkeeping of documents that it shares with the router loss.

With `w[t]` the weight of predicting token `t` from the tokens before it, a step's loss is

    sum of w * CE / sum of w   +   router_aux_loss_coef * sum of aux_d over documents / number of documents

with the sums over all micro-batches of all ranks. This file travels to the Hub with every checkpoint and imports
nothing of the package.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


IGNORE_INDEX = -100
# Logits at a time, on a GPU and on a CPU: enough for a matrix product, few enough for the cache.
MAX_LOGITS = (2**25, 2**22)
# Tokens at a time, however large the vocabulary: each time costs a pass over the head's gradient.
MIN_ROWS = 256


def prediction_weights(labels: torch.Tensor, loss_mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    Weight of predicting each token from those before it. The first token of a row has none.

    Args:
        labels (`torch.LongTensor` of shape `(batch_size, seq_len)`): token ids, -100 where nothing is trained.
        loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): non-negative weights.

    Returns:
        `torch.FloatTensor` of shape `(batch_size, seq_len)`, float32; column 0 is zero.
    """
    weights = (labels != IGNORE_INDEX).float()
    if loss_mask is not None:
        if loss_mask.shape != labels.shape:
            raise ValueError(
                f"loss_mask has shape {tuple(loss_mask.shape)}, labels {tuple(labels.shape)}: they must be equal, "
                "loss_mask[:, t] being the weight of predicting labels[:, t]."
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
    `sum of w * CE / num_items_in_batch`, in float32, with the labels shifted inside.

    Args:
        logits (`torch.Tensor` of shape `(batch_size, seq_len, vocab_size)`): `logits[:, t]` predicts token `t + 1`.
        labels (`torch.LongTensor` of shape `(batch_size, seq_len)`): unshifted, -100 where nothing is trained.
        loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): weights, aligned with `labels`.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): the divisor; the sum of the weights by default.

    Returns:
        `torch.FloatTensor`: a scalar, in nats. Zero, with zero gradients, where all weights are zero.
    """
    targets, weights = _targets(labels, loss_mask)
    token_losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return (token_losses * weights).sum() / _divisor(weights, num_items_in_batch)


def linear_masked_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    `masked_cross_entropy(hidden_states @ weight.T, ...)` without the logits of all tokens in memory at once: those of
    some tokens at a time are turned into their loss and, where gradients are wanted, into gradients, and forgotten.

    NOTE: torch's `linear_cross_entropy` and Liger's know weights of classes, not of tokens. torch's can return the loss of
    each token, but then computes the logits twice: 2.4 to 3 times as long as this on a CPU in bfloat16.

    Args:
        hidden_states (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`)
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): of the language-modelling head.

    The other arguments, and what is returned, are those of [`masked_cross_entropy`].
    """
    targets, weights = _targets(labels, loss_mask)
    if not torch.is_grad_enabled():
        # Seen from inside, gradients are never enabled, and always wanted.
        hidden_states, weight = hidden_states.detach(), weight.detach()
    total = _LinearCrossEntropy.apply(hidden_states.flatten(0, 1), weight, targets, weights)
    return total / _divisor(weights, num_items_in_batch)


def _targets(labels: torch.Tensor, loss_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What each position predicts, and the weight of that, both of shape `(batch_size * seq_len,)`. The labels are shifted,
    not the logits, which would be copied.
    """
    weights = F.pad(prediction_weights(labels, loss_mask)[:, 1:], (0, 1)).flatten()
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten(), weights


def _divisor(weights: torch.Tensor, num_items_in_batch: torch.Tensor | float | None) -> torch.Tensor | float:
    if num_items_in_batch is not None:
        return num_items_in_batch
    # An all-masked batch has nothing to divide by: its sum is zero and stays so.
    return torch.where(weights.sum() > 0, weights.sum(), 1.0)


class _LinearCrossEntropy(torch.autograd.Function):
    """
    `sum of weights * CE(hidden_states @ weight.T, targets)` in float32. The gradients are computed with the loss, since
    they need the same logits; backward multiplies them by that of the sum.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, targets, weights):
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device):
            # As autocast would, once for all chunks.
            dtype = torch.get_autocast_dtype(device)
            hidden, matrix = hidden_states.to(dtype), weight.to(dtype)
        else:
            hidden, matrix = hidden_states, weight
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        num_rows = max(MIN_ROWS, MAX_LOGITS[device == "cpu"] // len(weight))
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), num_rows):
                rows = slice(start, start + num_rows)
                log_probs = (hidden[rows] @ matrix.T).float().log_softmax(dim=-1)
                # A label of -100 has the weight 0, whatever token stands in for it.
                chosen = targets[rows].masked_fill(targets[rows] == IGNORE_INDEX, 0).unsqueeze(-1)
                total -= (log_probs.gather(-1, chosen).squeeze(-1) * weights[rows]).sum()
                if not wants_hidden and not wants_weight:
                    continue
                grad_logits = log_probs.exp_()
                grad_logits.scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=torch.float32))
                grad_logits = grad_logits.mul_(weights[rows].unsqueeze(-1)).to(hidden.dtype)
                if wants_hidden:
                    torch.mm(grad_logits, matrix, out=grad_hidden[rows])
                if wants_weight:
                    grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total):
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(g if g is None else (g * grad_total).to(dtype) for g, dtype in gradients), None, None


class Documents(NamedTuple):
    """
    Which document each token of a batch belongs to.

    Attributes:
        index (`torch.LongTensor` of shape `(batch_size * seq_len,)`): number of the document, counted through the batch.
        token_mask (`torch.BoolTensor` of shape `(batch_size * seq_len,)`): tokens that count: not padding, and in a
            document that trains something.
        count (`torch.LongTensor`, scalar): documents with a token that counts.
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
    Finds the documents of a batch. A document begins with each row and wherever `position_ids` does not go on by one
    (beside an `attention_mask`, whose padding may hold any position: wherever it is 0). Padding does not count; where
    `labels` are given, nor does a document without any trained token (padding of packed rows, a row that fills up the
    last batch).

    Args:
        shape (`tuple` of `batch_size, seq_len`): of the batch.
        position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)` or `(1, seq_len)`, *optional*)
        attention_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): 1 for tokens, 0 for padding.
        labels, loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): as in `masked_cross_entropy`.
    """
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    starts[:, 0] = True
    if position_ids is not None and attention_mask is None:
        starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    elif position_ids is not None:
        starts[:, 1:] = position_ids[:, 1:] == 0
    index = starts.flatten().cumsum(0) - 1

    token_mask = torch.ones_like(starts).flatten()
    if attention_mask is not None and attention_mask.dim() == 2:
        token_mask = attention_mask.bool().flatten()
    if labels is not None:
        trained = (prediction_weights(labels, loss_mask) > 0).flatten()
        token_mask = token_mask & (_sum_by(index, trained.float())[index] > 0)
    count = (_sum_by(index, token_mask.float()) > 0).sum()
    return Documents(index, token_mask, count)


def _sum_by(index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums `values (num_tokens, ...)` by document, without asking the device how many there are."""
    return torch.zeros_like(values).index_add_(0, index, values)


def router_loss(
    router_logits: tuple[torch.Tensor, ...], top_k: int, documents: Documents, *, level: str = "sequence"
) -> torch.Tensor:
    """
    The load-balancing loss of Switch Transformers (https://huggingface.co/papers/2101.03961, equations 4 to 6), summed
    over layers and averaged over documents: for each document `E * sum over experts of f_e * P_e`, with `f_e` the share
    of its top-k choices that went to expert `e` and `P_e` the mean probability that its tokens give to `e`. It is 1 a
    layer where the load is even.

    Args:
        router_logits (`tuple` of `torch.Tensor` of shape `(batch_size * seq_len, num_experts)`): one a layer.
        top_k (`int`): experts a token is sent to.
        documents ([`Documents`]): from [`find_documents`].
        level (`str`): `"sequence"`, or `"batch"` for one loss over all tokens that count.

    Returns:
        `torch.FloatTensor`: a scalar, unscaled by the coefficient; zero where no document counts.
    """
    mask = documents.token_mask.float().unsqueeze(-1)
    index = documents.index if level == "sequence" else torch.zeros_like(documents.index)
    num_tokens = _sum_by(index, mask)
    total = router_logits[0].new_zeros((), dtype=torch.float32)
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        load = _sum_by(index, chosen * mask) / (num_tokens * top_k).clamp(min=1)
        mean_probability = _sum_by(index, probabilities * mask) / num_tokens.clamp(min=1)
        total = total + logits.shape[-1] * (load * mean_probability).sum()
    num_groups = documents.count if level == "sequence" else documents.count.clamp(max=1)
    return total / num_groups.clamp(min=1)


__all__ = [
    "IGNORE_INDEX",
    "MAX_LOGITS",
    "Documents",
    "find_documents",
    "linear_masked_cross_entropy",
    "masked_cross_entropy",
    "prediction_weights",
    "router_loss",
]
