"""Count how many tokens the router of each layer sends to each expert."""

import torch


class RouterLoad:
    """Number of tokens per layer and expert, summed over batches."""

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None

    def add(self, router_logits: tuple[torch.Tensor, ...], token_mask: torch.Tensor, *, top_k: int) -> None:
        """
        Count the experts that the router chooses for the tokens of a batch.

        Args:
            router_logits (`tuple` of `torch.Tensor` of shape `(batch_size * seq_len, num_experts)`): one per layer.
            token_mask (`torch.BoolTensor` of shape `(batch_size * seq_len,)`): false for tokens that do not count,
                such as padding.
            top_k (`int`): number of experts per token.
        """
        # (num_layers, batch_size * seq_len, num_experts)
        logits = torch.stack(router_logits).detach()
        chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
        counts = chosen[:, token_mask].sum(1, dtype=torch.float32)
        self.counts = counts if self.counts is None else self.counts + counts


def to_shares(counts: torch.Tensor) -> list[list[float]]:
    """Return the share of each expert in the counts of its layer, from counts of shape `(num_layers, num_experts)`."""
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).tolist()


__all__ = ["RouterLoad", "to_shares"]
