"""The share of the cores that other processes take from a run on CPUs."""

from contextlib import suppress

import psutil

from .processes import num_local_processes


# Below this share, the measured speed is that of a run alone, within the usual noise.
NOTICEABLE_SHARE = 0.2
_MIN_CORE_SECONDS = 0.5


class OtherProcesses:
    """Measure the share of this machine's cores that processes outside the run take, since the last measurement."""

    def __init__(self) -> None:
        self._last = _read_seconds()

    def measure(self) -> float:
        """Return the share, or 0 if cores were idle: the other processes then took nothing from the run."""
        now = _read_seconds()
        total, idle, own = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return share_of_others(total, idle, own)


def share_of_others(total: float, idle: float, own: float) -> float:
    """
    Return the share of `total` core seconds that is neither idle nor the run's own. It is 0 if a tenth was idle, and
    for intervals that are too short for clocks that count hundredths of a second.
    """
    if total < _MIN_CORE_SECONDS or idle / total > 0.1:
        return 0.0
    return max(0.0, 1 - (idle + own) / total)


def _read_seconds() -> tuple[float, float, float]:
    """Return the core seconds of the machine so far, in all and idle, and those of the run's processes on it."""
    times = psutil.cpu_times()
    # The time of virtual machines is part of the other times.
    total = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)
    own = 0.0
    process = psutil.Process()
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            used = member.cpu_times()
            own += used.user + used.system
    # The ranks of a run do equal work.
    return total, times.idle + getattr(times, "iowait", 0), own * num_local_processes()


__all__ = ["NOTICEABLE_SHARE", "OtherProcesses", "share_of_others"]
