"""What the files of a run tell: its launches, and the figures of its log."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .metrics import NATS


@dataclass
class RunHistory:
    """
    What a run has recorded, with all its launches.

    Args:
        name (`str`): the name of its directory.
        launches (`list[dict]`): the entries of `run.json`, one per launch.
        log (`list[dict]`): the log history of [`~transformers.TrainerState`].
    """

    name: str
    launches: list[dict[str, Any]]
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_launch(self) -> dict[str, Any]:
        return self.launches[-1] if self.launches else {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the last launch that has some: a launch records them when its training begins."""
        return next((launch["arguments"] for launch in reversed(self.launches) if "arguments" in launch), {})

    @property
    def loss_unit(self) -> str:
        """The unit of the loss, such as `nats per token`, or the algorithm whose loss it is."""
        return self.last_launch.get("loss_unit", NATS)

    @property
    def unigram_loss(self) -> float | None:
        """The validation loss of a unigram model, which the end of a pretraining records."""
        return self.last_launch.get("unigram_loss")

    @property
    def has_answers(self) -> bool:
        """Whether the samples are answers to prompts, and not continuations of texts."""
        return trained_on_text(self.launches) is False

    @property
    def samples(self) -> dict[int, list[tuple[str, str]]]:
        """Prompts and generated texts by step. A resumed launch replaces those of the steps that it repeats."""
        return {step: pairs for launch in self.launches for step, pairs in launch.get("samples", [])}

    def series(self, key: str, *, over: str = "tokens") -> tuple[list[float], list[float]]:
        """
        Return the x and y values of a logged figure, one point per step. With `--load_best_model_at_end`, a second
        validation at the last step belongs to an earlier step, and is left out.

        Args:
            key (`str`): name of the figure in the log.
            over (`str`): `tokens` (millions that the run has seen) or `minutes` (of training, without evaluations).
        """
        timed = [entry for entry in self.log if "training_seconds" in entry]
        steps = [0, *(entry["step"] for entry in timed)]
        seconds = [0.0, *itertools.accumulate(entry["training_seconds"] for entry in timed)]
        if timed and self.log[-1]["step"] > steps[-1] > 0:
            # The last steps were too few for a log of their own.
            steps, seconds = [*steps, self.log[-1]["step"]], [*seconds, seconds[-1] * self.log[-1]["step"] / steps[-1]]
        points: dict[int, tuple[float, float]] = {}
        for entry in self.log:
            if key in entry and "num_input_tokens_seen" in entry:
                points.setdefault(entry["step"], (entry["num_input_tokens_seen"] / 1e6, entry[key]))
        minutes = (np.interp(list(points), steps, seconds) / 60).tolist()
        return minutes if over == "minutes" else [x for x, _ in points.values()], [y for _, y in points.values()]

    @property
    def seconds_left(self) -> float | None:
        """The training time that is left, at the speed of the last logged steps; `None` if it is unknown."""
        timed = [entry for entry in self.log if "training_seconds" in entry]
        if not timed or "max_steps" not in timed[-1]:
            return None
        first = timed[-2]["step"] if len(timed) > 1 else 0
        pace = timed[-1]["training_seconds"] / max(1, timed[-1]["step"] - first)
        left = pace * (timed[-1]["max_steps"] - timed[-1]["step"])
        return left if 0 <= left < 1e9 else None

    def last(self, key: str) -> Any:
        """Return the last value of a logged figure; `None` if it was never logged."""
        return next((entry[key] for entry in reversed(self.log) if key in entry), None)


def trained_on_text(launches: list[dict[str, Any]]) -> bool | None:
    """Return whether the last training of a run was on text, and not on chats; `None` without a record of it."""
    # A launch that ended before its training has no recipe.
    trained = [launch for launch in launches if "recipe" in launch]
    if not trained:
        return None
    return trained[-1]["recipe"] == "pretrain" or trained[-1].get("arguments", {}).get("dataset_kind") == "text"
