"""
Preference training: direct preference optimization (https://arxiv.org/abs/2305.18290) and its `--loss_type`s, with
TRL's trainer, and with this package's router loss, saving and pushing.

The loss averages over pairs. Every global batch is complete: the last pairs of an epoch that do not fill a batch are
left out (different pairs in each epoch). So accumulation and world size change nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from ..runtime.errors import needing_extra
from ..training.training_arguments import SFTTrainingArguments
from .trl_support import WholeBatchesMixin


with needing_extra("trl", "Preference training needs TRL"):
    from trl import DPOConfig, DPOTrainer


@dataclass
class DPOTrainingArguments(SFTTrainingArguments, DPOConfig):
    """TRL's `DPOConfig`. Flags that other recipes also have keep this package's defaults."""

    takes_fp8 = False
    output_dir: str | None = field(default="out/dpo", metadata={"help": "Directory of the run."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and answer; longer ones are truncated."})

    @property
    def has_reference(self) -> bool:
        return True


class MiniMindDPOTrainer(WholeBatchesMixin, DPOTrainer):
    """TRL's [`~trl.DPOTrainer`] for pairs of [`~data.preference_pairs.prepare_pairs`]."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Return the dataset unchanged: its rows are tokenized already."""
        return dataset
