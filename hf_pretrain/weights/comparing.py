"""Compare what was read back from an export with the original model."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel


# The random input on which logits are compared.
ROWS, ROW_TOKENS = 8, 64


@dataclass
class ExportReport:
    """
    Result of [`~weights.exporting.export`]: the format that was written, and its difference from the original model.

    Args:
        format (`str`): the format that was written; for GGUF, also its architecture.
        dtype (`str`): the dtype of the weights.
        max_difference (`float`): the largest difference of a logit on `ROWS` rows of `ROW_TOKENS` random ids, both
            sides computed in float32.
        relative_difference (`float`): the norm of the differences divided by the norm of the logits.
    """

    format: str
    dtype: str
    max_difference: float
    relative_difference: float

    def __str__(self) -> str:
        return (
            f"{self.format}, {self.dtype}: read back; largest logit difference on {ROWS} rows "
            f"{self.max_difference:.2e} ({self.relative_difference:.1e} of the logits' norm)"
        )


@torch.no_grad()
def compare(
    reference: PreTrainedModel, written: PreTrainedModel, *, path: str | Path, format: str, dtype: str, is_exact: bool
) -> ExportReport:
    """
    Compare the logits of two models in eval mode on the same random ids, in float32.

    Args:
        reference ([`PreTrainedModel`]): the original model.
        written ([`PreTrainedModel`]): the model that was read back.
        path, format, dtype: for the report and the message.
        is_exact (`bool`): no weight was rounded, so only the order of float32 operations may differ.

    Raises:
        `RuntimeError`: if what was written is another model.
    """
    # Random ids need no tokenizer, and use rows of the embedding that text rarely uses.
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_TOKENS, reference.config.max_position_embeddings)
    # Our own generator: the comparison must neither depend on the global seed nor change it.
    input_ids = torch.randint(reference.config.vocab_size, (ROWS, length), generator=generator)
    expected = reference(input_ids).logits
    difference = written(input_ids).logits - expected
    decisive = (difference.norm() / expected.norm()).item()
    report = ExportReport(format, dtype, difference.abs().max().item(), decisive)
    # Rounding may decide a near tie between two experts, and then a whole row differs: take the second-worst row. But
    # a NaN in a single row would hide behind it.
    if reference.config.num_experts and math.isfinite(decisive):
        decisive = (difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).topk(2).values[1].item()
    if not math.isfinite(decisive) or (is_exact and decisive > 1e-5):
        raise RuntimeError(f"{path} was written wrongly: it is not the same model: {report}. Please report this.")
    return report
