"""Run something on one process, or on those that write files, with the same outcome on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments


T = TypeVar("T")


def on_main_process(args: TrainingArguments, decide: Callable[[], T]) -> T:
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


def on_saving_processes(args: TrainingArguments, action: Callable[[], None]) -> None:
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


__all__ = ["T", "on_main_process", "on_saving_processes"]
