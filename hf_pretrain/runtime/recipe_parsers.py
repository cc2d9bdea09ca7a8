"""The command-line parser of a recipe, for the flag reference, shell completion and tests of documented commands."""

import argparse
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from .command_line import RecipeParser
from .errors import UserError


class _ParserFound(BaseException):
    """Carries the parser out of a recipe. It is a `BaseException`, so no `except Exception` of the recipe stops it."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def recipe_parser(path: str | Path) -> argparse.ArgumentParser:
    """
    Return the parser of a recipe, without running the recipe.

    Args:
        path (`str` or `Path`): the file of the recipe.

    Raises:
        `ValueError`: if the file parses no command line.
        `SystemExit`: if the recipe needs an extra that is not installed.
    """

    def stop(parser: argparse.ArgumentParser, *args, **kwargs):
        raise _ParserFound(parser)

    path = str(path)
    with patch.object(sys, "argv", [path]), patch.multiple(RecipeParser, parse_args=stop, parse_known_args=stop):
        try:
            runpy.run_path(path, run_name="__main__")
        except _ParserFound as found:
            return found.parser
    raise UserError(f"{path} parsed no command line.")


__all__ = ["recipe_parser"]
