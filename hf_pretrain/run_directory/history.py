"""What the files of a run tell: its launches, and the figures of its log."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer import TRAINER_STATE_NAME

from ..runtime.errors import UserError
from ..runtime.stages import STAGES
from .directory import MOST_BYTES, RunDirectory, parse_lines, read_json
from .metrics import NATS


# By file: the number of bytes that were read, the last of them, and the entries that they hold.
_read_logs: dict[Path, tuple[int, bytes, list[dict[str, Any]]]] = {}


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
    stage, arguments = STAGES.get(trained[-1]["recipe"]), trained[-1].get("arguments", {})
    return (stage is not None and stage.trains_on_text) or arguments.get("dataset_kind") == "text"


def read_run(path: str | Path) -> RunHistory:
    """Read the run of a directory, also while it trains. Without a log file, read the log of its newest checkpoint."""
    directory = RunDirectory(path)
    return RunHistory(directory.path.resolve().name, directory.launches, _read_log(directory))


def _read_log(directory: RunDirectory) -> list[dict[str, Any]]:
    file, end = directory.log_file, directory.path / TRAINER_STATE_NAME
    # The state at the end of a run holds more: figures that were added to its entries later.
    is_newest = file.is_file() and not (end.is_file() and end.stat().st_mtime_ns >= file.stat().st_mtime_ns)
    if is_newest and file.stat().st_size < MOST_BYTES:
        return _read_growing(file)
    states = [end, *directory.path.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    newest = max(filter(Path.is_file, states), key=lambda path: path.stat().st_mtime, default=None)
    state = read_json(newest) if newest else {}
    log = state.get("log_history") if isinstance(state, dict) else None
    return _figures(log if isinstance(log, list) else [])


def _read_growing(path: Path) -> list[dict[str, Any]]:
    """Return the figures in a log. Of a log that has only grown since the last call, read only what is new."""
    size, last, entries = _read_logs.get(path, (0, b"", []))
    with path.open("rb") as file:
        file.seek(size - len(last))
        if file.read(len(last)) != last:
            # A resumed launch has written it anew.
            size, last, entries = file.seek(0), b"", []
        new = file.read()
    # The last line may not be complete yet.
    new = new[: new.rfind(b"\n") + 1]
    entries = [*entries, *_figures(parse_lines(new.split(b"\n")))]
    _read_logs[path] = size + len(new), (last + new)[-500:], entries
    return entries


def _figures(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the numbers in entries of a log. Leave out entries without a step, and integers that are no floats."""
    found = [
        {name: each for name, each in entry.items() if _is_number(each)}
        for entry in entries
        if isinstance(entry, dict)
    ]
    return [figures for figures in found if isinstance(figures.get("step"), int)]


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)


def read_runs(directories: Iterable[Path]) -> tuple[list[RunHistory], list[str]]:
    """
    Read the runs of several directories, by which they are named.

    Returns:
        `tuple`: the runs, and for each directory without a run the reason why it is left out.

    Raises:
        `UserError`: if no directory holds a run that trained.
    """
    runs, reasons = [], []
    for directory in dict.fromkeys(directories):
        run = read_run(directory)
        if run.launches and run.log:
            # A name may be no text in UTF-8.
            run.name = str(directory).encode(errors="replace").decode()
            runs.append(run)
        else:
            reasons.append(f"{directory} holds no run that has logged something. Pass the --output_dir of a run.")
    if not runs:
        raise UserError("\n".join(reasons))
    return runs, reasons
