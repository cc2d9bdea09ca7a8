"""Choose the checkpoint that a run resumes from, and lock its `output_dir`. All ranks choose the same checkpoint."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainingArguments
from transformers.utils import logging

from ..checkpoints.directory import abandon_later_checkpoints, newest_checkpoint, verify_checkpoint
from ..checkpoints.machines import require_same_files, share_checkpoint
from ..reports.runs import RECORD_NAME, REPORT_NAME, read_launches
from ..runtime.command_line import EXIT_NOT_SAVED
from ..runtime.errors import UserError
from ..runtime.locking import hold_output_dir, lock_holder, release_output_dir
from ..runtime.processes import on_main_process, on_processes, on_saving_processes
from ..runtime.writing import is_unfinished
from .arguments import LMTrainingArguments


logger = logging.get_logger(__name__)

# A resumed run waits this long for the earlier one, whose ranks may still be saving after their launcher has ended.
_PATIENCE_SECONDS = 30.0
# A file that one machine wrote may become visible to another one this much later. NFS remembers for up to 60 seconds
# (`acdirmax`) that a file was not there.
_VISIBLE_SECONDS = 90.0
# Files of a run that ended before its first checkpoint. Their directory counts as empty. TensorBoard writes `runs`.
_NO_RUN = {"rejected.jsonl", "runs", RECORD_NAME, REPORT_NAME}


def checkpoint_to_resume(args: LMTrainingArguments) -> str | None:
    """
    Return the checkpoint directory that `--resume_from_checkpoint` names, or `None` to start a new run.

    `auto` means the newest intact checkpoint in `output_dir`, if there is one. It is the default after a restart by
    torchrun's elastic agent or SLURM. Newer checkpoints that are damaged are renamed to `damaged-checkpoint-*`. All
    ranks return the same directory. With `--save_on_each_node`, machines that lack the checkpoint get a copy, if it is
    in `output_dir`.

    Raises:
        `ValueError`: if the named checkpoint does not exist, is damaged, must be unpickled without
            `--trust_checkpoint`, or lies outside `output_dir` and is not the same on all machines; or if a new run
            would start in an `output_dir` that holds files.
    """
    resume = args.resume_from_checkpoint
    # A machine that came back may count fewer restarts than the others.
    restarts = max(on_processes(args, _num_restarts))
    # The flag is a string; Python callers may pass True, as transformers allows.
    if resume in ("auto", "true", "True", True) or (resume is None and restarts):
        return newest_of_all_machines(args, unverified=args.allow_inexact_resume)
    if resume is None:
        on_saving_processes(args, lambda: _refuse_used(Path(args.output_dir)))
        return None
    path = Path(resume)
    # All ranks must decide alike, but links and files may differ between machines.
    is_own = all(on_processes(args, lambda: Path(args.output_dir).resolve() == path.resolve().parent))
    has_metadata = any(on_processes(args, lambda: any(path.glob("*/.metadata"))))
    if (args.deepspeed_plugin is not None or has_metadata) and not is_own and not args.trust_checkpoint:
        raise UserError(
            f"--resume_from_checkpoint {resume} lies outside --output_dir {args.output_dir}, and its shards "
            "(DeepSpeed's global_step*/*.pt, torch's .metadata) are pickles: loading them runs whatever code they "
            "contain. Add --trust_checkpoint if you know who wrote them."
        )
    # Before the restart, the run may have saved newer checkpoints than the one on its command line.
    if restarts and (further := newest_of_all_machines(args, unverified=args.allow_inexact_resume)):
        return further
    verified = on_main_process(args, lambda: verify_checkpoint(path, unverified=args.allow_inexact_resume))
    if _saves_on_each_machine(args):
        share_checkpoint(path, args, source=0) if is_own else require_same_files(path, args)
    if is_own:
        # Otherwise `auto` would later resume from the later checkpoints that this resume abandons.
        on_saving_processes(args, lambda: abandon_later_checkpoints(path))
    return verified


def newest_of_all_machines(args: TrainingArguments, *, unverified: bool = False) -> str | None:
    """
    Return the newest intact checkpoint in `output_dir`, or `None`. With `--save_on_each_node`, look on all machines,
    and copy the checkpoint to those that lack it. All ranks must call this function.

    Args:
        unverified (`bool`): accept a checkpoint without a manifest, as another program writes it.
    """
    newest = find_newest(args, unverified=unverified)
    if newest is None:
        if args.process_index == 0:
            logger.warning(f"No checkpoint in {args.output_dir}: starting from the first step.")
        return None
    path, source = newest
    if args.process_index == 0:
        logger.warning(f"Resuming from {path}.")
    if _saves_on_each_machine(args):
        share_checkpoint(Path(path), args, source=source)
    return path


def find_newest(args: TrainingArguments, *, unverified: bool = False) -> tuple[str, int] | None:
    """
    Return the newest intact checkpoint in `output_dir` of any machine, and the first rank that found it; `None` if
    there is none. All ranks must call this function.
    """
    found = on_saving_processes(args, lambda: newest_checkpoint(args.output_dir, unverified=unverified))
    paths = [(path, rank) for rank, path in enumerate(found) if path is not None]
    return max(paths, key=lambda item: int(item[0].rpartition("-")[2]), default=None)


def _saves_on_each_machine(args: TrainingArguments) -> bool:
    return args.save_on_each_node and args.world_size > 1


def _num_restarts() -> int:
    counts = {name: os.environ.get(name) or "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")}
    for name, count in counts.items():
        if not count.isdecimal():
            raise UserError(f"The environment variable {name}={count} is not a number. Unset it, or correct it.")
    return max(map(int, counts.values()))


def _refuse_used(output_dir: Path) -> None:
    if output_dir.is_dir() and any(
        path.name not in _NO_RUN and not is_unfinished(path) for path in output_dir.iterdir()
    ):
        launches = read_launches(output_dir)
        if launches and launches[-1].get("ended"):
            raise UserError(
                f"--output_dir {output_dir} is not empty: it holds a finished run. Choose another directory, or "
                "delete this one."
            )
        raise UserError(
            f"--output_dir {output_dir} is not empty. Resume its run with `--resume_from_checkpoint auto`, choose "
            "another directory, or delete this one."
        )


def occupy_output_dir(args: LMTrainingArguments) -> None:
    """
    Create and lock `output_dir`, with `--save_on_each_node` on each machine. All ranks must call this function.

    Raises:
        `ValueError`: if another run holds the lock, or if the machines do not share `output_dir` without
            `--save_on_each_node`. A resumed run waits up to 30 seconds for the end of the other one.
        `SystemExit`: with the status `EXIT_NOT_SAVED`, if `output_dir` cannot be written to.
    """
    is_resumed = args.resume_from_checkpoint is not None or _num_restarts() > 0

    def hold() -> None:
        try:
            hold_output_dir(args.output_dir, patience_seconds=_PATIENCE_SECONDS if is_resumed else 0)
        except OSError as error:
            print(
                f"error: --output_dir {args.output_dir} cannot be written to: {error}. Choose another directory.",
                file=sys.stderr,
            )
            raise SystemExit(EXIT_NOT_SAVED) from error

    on_saving_processes(args, hold)
    if args.save_strategy != "no" and not args.save_on_each_node:
        holder = on_main_process(args, lambda: lock_holder(args.output_dir))
        on_processes(args, lambda: _wait_until_visible(args, holder))


def _wait_until_visible(args: TrainingArguments, holder: dict) -> None:
    """Raise `ValueError` if this machine does not see the lock of `output_dir` that the main process holds."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while args.local_process_index == 0 and lock_holder(args.output_dir) != holder:
        if time.monotonic() > deadline:
            raise UserError(
                f"--output_dir {args.output_dir} on {socket.gethostname()} is not the directory of this name on "
                f"{holder.get('host')}: each machine would save a part of every checkpoint. Pass --save_on_each_node, "
                "or use a directory that all machines share."
            )
        time.sleep(0.2)


@contextmanager
def holding_output_dir(args: TrainingArguments) -> Iterator[None]:
    """Lock `output_dir` within the block, unless the caller has locked it already. All ranks must enter the block."""
    output_dir, is_new = args.output_dir, False
    if args.save_strategy != "no":
        is_new = bool(on_saving_processes(args, lambda: hold_output_dir(output_dir))[args.process_index])
    try:
        yield
    finally:
        if is_new:
            release_output_dir(output_dir)


__all__ = [
    "EXIT_NOT_SAVED",
    "checkpoint_to_resume",
    "find_newest",
    "holding_output_dir",
    "newest_of_all_machines",
    "occupy_output_dir",
]
