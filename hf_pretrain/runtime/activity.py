"""
Show what a run is doing: one display for all its phases.

In a terminal, the last line is a progress bar with the phase, its time and the time left, and everything else is
printed above it. Elsewhere, a plain line appears whenever nothing has been printed for some seconds.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim
from transformers.utils import is_in_notebook


SILENT_SECONDS = 9.0
_TICK_SECONDS = 0.25
# A return to the start of a line, with which progress bars redraw it. In `\r\n`, it only ends a line.
_RETURN = re.compile(r"\r(?!\n)")


def shows_bars() -> bool:
    """
    Return whether this process shows progress bars: the main process does, if the output is a terminal or a notebook.
    """
    return os.environ.get("RANK", "0") == "0" and (sys.stderr.isatty() or is_in_notebook())


@dataclass
class Phase:
    """
    A part of a run.

    Args:
        text (`str`): what the run does, such as `evaluating`.
        total (`int`, *optional*): number of things to do, if it is known.
        done (`int`): number of things that are done.
    """

    text: str
    total: int | None = None
    done: int = 0
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._initial = self.done

    def format(self, width: int | None = None) -> str:
        """Return the phase as a line: a progress bar of `width` columns, or without `width` plain text."""
        elapsed = time.monotonic() - self.since
        if not self.total:
            return disp_trim(f"{self.text}, {tqdm.format_interval(elapsed)}", width or sys.maxsize)
        bar = "" if width is None else " |{bar}|"
        left = ", {remaining} left" if self._initial < self.done < self.total else ""
        line = "{desc} {n_fmt}/{total_fmt}" + bar + (", " if width is None else " ") + "{elapsed}" + left
        return tqdm.format_meter(
            self.done, self.total, elapsed, ncols=width, prefix=self.text, bar_format=line, initial=self._initial
        )


class Activity:
    """The phases of this process, and their display between [`~Activity.start`] and [`~Activity.stop`]."""

    def __init__(self) -> None:
        self.phase = Phase("starting")
        # The last state of a library's progress bar.
        self._library_bar = ""
        self._end_display()

    def _end_display(self) -> None:
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._draw: Callable[[str], object] | None = None
        self._drawn_columns = 0
        self._is_line_begun = False
        self._last_output = time.monotonic()

    def begin(self, text: str, total: int | None = None, done: int = 0) -> Phase:
        """Begin a phase, which lasts until the next one. Arguments as in [`Phase`]."""
        self.phase, self._library_bar = Phase(text, total, done), ""
        with self._lock:
            self._redraw()
        return self.phase

    @contextmanager
    def during(self, text: str, total: int | None = None) -> Iterator[Phase]:
        """Begin a phase for a block, and then return to the earlier phase. Arguments as in [`Phase`]."""
        earlier = self.phase
        try:
            yield self.begin(text, total)
        finally:
            self.phase, self._library_bar = earlier, ""

    def start(
        self,
        print_line: Callable[[str], object],
        draw: Callable[[str], object] | None,
        *,
        seconds: float = SILENT_SECONDS,
    ) -> None:
        """
        Display the phases from now on.

        Args:
            print_line (`Callable`): prints a line.
            draw (`Callable`, *optional*): writes text to the terminal, which then shows a progress bar.
            seconds (`float`): without a terminal, the longest silence.
        """
        self.stop()
        self._draw = draw
        # A daemon thread: it must not keep a finished process alive.
        self._thread = threading.Thread(target=self._watch, args=(print_line, seconds), name="activity", daemon=True)
        self._thread.start()

    @contextmanager
    def on_stderr(self, *, bars: bool = True) -> Iterator[None]:
        """
        Display the phases of a block on standard error, for a command that prints its result to standard output. A
        block that prints something itself needs `bars=False`, with which plain lines appear in a terminal, too.
        """
        draw = partial(print, end="", file=sys.stderr, flush=True) if bars and shows_bars() else None
        self.start(partial(print, file=sys.stderr), draw)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """End the display, and remove the progress bar."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._clear()
        self._end_display()

    @contextmanager
    def above(self, text: str) -> Iterator[None]:
        """Remove the progress bar for a block that prints `text`."""
        with self._lock:
            self._clear()
            yield
            self._last_output = time.monotonic()
            self._is_line_begun = not text.endswith("\n")
            self._redraw()

    def absorb(self, text: str) -> str:
        """
        Take the progress bars of libraries out of a text that is to be printed, and return the rest.

        Our own bar shows their state during a phase without a total. Thus there is never more than one bar, and a
        redirected output holds none.
        """
        if self._library_bar and not text.strip("\n\x1b[A"):
            # The library moves to another bar, or ends the line of a finished one.
            return ""
        *bars, rest = _RETURN.split(text)
        if not bars or bars[0]:
            # Bars begin with a return. Other programs end a line with it, to print over the line.
            self._library_bar = ""
            return _RETURN.sub("\n", text)
        if rest.endswith("\n"):
            self._library_bar = ""
            return rest
        self._library_bar = rest.strip()
        return ""

    def _watch(self, print_line: Callable[[str], object], seconds: float) -> None:
        while not self._is_over.wait(min(_TICK_SECONDS, seconds / 4)):
            if self._draw is not None:
                with self._lock:
                    self._redraw()
            elif time.monotonic() - self._last_output >= seconds:
                print_line(self.phase.format())
                self._last_output = time.monotonic()

    def _redraw(self) -> None:
        if self._draw is None or self._is_line_begun or self._is_over.is_set():
            return
        try:
            # In the last column, some terminals would begin a new line.
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        except (OSError, ValueError):
            # Notebooks have no width.
            width = 80
        bar = self._library_bar if self.phase.total is None else ""
        line = disp_trim(bar, width) if bar else self.phase.format(width)
        # Overwrite the rest of an earlier, longer line.
        self._draw(f"\r{line}" + " " * max(0, self._drawn_columns - disp_len(line)))
        self._drawn_columns = disp_len(line)

    def _clear(self) -> None:
        if self._drawn_columns:
            self._draw("\r" + " " * self._drawn_columns + "\r")
            self._drawn_columns = 0


# One per process: its phases follow each other.
activity = Activity()
atexit.register(activity.stop)
# A forked worker has no thread, and its copy of the lock may be locked forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=activity._end_display)


__all__ = ["SILENT_SECONDS", "Activity", "Phase", "activity", "shows_bars"]
