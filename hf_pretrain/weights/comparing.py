"""Compare what was read back from an export with the original model: the logits, or else the weights."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.utils import logging

from ..model.modeling_minimind import MiniMindForCausalLM
from .configs import write_stock_fields
from .gguf import check_gguf_fields, gguf_layout, read_ernie_weights
from .perplexity import perplexity


# NOTE: the GGUF reader draws its bar with tqdm itself, so the switch of transformers (`disable_progress_bar`) does not
# reach it. With the wrapper of transformers, it does.
modeling_gguf_pytorch_utils.tqdm = logging.tqdm
# The random input on which logits are compared.
ROWS, ROW_TOKENS = 8, 64


@dataclass
class ExportReport:
    """
    Result of [`~weights.exporting.export`]: the format that was written, and its difference from the original model.

    Args:
        format (`str`): the format that was written; for GGUF, also its architecture.
        dtype (`str`): the dtype of the weights.
        max_difference (`float`, *optional*): the largest difference of a logit on `ROWS` rows of `ROW_TOKENS` random
            ids, both sides computed in float32; `None` if no program here can run the format, in which case the
            tensors are compared.
        relative_difference (`float`, *optional*): the norm of the differences divided by the norm of the logits.
        max_weight_difference (`float`, *optional*): the largest difference of a weight, if the logits could not be
            compared.
        decisive_difference (`float`): the difference that decides whether the export is correct. If the written dtype
            is the model's, it must be rounding error. It is the difference of the weights, or of all logits. For a
            model with experts it is the difference of the second-worst row, because rounding may decide a near tie
            between two experts, and then a whole row differs.
        perplexity (`tuple[float, float]`, *optional*): the perplexity before and after, for a GGUF file and with
            documents to measure it on.
    """

    format: str
    dtype: str
    max_difference: float | None = None
    relative_difference: float | None = None
    max_weight_difference: float | None = None
    decisive_difference: float = math.nan
    perplexity: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.max_difference is None:
            difference = f"largest difference of a weight {self.max_weight_difference:.2e}"
        else:
            difference = (
                f"largest logit difference on {ROWS} rows {self.max_difference:.2e} "
                f"({self.relative_difference:.1e} of the logits' norm)"
            )
        cost = ""
        if self.perplexity is not None:
            before, after = self.perplexity
            change = f"{after / before - 1:+.2%}"
            cost = f"; perplexity on validation text {before:.3f} before, {after:.3f} after ({change})"
        return f"{self.format}, {self.dtype}: read back; {difference}{cost}"


@torch.no_grad()
def compare(reference: PreTrainedModel, written: PreTrainedModel, format: str, dtype: str) -> ExportReport:
    """Compare the logits of two models on the same random ids, in float32."""
    # Random ids need no tokenizer, and use rows of the embedding that text rarely uses.
    generator = torch.Generator().manual_seed(0)
    length = min(ROW_TOKENS, reference.config.max_position_embeddings)
    # Our own generator: the comparison must neither depend on the global seed nor change it.
    input_ids = torch.randint(reference.config.vocab_size, (ROWS, length), generator=generator)
    expected = reference(input_ids).logits
    difference = written.eval()(input_ids).logits - expected
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    relative_difference = (difference.norm() / expected.norm()).item()
    # A NaN in a single row would hide behind a finite second-worst row. With a NaN, use the difference of all logits.
    is_tie_possible = reference.config.num_experts and math.isfinite(relative_difference)
    return ExportReport(
        format,
        dtype,
        max_difference=difference.abs().max().item(),
        relative_difference=relative_difference,
        # The second-worst row: rounding may decide a near tie of two experts in one row.
        decisive_difference=rows.topk(2).values[1].item() if is_tie_possible else relative_difference,
    )


def compare_gguf(
    reference: MiniMindForCausalLM, path: Path, dtype: str, documents: list[list[int]] | None
) -> ExportReport:
    """
    Compare the logits through transformers' GGUF reader. It cannot read Ernie, so compare the weights there. With
    `documents`, also measure the perplexity of both models.
    """
    layout = gguf_layout(reference.config)
    name = f"GGUF ({layout})"
    check_gguf_fields(path, reference.config)
    if layout == "ernie4_5_moe":
        written, expected = read_ernie_weights(path), reference.state_dict()
        if reference.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        if written.keys() != expected.keys():
            raise RuntimeError(
                f"{path} was written wrongly; these tensors are missing or unexpected: "
                f"{written.keys() ^ expected.keys()}."
            )
        differences = torch.stack([(written[key] - tensor).abs().max() for key, tensor in expected.items()])
        difference = differences.max().item()
        report = ExportReport(name, dtype, max_weight_difference=difference, decisive_difference=difference)
        written_model: PreTrainedModel = copy.deepcopy(reference)
        # A tied head has no weights of its own.
        written_model.load_state_dict(written, strict=False)
    else:
        written_model = _load_gguf(reference, path, layout)
        report = compare(reference, written_model, name, dtype)
    if documents:
        report.perplexity = perplexity(reference, documents), perplexity(written_model.eval(), documents)
    return report


def _load_gguf(reference: MiniMindForCausalLM, path: Path, layout: str) -> PreTrainedModel:
    """Load a GGUF file with transformers, in float32."""
    # transformers reads the config from the file for llama, but not for the other architectures.
    loading: dict[str, Any] = {}
    if layout != "llama":
        loading["config"] = AutoConfig.for_model(layout, **write_stock_fields(reference.config, layout))
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **loading)


__all__ = ["ExportReport", "compare", "compare_gguf"]
