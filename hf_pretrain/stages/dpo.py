"""
Preference training: direct preference optimization (https://arxiv.org/abs/2305.18290) and its `--loss_type`s, with
TRL's trainer, and with this package's router loss, saving and pushing.

The loss averages over pairs. Every global batch is complete: the last pairs of an epoch that do not fill a batch are
left out (different pairs in each epoch). So accumulation and world size change nothing, except with the losses `sft`,
`aot` and `aot_unpaired`, which are no means over pairs.
"""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..runtime.errors import needing_extra
from ..runtime.flags import flag
from ..training.training_arguments import SFTTrainingArguments
from .log_probs import replace_heads
from .trl_trainer import TrlTrainer


with needing_extra("trl", "Preference training needs TRL"):
    from trl import DPOConfig, DPOTrainer


# Those of TRL.
_LOSSES = tuple(
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft "
    "sigmoid_norm".split()
)


@dataclass
class DPOTrainingArguments(SFTTrainingArguments, DPOConfig):
    """TRL's `DPOConfig`. Flags that other recipes also have keep this package's defaults."""

    has_masked_loss = False
    has_reference = True
    output_dir: str | None = flag("out/dpo")
    learning_rate: float = flag(1e-6)
    max_length: int = flag(512, "Tokens of prompt and answer; longer ones are truncated.")
    loss_type: list[str] = flag(["sigmoid"], "Losses to add up, weighted by --loss_weights.", choices=_LOSSES)

    @property
    def loss_depends_on_micro_batch(self) -> bool:
        # `sft` divides by the tokens of a micro-batch, and the others sort its pairs.
        return not {"sft", "aot", "aot_unpaired"}.isdisjoint(self.loss_type)


class MiniMindDPOTrainer(TrlTrainer, DPOTrainer):
    """TRL's [`~trl.DPOTrainer`] for pairs of [`~rows.preference_pairs.prepare_pairs`]."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        replace_heads(self, "entropy", "mean_logits", "is_top1", *(["log_sum_sq_probs"] if self.use_weighting else []))

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Return the dataset unchanged: its rows are tokenized already."""
        return dataset
