"""The class that knows the files of a run: it locks the directory, and reads and writes `run.json` and the log."""

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import get_token
from transformers import TrainingArguments
from transformers.utils import logging

from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from ..runtime.secret_words import hide_secrets
from ..runtime.writing import ASIDE, LOCK_NAME, is_unfinished, release_lock, take_lock, written_whole


logger = logging.get_logger(__name__)

RECORD_NAME, REPORT_NAME, LOG_NAME = "run.json", "report.html", "log.jsonl"
# What a run prints, if `hf-pretrain board` has started it.
OUTPUT_NAME = "output.log"
REJECTED_NAME, SPIKES_NAME = "rejected.jsonl", "spikes.jsonl"
# The prefix of directories that hold a push in progress.
PUSH_PREFIX = ".hub-"
# Files of a run that ended before its first checkpoint. Their directory counts as empty. TensorBoard writes `runs`.
_NO_RUN = {REJECTED_NAME, SPIKES_NAME, "runs", RECORD_NAME, REPORT_NAME, LOG_NAME, OUTPUT_NAME}
# The command `hf-pretrain` sets it to the command that it runs.
_COMMAND_VARIABLE = "HF_PRETRAIN_COMMAND"
_PACKAGES = ("hf_pretrain", "torch", "transformers", "accelerate", "datasets", "deepspeed", "trl", "peft")
# A resumed run waits this long for the earlier one, whose ranks may still be saving after their launcher has ended.
_PATIENCE_SECONDS = 30.0
# NFS remembers for up to 60 seconds (`acdirmax`) that a file was not there.
_VISIBLE_SECONDS = 90.0
# A larger file is no record of a run.
MOST_BYTES = 256 << 20
# What readers of a record rely on.
_SHAPE: dict[str, Any] = {"arguments": {}, "versions": {}, "unigram_loss": 0.0, "recipe": "", "loss_unit": ""}
_SHAPE |= {"samples": [[0, [["", ""]]]], "next_commands": [["", ""]], "data": {"counts": [""], "names": [""]}}
_SHAPE |= {"command": "", "directory": "", "stopped": ""}


class RunDirectory:
    """
    The `output_dir` of a run. The main process locks it, and records each launch in `run.json`: at its start the
    command, arguments, versions, commit and data, at its end the figures and the report. A launch that was cut off has
    no `ended`. The record holds no access tokens and is never pushed.

    Anyone can write such files, and a disk can damage them. Whoever reads gets what is well-formed.

    Args:
        path (`str` or `Path`): the directory, which need not exist.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record_file, self.report_file = self.path / RECORD_NAME, self.path / REPORT_NAME
        self.log_file, self.output_file = self.path / LOG_NAME, self.path / OUTPUT_NAME
        self.lock_file = self.path / LOCK_NAME
        # Only the main process holds the lock.
        self._is_main = False

    # Read

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The entries of `run.json`, without fields that have another type than a run writes; empty without a run."""
        launches = self._read_record()
        return [{name: each for name, each in launch.items() if _fits({name: each}, _SHAPE)} for launch in launches]

    def _read_record(self) -> list[dict[str, Any]]:
        launches = read_json(self.record_file) if self.record_file.is_file() else []
        return [launch for launch in (launches if isinstance(launches, list) else []) if isinstance(launch, dict)]

    # Write

    def lock(self, args: TrainingArguments, *, is_resumed: bool = False) -> None:
        """
        Create the directory and lock it against other runs until [`release`]. All ranks must call this method.

        Args:
            args ([`~transformers.TrainingArguments`]): tell the rank of this process.
            is_resumed (`bool`): wait up to 30 seconds for the end of another run.

        Raises:
            `UserError`: if another run holds the lock, or if a machine does not share the directory.
            `OSError`: if the directory cannot be written to.
        """

        def take() -> int:
            self.path.mkdir(parents=True, exist_ok=True)
            take_lock(self.lock_file, patience_seconds=_PATIENCE_SECONDS if is_resumed else 0.0)
            return self.lock_file.stat().st_mtime_ns

        self._is_main = args.process_index == 0
        changed = on_main_process(args, take)
        # Each machine would save a part of every checkpoint into a directory of its own.
        deadline, file = time.monotonic() + _VISIBLE_SECONDS, self.lock_file
        while args.local_process_index == 0 and not (file.exists() and file.stat().st_mtime_ns == changed):
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output_dir {self.path} on {socket.gethostname()} is not the directory of this name on the "
                    "first machine. Use a directory that all machines share."
                )
            time.sleep(0.2)

    def release(self) -> None:
        """Release the lock."""
        if self._is_main:
            release_lock(self.lock_file)

    @contextmanager
    def locked(self, args: TrainingArguments) -> Iterator[None]:
        """Lock the directory within the block. All ranks must enter it."""
        self.lock(args)
        try:
            yield
        finally:
            self.release()

    def check_unused(self) -> None:
        """Raise `UserError` if the directory holds more than what a run leaves that ended before its training."""
        if not self.path.is_dir():
            return
        if all(path.name in _NO_RUN or is_unfinished(path) for path in self.path.iterdir()):
            return
        raise UserError(
            f"--output_dir {self.path} is not empty. If its run has not ended, resume it with "
            "`--resume_from_checkpoint auto`. Otherwise choose another directory, or delete this one."
        )

    def remove_leftovers(self) -> None:
        """Delete the unfinished saves and pushes of a killed run. None may be in progress."""
        for path in (*self.path.glob(f"{ASIDE}*"), *self.path.glob(f"{PUSH_PREFIX}*")):
            shutil.rmtree(path, ignore_errors=True)

    def record_start(self, **fields: Any) -> None:
        """Add the entry of a launch, with fields that only its caller knows. Only the main process records."""
        entry = {
            "started": now(),
            "command": os.environ.get(_COMMAND_VARIABLE) or _find_command(),
            "directory": os.getcwd(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in _PACKAGES if find_spec(name)},
            "commit": _commit(),
        }
        self._write_record([*self._read_record(), entry | fields])

    def record(self, **fields: Any) -> None:
        """Add fields to the entry of the current launch. A trainer without a recipe has none."""
        if launches := self._read_record():
            self._write_record([*launches[:-1], launches[-1] | fields])

    def _write_record(self, launches: list[dict[str, Any]]) -> None:
        text = json.dumps(launches, indent=1, ensure_ascii=False, default=str)
        # The command line may hold a token.
        token = get_token()
        if token:
            text = text.replace(token, "<token>")
        try:
            with written_whole(self.path) as scratch:
                (scratch / RECORD_NAME).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            # The run matters more than its record.
            logger.warning(f"The run continues without its record: {error}.")

    def write_log(self, entries: Iterable[dict[str, Any]], *, anew: bool = False) -> None:
        """Add entries to the log. A resumed run repeats the steps after its checkpoint, so it writes the log anew."""
        try:
            with self.log_file.open("w" if anew else "a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(entry)}\n" for entry in entries)
        except OSError as error:
            # The run matters more than its log, which its checkpoints hold, too.
            logger.warning(f"The run continues, and {LOG_NAME} lacks an entry: {error}.")


def read_json(path: Path) -> Any:
    """Return what a record holds; `None` if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning(f"{path} is damaged ({error}), so it is left out.")
        return None


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of JSON lines, if it exists."""
    # Texts may hold other ends of lines.
    return list(parse_lines(path.read_bytes().split(b"\n") if path.is_file() else ()))


def parse_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects in lines. Leave out a line that was cut off or is damaged."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                yield entry


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a value has the types of a shape, which holds an example of each part."""
    if isinstance(shape, list) and isinstance(value, list):
        shapes = shape * len(value) if len(shape) == 1 else shape
        return len(value) == len(shapes) and all(map(_fits, value, shapes))
    if isinstance(shape, dict) and isinstance(value, dict):
        return all(_fits(value[name], shape[name]) for name in shape.keys() & value.keys())
    return isinstance(value, type(shape))


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _find_command() -> str:
    """
    Return the command with which the user started this run: that of the outermost process above this one that names
    the recipe, such as torchrun, deepspeed or accelerate, or of this process itself. Pasted, it starts all ranks.
    """
    words = [sys.executable, *sys.argv]
    # Another user may own a process above.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            if sys.argv[0] not in process.cmdline():
                break
            words = process.cmdline()
    return shlex.join(hide_secrets(words))


def _commit() -> str | None:
    """Return the commit of the checkout that holds this package, with `-dirty` after it if files were changed."""
    checkout = Path(__file__).resolve().parents[2]
    # An installed package has no checkout. git would search the directories above it and find an unrelated one.
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or None
