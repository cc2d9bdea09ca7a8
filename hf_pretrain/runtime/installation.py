"""The command that installs an extra of this package."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import MissingExtraError


_ROOT = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Return the command that adds an extra (a key of `optional-dependencies` in pyproject.toml)."""
    if (_ROOT / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", "-e", f"{_ROOT}[{extra}]"])
    return shlex.join(["pip", "install", f"hf_pretrain[{extra}]"])


@contextmanager
def needing_extra(extra: str, need: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import of the block fails. `need` says what needs which package."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{need}: {install_command(extra)}") from error
