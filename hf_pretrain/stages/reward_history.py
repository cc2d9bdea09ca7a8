"""What the rewards of past steps decide: a warning if they never differ, and the level of the tasks."""

import json
import math
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from ..runtime.errors import UserError
from ..training.callbacks import print_step


logger = logging.get_logger(__name__)

# After so many steps without a difference between rewards, a run says that it learns nothing.
STEPS_WITHOUT_SIGNAL = 10
# The mean reward of so many generations raises the level of the tasks.
NUM_GENERATIONS = 10
LEVEL_NAME = "task_level.json"
# Mean difference between the log-probabilities of vLLM and of the model. Rounding to bfloat16 gives a few hundredths.
MAX_DIFFERENCE = 0.5


class KnownFigures(TrainerCallback):
    """
    Log only figures that some completion has. Trackers expect no `None`, which TRL logs for the others. Warn once if
    the rewards of all groups were equal for ten steps, in which they taught nothing.

    Raises:
        `UserError`: if the answers come from another model than the one that learns.
    """

    def __init__(self):
        # The last step that was logged with a group whose rewards differ.
        self.last_signal: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.last_signal = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if (difference := logs.get("sampling/sampling_logp_difference/mean") or 0.0) > MAX_DIFFERENCE:
            raise UserError(
                f"vLLM computes other probabilities than the model: they differ by {difference:.2g} nats per token. "
                "With --vllm_mode server, serve the run's own checkpoint, not an export, whose weights have another "
                "order, with --logprobs-mode processed_logprobs."
            )
        if logs.get("frac_reward_zero_std", 1.0) < 1.0:
            self.last_signal = state.global_step
        elif "frac_reward_zero_std" in logs and state.global_step - self.last_signal >= STEPS_WITHOUT_SIGNAL:
            logger.warning_once(
                f"In {STEPS_WITHOUT_SIGNAL} steps, all completions of each prompt got the same reward, which teaches "
                "nothing. Sample hotter (--temperature), take easier or harder tasks or other --rewards, raise "
                "--num_generations, or fine-tune on examples first (hf-pretrain sft)."
            )
        for entry in (logs, state.log_history[-1]):
            for name in [name for name, value in entry.items() if value is None]:
                del entry[name]


class TaskLevel:
    """
    The level of the tasks of reasoning-gym, which rises with the rewards.

    It acts where a batch is used, because data loaders read ahead, some in other processes. All ranks count the same
    rewards, and checkpoints hold them.

    Args:
        tasks ([`~datasets.Dataset`]): training tasks of [`~data.reasoning_gym_tasks.load_gym_tasks`].
        threshold (`float`): mean reward of the verifiers at which the level rises.
    """

    def __init__(self, tasks: Dataset, threshold: float):
        found = zip(tasks["reasoning_gym"], tasks["harder"], strict=True) if "harder" in tasks.column_names else ()
        levels = [(len(harder), place["level"]) for place, harder in found if place]
        num_higher, first = max(levels, default=(0, 0))
        if not num_higher:
            raise UserError("--raise_level_at: no task has a higher level. Name a reasoning_gym:NAME that has some.")
        self.level, self.first, self.highest, self.threshold = first, first, first + num_higher, threshold
        self.rewards: list[float] = []

    def choose(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a training task at the present level, or at the highest that its family has."""
        harder = (row["harder"] or [])[: self.level - self.first]
        return row | (json.loads(harder[-1]) if harder else {})

    def count(self, reward: float, state: TrainerState) -> None:
        """Count the mean reward of a generation over all ranks, which is NaN if none of its tasks has a verifier."""
        self.rewards = [*self.rewards, *([] if math.isnan(reward) else [reward])][-NUM_GENERATIONS:]
        mean = sum(self.rewards) / NUM_GENERATIONS
        if len(self.rewards) == NUM_GENERATIONS and mean >= self.threshold and self.level < self.highest:
            self.level, self.rewards = self.level + 1, []
            if state.is_world_process_zero:
                print_step(state, f"mean reward {mean:.2f} of the verifiers: the tasks rise to level {self.level}")

    def save(self, trainer: Any, directory: Path) -> None:
        if trainer.args.should_save:
            (directory / LEVEL_NAME).write_text(json.dumps([self.level, self.rewards]), encoding="utf-8")

    def load(self, trainer: Any, checkpoint: str) -> None:
        path = Path(checkpoint, LEVEL_NAME)
        if path.exists():
            self.level, self.rewards = json.loads(path.read_text(encoding="utf-8"))
