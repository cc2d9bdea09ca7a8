"""Validation loss by position in the document, with and without the YaRN that a model's config asks for."""

import copy
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F

from ..loading.adapters import base_model_of
from ..model.rotary import MiniMindRotaryEmbedding
from ..training.masked_loss_trainer import MaskedLossTrainer


# The ranges of positions end before these.
EDGES = torch.tensor([2**power for power in range(7, 20)])


@torch.no_grad()
def measure_positions(trainer: MaskedLossTrainer, rows: Dataset) -> list[dict[str, Any]]:
    """
    Return the mean loss of the tokens in each range of positions.

    Returns:
        `list[dict]`: `first` and `last` position, number of `tokens`, `loss`, and with YaRN `loss_without_yarn`, in
            nats per token.
    """
    decoder = base_model_of(trainer.model).model
    scaled = decoder.rotary_emb
    counts, losses = _sum_losses(trainer, rows)
    columns = {"loss": losses}
    if scaled.config.rope_parameters["rope_type"] == "yarn":
        # The plain table has as many positions, so the model sees the same tokens.
        plain = copy.deepcopy(scaled.config)
        plain.rope_parameters = {"rope_type": "default", "rope_theta": plain.rope_parameters["rope_theta"]}
        decoder.rotary_emb = MiniMindRotaryEmbedding(plain).to(trainer.args.device)
        columns["loss_without_yarn"] = _sum_losses(trainer, rows)[1]
        decoder.rotary_emb = scaled
    first = [0, *EDGES.tolist()]
    return [
        {"first": first[i], "last": first[i + 1] - 1, "tokens": int(count)}
        | {name: (sums[i] / count).item() for name, sums in columns.items()}
        for i, count in enumerate(counts)
        if count
    ]


def _sum_losses(trainer: MaskedLossTrainer, rows: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the number of predicted tokens in each range of positions, and the sum of their losses, both
    `(len(EDGES) + 1,)`.
    """
    model, device = trainer.model.eval(), trainer.args.device
    edges = EDGES.to(device)
    totals = np.zeros((2, len(EDGES) + 1))
    for batch in trainer.get_eval_dataloader(rows):
        input_ids, labels, positions = (batch[name].to(device) for name in ("input_ids", "labels", "position_ids"))
        with trainer.compute_loss_context_manager():
            logits = model(input_ids=input_ids, position_ids=positions).logits
        labels, bins = labels[:, 1:].flatten(), torch.bucketize(positions[:, 1:].flatten(), edges, right=True)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="none")
        kept = (labels != -100).float()
        for total, weights in zip(totals, (kept, losses * kept), strict=True):
            # Apple GPUs have no float64, in which NumPy adds up.
            total += np.bincount(bins.cpu().numpy(), weights.cpu().numpy(), minlength=len(total))
    return totals[0], totals[1]
