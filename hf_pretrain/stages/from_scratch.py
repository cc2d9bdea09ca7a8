"""
Plan and run the stages from text to a chat model within a budget of time (`recipes/from_scratch.py`).

`plan.json` in the output directory holds the plan and the seconds that were used, so a run that was killed goes on.
"""

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..reports.run_files import Run, read_launches
from ..runtime.errors import UserError
from ..runtime.writing import written_whole


PLAN_NAME = "plan.json"
# Presets from small to large. Choose the one whose tokens per parameter, in the time on this machine, come nearest to
# the best ratio (https://arxiv.org/abs/2203.15556).
CANDIDATES = ("tiny", "minimind2-small", "minimind2", "0.5B", "1B")
TOKENS_PER_PARAMETER = 20
# Repeated text is worth almost as much as new text for four passes (https://arxiv.org/abs/2305.16264).
MAX_PASSES = 4
# Share of pretraining in the time of the steps (docs/performance.md).
PRETRAINING_SHARE = 0.3
# Share of the steps that fit into the measured time. Evaluations, checkpoints and slower steps take the rest.
SAFETY = 0.95
# Each stage trains at least for this share of the time, even if the machine is slower than planned.
LEAST_SHARE = 0.1
# Statuses of a command without enough memory: torch's error, and Linux's kill.
_TOO_LARGE = (1, -9, 137)
# Lines of the plan that `--dry_run` prints.
_PLAN = re.compile(
    r"^Steps +([\d,]+) of ([\d,]+) .* over ([\d,]+) sequences$.*, (\S+) per parameter$.*^Time +(\S+) s per step",
    re.MULTILINE | re.DOTALL,
)


class Pace(NamedTuple):
    """What `--dry_run` measured. The tokens are those of one step."""

    start_seconds: float
    step_seconds: float
    steps_per_pass: float
    tokens_per_parameter: float

    def count_steps(self, seconds: float) -> int:
        """Return the steps that fit into a time, and into `MAX_PASSES` passes over the data."""
        # The stages evaluate after half of their steps, too.
        return max(2, int(min(SAFETY * seconds / self.step_seconds, MAX_PASSES * self.steps_per_pass)))


class Budget:
    """
    The clock and the plan of a run.

    Args:
        directory (`Path`): the output directory.
        seconds (`float`): the time of all commands together, over all launches.
    """

    def __init__(self, directory: Path, seconds: float):
        self.path, self._clock = directory / PLAN_NAME, time.monotonic()
        self.plan: dict[str, Any] = {"used_seconds": 0.0, "preset": None, "steps": {}}
        if self.path.is_file():
            self.plan = json.loads(self.path.read_text(encoding="utf-8"))
        self.plan["seconds"] = seconds

    @property
    def seconds_left(self) -> float:
        return self.plan["seconds"] - self.plan["used_seconds"]

    def save(self) -> None:
        """Write the plan with the seconds until now."""
        started, self._clock = self._clock, time.monotonic()
        self.plan["used_seconds"] += self._clock - started
        with written_whole(self.path.parent) as scratch:
            (scratch / PLAN_NAME).write_text(json.dumps(self.plan, indent=1) + "\n", encoding="utf-8")

    def run(self, *words: str) -> str:
        """Run a stage in its directory, and return its output. If it fails or stops, exit with its status."""
        lines = []
        command = [sys.executable, "-m", "hf_pretrain_cli", *words, "--output_dir", str(self.path.parent / words[0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            # The stage saves a checkpoint and stops.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: process.send_signal(number))
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
                self.save()
        self.save()
        if process.returncode:
            print(f"{words[0]} ended early. The same command goes on from its newest checkpoint.", file=sys.stderr)
            raise SystemExit(process.returncode)
        return "".join(lines)

    def measure(self, *words: str) -> Pace:
        """Measure the pace of a stage on this machine and its data."""
        used = self.plan["used_seconds"]
        found = _PLAN.search(self.run(*words, "--dry_run"))
        if found is None:
            raise UserError(
                f"The plan of {words[0]} names no passes over the data, from which its steps follow. Leave out "
                "--streaming."
            )
        steps, rows, num_rows, tokens, seconds = (float(text.replace(",", "")) for text in found.groups())
        # A dry run trains four steps. Everything else also precedes the steps of the stage.
        return Pace(self.plan["used_seconds"] - used - 4 * seconds, seconds, num_rows / rows, tokens / steps)

    def plan_pretraining(self, presets: tuple[str, ...], flags: list[str]) -> None:
        """Choose the preset and the steps of pretraining."""
        found: dict[float, tuple[str, Pace]] = {}
        for preset in presets:
            try:
                pace = self.measure("pretrain", "--preset", preset, *flags)
            except SystemExit as error:
                if not found or error.code not in _TOO_LARGE:
                    raise
                print(f"{preset} does not run here: choosing among the smaller presets.")
                break
            ratio = pace.tokens_per_parameter * self.seconds_left / pace.step_seconds / TOKENS_PER_PARAMETER
            found[abs(math.log(max(ratio, 1e-9)))] = preset, pace
            if ratio < 1:
                break
        self.plan["preset"], pace = found[min(found)]
        # Fine-tuning starts, too.
        seconds = PRETRAINING_SHARE * (self.seconds_left - 2 * pace.start_seconds)
        self.plan["steps"]["pretrain"] = pace.count_steps(max(seconds, LEAST_SHARE * self.plan["seconds"]))
        self.save()

    def train(self, stage: str, *flags: str) -> Path:
        """Run a stage to its end, in the time that is left if it has no plan yet, and return its directory."""
        directory = self.path.parent / stage
        words = [stage, "--preset", self.plan["preset"], *flags]
        if not any("ended" in launch for launch in read_launches(directory)):
            if stage not in self.plan["steps"]:
                pace = self.measure(*words)
                seconds = self.seconds_left - pace.start_seconds
                self.plan["steps"][stage] = pace.count_steps(max(seconds, LEAST_SHARE * self.plan["seconds"]))
                self.save()
            words += ["--max_steps", str(self.plan["steps"][stage])]
            self.run(*words, "--eval_steps", "0.5", "--save_steps", "0.1", "--resume_from_checkpoint", "auto")
        return directory

    def describe(self, runs: list[Run]) -> list[str]:
        """Return sentences for the page: the time, and what a longer budget would have bought."""
        used, planned = self.plan["used_seconds"], self.plan["seconds"]
        notes = [f"The preset {self.plan['preset']} took {used:,.0f} of {planned:,.0f} seconds, measuring included."]
        for run in runs:
            losses = run.series("eval_loss")[1]
            if not losses:
                # The flags of the stage leave no validation set.
                continue
            notes.append(
                f"{run.name}: the validation loss fell by {losses[-2] - losses[-1]:.3f} in the second half of the "
                "steps. Twice the time would buy at most as much again, because a part of it comes from the learning "
                "rate, which falls towards the end."
            )
        return notes
