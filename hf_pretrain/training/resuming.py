"""
Which checkpoint a run goes on from, decided by one process for all of them, and what is cleared away before.
"""

import os
import sys
from functools import partial
from pathlib import Path

from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..runtime.command_line import EXIT_NOT_SAVED
from ..runtime.locking import LOCK_NAME, hold_output_dir
from ..runtime.processes import on_main_process
from .arguments import LMTrainingArguments
from .run_log import LOG_NAME
from .run_record import RECORD_NAME


logger = logging.get_logger(__name__)

# A run that goes on waits so long for the one before it: its ranks may still be saving when their launcher is gone.
_PATIENCE_SECONDS = 30.0
# Files of a run that came to nothing, and may be tried again.
_NO_RUN = {"rejected.jsonl", RECORD_NAME, LOCK_NAME, LOG_NAME}


def checkpoint_to_resume(args: LMTrainingArguments) -> str | None:
    """
    The checkpoint directory that `--resume_from_checkpoint` means, or `None` to start afresh. `auto` is the newest one
    in `output_dir` that verifies, if any, and the default after a restart by torchrun's elastic agent or SLURM;
    damaged ones that are newer get a name that says so. All ranks get the same.

    Raises:
        `ValueError`: if the checkpoint named does not exist or verify, or would have to be unpickled, or if a run would start in an `output_dir` that
            holds files already.
    """
    resume = args.resume_from_checkpoint
    restarts = _num_restarts()
    newest = partial(newest_checkpoint, args.output_dir, unverified=args.allow_inexact_resume)
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
            "(DeepSpeed's global_step*/*.pt, torch's .metadata) are unpickled, which runs whatever code was put into "
            "them. Add --trust_checkpoint if you know who wrote it."
        )

    def decide() -> str:
        # After a restart the run may have come further than the checkpoint that it was started with.
        if restarts and (further := newest()):
            return further
        verified = verify_checkpoint(path, unverified=args.allow_inexact_resume)
        if is_own:
            abandon_later_checkpoints(path)
        return verified

    return on_main_process(args, decide)


def _num_restarts() -> int:
    return max(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _refuse_used(output_dir: Path) -> None:
    if output_dir.is_dir() and any(path.name not in _NO_RUN for path in output_dir.iterdir()):
        raise ValueError(
            f"--output_dir {output_dir} is not empty. Go on with `--resume_from_checkpoint auto`, choose another "
            "directory, or delete this one."
        )


def occupy_output_dir(args: LMTrainingArguments) -> None:
    """
    Makes `output_dir` and locks it; ends the process with `EXIT_NOT_SAVED` where nothing can be written into it.

    Raises:
        `ValueError`: if another run holds it. A run that goes on waits some time for the end of that one.
    """
    goes_on = args.resume_from_checkpoint is not None or _num_restarts() > 0
    try:
        hold_output_dir(args.output_dir, patience_seconds=_PATIENCE_SECONDS if goes_on else 0)
    except OSError as error:
        print(f"--output_dir {args.output_dir} cannot be written to: {error}. Choose another one.", file=sys.stderr)
        raise SystemExit(EXIT_NOT_SAVED) from error


__all__ = ["EXIT_NOT_SAVED", "checkpoint_to_resume", "occupy_output_dir"]
