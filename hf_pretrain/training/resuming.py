"""The checkpoint that a run resumes from."""

import os
from pathlib import Path

from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..checkpoints.optimizer_state import is_whole
from ..run_directory.directory import RunDirectory
from ..runtime.errors import UserError
from ..runtime.ranks import on_main_process
from .training_arguments import LMTrainingArguments


logger = logging.get_logger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pth", ".gguf")


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
        RunDirectory(args.output_dir).check_unused()
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
