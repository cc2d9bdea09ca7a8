"""The command that installs an extra of this package into this installation, and what is missing in it."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .errors import MissingExtraError, UserError


_NAME = "hf_pretrain"


def install_command(extra: str) -> str:
    """
    Return the command that adds an extra (a key of `optional-dependencies` in pyproject.toml) to this installation.

    pip records where it took a package from, unless it was an index:
    https://packaging.python.org/en/latest/specifications/direct-url/
    """
    try:
        origin = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        # This checkout is not installed.
        origin = {"url": Path(__file__).parents[2].as_uri(), "dir_info": {"editable": True}}
    package = f"{_NAME}[{extra}]"
    if not origin:
        return shlex.join(["pip", "install", package])
    if "dir_info" in origin:
        is_editable = origin["dir_info"].get("editable", False)
        directory = unquote(urlsplit(origin["url"]).path)
        return shlex.join(["pip", "install", *(["-e"] if is_editable else []), f"{directory}[{extra}]"])
    source = origin["url"]
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{source}@{origin['vcs_info']['commit_id']}"
    return shlex.join(["pip", "install", f"{package} @ {source}"])


@contextmanager
def needing_extra(extra: str, need: str) -> Iterator[None]:
    """Raise `MissingExtraError` if an import of the block fails. `need` says what needs which package."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{need}: {install_command(extra)}") from error


def check_deepspeed() -> None:
    """Raise `ValueError` if DeepSpeed is not installed. This package requires it on Linux only."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "This run needs DeepSpeed, which is not installed. It supports Linux; there, `pip install deepspeed` adds "
            "it. Elsewhere, launch with torchrun and pass --fsdp_size N to shard the model."
        )


__all__ = ["check_deepspeed", "install_command", "needing_extra"]
