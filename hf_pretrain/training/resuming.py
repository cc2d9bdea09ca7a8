"""Choose the checkpoint that a run resumes from, and lock its `output_dir`. The main process decides for all ranks."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import TrainingArguments
from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..reports.history import HISTORY_NAME
from ..runtime.command_line import EXIT_NOT_SAVED
from ..runtime.locking import LOCK_NAME, hold_output_dir, release_output_dir
from ..runtime.processes import on_main_process
from .arguments import LMTrainingArguments
from .run_log import LOG_NAME
from .run_record import RECORD_NAME


logger = logging.get_logger(__name__)

# A resumed run waits this long for the earlier one, whose ranks may still be saving after their launcher has ended.
_PATIENCE_SECONDS = 30.0
# Files of a run that ended before its first checkpoint. Their directory counts as empty.
_NO_RUN = {"rejected.jsonl", RECORD_NAME, LOCK_NAME, LOG_NAME, HISTORY_NAME}


def checkpoint_to_resume(args: LMTrainingArguments) -> str | None:
    """
    Return the checkpoint directory that `--resume_from_checkpoint` names, or `None` to start a new run.

    `auto` means the newest intact checkpoint in `output_dir`, if there is one. It is the default after a restart by
    torchrun's elastic agent or SLURM. Newer checkpoints that are damaged are renamed to `damaged-checkpoint-*`. All
    ranks return the same directory.

    Raises:
        `ValueError`: if the named checkpoint does not exist, is damaged, or must be unpickled without
            `--trust_checkpoint`; or if a new run would start in an `output_dir` that holds files.
    """
    resume = args.resume_from_checkpoint
    restarts = _num_restarts()
    newest = partial(newest_checkpoint, args.output_dir, unverified=args.allow_inexact_resume)
    # The flag is a string; Python callers may pass True, as transformers allows.
    if resume in ("auto", "true", "True", True) or (resume is None and restarts):
        return on_main_process(args, newest)
    if resume is None:
        return on_main_process(args, lambda: _refuse_used(Path(args.output_dir)))
    path = Path(resume)
    is_own = Path(args.output_dir).resolve() == path.resolve().parent
    is_unpickled = args.deepspeed_plugin is not None or any(path.glob("*/.metadata"))
    if is_unpickled and not is_own and not args.trust_checkpoint:
        raise ValueError(
            f"--resume_from_checkpoint {resume} lies outside --output_dir {args.output_dir}, and its shards "
            "(DeepSpeed's global_step*/*.pt, torch's .metadata) are pickles: loading them runs whatever code they "
            "contain. Add --trust_checkpoint if you know who wrote them."
        )

    def decide() -> str:
        # Before the restart, the run may have saved newer checkpoints than the one on its command line.
        if restarts and (further := newest()):
            return further
        verified = verify_checkpoint(path, unverified=args.allow_inexact_resume)
        if is_own:
            # Otherwise `auto` would later resume from the later checkpoints that this resume abandons.
            abandon_later_checkpoints(path)
        return verified

    return on_main_process(args, decide)


def _num_restarts() -> int:
    return max(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _refuse_used(output_dir: Path) -> None:
    if output_dir.is_dir() and any(path.name not in _NO_RUN for path in output_dir.iterdir()):
        raise ValueError(
            f"--output_dir {output_dir} is not empty. Resume its run with `--resume_from_checkpoint auto`, choose "
            "another directory, or delete this one."
        )


def occupy_output_dir(args: LMTrainingArguments) -> None:
    """
    Create and lock `output_dir`.

    Raises:
        `ValueError`: if another run holds the lock. A resumed run waits up to 30 seconds for the end of the other one.
        `SystemExit`: with the status `EXIT_NOT_SAVED`, if `output_dir` cannot be written to.
    """
    is_resumed = args.resume_from_checkpoint is not None or _num_restarts() > 0
    try:
        hold_output_dir(args.output_dir, patience_seconds=_PATIENCE_SECONDS if is_resumed else 0)
    except OSError as error:
        print(
            f"--output_dir {args.output_dir} cannot be written to: {error}. Choose another directory.", file=sys.stderr
        )
        raise SystemExit(EXIT_NOT_SAVED) from error


@contextmanager
def holding_output_dir(args: TrainingArguments) -> Iterator[None]:
    """Lock `output_dir` within the block, unless the caller has locked it already. All ranks must enter the block."""
    output_dir = args.output_dir
    is_new = args.save_strategy != "no" and on_main_process(args, lambda: hold_output_dir(output_dir))
    try:
        yield
    finally:
        if is_new:
            release_output_dir(output_dir)


__all__ = ["EXIT_NOT_SAVED", "checkpoint_to_resume", "holding_output_dir", "occupy_output_dir"]
