"""
Preference training: direct preference optimization (https://arxiv.org/abs/2305.18290) and its `--loss_type`s, with
TRL's trainer, and with this package's router loss, saving and pushing.

The loss averages over pairs. Every global batch is complete: the last pairs of an epoch that do not fill a batch are
left out (different pairs in each epoch). So accumulation and world size change nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers.utils import logging

from ..data.padding_rows import EpochSampler, PaddedDataset, RowSource
from ..runtime.errors import UserError, needing_extra
from ..training.training_arguments import LMTrainingArguments
from .trl_support import RouterLossMixin


with needing_extra("trl", "Preference training needs TRL"):
    from trl import DPOConfig, DPOTrainer

logger = logging.get_logger(__name__)


@dataclass
class DPOTrainingArguments(LMTrainingArguments, DPOConfig):
    """TRL's `DPOConfig`. Flags that other recipes also have keep this package's defaults."""

    default_optim_preset = "adamw"
    takes_fp8 = False
    output_dir: str | None = field(default="out/dpo", metadata={"help": "Directory of the run."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and answer; longer ones are truncated."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations in the backward pass to save memory."}
    )
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})

    @property
    def has_reference(self) -> bool:
        return True


class MiniMindDPOTrainer(RouterLossMixin, DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`] for pairs of [`~data.preference_pairs.prepare_pairs`].

    It leaves out the last rows of an epoch, or of an evaluation, that do not fill a global batch. An evaluation warns
    about the rows that it leaves out, and uses smaller batches for a small validation set. Raise `UserError` if the
    rows do not fill a single batch.
    """

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Return the dataset unchanged: its rows are tokenized already."""
        return dataset

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return a source of rows whose sampler leaves out rows that do not fill a global batch."""
        num_processes = self.accelerator.num_processes
        if not is_training:
            # A small validation set would otherwise fill no batch and give no figures.
            batch_size = max(1, min(batch_size, len(dataset) // num_processes))
        multiple = batch_size * num_processes
        if is_training:
            multiple *= self.args.gradient_accumulation_steps
        elif len(dataset) % multiple:
            left_out = len(dataset) % multiple
            logger.warning_once(
                f"{description}: {left_out} of {len(dataset)} rows do not fill a batch. The run leaves them out."
            )
        # Padding rows are not possible here: unlike the loss of pretraining, a preference loss has no row weights.
        if len(dataset) < multiple:
            raise UserError(
                f"{description}: {len(dataset)} rows do not fill one batch of {multiple} (devices x batch size"
                f"{' x accumulation' if is_training else ''}). Lower the batch size or add data."
            )
        # The seed decides which rows are left out: different ones in each epoch, but the same ones on every rank.
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed

        def whole_batches(_):
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            rows = sampler if sampler is not None else range(len(dataset))
            # Trainer calls this function later, when `reachable` below exists.
            reachable.sampler = EpochSampler(rows, seed=seed, multiple=multiple, pads=False)
            return reachable.sampler

        # NOTE: after a resume on several ranks, accelerate calls `set_epoch` only on the dataset, not on the sampler.
        reachable = PaddedDataset(dataset)
        return RowSource(reachable, batch_size, whole_batches)
