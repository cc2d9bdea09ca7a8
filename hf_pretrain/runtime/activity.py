"""
Tell what a run is doing when its output is silent.

Without a terminal there are no progress bars, and a long step, evaluation or save would look like a hang. A thread
then prints a line whenever nothing has been printed for some seconds.
"""

import threading
import time
from collections.abc import Callable

from .command_line import shows_bars


SILENT_SECONDS = 9.0


class Activity:
    """What the process is doing, and since when."""

    def __init__(self) -> None:
        self.text = "starting"
        self.since = self.last_output = time.monotonic()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, text: str) -> None:
        """Name what begins now, such as `evaluating`."""
        self.text, self.since = text, time.monotonic()

    def note_output(self) -> None:
        """Begin a new silence: something was printed."""
        self.last_output = time.monotonic()

    def start(self, write: Callable[[str], object], *, seconds: float = SILENT_SECONDS) -> None:
        """
        Print lines from now on, unless progress bars do.

        Args:
            write (`Callable`): prints a line.
            seconds (`float`): longest silence.
        """
        self.stop()
        if shows_bars():
            return
        self._is_over = threading.Event()
        self.note_output()
        # A daemon thread: it must not keep a finished process alive.
        self._thread = threading.Thread(target=self._watch, args=(write, seconds), name="activity", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print no more lines."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _watch(self, write: Callable[[str], object], seconds: float) -> None:
        while not self._is_over.wait(min(1.0, seconds / 4)):
            now = time.monotonic()
            if now - self.last_output >= seconds:
                write(f"{self.text}, {now - self.since:.0f} s")
                self.last_output = time.monotonic()


# One per process: its phases follow each other.
activity = Activity()


__all__ = ["SILENT_SECONDS", "Activity", "activity"]
