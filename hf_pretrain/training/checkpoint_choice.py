"""Choose the checkpoint that a run resumes from: the newest one, or one that the user names."""

import os
from pathlib import Path

from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from .run_directory import RunDirectory
from .training_arguments import LMTrainingArguments


logger = logging.get_logger(__name__)


def is_resumed(args: LMTrainingArguments) -> bool:
    """Return whether a run may resume from a checkpoint: a flag asks for it, or a launcher has started it again."""
    return args.resume_from_checkpoint is not None or _num_restarts() > 0


def checkpoint_to_resume(args: LMTrainingArguments) -> str | None:
    """
    Return the checkpoint directory that the run resumes from, or `None` to start a new run. The main process chooses;
    all ranks must call this function.

    `--resume_from_checkpoint auto` means the newest intact checkpoint in `output_dir`, if there is one. It is the
    default after a restart by torchrun's elastic agent or SLURM. Newer checkpoints that are damaged are renamed to
    `damaged-checkpoint-*`.

    Raises:
        `ValueError`: if the named checkpoint does not exist, is damaged, or must be unpickled without
            `--trust_checkpoint`; or if a new run would start in an `output_dir` that holds files.
    """
    return on_main_process(args, lambda: _choose(args))


def _choose(args: LMTrainingArguments) -> str | None:
    named, restarts = args.resume_from_checkpoint, _num_restarts()
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
        logger.warning(f"No checkpoint in {args.output_dir}: starting from the first step.")
        return None
    path = Path(str(named))
    is_own = Path(args.output_dir).resolve() == path.resolve().parent
    is_pickled = args.deepspeed_plugin is not None or any(path.glob("*/.metadata"))
    if is_pickled and not is_own and not args.trust_checkpoint:
        raise UserError(
            f"--resume_from_checkpoint {path} lies outside --output_dir {args.output_dir}, and its shards "
            "(DeepSpeed's global_step*/*.pt, torch's .metadata) are pickles: loading them runs whatever code they "
            "contain. Add --trust_checkpoint if you know who wrote them."
        )
    verify_checkpoint(path, unverified=args.allow_inexact_resume)
    if is_own:
        # Otherwise `auto` would later resume from the later checkpoints that this resume abandons.
        abandon_later_checkpoints(path)
    return str(path)


def _num_restarts() -> int:
    """Return how often torchrun or SLURM has started the run again."""
    return max(int(os.environ.get(f"{name}_RESTART_COUNT") or 0) for name in ("TORCHELASTIC", "SLURM"))
