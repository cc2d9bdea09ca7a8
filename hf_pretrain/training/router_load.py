"""Count how many tokens the router of each layer sends to each expert."""

import torch


class RouterLoad:
    """Sums over the batches of an evaluation."""

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None

    def add(self, router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, *, top_k: int) -> None:
        """
        Count the choices for the tokens of a batch, without padding.

        Args:
            router_logits (`tuple` of `torch.Tensor` of shape `(batch_size * seq_len, num_experts)`): one per layer.
            labels (`torch.LongTensor` of shape `(batch_size, seq_len)`): -100 for tokens that do not count.
            top_k (`int`): experts of each token.
        """
        # (num_layers, batch_size * seq_len, num_experts)
        logits = torch.stack(router_logits).detach()
        chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)
        counts = chosen[:, (labels != -100).flatten()].sum(1, dtype=torch.float32)
        self.counts = counts if self.counts is None else self.counts + counts


def to_shares(counts: torch.Tensor) -> list[list[float]]:
    """Return counts of shape `(num_layers, num_experts)` as the share of each expert in the choices of its layer."""
    return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).tolist()


__all__ = ["RouterLoad", "to_shares"]
