"""
The history of a run: `history.jsonl` in its `output_dir` holds one JSON object per line for each event.

Each line has the wall-clock `time` in seconds since 1970, the `step`, and a `kind`: `start`, `resume`, `log`,
`samples`, `router_load`, `checkpoint`, `skipped_step`, `stop` or `end`. The run writes each line at once, so a killed
run loses no line. [`~reports.runs.read_run`] reads the file.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers.utils import logging


logger = logging.get_logger(__name__)

HISTORY_NAME = "history.jsonl"


class History:
    """
    Append lines to the history of a run. Only the first process writes, and only after [`begin`].

    Args:
        output_dir (`str` or `Path`): the run's directory.
        is_writer (`bool`): whether this is the first process.
    """

    def __init__(self, output_dir: str | Path, *, is_writer: bool):
        self.path = Path(output_dir, HISTORY_NAME)
        self.is_writer, self.has_begun = is_writer, False

    def begin(self, step: int, *, checkpoint: str | None) -> None:
        """Add a line for the start of a run, or for its resume from a checkpoint."""
        self.has_begun = True
        self.add("resume" if checkpoint else "start", step, **({"message": checkpoint} if checkpoint else {}))

    def add(self, kind: str, step: int, **fields: Any) -> None:
        """Append a line. Figures that are not finite become `null`, because JSON has no NaN."""
        if not self.is_writer or not self.has_begun:
            return
        figures = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        line = json.dumps({"kind": kind, "time": time.time(), "step": step} | figures, ensure_ascii=False, default=str)
        try:
            with self.path.open("ab+") as file:
                # A full disk or a power failure may have cut the last line off.
                is_torn = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * is_torn + line.encode(errors="backslashreplace") + b"\n")
        except OSError as error:
            # The run matters more than its history.
            logger.warning_once(f"{self.path} could not be written: {error}. The run continues without its history.")


__all__ = ["HISTORY_NAME", "History"]
