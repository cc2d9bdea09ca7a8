"""Protect the weights from non-finite losses and gradients."""

import json
from pathlib import Path
from typing import Any


# EX_DATAERR of sysexits.h.
EXIT_NOT_FINITE = 65
# A run that must skip more steps has a problem that skipping cannot solve, such as a learning rate that is too high.
MAX_SKIPPED_STEPS = 10


class NonfiniteGuard:
    """
    Record steps whose loss or gradient is not finite, and decide whether the run may skip them.

    Args:
        output_dir (`str` or `Path`): where `nonfinite-<step>.json` is written.
        skips (`bool`): skip up to `MAX_SKIPPED_STEPS` such steps instead of stopping at the first one.
    """

    def __init__(self, output_dir: str | Path, *, skips: bool):
        self.output_dir = Path(output_dir)
        self.skips = skips
        self.num_skipped = 0

    def decide(self, step: int, what: str, rows: list[dict[str, Any]]) -> tuple[bool, str]:
        """Return whether the run skips this step, and the message to the user. Arguments as in [`write_report`]."""
        message = f"{what} in step {step}; {self.path(step)} has the {len(rows)} row(s) that may have caused it."
        if self.skips and self.num_skipped < MAX_SKIPPED_STEPS:
            self.num_skipped += 1
            return True, f"{message} The run skips the step ({self.num_skipped} of {MAX_SKIPPED_STEPS})."
        return False, (
            f"{message} The run stopped before the update and wrote no checkpoint; the checkpoints in "
            f"{self.output_dir} are intact. Look at the rows, skip such steps with --on_nonfinite skip, or "
            "resume with a lower --learning_rate and --allow_inexact_resume."
        )

    def path(self, step: int) -> Path:
        """Return the path of the report about a step."""
        return self.output_dir / f"nonfinite-{step}.json"

    def write_report(self, step: int, what: str, rows: list[dict[str, Any]]) -> None:
        """
        Write the rows of a step to a file for the user.

        Args:
            step (`int`): number of the step, from 1.
            what (`str`): the non-finite quantity, such as `The loss is not finite`.
            rows (`list[dict]`): the result of [`find_suspects`].
        """
        path = self.path(step)
        # A run without checkpoints may not have made the directory yet.
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"step": step, "what": what, "rows": rows}
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")


def find_suspects(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows whose `is_finite` is false, or all rows of the step if there are none."""
    return [row for row in rows if not row["is_finite"]] or rows


__all__ = ["EXIT_NOT_FINITE", "MAX_SKIPPED_STEPS", "NonfiniteGuard", "find_suspects"]
