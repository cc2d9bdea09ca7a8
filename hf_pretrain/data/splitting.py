"""Split documents into training and validation sets by a hash."""

import hashlib
from collections.abc import Callable
from functools import partial

import datasets
from datasets import Dataset, Features, IterableDataset, Value

from .parts import cache_key, cut_into_parts, is_cached, map_parts


DOCUMENT_FEATURES = Features({"text": Value("string"), "origin": Value("string")})


def split_documents(
    documents: Dataset | IterableDataset, start: float, stop: float, num_proc: int | None
) -> Dataset | IterableDataset:
    """
    Return the documents whose hash lies in [`start`, `stop`), with only the column `text`.

    Args:
        documents ([`Dataset`] or [`IterableDataset`]): with the columns of `DOCUMENT_FEATURES`.
        start, stop (`float`): range within [0, 1].
        num_proc (`int`, *optional*): number of processes; by default one per core, up to 8.
    """
    is_wanted = partial(hashes_are_between, start=start, stop=stop)
    if isinstance(documents, IterableDataset):
        documents = documents.filter(is_wanted, batched=True, input_columns=list(DOCUMENT_FEATURES))
    else:
        # Our own key: `datasets` would hash the pickled function, and that hash does not show changes in this module.
        key_of = partial(_key_of_part, bounds=f"{start} {stop}")
        parts = map_parts(
            cut_into_parts(documents),
            partial(_split_part, is_wanted=is_wanted, key_of=key_of),
            num_proc=num_proc,
            desc="splitting",
            finds_result=lambda part: is_cached(part, key_of(part)),
        )
        documents = datasets.concatenate_datasets(parts)
    return documents.select_columns(["text"])


def _key_of_part(documents: Dataset, bounds: str) -> str:
    return cache_key(documents._fingerprint, bounds)


def _split_part(documents: Dataset, is_wanted: Callable[..., list[bool]], key_of: Callable[[Dataset], str]) -> Dataset:
    """Filter one part of a dataset."""
    return documents.filter(
        is_wanted, batched=True, input_columns=list(DOCUMENT_FEATURES), new_fingerprint=key_of(documents)
    )


def hashes_are_between(texts: list[str], origins: list[str | None], start: float, stop: float) -> list[bool]:
    """
    Return, for each document, whether its hash as a number in [0, 1) lies in [`start`, `stop`).

    The function hashes the document's origin, such as the first question of a conversation, so that all documents with
    the same origin land in the same set. It hashes the text of a document without an origin.

    Args:
        texts (`list[str]`): the documents.
        origins (`list[str | None]`): origin of each document.
        start, stop (`float`): range within [0, 1].
    """
    keys = (text if origin is None else origin for text, origin in zip(texts, origins, strict=True))
    hashes = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
    # NOTE: Python's `hash` differs between processes, so each rank would get a different split. Multiplying a bound by
    # a power of two is exact, so neighbouring ranges neither overlap nor leave a gap.
    return [start * 2**64 <= int.from_bytes(value) < stop * 2**64 for value in hashes]


__all__ = ["DOCUMENT_FEATURES", "hashes_are_between", "split_documents"]
