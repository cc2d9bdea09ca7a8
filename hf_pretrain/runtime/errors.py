"""The errors of this package for mistakes of the user. All other exceptions are bugs, or come from libraries."""

import os
import pickle
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError


_ROOT = Path(__file__).parents[2]


class UserError(ValueError):
    """
    A mistake of the user. Its message says what happened, where, and what to do.

    The command prints the message as one line; every other exception keeps its traceback.
    """


class OutOfMemory(UserError):
    """The memory does not suffice. The command ends with a status of its own."""


class MissingExtraError(UserError, ImportError):
    """An extra of this package is not installed. The message gives the command that installs it."""


@contextmanager
def as_user_errors() -> Iterator[None]:
    """
    Raise each `ValueError` of a block, and each wrong type in a config, as a `UserError`, for code that cannot import
    this module: the model, whose files travel without the package, and the argument classes of libraries.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, StrictDataclassError) as error:
        raise UserError(str(error)) from error
    except pickle.UnpicklingError as error:
        # torch's message advises to run the code.
        raise UserError("The weights are a pickle of more than tensors, or damaged. No code in it ran.") from error


def find_program(name: str) -> str:
    """
    Return the word that starts a program of this environment in the user's shell: its name if the environment is
    active, and otherwise its path, as after `make`.
    """
    beside = Path(sys.executable).with_name(name)
    # venv and conda set the variables when they activate an environment.
    is_active = sys.prefix in (sys.base_prefix, os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"))
    if is_active or not beside.is_file():
        return name
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def install_command(extra: str) -> str:
    """Return the command that adds an extra (a key of `optional-dependencies` in pyproject.toml)."""
    source = ["-e", f"{_ROOT}[{extra}]"] if (_ROOT / "pyproject.toml").is_file() else [f"hf_pretrain[{extra}]"]
    return shlex.join([find_program("pip"), "install", *source])


@contextmanager
def needing_extra(extra: str, need: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import of the block fails. `need` says what needs which package."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{need}: {install_command(extra)}") from error
