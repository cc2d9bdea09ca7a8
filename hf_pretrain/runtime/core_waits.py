"""How long the threads of this process wait for a core, because others use all of them."""

from contextlib import suppress
from pathlib import Path


# Below this share, a step takes as long as on a quiet machine, within the usual noise.
NOTICEABLE_SHARE = 0.2
_THREADS = Path("/proc/self/task")


class CoreWaits:
    """Measure the share of its time that this process waits for a core. Only Linux counts these waits."""

    def __init__(self) -> None:
        self._last = _read()

    def measure(self) -> float:
        """
        Return the share since the last call, from 0 to 1: the time that threads were ready to run but had no core,
        divided by this time and the time that they ran. It is 0 if the system does not count it.
        """
        now = _read()
        ran, waited = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return waited / (ran + waited) if ran > 0 and waited > 0 else 0.0


def _read() -> tuple[int, int]:
    """Return the nanoseconds that the threads of this process have run, and have waited for a core."""
    # https://docs.kernel.org/scheduler/sched-stats.html, /proc/<pid>/schedstat.
    ran = waited = 0
    for thread in _THREADS.glob("*/schedstat"):
        # A thread may end meanwhile.
        with suppress(OSError):
            numbers = thread.read_text().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited


__all__ = ["NOTICEABLE_SHARE", "CoreWaits"]
