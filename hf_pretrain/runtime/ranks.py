"""Let the ranks of a run agree, take turns, and end."""

import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
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
        except (ValueError, OSError) as error:
            outcome[1] = error
    if args.world_size > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def made_once_per_machine(args: TrainingArguments, make: Callable[[], T], *, is_shared: bool = True) -> T:
    """
    Call `make` in the first process of each machine, and return its pickled result in the others. All ranks must call
    this function.

    If `make` fails, the other processes call it, too, and the launcher of the first one ends them. If that process
    dies, they raise.

    Args:
        args (`TrainingArguments`): the training arguments, which know the ranks.
        make (`Callable`): makes the result.
        is_shared (`bool`, defaults to `True`): send the result. Otherwise, the other processes call `make` afterwards.

    NOTE: `main_process_first` of transformers waits at most `--ddp_timeout` seconds. This function has a week.
    """
    if args.world_size == 1 or not dist.is_initialized():
        return make()
    is_first, host = args.local_process_index == 0, socket.gethostname()
    made: list[Any] = [None] * args.world_size
    mine = None
    try:
        if is_first:
            result = make()
            # As bytes, because a dataset opens its files when it is unpickled, and other machines do not have them.
            mine = (host, pickle.dumps(result)) if is_shared else None
    finally:
        dist.all_gather_object(made, mine, group=_patient_group())
    if is_first:
        return result
    received = next((content for name, content in filter(None, made) if name == host), None)
    return make() if received is None else pickle.loads(received)


@cache
def _patient_group() -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives have a week."""
    return dist.new_group(backend="gloo", timeout=timedelta(weeks=1))


class Ranks:
    """
    The ranks of a run, and small collectives over them that do not wait for a GPU.

    Args:
        world_size (`int`): number of ranks. With one, nothing is communicated.
        rank (`int`): number of this process.
        timeout_seconds (`float`): how long a collective waits for the other ranks.
    """

    def __init__(self, world_size: int, rank: int, *, timeout_seconds: float):
        self.world_size = world_size
        self.rank = rank
        self.timeout_seconds = timeout_seconds

    @cached_property
    def _cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group; `None` if the default group uses gloo. NCCL collectives would wait for the GPU's queue."""
        if dist.get_backend() == "gloo":
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))

    def largest(self, number: int) -> int:
        """Return the largest `number` of all ranks."""
        if self.world_size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._cpu_group)
        return int(tensor.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._cpu_group)
        return values


def leave_process_group() -> None:
    """
    Leave the process group, if this process is in one. NCCL warns if a process ends without it.

    NOTE: with NCCL, all ranks must call this function: a rank that leaves alone waits for the others. So a rank that
    fails does not leave, and its launcher ends the others.

    gloo's threads free the tensors of the last collective shortly after it ends, and need the interpreter for that. If
    the interpreter is exiting by then, they abort the process with `terminate called without an active exception`.
    Without the pause, this happened to 5 of 136 processes on a busy machine.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.2)


def remove_allreduce_buffers() -> None:
    """
    Remove this run's buffers of DeepSpeed's CPU kernel. A rank that still uses one keeps its mapping.

    NOTE: the kernel leaks 66 MiB of shared memory per rank per run, until /dev/shm is full.
    """
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    # The names hold address and port, so the buffers of other runs on this machine stay.
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{address}_{port}_*"):
        path.unlink(missing_ok=True)
