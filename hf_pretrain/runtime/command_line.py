"""
How a recipe meets mistakes on its command line and after: one line for the user's own, a traceback for a bug. And what
libraries print beside a recipe: bars on a terminal alone, and nothing that only says what they do.
"""

import argparse
import dis
import errno
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import datasets
from huggingface_hub.constants import HF_HOME
from transformers import HfArgumentParser
from transformers.utils import is_in_notebook
from transformers.utils import logging as transformers_logging


EXIT_MISTAKE = 2
# sysexits.h calls it EX_IOERR: what was to be written could not be.
EXIT_NOT_SAVED = 74
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# Within these seconds a launcher ends the other ranks after the first one that stopped.
_LAUNCHER_SECONDS = 5.0
_MISTAKES = (ValueError, ImportError, OSError)


class RecipeParser(HfArgumentParser):
    """A parser of dataclasses, or of arguments added one by one, that raises `ValueError` where argparse exits."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. `--help` lists the flags.")


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--debug` to a parser; [`one_line_errors`] looks for it on the command line."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of a mistake, too")


def shows_bars() -> bool:
    """Whether somebody sees progress bars, which a log file fills up with."""
    return sys.stderr.isatty() or is_in_notebook()


def quiet_libraries() -> None:
    """
    Hides the bars of libraries where nobody sees them and, unless `--log_level info` or `debug` is on the command line,
    what they say that no user can act on.
    """
    if not shows_bars():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    if re.search(r"--log_level[ =](info|debug)", " ".join(sys.argv)):
        return
    if not sys.warnoptions:
        # Libraries warn each other of names that will change.
        warnings.filterwarnings("ignore", category=FutureWarning)
    # NOTE: DeepSpeed says so wherever it is imported. A run's first line tells the device.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Ends the process with `error: ...`, and with status 2 for a user's mistake, 74 for a disk that is full or cannot be
    written to, as where the caches are (`HF_HOME`). All other exceptions pass with their tracebacks, and with `--debug`
    on the command line these, too.

    Of several ranks, the first one on each machine prints the line. The others wait until their launcher ends them, and
    print the line only if it does not: the first one may not have met the mistake.
    """
    quiet_libraries()
    try:
        yield
    except Exception as error:
        refusal = None if is_mistake(error) else _refusal_of_a_disk(error)
        if "--debug" in sys.argv or not (is_mistake(error) or refusal):
            raise
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(_LAUNCHER_SECONDS)
        message = re.sub(r"\s*\n\s*", " ", refusal or str(error))
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_NOT_SAVED if refusal else EXIT_MISTAKE) from None


def _refusal_of_a_disk(error: BaseException | None) -> str | None:
    """What to tell a user where a disk refused to be written to, be it behind a library's own error; else `None`."""
    # NOTE: `datasets` asks for the space itself and leaves the number out.
    while not (
        error is None
        or (isinstance(error, OSError) and (error.errno in _DISK_ERRORS or "Not enough disk space" in str(error)))
    ):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    return (
        f"{error}. Free some space or choose other directories: caches are in HF_HOME={HF_HOME}, temporary files in "
        f"{tempfile.gettempdir()} (TMPDIR)."
    )


def is_mistake(error: BaseException) -> bool:
    """
    Whether a `raise` statement of this package or of a recipe raised `error`: such a `ValueError`, `ImportError` or
    `OSError` tells the user what to do. One that a library or the interpreter raises (`int("x")`) is nobody's message.
    """
    traceback = error.__traceback__
    if not isinstance(error, _MISTAKES) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__"))
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return (
        module.partition(".")[0] in (__package__.partition(".")[0], "__main__")
        and instruction == dis.opmap["RAISE_VARARGS"]
    )


__all__ = [
    "EXIT_MISTAKE",
    "EXIT_NOT_SAVED",
    "RecipeParser",
    "add_debug_flag",
    "is_mistake",
    "one_line_errors",
    "shows_bars",
]
