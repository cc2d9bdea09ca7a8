"""
The rows that a data loader reads, and padding rows: rows of weight zero that fill the last global batch of an epoch.

Every rank needs the same number of batches. accelerate would fill the last batch with the first rows of the data, and
the run would train on those rows twice.
"""

import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from ..runtime.errors import UserError


PADDING_ROW_COLUMN = "is_padding_row"


class PaddedDataset(Dataset):
    """
    Map-style dataset in which an index past the end gives a padding row.

    A padding row is a copy of the first row with `is_padding_row` set. [`PaddingRowCollator`] sets its labels to -100.

    Args:
        dataset: map-style rows.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        # Any sampler with `set_epoch`. The caller sets it.
        self.sampler: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # NOTE: workers that do not fork, as on Windows and macOS, get a copy, and read only rows. The sampler holds a
        # generator from the second epoch on, and torch frees the generator's state before the worker has copied it.
        return vars(self) | {"sampler": None}

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int):
        # NOTE: after a resume on several ranks, accelerate replaces the sampler and calls `set_epoch` only on the
        # dataset.
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch. torch's loader asks for all rows at once, so `datasets` reads only once."""
        # A padding row needs valid content of the same columns, so it copies the first row.
        places = [index if index < len(self.dataset) else 0 for index in indices]
        reads_batches = isinstance(self.dataset, datasets.Dataset)
        rows = self.dataset.__getitems__(places) if reads_batches else [self.dataset[place] for place in places]
        pairs = zip(rows, indices, strict=True)
        return [row if index < len(self.dataset) else {**row, PADDING_ROW_COLUMN: True} for row, index in pairs]


class EpochSampler(Sampler[int]):
    """
    Sampler whose order depends only on the seed and the epoch, and whose length is a multiple of `multiple`.

    Args:
        sampler (`Sampler`): the sampler of the data. A random one gets a generator of its own, since the global
            generator may differ between ranks.
        seed (`int`): seed of the first epoch.
        multiple (`int`, defaults to 1): number of rows in a global batch.
        pads (`bool`, defaults to `True`): append indices past the end of the data up to the next multiple.
            [`PaddedDataset`] returns padding rows for them. Otherwise, leave out the last rows.
    """

    def __init__(self, sampler: Any, *, seed: int, multiple: int = 1, pads: bool = True):
        self.sampler = sampler
        self.seed = seed
        self.multiple = multiple
        self.pads = pads
        self.epoch = 0

    def __len__(self) -> int:
        # Include the padding rows: Trainer derives the number of steps from this length.
        num_rows = len(self.sampler)
        return num_rows + (-num_rows % self.multiple if self.pads else -(num_rows % self.multiple))

    def __iter__(self) -> Iterator[int]:
        if hasattr(self.sampler, "generator"):
            self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from itertools.islice(self.sampler, len(self))
        yield from range(len(self.sampler), len(self))

    def set_epoch(self, epoch: int):
        self.epoch = epoch


class PaddedStream(IterableDataset):
    """
    Stream that appends padding rows after its last row, up to a multiple of `multiple`.

    In training, it then starts again, without an end. The number of steps alone thus gives the position of a run.

    Args:
        dataset: an iterable of rows.
        multiple (`int`): number of rows in a global batch.
        is_training (`bool`, defaults to `True`): start again after each pass.
    """

    def __init__(self, dataset: Any, *, multiple: int, is_training: bool = True):
        self.dataset = dataset
        self.multiple = multiple
        self.is_training = is_training

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in itertools.count() if self.is_training else range(1):
            if self.is_training and isinstance(self.dataset, datasets.IterableDataset):
                # Shuffle anew in each pass.
                self.dataset.set_epoch(epoch)
            num_rows = yield from self._read_pass()
            if num_rows == 0:
                return

    def _read_pass(self) -> Generator[dict[str, Any], None, int]:
        """Yield the rows of one pass and its padding rows, and return the number of rows."""
        num_rows, row = 0, {}
        for row in self.dataset:
            yield row
            num_rows += 1
        # The last row serves as the padding row: a stream cannot go back to its first one.
        # An empty stream gets no padding rows, because -0 % multiple is 0.
        for _ in range(-num_rows % self.multiple):
            yield {**row, PADDING_ROW_COLUMN: True}
        return num_rows


class PaddingRowCollator:
    """
    Collator that wraps another collator and removes the labels of padding rows.

    It also checks that `loss_mask` is not negative and that all ids are below `vocab_size`.

    Args:
        collator (`Callable`): makes a batch from rows, one row of labels per feature.
        vocab_size (`int`): number of ids that the model can embed.

    Raises:
        `ValueError`: when called, for an id out of range or a negative weight.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], vocab_size: int):
        self.collator = collator
        self.vocab_size = vocab_size

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        is_padding_row = torch.tensor([bool(feature.get(PADDING_ROW_COLUMN)) for feature in features])
        # Remove our own column first: the wrapped collator may stack all columns that it gets.
        batch = self.collator([{k: v for k, v in f.items() if k != PADDING_ROW_COLUMN} for f in features])
        if is_padding_row.any() and "labels" in batch:
            batch["labels"][is_padding_row] = -100
        if "input_ids" in batch:
            # A GPU would only report that an assertion failed. Here on the CPU, reading the result waits for nothing.
            least, largest = (int(value) for value in batch["input_ids"].aminmax())
            if least < 0 or largest >= self.vocab_size:
                raise UserError(
                    f"A row holds the id {least if least < 0 else largest}; the model knows ids 0 to "
                    f"{self.vocab_size - 1}. Prepare the rows with the model's own tokenizer."
                )
        if "loss_mask" in batch and (batch["loss_mask"] < 0).any():
            raise UserError("loss_mask holds a negative weight. Weights of predictions must be zero or positive.")
        return batch


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
        is_training (`bool`): let a stream start again after each pass.
    """
    if is_stream(dataset):
        # A stream has no length and no sampler. It pads itself when it ends.
        return PaddedStream(dataset, multiple=multiple, is_training=is_training), None
    padded = PaddedDataset(dataset)

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
