"""Guard the weights against losses and gradients that are not finite."""

import json
from pathlib import Path
from typing import Any


# sysexits.h calls it EX_DATAERR.
EXIT_NOT_FINITE = 65
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

    def may_skip(self) -> bool:
        """Return whether the run skips this step, and count it."""
        if not self.skips or self.num_skipped >= MAX_SKIPPED_STEPS:
            return False
        self.num_skipped += 1
        return True

    def path(self, step: int) -> Path:
        return self.output_dir / f"nonfinite-{step}.json"

    def write_report(self, step: int, what: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a step, so that a user can look at them."""
        path = self.path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"step": step, "what": what, "rows": rows}
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")

    def describe(self, step: int, what: str, rows: list[dict[str, Any]]) -> str:
        """Return the first sentence of the message to the user."""
        return f"{what} in step {step}; {self.path(step)} has the {len(rows)} row(s) it may come from."


__all__ = ["EXIT_NOT_FINITE", "MAX_SKIPPED_STEPS", "NonfiniteGuard"]
