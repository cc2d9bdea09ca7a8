"""Run a function on the main process or on the processes that write files, with the same outcome on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments


T = TypeVar("T")


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


def on_saving_processes(args: TrainingArguments, action: Callable[[], None]) -> None:
    """
    Run `action` on the processes that write files. If one of them raises, all ranks raise. All ranks must call this
    function.
    """
    error: BaseException | None = None
    try:
        if args.should_save:
            action()
    except (ValueError, OSError, SystemExit) as raised:
        error = raised
    # Each saving rank may fail on its own disk, so gather the errors of all ranks.
    errors: list[Any] = [error]
    if args.world_size > 1:
        errors = [None] * args.world_size
        dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise error


__all__ = ["T", "on_main_process", "on_saving_processes"]
