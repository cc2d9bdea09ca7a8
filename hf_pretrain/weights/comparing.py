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
        decisive_difference (`float`): the difference that decides whether the export is correct. If the written dtype
            is the model's, it must be rounding error. For a model with experts it is the difference of the
            second-worst row, because rounding may decide a near tie between two experts, and then a whole row differs.
    """

    format: str
    dtype: str
    max_difference: float
    relative_difference: float
    decisive_difference: float

    def __str__(self) -> str:
        return (
            f"{self.format}, {self.dtype}: read back; largest logit difference on {ROWS} rows "
            f"{self.max_difference:.2e} ({self.relative_difference:.1e} of the logits' norm)"
        )

    def check(self, path: str | Path, *, is_exact: bool) -> None:
        """
        Raise `RuntimeError` if what was written is another model. `is_exact` says that no weight was rounded, so only
        the order of float32 operations may differ.
        """
        if not math.isfinite(self.decisive_difference) or (is_exact and self.decisive_difference > 1e-5):
            raise RuntimeError(
                f"{path} was written wrongly: what was read back is not the same model: {self}. Please report this."
            )


@torch.no_grad()
def compare(reference: PreTrainedModel, written: PreTrainedModel, format: str, dtype: str) -> ExportReport:
    """Compare the logits of two models in eval mode on the same random ids, in float32."""
    # Random ids need no tokenizer, and use rows of the embedding that text rarely uses.
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_TOKENS, reference.config.max_position_embeddings)
    # Our own generator: the comparison must neither depend on the global seed nor change it.
    input_ids = torch.randint(reference.config.vocab_size, (ROWS, length), generator=generator)
    expected = reference(input_ids).logits
    difference = written(input_ids).logits - expected
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    relative_difference = (difference.norm() / expected.norm()).item()
    # A NaN in a single row would hide behind a finite second-worst row. With a NaN, use the difference of all logits.
    is_tie_possible = reference.config.num_experts and math.isfinite(relative_difference)
    return ExportReport(
        format,
        dtype,
        max_difference=difference.abs().max().item(),
        relative_difference=relative_difference,
        decisive_difference=rows.topk(2).values[1].item() if is_tie_possible else relative_difference,
    )
