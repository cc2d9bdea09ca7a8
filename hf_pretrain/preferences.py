"""
Direct preference optimization (https://arxiv.org/abs/2305.18290) by TRL's trainer, with this package's router loss,
saving and pushing.

The loss is a mean over pairs, and every global batch is a whole one: the pairs that do not fill the last one of an epoch
are left out of it (each epoch draws anew), so that accumulation and world size change nothing.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from .arguments import LMTrainingArguments
from .data.filling import FilledSampler
from .hub import HubPushMixin
from .trl_support import RouterLossMixin


@dataclass
class DPOTrainingArguments(LMTrainingArguments, DPOConfig):
    """TRL's `DPOConfig`; what it shares with the other recipes has their defaults."""

    output_dir: str | None = field(default="out/dpo", metadata={"help": "Where the run goes."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and answer; the rest is cut off."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Compute activations twice to save memory."})
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})


class MiniMindDPOTrainer(RouterLossMixin, HubPushMixin, DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`] over pairs of [`~data.preferences.prepare_pairs`].

    Raises:
        `ValueError`: if the pairs fill no global batch.
    """

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **kwargs):
        multiple = batch_size * self.accelerator.num_processes
        if is_training:
            multiple *= self.args.gradient_accumulation_steps
        if len(dataset) < multiple:
            raise ValueError(
                f"{description}: {len(dataset)} pairs do not fill one batch of {multiple} (devices x batch size"
                f"{' x accumulation' if is_training else ''}). Lower the batch size or add data."
            )
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed

        def whole_batches(dataset):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            return WholeBatchSampler(sampler or range(len(dataset)), multiple=multiple, seed=seed)

        return super()._get_dataloader(dataset, description, batch_size, whole_batches, is_training, **kwargs)


class WholeBatchSampler(FilledSampler):
    """The indices of another sampler, as many as fill whole batches."""

    def __len__(self) -> int:
        return self.multiple * math.floor(len(self.sampler) / self.multiple)

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(super().__iter__(), len(self))


__all__ = ["DPOTrainingArguments", "MiniMindDPOTrainer"]
