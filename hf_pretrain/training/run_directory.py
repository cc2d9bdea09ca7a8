"""
The directory of a run (`--output_dir`): its lock, its record `run.json`, which says how the model was made, and the
checkpoint that the run resumes from.

The record holds a list with one entry per launch, whether that launch started or resumed the run. The start of a
launch records the command, arguments, versions, commit and data; its end records the figures and the report. A launch
that was cut off has no `ended`. The record holds no access tokens and is never pushed.
"""

import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import get_token
from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..checkpoints.optimizer_state import is_whole
from ..reports.run_files import LOG_NAME, OUTPUT_NAME, RECORD_NAME, REPORT_NAME, read_record
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from ..runtime.secret_words import hide_secrets
from ..runtime.writing import LOCK_NAME, is_unfinished, release_lock, take_lock, written_whole
from .training_arguments import LMTrainingArguments


logger = logging.get_logger(__name__)

# The command `hf-pretrain` sets it to the command that it runs.
COMMAND_VARIABLE = "HF_PRETRAIN_COMMAND"
_PACKAGES = ("hf_pretrain", "torch", "transformers", "accelerate", "datasets", "deepspeed", "trl", "peft")
# Files of a run that ended before its first checkpoint. Their directory counts as empty. TensorBoard writes `runs`.
_NO_RUN = {"rejected.jsonl", "spikes.jsonl", "runs", RECORD_NAME, REPORT_NAME, LOG_NAME, OUTPUT_NAME}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf")
# A resumed run waits this long for the earlier one, whose ranks may still be saving after their launcher has ended.
_PATIENCE_SECONDS = 30.0
# NFS remembers for up to 60 seconds (`acdirmax`) that a file was not there.
_VISIBLE_SECONDS = 90.0


class RunDirectory:
    """
    The `output_dir` of a run. The main process locks it and writes the record.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
    """

    def __init__(self, args: LMTrainingArguments):
        self.args = args

    @property
    def path(self) -> Path:
        return Path(self.args.output_dir)

    def lock(self, *, is_resumed: bool = False) -> None:
        """
        Create the directory and lock it against other runs until [`release`]. All ranks must call this method.

        Args:
            is_resumed (`bool`): wait up to 30 seconds for the end of another run.

        Raises:
            `UserError`: if another run holds the lock, or if a machine does not share the directory.
            `OSError`: if the directory cannot be written to.
        """
        path = self.path / LOCK_NAME

        def take() -> int:
            self.path.mkdir(parents=True, exist_ok=True)
            take_lock(path, patience_seconds=_PATIENCE_SECONDS if is_resumed else 0.0)
            return path.stat().st_mtime_ns

        changed = on_main_process(self.args, take)
        # Each machine would save a part of every checkpoint into a directory of its own.
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while self.args.local_process_index == 0 and not (path.exists() and path.stat().st_mtime_ns == changed):
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output_dir {self.path} on {socket.gethostname()} is not the directory of this name on the "
                    "first machine. Use a directory that all machines share."
                )
            time.sleep(0.2)

    def release(self) -> None:
        """Release the lock."""
        if self.args.process_index == 0:
            release_lock(self.path / LOCK_NAME)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory within the block. All ranks must enter it."""
        self.lock()
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

    def record_start(self, *, checkpoint: str | None) -> None:
        """
        Add the entry of a launch. As all methods that record, only the main process calls it.

        Args:
            checkpoint (`str`, *optional*): the checkpoint that the run resumes from.
        """
        args = self.args
        entry = {
            "started": now(),
            "date": args.date,
            "command": os.environ.get(COMMAND_VARIABLE) or _find_command(),
            "launcher": args.launcher,
            "launch": args.launch_description,
            "rows_per_step": args.rows_per_step,
            "directory": os.getcwd(),
            "resumed_from": checkpoint,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in _PACKAGES if find_spec(name)},
            "commit": _commit(),
        }
        self._write([*read_record(self.path), entry])

    def record(self, **fields: Any) -> None:
        """Add fields to the entry of the current launch. A trainer without a recipe has none."""
        if launches := read_record(self.path):
            self._write([*launches[:-1], launches[-1] | fields])

    def _write(self, launches: list[dict[str, Any]]) -> None:
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


def is_resumed(args: LMTrainingArguments) -> bool:
    """Return whether a run may resume from a checkpoint: a flag asks for it, or a launcher has started it again."""
    return args.resume_from_checkpoint is not None or _num_restarts() > 0


def checkpoint_to_resume(args: LMTrainingArguments, named: str | None = None) -> str | None:
    """
    Return the checkpoint directory that the run resumes from, or `None` to start a new run. The main process chooses;
    all ranks must call this function.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        named (`str`, *optional*): the checkpoint; by default `args.resume_from_checkpoint`.

    `--resume_from_checkpoint auto` means the newest intact checkpoint in `output_dir`, if there is one. It is the
    default after a restart by torchrun's elastic agent or SLURM. Newer checkpoints that are damaged are renamed to
    `damaged-checkpoint-*`.

    Raises:
        `UserError`: if the named checkpoint does not exist, is damaged, or has pickled shards and lies elsewhere; or
            if a new run would start in an `output_dir` that holds files, or with `auto` in one that holds a model.
    """
    return on_main_process(args, lambda: _choose(args, named or args.resume_from_checkpoint))


def _choose(args: LMTrainingArguments, named: str | bool | None) -> str | None:
    restarts = _num_restarts()
    if named is None and not restarts:
        RunDirectory(args).check_unused()
        return None
    # The flag is a string; Python callers may pass True, as transformers allows.
    is_automatic = named in (None, "auto", "true", "True", True)
    # Before a restart, the run may have saved newer checkpoints than the one on its command line.
    if is_automatic or restarts:
        newest = newest_checkpoint(args.output_dir, unverified=args.allow_inexact_resume)
        if newest is not None:
            logger.warning(f"Resuming from {newest}.")
            return newest
    if is_automatic:
        if model := next((path for path in Path(args.output_dir).glob("*") if path.suffix in _WEIGHTS), None):
            raise UserError(
                f"--resume_from_checkpoint auto finds no checkpoint in --output_dir {args.output_dir}, but a model "
                f"({model.name}), which the run would overwrite. Choose another directory, or move the model."
            )
        logger.warning(f"No checkpoint in {args.output_dir}: starting from the first step.")
        return None
    path = Path(str(named))
    is_own = Path(args.output_dir).resolve() == path.resolve().parent
    # A whole state is read with `weights_only`, and shards beside it are not read.
    is_pickled = args.deepspeed_plugin is not None or any(path.glob("*/.metadata"))
    if is_pickled and not is_own and not is_whole(path):
        raise UserError(
            f"--resume_from_checkpoint {path} lies outside --output_dir {args.output_dir}, and its shards "
            "(DeepSpeed's global_step*/*.pt, torch's .metadata) are pickles: loading them runs whatever code they "
            "contain. If you know who wrote them, move the checkpoint into --output_dir."
        )
    verify_checkpoint(path, unverified=args.allow_inexact_resume)
    if is_own:
        # Otherwise `auto` would later resume from the later checkpoints that this resume abandons.
        abandon_later_checkpoints(path)
    return str(path)


def _num_restarts() -> int:
    """Return how often torchrun or SLURM has started the run again."""
    return max(int(os.environ.get(f"{name}_RESTART_COUNT") or 0) for name in ("TORCHELASTIC", "SLURM"))


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
