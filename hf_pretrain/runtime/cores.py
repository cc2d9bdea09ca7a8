"""The cores of this process that other programs use, and the number of threads that suits the rest of them."""

import os
import sys
import time

import psutil
import torch


_USER_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
_SECONDS = 0.5


class CoreLoad:
    """Measure how many cores other programs use."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # psutil measures since the last call.
        self.measure()

    def measure(self) -> float:
        """Return the mean number of cores that other programs have used since the last call."""
        shares = psutil.cpu_percent(percpu=True)
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(len(shares))
        all_programs = sum(shares[core] for core in cores if core < len(shares))
        return max(0.0, all_programs - self._process.cpu_percent()) / 100


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
    default, cores, reason = torch.get_num_threads(), num_cores(), "as before"
    if kept is None:
        load = CoreLoad()
        time.sleep(_SECONDS)
        others = load.measure()
        kept = free_cores(others)
        reason = f"because other programs use {others:.1f} of {cores} cores"
    threads = min(kept, default)
    if threads == default:
        return ""
    torch.set_num_threads(threads)
    return f"{threads} of {default} threads, {reason}"


def free_cores(others: float) -> int:
    """Return the number of cores that other programs leave, at least 1. `others` is their number of cores."""
    return max(1, num_cores() - round(others))


__all__ = ["CoreLoad", "choose_threads", "free_cores", "num_cores"]
