"""
The router loss, and the documents that it averages over. This file travels to the Hub with every checkpoint.
"""

from typing import NamedTuple

import torch

from .loss import prediction_weights


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
