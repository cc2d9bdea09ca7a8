"""Read `run.json` and `history.jsonl`, which a run writes into its directory."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..runtime.metrics import NATS
from .history import HISTORY_NAME


RECORD_NAME = "run.json"
REPORT_NAME = "report.html"
# The data module writes one line per bad line of the data.
_REJECTED_NAME = "rejected.jsonl"


@dataclass
class Run:
    """
    A run with all its launches.

    Args:
        name (`str`): the name of its directory.
        launches (`list[dict]`): the entries of `run.json`, one per launch.
        entries (`list[dict]`): the lines of `history.jsonl`, without the figures of steps that a resumed run repeated.
    """

    name: str
    launches: list[dict[str, Any]]
    entries: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] in kinds]

    @property
    def logs(self) -> list[dict[str, Any]]:
        return self.of_kind("log")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the last launch."""
        return self.launches[-1].get("arguments", {}) if self.launches else {}

    @property
    def loss_unit(self) -> str:
        """The unit of the loss, such as `nats per token`, or the algorithm whose loss it is."""
        return self.launches[-1].get("loss_unit", NATS) if self.launches else NATS

    @property
    def has_answers(self) -> bool:
        """Whether the samples are answers to prompts, and not continuations of texts."""
        return trained_on_text(self.launches) is False

    @property
    def num_steps(self) -> int:
        """Number of trained steps. A checkpoint or a stop may come after the last log."""
        return self.entries[-1]["step"] if self.entries else 0

    def training_seconds(self) -> dict[int, float]:
        """
        Return the seconds of training before each logged step, without evaluation and saving. A run that logged no
        `training_seconds` gets the time on the clock since its start instead, without the pauses before it resumed.
        """
        if not self.is_timed:
            return self._clock_seconds()
        seconds, found = 0.0, {0: 0.0}
        for entry in self.logs:
            seconds += entry.get("training_seconds", 0.0)
            found[entry["step"]] = seconds
        return found

    @property
    def is_timed(self) -> bool:
        """Whether the run logged the time of its training."""
        return self.last("training_seconds") is not None

    def _clock_seconds(self) -> dict[int, float]:
        """Return the seconds on the clock before the first log entry of each step."""
        seconds, before, found = 0.0, None, {0: 0.0}
        for entry in self.of_kind("start", "resume", "log"):
            if entry["kind"] == "log" and before is not None:
                seconds += entry["time"] - before
                found.setdefault(entry["step"], seconds)
            before = entry["time"]
        return found

    def series(self, key: str, *, over: str = "tokens") -> tuple[list[float], list[float]]:
        """
        Return the x and y values of a logged figure, one point per step. With `--load_best_model_at_end`, a second
        validation at the last step belongs to an earlier step, and is left out.

        Args:
            key (`str`): name of the figure in the log.
            over (`str`): `tokens` (millions that the run has seen) or `minutes` (of training).
        """
        seconds = self.training_seconds()
        points: dict[int, tuple[float, float]] = {}
        for entry in self.logs:
            if isinstance(entry.get(key), (int, float)) and "num_input_tokens_seen" in entry:
                x = entry["num_input_tokens_seen"] / 1e6 if over == "tokens" else seconds[entry["step"]] / 60
                points.setdefault(entry["step"], (x, entry[key]))
        return [x for x, _ in points.values()], [y for _, y in points.values()]

    def last(self, key: str) -> float | None:
        """Return the last value of a logged figure; `None` if it was never logged."""
        values = [entry[key] for entry in self.logs if isinstance(entry.get(key), (int, float))]
        return values[-1] if values else None


def read_run(directory: str | Path) -> Run:
    """
    Read the run of a directory.

    Raises:
        `ValueError`: if the directory holds no run, or its `run.json` is damaged.
    """
    directory = Path(directory)
    record = directory / RECORD_NAME
    if not record.is_file():
        raise UserError(f"{directory} holds no run: it has no {RECORD_NAME}. Pass the --output_dir of a run.")
    try:
        launches = json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{record} is not valid JSON: {error}. Restore the file from a copy.") from None
    entries = _read_rejected(directory / _REJECTED_NAME) + _read_history(directory / HISTORY_NAME)
    return Run(directory.resolve().name, launches, entries)


def read_runs(directories: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """
    Read the runs of several directories. The name of each run is the shortest end of its path that no other run has.

    Returns:
        `tuple`: the runs, and for each directory without a run the reason why it is left out.

    Raises:
        `ValueError`: if no directory holds a run that trained, or a `run.json` is damaged.
    """
    runs, reasons = {}, []
    for directory in directories:
        try:
            run = read_run(directory)
        except ValueError as error:
            if Path(directory, RECORD_NAME).is_file():
                raise
            reasons.append(str(error))
            continue
        if run.entries:
            runs[directory.resolve()] = run
        else:
            reasons.append(f"{directory} holds a run that ended before its training.")
    if not runs:
        raise UserError("\n".join(reasons))
    num_parts = 1
    while len({path.parts[-num_parts:] for path in runs}) < len(runs):
        num_parts += 1
    for path, run in runs.items():
        run.name = "/".join(path.parts[-num_parts:])
    return list(runs.values()), reasons


def trained_on_text(launches: list[dict[str, Any]]) -> bool | None:
    """Return whether the last training of a run was on text, and not on chats; `None` without a record of it."""
    # A launch that ended before its training has no recipe.
    trained = [launch for launch in launches if "recipe" in launch]
    if not trained:
        return None
    return trained[-1]["recipe"] == "pretrain" or trained[-1].get("arguments", {}).get("dataset_kind") == "text"


def read_launches(directory: str | Path) -> list[dict[str, Any]]:
    """Return the launches that `run.json` holds; an empty list if there is no such file or it is damaged."""
    try:
        launches = json.loads(Path(directory, RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [launch for launch in launches if isinstance(launch, dict)] if isinstance(launches, list) else []


def _read_rejected(path: Path) -> list[dict[str, Any]]:
    """Return an event if the data had bad lines."""
    if not path.is_file():
        return []
    num_lines = path.read_bytes().count(b"\n")
    message = f"{num_lines:,}, listed in {path.name}"
    return [{"kind": "rejected", "time": path.stat().st_mtime, "step": 0, "message": message}]


def _read_history(path: Path) -> list[dict[str, Any]]:
    """
    Return the lines of a history. A new run replaces all earlier lines. A resumed run replaces the figures of the
    steps that it repeats, but not the events.
    """
    entries: list[dict[str, Any]] = []
    # Other ends of lines than "\n" may stand within a sample.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    for line in filter(None, lines):
        try:
            entry = json.loads(line)
        except ValueError:
            # The machine lost power, or the disk was full, while the run wrote this line.
            continue
        if entry["kind"] == "start":
            entries = []
        elif entry["kind"] == "resume":
            figures = ("log", "samples", "router_load")
            entries = [old for old in entries if old["step"] <= entry["step"] or old["kind"] not in figures]
        entries.append(entry)
    return entries


__all__ = ["RECORD_NAME", "REPORT_NAME", "Run", "read_launches", "read_run", "read_runs", "trained_on_text"]
