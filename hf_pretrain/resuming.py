"""
Which checkpoint a run goes on from, decided by one process for all of them, and what is cleared away before.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from .command_line import EXIT_NOT_SAVED
from .locking import LOCK_NAME, hold_output_dir
from .manifest import MANIFEST_NAME, find_damage, read_manifest
from .run_log import LOG_NAME
from .run_record import RECORD_NAME
from .training_args import LMTrainingArguments
from .weight_files import check_shards


logger = logging.get_logger(__name__)

SAVING = ".saving"
# A run that goes on waits so long for the one before it: its ranks may still be saving when their launcher is gone.
_PATIENCE_SECONDS = 30.0
# Files of a run that came to nothing, and may be tried again.
_NO_RUN = {"rejected.jsonl", RECORD_NAME, LOCK_NAME, LOG_NAME}
T = TypeVar("T")


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
        verified = _verified(path, unverified=args.allow_inexact_resume)
        if is_own:
            _leave_branch(path)
        return verified

    return on_main_process(args, decide)


def _num_restarts() -> int:
    return max(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def on_main_process(args: LMTrainingArguments, decide: Callable[[], T]) -> T:
    """What `decide` returns or raises on the main process, on all of them: none is left waiting for the others."""
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = decide()
        except (ValueError, OSError, SystemExit) as error:
            outcome[1] = error
    if args.world_size > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_saving_processes(args: LMTrainingArguments, action: Callable[[], None]) -> None:
    """Does something on the processes that write files; all raise what one of them raises."""
    error: BaseException | None = None
    try:
        if args.should_save:
            action()
    except (ValueError, OSError, SystemExit) as raised:
        error = raised
    errors: list[Any] = [error]
    if args.world_size > 1:
        errors = [None] * args.world_size
        dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise error


def _refuse_used(output_dir: Path) -> None:
    if output_dir.is_dir() and any(path.name not in _NO_RUN for path in output_dir.iterdir()):
        raise ValueError(
            f"--output_dir {output_dir} is not empty. Go on with `--resume_from_checkpoint auto`, choose another "
            "directory, or delete this one."
        )


def newest_checkpoint(output_dir: str | Path, *, unverified: bool = False) -> str | None:
    """
    The newest checkpoint in `output_dir` that verifies, if any; damaged ones that are newer get another name. One
    without a manifest is an error (`ValueError`), unless `unverified` ones are wanted.
    """
    output_dir = Path(output_dir)
    found = sort_checkpoints(str(output_dir)) if output_dir.is_dir() else []
    for path in map(Path, reversed(found)):
        damage = find_damage(path)
        if not damage or (unverified and not (path / MANIFEST_NAME).exists()):
            logger.warning(
                f"Resuming from {path}." if not damage else f"Resuming from {path}, unverified: {damage[0]}."
            )
            check_shards(path)
            return str(path)
        if not (path / MANIFEST_NAME).exists():
            raise ValueError(_no_manifest(path))
        aside = set_aside(path)
        logger.warning(f"{path} is damaged and now called {aside.name}: {summarize(damage)}.")
    logger.warning(f"No checkpoint in {output_dir}: starting.")
    return None


def _leave_branch(path: Path) -> None:
    """Renames the checkpoints beside `path` that came after it: `auto` would return to them."""
    found = [Path(other).resolve() for other in sort_checkpoints(str(path.parent))]
    for other in found[found.index(path.resolve()) + 1 :] if path.resolve() in found else []:
        logger.warning(f"Going on from {path}: {other} is now called {set_aside(other, 'abandoned').name}.")


def _verified(path: Path, *, unverified: bool) -> str:
    if not (path / TRAINER_STATE_NAME).is_file():
        raise ValueError(f"--resume_from_checkpoint {path} is not a checkpoint: it has no {TRAINER_STATE_NAME}.")
    check_shards(path)
    if not (path / MANIFEST_NAME).exists():
        if not unverified:
            raise ValueError(_no_manifest(path))
        logger.warning(f"{path} has no {MANIFEST_NAME}: nothing in it was verified.")
        return str(path)
    damage = find_damage(path)
    if damage:
        raise ValueError(
            f"--resume_from_checkpoint {path} is damaged: {summarize(damage)}. `--resume_from_checkpoint auto` takes the "
            "newest one in --output_dir that is whole."
        )
    return str(path)


def _no_manifest(path: Path) -> str:
    return (
        f"{path} has no {MANIFEST_NAME}, so nothing says whether it is whole: another program wrote it, or an earlier "
        "version. Go on from it with --allow_inexact_resume, or from its weights alone with --model_name_or_path."
    )


def rotate_checkpoints(newest: Path, *, limit: int | None, best: Path | None = None) -> None:
    """
    Removes the checkpoints beside `newest`, which was just saved, that have the lowest steps, until `limit` are left;
    `newest` and `best` stay. The step is the one in the manifest: times lie after a clock was set or files were copied.
    A checkpoint without a readable manifest is not this run's to remove, and does not count.
    """
    steps = {}
    for path in map(Path, sort_checkpoints(str(newest.parent))):
        with suppress(ValueError, KeyError):
            steps[path] = int(read_manifest(path)["run"]["step"])
    kept = {newest.name, best.name if best else None}
    removable = sorted((path for path in steps if path.name not in kept), key=lambda path: steps[path])
    for path in removable[: max(0, len(steps) - limit)] if limit else []:
        shutil.rmtree(path, ignore_errors=True)


def summarize(damage: list[str]) -> str:
    return "; ".join(damage[:5]) + (f"; and {len(damage) - 5} more" if len(damage) > 5 else "")


def set_aside(path: Path, why: str = "damaged") -> Path:
    number = 0
    while (aside := path.with_name(f"{why}-{path.name}" + (f"-{number}" if number else ""))).exists():
        number += 1
    path.rename(aside)
    return aside


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


def remove_leftovers(output_dir: str | Path) -> None:
    """Removes what a killed run was writing into `output_dir`; no save may be under way there."""
    shutil.rmtree(Path(output_dir, SAVING), ignore_errors=True)


def find_newest_run(directory: str = "out") -> str:
    """
    The directory of the MiniMind model that was saved last in `directory`, by the time of its weights.

    Raises:
        `ValueError`: if there is none.
    """
    runs = []
    for config in Path(directory).glob("*/config.json"):
        weights = max((path.stat().st_mtime for path in config.parent.glob("model*.safetensors")), default=None)
        try:
            is_minimind = json.loads(config.read_text(encoding="utf-8")).get("model_type") == "minimind"
        except (ValueError, AttributeError, OSError) as error:
            logger.warning(f"{config} cannot be read and is skipped: {error}.")
            continue
        if weights is not None and is_minimind and (config.parent / "tokenizer.json").is_file():
            runs.append((weights, str(config.parent)))
    if not runs:
        raise ValueError(
            f"No model in {directory}/: run `make pretrain` first, or name one: --model_name_or_path DIR."
        )
    return max(runs)[1]


__all__ = [
    "EXIT_NOT_SAVED",
    "SAVING",
    "checkpoint_to_resume",
    "find_newest_run",
    "newest_checkpoint",
    "occupy_output_dir",
    "on_main_process",
    "on_saving_processes",
    "remove_leftovers",
    "rotate_checkpoints",
    "set_aside",
    "summarize",
]
