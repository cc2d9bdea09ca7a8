"""Rows that a data loader reads, and the padding rows that fill the last global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
from torch.utils.data import IterableDataset

from ..data.padding_rows import EpochSampler, PaddedDataset, PaddedStream


@dataclass
class RowSource:
    """
    Arguments for Trainer's data loader.

    Args:
        dataset: the rows.
        batch_size (`int`): rows per micro-batch and device.
        sampler_fn (`Callable`, *optional*): returns the sampler for a dataset.
        collator (`Callable`, *optional*): replaces the trainer's collator.
    """

    dataset: Any
    batch_size: int
    sampler_fn: Callable[[Any], Any] | None = None
    collator: Callable | None = None


def pad_rows(
    dataset: Any,
    sampler_fn: Callable[[Any], Any] | None,
    multiple: int,
    *,
    seed: int,
    is_training: bool,
) -> tuple[Any, Callable[[Any], Any] | None]:
    """
    Return the dataset with padding rows up to a multiple of `multiple`, and a function that returns its sampler.

    Args:
        dataset: a map-style dataset or a stream.
        sampler_fn (`Callable`, *optional*): returns the caller's sampler for the dataset; by default, the rows come in
            their order.
        multiple (`int`): rows of a global batch.
        seed (`int`): seed for the sampler of each epoch.
        is_training (`bool`): give each row its number, for reports about non-finite steps.
    """
    if is_stream(dataset):
        # A stream has no length and no sampler. It pads itself when it ends.
        return PaddedStream(dataset, multiple=multiple, is_training=is_training), None
    # Row numbers go into reports about non-finite steps. Evaluation writes no such reports.
    padded = PaddedDataset(dataset, is_numbered=is_training)

    def padded_sampler(_: Any) -> EpochSampler:
        # Give the sampler the caller's dataset: some samplers read columns, such as lengths, that padding rows lack.
        sampler = sampler_fn(dataset) if sampler_fn is not None else None
        rows = sampler if sampler is not None else range(len(dataset))
        padded.sampler = EpochSampler(rows, seed=seed, multiple=multiple)
        return padded.sampler

    return padded, padded_sampler


def is_stream(dataset: Any) -> bool:
    """Return whether the rows of a dataset have no numbers and no known length."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))
