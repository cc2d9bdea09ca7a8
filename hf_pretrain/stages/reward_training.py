"""
Training of a reward model on preferences, with TRL's trainer: the score of the chosen answer shall exceed the score of
the rejected one, with the loss -log sigmoid(chosen - rejected) (https://arxiv.org/abs/2203.02155).
"""

import copy
from dataclasses import dataclass

from ..loading.adapters import is_adapted, merge_adapter
from ..model.modeling_minimind import MiniMindForCausalLM, MiniMindForSequenceClassification
from ..runtime.errors import UserError, needing_extra
from ..runtime.flags import flag
from ..training.training_arguments import SFTTrainingArguments
from .trl_trainer import TrlTrainer


with needing_extra("trl", "Training of reward models needs TRL"):
    from trl import RewardConfig, RewardTrainer


@dataclass
class RewardTrainingArguments(SFTTrainingArguments, RewardConfig):
    """TRL's `RewardConfig`. Flags that other recipes also have keep this package's defaults."""

    has_masked_loss = False
    # TRL's other trainers have these flags.
    sync_ref_model = False
    router_aux_loss_coef = None
    output_dir: str | None = flag("out/reward")
    learning_rate: float = flag(1e-5)
    max_length: int = flag(512, "Tokens of prompt and answer; longer pairs are left out.")

    def __post_init__(self):
        if self.distributed_config is not None:
            raise UserError(
                "--fsdp_size, --tp_size and --ep_size shard no reward models. Use --deepspeed ds_configs/zero3.json."
            )
        super().__post_init__()


class MiniMindRewardTrainer(TrlTrainer, RewardTrainer):
    """TRL's [`~trl.RewardTrainer`] for whole pairs of [`~rows.preparation.load_rows`]."""


def make_reward_model(model: MiniMindForCausalLM) -> MiniMindForSequenceClassification:
    """Return a model with the decoder of a language model and a new head that gives one score per text."""
    model = merge_adapter(model) if is_adapted(model) else model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    reward_model = MiniMindForSequenceClassification(config)
    reward_model.model = model.model
    return reward_model
