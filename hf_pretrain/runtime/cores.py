"""The number of threads that suits the cores that other programs leave free."""

import os
import sys

import psutil
import torch


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
