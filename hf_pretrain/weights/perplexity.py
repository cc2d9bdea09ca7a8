"""Perplexity on validation text, which shows what rounded weights cost."""

import math

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..data.loading import load_documents
from ..tokenizer.encoding import encode_documents


logger = logging.get_logger(__name__)

# About the tokens of the embedded validation set. More text would hardly change the difference of two perplexities.
MAX_TOKENS = 50_000
MAX_LENGTH = 512


def validation_documents(dataset_names: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """
    Return the token ids of validation documents, at most `MAX_LENGTH` of each and about `MAX_TOKENS` of all.

    A hash chooses them, as in training, so no run on the same data with the default `--validation_fraction` has
    trained on these documents. Return nothing and warn if a package that holds the data is not installed.

    Raises:
        `ValueError`: in the cases of [`~data.loading.load_documents`].
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


@torch.no_grad()
def perplexity(model: PreTrainedModel, documents: list[list[int]]) -> float:
    """
    Return the perplexity per token, without the first token of each document.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, in eval mode. Documents are cut at its last position.
        documents (`list[list[int]]`): token ids of each document.
    """
    nats, num_tokens = 0.0, 0
    for ids in documents:
        input_ids = torch.tensor([ids[: model.config.max_position_embeddings]])
        logits = model(input_ids).logits[0, :-1].float()
        nats += F.cross_entropy(logits, input_ids[0, 1:], reduction="sum").item()
        num_tokens += len(logits)
    return math.exp(nats / num_tokens)


__all__ = ["perplexity", "validation_documents"]
