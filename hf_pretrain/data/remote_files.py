"""Files at addresses that fsspec opens, such as `s3://bucket/text.jsonl`, copied into a cache of this machine."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.registry import known_implementations
from huggingface_hub.constants import HF_HOME

from ..runtime.errors import UserError
from ..runtime.names import public_name


def download_files(name: str, choose: Callable[[list[Path]], list[Path]]) -> list[Path]:
    """
    Copy files into the cache, unless it holds their present version, and return the copies.

    Args:
        name (`str`): the address of a file, a directory or, except on the web, a glob.
        choose (`Callable`): returns those of the files of a directory or glob that hold data.

    Raises:
        `UserError`: if the address leads to no file, or the package of its protocol is not installed.
    """
    protocol = name.partition("://")[0]
    # The query of a web address may hold a secret.
    shown = public_name(name)
    try:
        filesystem, path = fsspec.url_to_fs(name)
        if protocol in ("http", "https") or filesystem.isfile(path):
            return [_download(filesystem, path)]
        found = filesystem.glob(path) if any(mark in path for mark in "*?[") else filesystem.find(path)
        if not found:
            raise FileNotFoundError("there is no such file")
        by_name = {Path(file): file for file in found}
        return [_download(filesystem, by_name[file]) for file in choose([*by_name])]
    except UserError:
        raise
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise UserError(f"{shown} cannot be read: {error}. Run `pip install {package}`.") from error
    # Each protocol has errors of its own.
    except Exception as error:
        reason = str(error).replace(name, shown)
        raise UserError(
            f"{shown} cannot be read: {reason}. Check the address, the connection and the login."
        ) from error


def _download(filesystem: Any, path: str) -> Path:
    """Return the copy of a file in the cache."""
    # The description holds the size and, if the protocol has them, the checksum and the time.
    version = str(sorted(filesystem.info(path).items()))
    digest = hashlib.blake2b(f"{path}\n{version}".encode(), digest_size=16).hexdigest()
    copy = Path(HF_HOME, "hf_pretrain", "files", digest, Path(public_name(path)).name)
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Another process must not read half a file.
        with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
            filesystem.get_file(path, f"{scratch}/part")
            os.replace(f"{scratch}/part", copy)
    return copy
