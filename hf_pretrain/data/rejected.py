"""Count and list the bad lines of a load, against a limit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .corpora import COPY


logger = logging.get_logger(__name__)

MAX_WARNINGS = 20


RATIO_INTERVAL = 1000


class RejectedLines:
    """
    The bad lines of one load: warned of, listed in a file, counted against a limit.

    Args:
        max_ratio (`float`): share of all lines that may be bad.
        path (`str` or `Path`, *optional*): JSONL file to list them in; an older one is removed.
    """

    def __init__(self, max_ratio: float, path: str | Path | None):
        self.max_ratio = max_ratio
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.num_lines = 0
        self.num_rejected = self.num_copies = 0
        self.listed: set[tuple[str, int]] = set()
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def keep(self, row: dict[str, Any]) -> bool:
        """Whether a row of a stream is a document; looks at the limit every so many rows."""
        self.num_lines += 1
        if row["reason"] is not None:
            self.add(row["source"], row["line"], row["offset"], row["reason"])
        if self.num_lines % RATIO_INTERVAL == 0:
            self.check_ratio()
        return row["reason"] is None

    def add(self, source: str, line: int, offset: int | None, reason: str) -> None:
        """Notes a bad line; `ValueError` if a whole file is bad (line 0), since nobody knows how much it held."""
        if line == 0:
            raise ValueError(f"{source}: {reason}.")
        if reason == COPY.reason:
            self.num_copies += 1
            return
        self.num_rejected += 1
        if (source, line) in self.listed:  # a stream is read once more in every epoch
            return
        self.listed.add((source, line))
        self.reasons[reason] += 1
        self.examples.setdefault(reason, f"{source}:{line}")
        if len(self.listed) <= MAX_WARNINGS:
            logger.warning(f"{source}:{line}: {reason}. This line is set aside.")
        elif len(self.listed) == MAX_WARNINGS + 1:
            logger.warning(
                f"More lines are set aside; all of them are in {self.path or 'no file: pass rejected_path'}."
            )
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            entry = {"source": source, "line": line, "offset": offset, "reason": reason}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def describe_copies(self) -> str:
        """How many exact copies are left out, if any."""
        return f"{self.num_copies:,} exact copies of embedded documents left out" if self.num_copies else ""

    def check_ratio(self) -> None:
        """Raises `ValueError` if more lines are bad than the limit allows."""
        if self.num_rejected > self.max_ratio * self.num_lines:
            raise ValueError(
                f"{self.num_rejected} of {self.num_lines} lines ({self.num_rejected / self.num_lines:.2%}) are bad, "
                f"more than --max_rejected_ratio {self.max_ratio} allows. Mend the data or raise the limit."
                f"{self.describe()}"
            )

    def describe(self) -> str:
        """The commonest reasons, each with its count and where it is first seen."""
        lines = [
            f"{count} x {reason} (first: {self.examples[reason]})" for reason, count in self.reasons.most_common(5)
        ]
        if self.path is not None and lines:
            lines.append(f"all of them: {self.path}")
        return "".join(f"\n  {line}" for line in lines)


__all__ = ["MAX_WARNINGS", "RATIO_INTERVAL", "RejectedLines"]
