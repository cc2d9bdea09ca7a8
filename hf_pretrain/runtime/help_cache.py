"""
Answer `--help` from a cache, before torch and transformers are imported, which takes seconds.

`RecipeParser` keeps the text that it prints. The package imports this module first, and the next call of the same
command prints the kept text and ends. A text is valid while all files that made it are unchanged: like Python for its
bytecode, the cache compares size and modification time of each imported module's file, and of the directories of
installed packages.
"""

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from huggingface_hub.constants import HF_HOME


# The command `hf-pretrain` sets this variable to its first words, such as `hf-pretrain pretrain`.
STARTED_AS = "HF_PRETRAIN_PROGRAM"
_START = time.time_ns()


def print_kept_help() -> None:
    """Print the kept text and exit, if `--help` or `-h` is on the command line and a valid text is in the cache."""
    if not _asks_for_help():
        return
    try:
        kept = json.loads(_path().read_text(encoding="utf-8"))
        # A file that is gone raises an OSError.
        is_valid = kept["command"] == _command() and kept["files"] == {name: _state(name) for name in kept["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_valid:
        print(kept["text"], end="")
        raise SystemExit


def keep_help(text: str) -> None:
    """Keep the text that the running script prints for its command line."""
    # Only a script has a file whose changes show. The code of `python -c` has none.
    if not _asks_for_help() or not os.path.isfile(sys.argv[0]):
        return
    # `vars`, because some modules import others when an attribute is missing.
    names = [vars(module).get("__file__") for module in [*sys.modules.values()] if hasattr(module, "__dict__")]
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    paths = [os.path.abspath(name) for name in (sys.argv[0], *packages, *names) if isinstance(name, str)]
    files = {path: _state(path) for path in paths if os.path.exists(path)}
    # Of a file that changed after the start, the text may show the earlier version.
    if any(modified >= _START for _, modified in files.values()):
        return
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renaming is atomic: another process reads the whole file or none.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as scratch:
            json.dump({"command": _command(), "files": files, "text": text}, scratch)
        os.replace(scratch.name, path)
    except OSError:
        # Without a cache, the next call is slow again.
        return


def _asks_for_help() -> bool:
    return not {"-h", "--help", "--help-all"}.isdisjoint(sys.argv[1:])


def _command() -> list[object]:
    """Return everything but files that the text depends on."""
    # argparse wraps the text to the width of the terminal, and colours it from Python 3.14 on.
    colours = [os.environ.get(name) for name in ("PYTHON_COLORS", "NO_COLOR", "FORCE_COLOR", "TERM")]
    terminal = [shutil.get_terminal_size().columns, sys.stdout.isatty(), *colours]
    words = [os.environ.get(STARTED_AS), os.path.abspath(sys.argv[0]), sys.argv[1:]]
    return [sys.version, sys.prefix, sys.path, words, terminal]


def _path() -> Path:
    """Return the file of the running command."""
    name = hashlib.blake2b(repr([os.path.abspath(sys.argv[0]), sys.argv[1:]]).encode(), digest_size=16).hexdigest()
    return Path(HF_HOME, "hf_pretrain", "help", f"{name}.json")


def _state(path: str) -> list[int]:
    """Return size and modification time of a file or directory."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


__all__ = ["STARTED_AS", "keep_help", "print_kept_help"]
