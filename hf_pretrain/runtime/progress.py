"""Say what a command is doing: a line per phase, and a progress bar in a terminal. Both are on standard error."""

import os
import sys
from typing import Any

from tqdm import tqdm
from transformers.utils import is_in_notebook


def is_main() -> bool:
    """Return whether this process is the main one. Launchers number the processes before these have an accelerator."""
    return os.environ.get("RANK", "0") == "0"


def shows_bars() -> bool:
    """
    Return whether this process shows progress bars: the main process does, if the output is a terminal or a notebook.
    """
    return is_main() and (sys.stderr.isatty() or is_in_notebook())


def announce(text: str) -> None:
    """Print what the main process does next, such as `packing the documents`."""
    if is_main():
        print(f"{text} ...", file=sys.stderr, flush=True)


def progress(text: str, total: int | None = None) -> Any:
    """Return a progress bar for work with many parts ([`tqdm`]). Outside a terminal, [`announce`] the work instead."""
    if not shows_bars():
        announce(text)
    return tqdm(desc=text, total=total, disable=not shows_bars(), leave=False)
