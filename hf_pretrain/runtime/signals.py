"""
Listen for the signals that ask a run to stop, tell a real Ctrl-C from an exit of the user's code, and stop ranks whose
launcher is gone.
"""

import atexit
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any

import psutil

from .launchers import LAUNCHERS


# Windows has only the first two.
SIGNALS = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")]
# The terminal sends a signal to every process, and launchers forward it again. The copy arrives within this time.
_COPY_SECONDS = 2.0


class Interrupted(KeyboardInterrupt):
    """The user has pressed Ctrl-C. A plain `KeyboardInterrupt` may come from code of the user."""


class UserCodeExit(BaseException):
    """
    Code of the user, such as a reward, has raised `SystemExit` or `KeyboardInterrupt`, which would end the run as a
    success, or without a message.

    It is no `Exception`, because TRL turns those of a tool into its result.
    """


def interrupt(number: int, frame: Any) -> None:
    """Raise [`Interrupted`]: the handler of Ctrl-C."""
    raise Interrupted


@contextmanager
def running_user_code(name: str) -> Iterator[None]:
    """Raise `UserCodeExit` if the block, which runs code of the user, exits. `name` says which code."""
    try:
        yield
    except Interrupted:
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserCodeExit(f"{name} ended with {error!r}. Return a value there, or raise another error.") from error


def guard_user_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of the user that runs as [`running_user_code`] describes."""
    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return running_user_code(name)(function)

    @wraps(function)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        # A `SystemExit` would end asyncio's loop, and the thread that waits for its results would never go on.
        with running_user_code(name):
            return await function(*args, **kwargs)

    return guarded


class SignalListener:
    """
    Record signals instead of dying from them, so that a run can stop at the end of a step.

    Attributes:
        number (`int`): the first signal that arrived, or 0.
        is_impatient (`bool`): a second signal arrived more than two seconds later. Waiting for a push should end.
        is_ending (`bool`): set by the caller when the process is about to exit. When the block ends, signals are then
            ignored, because launchers may still send some. In an interactive session they are not ignored.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_impatient = self.is_ending = False
        self._first_time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle `SIGNALS` within the block. Outside the main thread, where Python allows no handlers, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Reset: in a notebook, a signal may have stopped an earlier run of the same trainer.
        self.number, self.is_impatient, self.is_ending = 0, False, False
        # `nohup` starts a run with SIGHUP ignored, and the run must keep ignoring it.
        handled = [
            number for number in SIGNALS if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
        ]
        # Restore the earlier handlers when the block ends: a notebook or a server has its own.
        previous = {number: signal.signal(number, self._note) for number in handled}
        try:
            yield
        finally:
            # `sys.ps1` exists only in interactive sessions, which continue after the run.
            ignores = self.is_ending and not hasattr(sys, "ps1")
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if ignores else handler)

    def _note(self, number: int, frame: Any) -> None:
        """Record a signal. A second Ctrl-C raises `KeyboardInterrupt` at once."""
        now = time.monotonic()
        if not self.number:
            self.number, self._first_time = number, now
        elif now > self._first_time + _COPY_SECONDS:
            self.is_impatient = True
            if number == signal.SIGINT:
                raise Interrupted


def let_workers_survive_one_sigterm(loader: Any) -> None:
    """
    Let the workers of torch's [`~torch.utils.data.DataLoader`] ignore the first SIGTERM.

    A signal to the whole process group would otherwise end the workers, and torch raises an error in the main process
    if a worker is missing. The main process needs its workers until the end of the step.
    """
    loader.worker_init_fn = partial(_survive_one_sigterm, loader.worker_init_fn)
    # Unregister first, so that several loaders register the function once.
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)


def _survive_one_sigterm(initialize: Callable[[int], None] | None, worker_id: int) -> None:
    """Initialize a worker of a data loader, and let it ignore the first SIGTERM."""
    if initialize is not None:
        initialize(worker_id)
    # A second SIGTERM must end a worker, because torch itself ends workers with SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def _end_workers() -> None:
    """
    End the workers that still live when the main process exits, as they do after an exception.

    NOTE: `multiprocessing` would send one SIGTERM, which they ignore, and wait for them without a limit. It registered
    its exit function earlier, so this function runs before it.
    """
    if sys.platform != "win32":
        # torch's handler would report the ended workers as a fault.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


@cache
def watch_launcher(name: str) -> None:
    """
    Stop this process, as after SIGTERM, when its launcher dies. `name` is the result of [`launchers.launcher`].

    A dead launcher can neither forward signals nor end its ranks, which would write into the directory of the next
    run. A process that a user started may outlive its shell, so it is not watched.
    """
    # The command `hf-pretrain` sets the variable, and so does `from_scratch`, which starts it.
    num_parents = int(os.environ.get("HF_PRETRAIN_PARENTS", 0))
    if name == "python" and not num_parents:
        return
    chain = _ancestors(next((each.num_levels for each in LAUNCHERS.values() if each.command == name), num_parents))
    is_orphan = _adopts_orphans(chain[0])

    def watch() -> None:
        # When a parent dies, the kernel gives its children another parent.
        while not is_orphan and _ancestors(len(chain)) == chain:
            time.sleep(1)
        # The launcher may have read the output.
        with suppress(OSError):
            print(f"The launcher ({name}) is gone. This rank stops, as after SIGTERM.", file=sys.stderr, flush=True)
        # Send the signal to this process itself: a run that trains saves a checkpoint and ends.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _adopts_orphans(pid: int) -> bool:
    """
    Return whether a parent has adopted this process because its launcher died before the watch: the first process
    of the system, or systemd. In a container, the launcher itself, a Python program, can be the first process.
    """
    try:
        parent = psutil.Process(pid)
        return (pid == 1 or parent.name() == "systemd") and "python" not in parent.exe()
    except psutil.NoSuchProcess:
        # A parent outside of the container has the id 0.
        return False
    except psutil.AccessDenied:
        # A launcher runs under the user of its ranks.
        return True


def _ancestors(number: int) -> list[int]:
    """Return the ids of the `number` nearest ancestors of this process, the parent first."""
    found = [os.getppid()]
    with suppress(psutil.Error):
        while len(found) < number:
            found.append(psutil.Process(found[-1]).ppid())
    return found
