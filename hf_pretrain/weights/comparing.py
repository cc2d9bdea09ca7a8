"""Compare what was read back from an export with the original model."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..data.documents import load_documents
from ..tokenizer.control_tokens import encode_documents


logger = logging.get_logger(__name__)

# The random input on which logits are compared.
ROWS, ROW_TOKENS = 8, 64
# The perplexity is measured on the beginnings of documents. About the tokens of the embedded validation set: more text
# would hardly change the difference of two perplexities.
MAX_TOKENS, MAX_LENGTH = 50_000, 512


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
        perplexity (`tuple[float, float]`, *optional*): the perplexity before and after, if there are documents to
            measure it on.
    """

    format: str
    dtype: str
    max_difference: float
    relative_difference: float
    decisive_difference: float
    perplexity: tuple[float, float] | None = None

    def __str__(self) -> str:
        text = (
            f"{self.format}, {self.dtype}: read back; largest logit difference on {ROWS} rows "
            f"{self.max_difference:.2e} ({self.relative_difference:.1e} of the logits' norm)"
        )
        if self.perplexity is None:
            return text
        before, after = self.perplexity
        change = f"{after / before - 1:+.2%}"
        return f"{text}; perplexity on validation text {before:.3f} before, {after:.3f} after ({change})"


@torch.no_grad()
def compare(
    reference: PreTrainedModel,
    written: PreTrainedModel,
    format: str,
    dtype: str,
    documents: list[list[int]] | None = None,
) -> ExportReport:
    """
    Compare the logits of two models in eval mode on the same random ids, and their perplexity on `documents`, in
    float32.
    """
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
        perplexity=(perplexity(reference, documents), perplexity(written, documents)) if documents else None,
    )


@torch.no_grad()
def perplexity(model: PreTrainedModel, documents: list[list[int]]) -> float:
    """Return the perplexity per token, without the first token of each document."""
    nats, num_tokens = 0.0, 0
    for ids in documents:
        input_ids = torch.tensor([ids[: model.config.max_position_embeddings]])
        logits = model(input_ids).logits[0, :-1].float()
        nats += F.cross_entropy(logits, input_ids[0, 1:], reduction="sum").item()
        num_tokens += len(logits)
    return math.exp(nats / num_tokens)


def validation_documents(dataset_names: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """
    Return the token ids of validation documents, at most `MAX_LENGTH` of each and about `MAX_TOKENS` of all.

    A hash chooses them, as in training, so no run on the same data with the default `--validation_fraction` has
    trained on these documents. Return nothing and warn if a package that holds the data is not installed.
    """
    try:
        # A stream reads only the beginning of large data.
        _, validation = load_documents(dataset_names, streaming=True)
    except ImportError as error:
        logger.warning(f"The perplexity is not measured: {error}")
        return []
    documents: list[list[int]] = []
    for ids in encode_documents(validation["text"][:], tokenizer):
        if sum(map(len, documents)) >= MAX_TOKENS:
            break
        documents.append(ids[:MAX_LENGTH])
    return documents
