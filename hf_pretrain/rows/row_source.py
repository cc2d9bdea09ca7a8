"""
The rows that a data loader reads, and padding rows: rows of weight zero that fill the last global batch of an epoch.

Every rank needs the same number of batches. accelerate would fill the last batch with the first rows of the data, and
the run would train on those rows twice.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from ..runtime.errors import UserError


PADDING_ROW_COLUMN = "is_padding_row"
# Returns the sampler for a dataset.
SamplerFn = Callable[[Any], Any] | None


class PaddedDataset(Dataset):
    """
    Map-style dataset in which an index past the end gives a padding row, and which knows the epoch.

    A padding row is a copy of the first row with `is_padding_row` set. [`PaddingRowCollator`] sets its labels to -100.

    NOTE: only the dataset has `set_epoch`. After a resume on several ranks, accelerate wraps the sampler and no longer
    finds it.

    Args:
        dataset: map-style rows.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch. torch's loader asks for all rows at once, so `datasets` reads only once."""
        # A padding row needs valid content of the same columns, so it copies the first row.
        places = [index if index < len(self) else 0 for index in indices]
        reads_batches = isinstance(self.dataset, datasets.Dataset)
        rows = self.dataset.__getitems__(places) if reads_batches else [self.dataset[place] for place in places]
        pairs = zip(rows, indices, strict=True)
        return [row if index < len(self) else {**row, PADDING_ROW_COLUMN: True} for row, index in pairs]


class EpochSampler(Sampler[int]):
    """
    Sampler whose order depends only on the seed and the epoch, and whose length is a multiple of `multiple`.

    Args:
        padded ([`PaddedDataset`]): knows the epoch.
        sampler (`Sampler`): the sampler of the data. A random one gets a generator of its own, since the global
            generator may differ between ranks.
        seed (`int`): seed of the first epoch.
        multiple (`int`): number of rows in a global batch.
        pads (`bool`): append indices past the end of the data up to the next multiple. [`PaddedDataset`] returns
            padding rows for them. Otherwise, leave out the last rows.
    """

    def __init__(self, padded: PaddedDataset, sampler: Any, *, seed: int, multiple: int, pads: bool):
        self.padded, self.sampler, self.seed = padded, sampler, seed
        # Include the padding rows: Trainer derives the number of steps from this length.
        num_rows = len(sampler)
        self.num_rows = num_rows + (-num_rows % multiple if pads else -(num_rows % multiple))

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        if hasattr(self.sampler, "generator"):
            self.sampler.generator = torch.Generator().manual_seed(self.seed + self.padded.epoch)
        yield from itertools.islice(self.sampler, len(self))
        yield from range(len(self.sampler), len(self))


class PaddedStream(IterableDataset):
    """
    Stream that appends padding rows after its last row, up to a multiple of `multiple`, or leaves out its last rows.

    In training, it then starts again, without an end. The number of steps alone thus gives the position of a run.

    Args:
        dataset: an iterable of rows.
        multiple (`int`): number of rows in a global batch.
        is_training (`bool`): start again after each pass.
        pads (`bool`): append padding rows.
    """

    def __init__(self, dataset: Any, *, multiple: int, is_training: bool, pads: bool):
        self.dataset, self.multiple, self.is_training, self.pads = dataset, multiple, is_training, pads

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in itertools.count() if self.is_training else range(1):
            rows, num_rows, held = self.dataset, 0, []
            if isinstance(rows, datasets.IterableDataset):
                # Shuffle anew in each pass.
                rows.set_epoch(epoch)
                # NOTE: in a worker of a loader, `__iter__` would draw another order. `iter` does not look for workers.
                rows = ({name: column[0] for name, column in batch.items()} for batch in rows.iter(batch_size=1))
            for num_rows, row in enumerate(rows, 1):
                held.append(row)
                if self.pads or num_rows % self.multiple == 0:
                    yield from held
                    held.clear()
            # The last row serves as the padding row: a stream cannot go back to its first one.
            for _ in range(-num_rows % self.multiple if self.pads else 0):
                yield {**row, PADDING_ROW_COLUMN: True}
            if num_rows < (1 if self.pads else self.multiple):
                return


class PaddingRowCollator:
    """
    Collator that wraps another collator and removes the labels of padding rows.

    It also checks that `loss_mask` is not negative and that all ids are below `vocab_size`.

    Args:
        collator (`Callable`): makes a batch from rows, one row of labels per feature.
        vocab_size (`int`): number of ids that the model can embed.

    Raises:
        `UserError`: when called, for an id out of range or a negative weight.
    """

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], vocab_size: int):
        self.collator = collator
        self.vocab_size = vocab_size

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        is_padding_row = torch.tensor([bool(feature.get(PADDING_ROW_COLUMN)) for feature in features])
        # Remove our own column first: the wrapped collator may stack all columns that it gets.
        batch = self.collator([{k: v for k, v in f.items() if k != PADDING_ROW_COLUMN} for f in features])
        if "labels" in batch and len(batch["labels"]) != len(features):
            raise UserError(
                f"The data collator makes {len(batch['labels'])} row(s) of labels from {len(features)} rows. Pass one "
                "that keeps the rows apart: DataCollatorForPackedRows, or one of transformers that pads."
            )
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


class EvaluationBatches(Dataset):
    """
    The batches of an evaluation that contains each item once, for figures that cannot leave out padding rows.

    All ranks need equal numbers of rows. The first items, too few for that, are batches of their own, which all ranks
    read. A loader that reads one batch at a time distributes the batches.

    Args:
        dataset: map-style items.
        collator (`Callable`): makes a batch from rows.
        batch_size (`int`): rows per batch.
        num_ranks (`int`): number of ranks that read different rows.
        copies (`int`, defaults to 1): number of consecutive rows for each item.

    Attributes:
        num_items (`list[int]`): number of items in each batch of all ranks together.
    """

    def __init__(self, dataset: Any, collator: Any, batch_size: int, *, num_ranks: int, copies: int = 1):
        self.dataset, self.collator = dataset, collator
        # Fewer items cannot give each rank the same number of rows.
        unit = num_ranks // math.gcd(num_ranks, copies)
        size = max(1, batch_size * num_ranks // copies // unit) * unit
        items, num_shared = list(range(len(dataset))), len(dataset) % unit
        groups = [[item] * num_ranks for item in items[:num_shared]]
        groups += [items[start : start + size] for start in range(num_shared, len(items), size)]
        self.num_items = [len(set(group)) for group in groups]
        self.batches: list[list[int]] = []
        for group in groups:
            self.batches += torch.tensor(group).repeat_interleave(copies).view(num_ranks, -1).tolist()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self.dataset[item] for item in self.batches[index]]

    def collate(self, batches: list[list[dict[str, Any]]]) -> Any:
        """Collate the single batch that the loader has read."""
        (rows,) = batches
        return self.collator(rows)


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
    sampler_fn: SamplerFn = None
    collator: Callable | None = None


def pad_rows(
    dataset: Any, sampler_fn: SamplerFn, multiple: int, *, seed: int, is_training: bool, pads: bool = True
) -> tuple[Any, SamplerFn]:
    """
    Return the dataset with padding rows up to a multiple of `multiple`, and a function that returns its sampler.

    Args:
        dataset: a map-style dataset or a stream.
        sampler_fn (`Callable`, *optional*): returns the caller's sampler for the dataset; by default, the rows come in
            their order.
        multiple (`int`): rows of a global batch.
        seed (`int`): seed for the sampler of each epoch.
        is_training (`bool`): let a stream start again after each pass.
        pads (`bool`, defaults to `True`): otherwise, leave out the last rows.
    """
    if is_stream(dataset):
        # A stream has no length and no sampler. It pads itself when it ends.
        return PaddedStream(dataset, multiple=multiple, is_training=is_training, pads=pads), None
    padded = PaddedDataset(dataset)

    def padded_sampler(_: Any) -> EpochSampler:
        # Give the sampler the caller's dataset: some samplers read columns, such as lengths, that padding rows lack.
        # Trainer has no sampler for an evaluation on several ranks.
        sampler = (sampler_fn and sampler_fn(dataset)) or range(len(dataset))
        return EpochSampler(padded, sampler, seed=seed, multiple=multiple, pads=pads)

    return padded, padded_sampler


def is_stream(dataset: Any) -> bool:
    """Return whether the rows of a dataset have no numbers and no known length."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))
