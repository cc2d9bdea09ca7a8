"""
The log file of a run: `train.log` in its `output_dir` keeps everything that the main process prints.

A run survives if its output cannot be written: the reader of a pipe exits (`| head`), the terminal closes, or the disk
below a redirected output is full.
"""

import errno
import logging
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ..runtime.activity import activity, shows_bars


LOG_NAME = "train.log"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The replaced streams by their names in `sys`.
_streams: dict[str, "_LoggedStream"] = {}


class _LoggedStream:
    """A text stream that copies its lines to a log, and leaves the progress bars of libraries to our display."""

    def __init__(self, stream: TextIO, log: TextIO | None):
        self.stream, self.log, self._line = stream, log, ""

    def write(self, text: str) -> int:
        printed = activity.absorb(text)
        if printed:
            with activity.above(printed):
                self._survive(lambda: self.stream.write(printed))
            if self.log is not None:
                *lines, self._line = (self._line + printed).split("\n")
                for line in lines:
                    self._keep(line)
        return len(text)

    def print_line(self, line: str) -> None:
        self.write(f"{line}\n")
        self.flush()

    def draw(self, text: str) -> None:
        """Write a part of a progress bar, which the log does not keep."""
        self._survive(lambda: self.stream.write(text))
        self.flush()

    def flush(self) -> None:
        self._survive(self.stream.flush)

    def _keep(self, line: str) -> None:
        kept = _ANSI.sub("", line).rstrip()
        # A line that was empty stays; a line that held only escape codes goes.
        if kept or not line:
            try:
                self.log.write(f"{kept}\n")
            except OSError:
                # The disk is full. The next save reports it, with the space that it needs.
                self.log = None

    def _survive(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                # The stream has no reader any more. Point its descriptor at /dev/null, because native code writes to
                # the descriptor, and Python flushes its buffer at exit. Other errors, such as a full disk, only lose
                # this text.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
        except ValueError:
            # Python raises it for a closed stream, which only loses this text.
            if not self.stream.closed:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def begin_log(path: Path | None) -> None:
    """
    Copy everything that this process prints from now on to a file, and survive errors of its own streams. On the main
    process, also show what the run is doing ([`~runtime.activity`]).

    Args:
        path (`Path`, *optional*): file to append to.
    """
    end_log()
    log = None
    if path is not None:
        # Buffer one line, so that a killed run loses none. A broken character must not end the run either.
        log = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")
        log.write(f"--- {datetime.now().isoformat(sep=' ', timespec='seconds')} ---\n")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Daemons and Windows programs without a console have no streams.
        if stream is not None:
            _streams[name] = _LoggedStream(stream, log)
            _replace(name, stream, _streams[name])
    if os.environ.get("RANK", "0") == "0" and "stdout" in _streams:
        draw = _streams["stderr"].draw if shows_bars() and "stderr" in _streams else None
        activity.start(_streams["stdout"].print_line, draw)


def end_log() -> None:
    """Restore the streams that [`begin_log`] replaced."""
    activity.stop()
    for name, stream in _streams.items():
        stream.log = None
        _replace(name, stream, stream.stream)
    _streams.clear()


def _replace(name: str, old: Any, new: Any) -> None:
    """Replace a stream of `sys`, also in logging handlers, which keep a reference to it."""
    # Other code, such as pytest, may have replaced the stream in between. Leave its stream in place.
    if getattr(sys, name) is old:
        setattr(sys, name, new)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


__all__ = ["LOG_NAME", "begin_log", "end_log"]
