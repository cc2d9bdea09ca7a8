"""Clean up when a rank on a CPU ends."""

import os
import time
from pathlib import Path

import torch.distributed as dist


def leave_process_group() -> None:
    """
    Leave the process group.

    NOTE: gloo's threads free the tensors of the last collective shortly after it ends, and need the interpreter for
    that. If the interpreter is exiting by then, they abort the process with `terminate called without an active
    exception`. Without the pause, this happened to 5 of 136 processes on a busy machine.
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
