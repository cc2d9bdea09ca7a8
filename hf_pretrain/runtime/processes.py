"""Run a function on the main process, all processes or those that write files, with the same outcome on every rank."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments


T = TypeVar("T")


def num_local_processes() -> int:
    """Return the number of processes that the launcher started on this machine."""
    # NOTE: under the deepspeed launcher, which sets LOCAL_SIZE, accelerate sets LOCAL_WORLD_SIZE to 1.
    is_deepspeed = "CROSS_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    return int(os.environ.get("LOCAL_SIZE" if is_deepspeed else "LOCAL_WORLD_SIZE", 1))


def on_main_process(args: TrainingArguments, decide: Callable[[], T]) -> T:
    """
    Run `decide` on the main process and give its result to every rank.

    If `decide` raises, every rank raises, so that no rank waits for a rank that has stopped. All ranks must call this
    function.
    """
    # Send the result and the error in one broadcast, so that every rank enters it in either case.
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = decide()
        except (ValueError, OSError, SystemExit) as error:
            outcome[1] = error
    if args.world_size > 1:
        # Without this broadcast the other ranks would wait in the next collective until its timeout.
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_saving_processes(args: TrainingArguments, action: Callable[[], T]) -> list[T | None]:
    """
    Run `action` on the processes that write files: the main process, or with `--save_on_each_node` the first process
    of each machine. If one of them raises, all ranks raise. All ranks must call this function.

    Returns:
        `list`: the result of each rank, and `None` for the ranks that do not write.
    """
    return on_processes(args, lambda: action() if args.should_save else None)


def on_processes(args: TrainingArguments, action: Callable[[], T]) -> list[T]:
    """
    Run `action` on all ranks, and return the result of each. If one of them raises, all ranks raise. All ranks must
    call this function.
    """
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = (action(), None)
    except (ValueError, OSError, SystemExit) as raised:
        outcome = (None, raised)
    # Each rank may fail on its own disk, so gather the errors of all ranks.
    outcomes: list[Any] = [outcome]
    if args.world_size > 1:
        outcomes = [None] * args.world_size
        dist.all_gather_object(outcomes, outcome)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


__all__ = ["T", "num_local_processes", "on_main_process", "on_processes", "on_saving_processes"]
