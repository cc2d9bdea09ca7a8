"""
Rows of weight zero that fill up the last global batch: accelerate would repeat the first rows instead, and every rank
needs as many batches as the others.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from transformers.trainer_pt_utils import LengthGroupedSampler


PADDING_ROW_COLUMN = "is_padding_row"
# The number of a row in the training data, or of its turn in a stream.
ROW_NUMBER_COLUMN = "row_number"


class PaddedDataset(Dataset):
    """
    Map-style rows. An index past the end gives a padding row: the first row, marked to get no weight. The others
    carry their number, if `is_numbered`.
    """

    def __init__(self, dataset: Any, *, is_numbered: bool = False):
        self.dataset = dataset
        self.is_numbered = is_numbered
        self.sampler: PaddedSampler | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int):
        # NOTE: after a resume on several ranks accelerate finds no way to the sampler below its own, but asks us.
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """The rows of a batch, which torch's loader asks for at once: `datasets` then reads them in one go."""
        places = [index if index < len(self.dataset) else 0 for index in indices]
        reads_batches = isinstance(self.dataset, datasets.Dataset)
        rows = self.dataset.__getitems__(places) if reads_batches else [self.dataset[place] for place in places]
        return [self._mark(row, index) for row, index in zip(rows, indices, strict=True)]

    def _mark(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if index >= len(self.dataset):
            return {**row, PADDING_ROW_COLUMN: True}
        return {**row, ROW_NUMBER_COLUMN: index} if self.is_numbered else row


class PaddedSampler(Sampler[int]):
    """
    The indices of another sampler, then as many past the end as fill up a multiple of `multiple`. A sampler that draws
    is seeded for each epoch: the global generator may have been used differently on each rank.
    """

    def __init__(self, sampler: Any, *, multiple: int, seed: int):
        self.sampler = sampler
        self.multiple = multiple
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.multiple * math.ceil(len(self.sampler) / self.multiple)

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.sampler, (RandomSampler, LengthGroupedSampler)):
            self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from self.sampler
        yield from range(len(self.sampler), len(self))

    def set_epoch(self, epoch: int):
        self.epoch = epoch


class PaddedStream(IterableDataset):
    """
    The same for a stream: after its last row come padding rows, up to a multiple of `multiple`; `ValueError` if training
    would see more of them than of rows.
    """

    def __init__(self, dataset: Any, *, multiple: int, is_training: bool = True):
        self.dataset = dataset
        self.multiple = multiple
        self.is_training = is_training

    def __iter__(self) -> Iterator[dict[str, Any]]:
        num_rows, row = 0, {}
        for row in self.dataset:
            yield {**row, ROW_NUMBER_COLUMN: num_rows}
            num_rows += 1
        worker = get_worker_info()
        if self.is_training and 2 * num_rows * (worker.num_workers if worker else 1) < self.multiple:
            raise ValueError(
                f"The stream ended after {num_rows:,} rows, and a step takes {self.multiple:,}. Lower "
                "--per_device_train_batch_size or --gradient_accumulation_steps, or add data."
            )
        for _ in range(-num_rows % self.multiple):
            yield {**row, PADDING_ROW_COLUMN: True}

    def set_epoch(self, epoch: int):
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class PaddingRowCollator:
    """
    Collates as another collator does, then takes the weight from padding rows and checks `loss_mask` and that all ids
    are below `vocab_size`. In training, the batch has `row_number` besides, of shape `(num_rows,)`: -1 for a padding row.
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
        *,
        is_training: bool,
        vocab_size: int | None = None,
    ):
        self.collator = collator
        self.is_training = is_training
        self.vocab_size = vocab_size

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        is_padding_row = torch.tensor([bool(feature.get(PADDING_ROW_COLUMN)) for feature in features])
        own = (PADDING_ROW_COLUMN, ROW_NUMBER_COLUMN)
        batch = self.collator([{k: v for k, v in f.items() if k not in own} for f in features])
        if self.is_training:
            batch[ROW_NUMBER_COLUMN] = torch.tensor([feature.get(ROW_NUMBER_COLUMN, -1) for feature in features])
        if is_padding_row.any() and "labels" in batch:
            if len(batch["labels"]) != len(features):
                raise ValueError(
                    f"The collator made {len(batch['labels'])} rows of labels from {len(features)} features. "
                    "MaskedLossTrainer needs one row a feature: pack rows before (data.packing), not in the collator."
                )
            batch["labels"][is_padding_row] = -100
        if self.vocab_size is not None and "input_ids" in batch:
            self._check_ids(batch["input_ids"], features)
        if "loss_mask" in batch and (batch["loss_mask"] < 0).any():
            raise ValueError("loss_mask holds a negative weight; weights of predictions are zero or positive.")
        return batch

    def _check_ids(self, input_ids: torch.Tensor, features: list[dict[str, Any]]):
        """Here, since a GPU would only say that an assertion failed somewhere."""
        is_bad = (input_ids < 0) | (input_ids >= self.vocab_size)
        if is_bad.any():
            place = int(is_bad.flatten(1).any(dim=1).nonzero()[0])
            number = features[place].get(ROW_NUMBER_COLUMN, "?") if len(features) == len(input_ids) else "?"
            raise ValueError(
                f"Row {number} holds the id {int(input_ids[is_bad][0])}, and the model knows 0 to {self.vocab_size - 1}. "
                "Prepare the rows with the model's own tokenizer."
            )
