"""How a recipe meets mistakes on its command line and after: one line for the user's own, a traceback for a bug."""

import argparse
import dis
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from transformers import HfArgumentParser


EXIT_MISTAKE = 2
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


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Ends the process with `error: ...` and status 2 for a user's mistake, unless `--debug` is on the command line. All
    other exceptions pass, with their tracebacks.

    Of several ranks, the first one on each machine prints the line. The others wait until their launcher ends them, and
    print the line only if it does not: the first one may not have met the mistake.
    """
    try:
        yield
    except _MISTAKES as error:
        if "--debug" in sys.argv or not is_mistake(error):
            raise
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(_LAUNCHER_SECONDS)
        message = re.sub(r"\s*\n\s*", " ", str(error))
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_MISTAKE) from None


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
    return module.partition(".")[0] in (__package__, "__main__") and instruction == dis.opmap["RAISE_VARARGS"]


__all__ = ["EXIT_MISTAKE", "RecipeParser", "add_debug_flag", "is_mistake", "one_line_errors"]
