"""Count and list the bad lines of a load, and compare their number with a limit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..runtime.errors import UserError


logger = logging.get_logger(__name__)

# A stream compares the number of bad lines with the limit once per this many rows.
RATIO_INTERVAL = 1000


class RejectedLines:
    """
    Record of the bad lines of one load: it logs and counts them, and lists them in a file.

    Args:
        max_ratio (`float`): maximum share of bad lines.
        path (`str` or `Path`, *optional*): JSONL file that lists them; an existing file is removed.
    """

    def __init__(self, max_ratio: float, path: str | Path | None):
        self.max_ratio = max_ratio
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.num_lines = 0
        self.num_rejected = 0
        # Reasons by the positions that are already logged and listed.
        self.listed: dict[tuple[str, int], str] = {}

    def keep(self, row: dict[str, Any]) -> bool:
        """Return whether a row of a stream is a document; check the limit every `RATIO_INTERVAL` rows."""
        self.num_lines += 1
        if row["reason"] is not None:
            self.add(row["source"], row["line"], row["reason"])
        if self.num_lines % RATIO_INTERVAL == 0:
            self.check_ratio()
        return row["reason"] is None

    def add(self, source: str, line: int, reason: str) -> None:
        """Record a bad line."""
        # Count the line in every epoch of a stream, because `num_lines` counts it in every epoch, too.
        self.num_rejected += 1
        if (source, line) in self.listed:  # every epoch of a stream reads it again
            return
        self.listed[source, line] = reason
        if len(self.listed) == 1:
            others = f"; {self.path} lists all skipped lines" if self.path else ""
            logger.warning(f"{source}:{line}: {reason}. This line is skipped{others}.")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            entry = {"source": source, "line": line, "reason": reason}
            # Open the file for each line, so that a killed run has listed all of them.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def check_ratio(self) -> None:
        """
        Compare the number of bad lines with the limit.

        Raises:
            `UserError`: if there are more bad lines than the limit allows.
        """
        if self.num_rejected > self.max_ratio * self.num_lines:
            raise UserError(
                f"{self.num_rejected} of {self.num_lines} lines ({self.num_rejected / self.num_lines:.2%}) are bad, "
                f"more than --max_rejected_ratio {self.max_ratio} allows. Fix the data (`hf-pretrain data clean` "
                f"drops bad lines) or raise the limit:{self.describe()}"
            )

    def describe(self) -> str:
        """Return the most frequent reasons, each with its count and first position."""
        first = {reason: f"{source}:{line}" for (source, line), reason in reversed(self.listed.items())}
        shown = Counter(self.listed.values()).most_common(5)
        lines = [f"{count} x {reason} (first: {first[reason]})" for reason, count in shown]
        if self.path is not None and lines:
            lines.append(f"all of them: {self.path}")
        # An error message becomes one line, where only the semicolons remain.
        return "\n  " + ";\n  ".join(lines) if lines else ""
