"""The command-line parser of each recipe, for the flag reference and for the tests of the documented commands."""

import argparse
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from hf_pretrain.runtime.command_line import RecipeParser


RECIPES = Path(__file__).parents[1] / "recipes"


class _ParserFound(BaseException):
    """Carries the parser out of a recipe; no `except Exception` on the way stops it."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def recipe_parser(recipe: str) -> argparse.ArgumentParser:
    """Return the parser of `recipes/<recipe>.py`, without running the recipe."""

    def stop(parser: argparse.ArgumentParser, *args, **kwargs):
        raise _ParserFound(parser)

    path = str(RECIPES / f"{recipe}.py")
    with patch.object(sys, "argv", [path]), patch.multiple(RecipeParser, parse_args=stop, parse_known_args=stop):
        try:
            runpy.run_path(path, run_name="__main__")
        except _ParserFound as found:
            return found.parser
    raise ValueError(f"{path} parsed no command line.")
