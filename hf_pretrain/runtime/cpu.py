"""Runs on CPUs: the number of threads, the memory allocator, and the end of a rank."""

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist


_USER_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
_SECONDS = 0.5


def choose_threads(kept: int | None = None) -> str:
    """
    Set the number of torch's threads, unless `OMP_NUM_THREADS` or `MKL_NUM_THREADS` is set, and return a description
    of the choice; "" for torch's own number.

    An operator ends when its slowest thread ends. One busy program on one of two cores cost the preset `tiny` three
    quarters of its speed with two threads, and nothing with one thread on the other core.

    Args:
        kept (`int`, *optional*): the number of the run to resume; other numbers give sums with other last bits.
    """
    if _USER_VARIABLES & os.environ.keys():
        return ""
    default, reason = torch.get_num_threads(), "as before"
    if kept is None:
        busy, cores = _measure_load()
        kept = max(1, cores - round(busy))
        reason = f"because other programs use {busy:.1f} of {cores} cores"
    threads = min(kept, default)
    if threads == default:
        return ""
    torch.set_num_threads(threads)
    return f"{threads} of {default} threads, {reason}"


def _measure_load() -> tuple[float, int]:
    """Return the number of cores that other programs use, and the number that this process may use."""
    # This process sleeps meanwhile, so all load is that of others.
    shares = psutil.cpu_percent(interval=_SECONDS, percpu=True)
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(len(shares))
    return sum(shares[core] for core in cores) / 100, len(cores)


# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
# With one of these, the user has configured the same parameters.
_VARIABLES = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
# The heap grows by this many bytes at once. Pages that are never touched take no memory.
_TOP_PAD_BYTES = 256 << 20


def keep_freed_blocks() -> None:
    """
    Let glibc keep freed memory in the process. A training step on a CPU is then up to 1.2 times as fast.

    By default, glibc returns large blocks to the system as soon as they are freed. The next step gets them back page
    by page, each after a page fault, and the system fills each page with zeros. Do nothing without glibc, and if the
    environment configures the allocator.
    """
    if any(name in os.environ for name in _VARIABLES) or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # Give large blocks a place in the heap instead of a mapping of their own, and never shrink the heap.
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)


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
