"""
The record of a run: `run.json` in its `output_dir` says how the model was made.

The file holds a list with one entry per launch, whether that launch started or resumed the run. The start of a launch
records the command, arguments, versions, commit and data; its end records the figures and the report. A launch that
was cut off has no `ended`. The file holds no access tokens and is never pushed.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import get_token
from transformers.utils import logging

from ..reports.runs import RECORD_NAME
from ..runtime.writing import written_whole
from .arguments import LMTrainingArguments


logger = logging.get_logger(__name__)

# The command `hf-pretrain` sets it to the command that it runs.
COMMAND_VARIABLE = "HF_PRETRAIN_COMMAND"
# The environment variables that change the number of processes and their devices.
_LAUNCH_VARIABLES = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "LOCAL_SIZE", "OMP_NUM_THREADS", "WORLD_SIZE")
_PACKAGES = ("hf_pretrain", "torch", "transformers", "accelerate", "datasets", "deepspeed", "trl", "peft")


def begin_record(training_args: LMTrainingArguments, arguments: tuple[Any, ...], *, checkpoint: str | None) -> None:
    """
    Add the entry of a launch. Only the main process calls it.

    Args:
        training_args ([`LMTrainingArguments`]): the run's training arguments.
        arguments (`tuple` of dataclasses): its other arguments.
        checkpoint (`str`, *optional*): the checkpoint that it resumes from.
    """
    given = {key: value for part in arguments for key, value in vars(part).items()}
    entry = {
        "started": _now(),
        "command": os.environ.get(COMMAND_VARIABLE) or _find_command(),
        "launcher": training_args.launcher,
        "launch": training_args.launch_description,
        "rows_per_step": training_args.rows_per_step,
        "directory": os.getcwd(),
        "resumed_from": checkpoint,
        "arguments": given | training_args.to_dict(),
        "versions": {"python": platform.python_version()}
        | {name: found for name in _PACKAGES if (found := _find(name))},
        "commit": _commit(),
    }
    path = Path(training_args.output_dir, RECORD_NAME)
    _write(path, [*_read(path), entry])


def add_to_record(training_args: LMTrainingArguments, **fields: Any) -> None:
    """Add fields to the entry of the current launch. Only the main process calls it."""
    path = Path(training_args.output_dir, RECORD_NAME)
    # A user may have deleted the file during the run.
    *earlier, entry = _read(path) or [{}]
    _write(path, [*earlier, entry | fields])


def end_record(training_args: LMTrainingArguments, **fields: Any) -> None:
    """Add fields and the time of the end to the entry of the current launch. Only the main process calls it."""
    add_to_record(training_args, ended=_now(), **fields)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        entries = None
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        return entries
    # Keep an unreadable file: it may hold the record of weeks of training.
    aside = path.with_name(f"unreadable-{path.name}")
    logger.warning(f"{path} is not valid JSON. It is now called {aside.name}, and a new record begins.")
    path.replace(aside)
    return []


def _write(path: Path, entries: list[dict[str, Any]]) -> None:
    text = json.dumps(entries, indent=1, ensure_ascii=False, default=str)
    # The command line may hold a token.
    token = get_token()
    if token:
        text = text.replace(token, "<token>")
    try:
        with written_whole(path.parent) as scratch:
            (scratch / path.name).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        # The run matters more than its record.
        logger.warning(f"{path} could not be written: {error}. The run continues without its record.")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _find(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_command() -> str:
    """
    Return the command with which the user started this run, with the environment variables that change its launch.

    It is the command of the outermost process above this one that names the recipe: of torchrun, deepspeed or
    accelerate, or of this process itself.
    """
    words = [sys.executable, *sys.argv]
    environment: Mapping[str, str] = os.environ
    try:
        for process in (psutil.Process(), *psutil.Process().parents()):
            if sys.argv[0] not in process.cmdline():
                break
            # The variables that a launcher sets for its ranks do not belong to the command of the user.
            words, environment = process.cmdline(), process.environ()
    except psutil.Error:
        # Another user owns the process, or it is gone. WORLD_SIZE stays in the command, so that pasting it fails
        # instead of training with one process.
        pass
    # The deepspeed launcher adds --local_rank to each rank's command.
    words = [word for word in words if not word.startswith("--local_rank=")]
    # A shell would take a quoted assignment for the name of a command, so quote only the value.
    assignments = [f"{name}={shlex.quote(environment[name])}" for name in _LAUNCH_VARIABLES if name in environment]
    return " ".join([*assignments, shlex.join(words)])


def _commit() -> str | None:
    """Return the commit of the checkout that holds this package, with `-dirty` after it if files were changed."""
    checkout = Path(__file__).resolve().parents[2]
    # An installed package has no checkout. git would search the directories above it and find an unrelated one.
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


__all__ = ["COMMAND_VARIABLE", "add_to_record", "begin_record", "end_record"]
