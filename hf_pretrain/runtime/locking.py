"""
Lock an `output_dir` for one run, and stop ranks whose launcher is gone.

The main process of a run holds a kernel lock (flock) on `.lock`, and writes its host, its process id and a counter
into that file every few seconds. The kernel frees the lock however the process ends. On a network file system, the
kernel may not know about locks of other machines. There, a new run takes over a lock whose counter stands still.
"""

import atexit
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil
from transformers.utils import logging

from .errors import UserError


try:
    import fcntl
except ImportError:
    # Windows has no flock. There, only the counter decides.
    fcntl = None  # type: ignore[assignment]


logger = logging.get_logger(__name__)

LOCK_NAME = ".lock"
_BEAT_SECONDS = 5.0
# Take over a lock of another machine if its counter has not moved for this long.
_SILENCE_SECONDS = 15.0
# The locks of this process, by the path that the caller gave. Do not make the path absolute: a relative path still
# leads to the locked file if a directory above it is renamed.
_held: dict[Path, "_Lock"] = {}


def hold_output_dir(output_dir: str | Path, *, patience_seconds: float = 0.0, lock_name: str = LOCK_NAME) -> bool:
    """
    Lock `output_dir` until [`release_output_dir`] or the end of this process. Create the directory if necessary.

    Args:
        patience_seconds (`float`, *optional*, defaults to 0): how long to wait for another run to end.
        lock_name (`str`, *optional*): the name of the file; one for each result that a directory may hold.

    Returns:
        `bool`: whether this call took the lock; `False` if this process held it already.

    Raises:
        `ValueError`: if another run holds the lock, or the working directory was deleted.
    """
    path = Path(output_dir, lock_name)
    # A process may call this twice: the recipe locks before it reads the data, the trainer before it writes.
    if any(_is_file_at(lock.descriptor, path) for lock in _held.values()):
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        # Every directory above can be created but the working directory.
        raise UserError(
            f"--output_dir {output_dir} has no place any more, because the working directory was deleted. Start the "
            "run again in another directory, or with an absolute --output_dir, which a run creates again."
        ) from error
    lock = _held.pop(path, None)
    if lock is not None:
        logger.warning(
            f"{output_dir} was renamed or deleted while the run wrote into it. Later checkpoints go into a "
            "new directory of this name."
        )
        lock.release()
    _held[path] = _Lock(path, patience_seconds)
    return True


def lock_holder(output_dir: str | Path) -> dict:
    """Return host, process id and start of the process that locked `output_dir`; an empty dictionary if unreadable."""
    # Open the file again in each call: NFS does not show changes to a file that stays open.
    with suppress(FileNotFoundError):
        descriptor = os.open(Path(output_dir) / LOCK_NAME, os.O_RDONLY)
        try:
            holder = _read(descriptor)
        finally:
            os.close(descriptor)
        return {name: holder[name] for name in ("host", "pid", "started") if name in holder}
    return {}


def release_output_dir(output_dir: str | Path, *, lock_name: str = LOCK_NAME) -> None:
    """Release the lock of `output_dir`, if this process holds it."""
    path = Path(output_dir, lock_name)
    for key, lock in list(_held.items()):
        # The caller may spell the path otherwise than before.
        if key == path or _is_file_at(lock.descriptor, path):
            _held.pop(key).release()


class _Lock:
    """A held lock: the open file, and a thread that writes the counter."""

    def __init__(self, path: Path, patience_seconds: float):
        self.path = path
        self.descriptor = _open_locked(path, patience_seconds)
        self._holder = {"host": socket.gethostname(), "pid": os.getpid()}
        self._holder["started"] = datetime.now().isoformat(sep=" ", timespec="seconds")
        self._beat(0)
        self._released = threading.Event()
        # A daemon thread: it must not keep a finished process alive.
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self, count: int) -> None:
        """Write the holder and its counter into the file."""
        # A full disk does not matter: the kernel's lock still holds.
        with suppress(OSError):
            text = json.dumps({**self._holder, "beat": count}).encode()
            # Flush to the disk: only then do other machines see the counter on a shared file system.
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            os.write(self.descriptor, text)
            os.ftruncate(self.descriptor, len(text))
            os.fsync(self.descriptor)

    def _keep_beating(self) -> None:
        """Raise the counter every few seconds until the lock is released."""
        count = 0
        while not self._released.wait(_BEAT_SECONDS):
            self._beat(count := count + 1)

    def release(self) -> None:
        """Stop the thread and free the lock, deleting the file if it still has its name."""
        self._released.set()
        # Wait for the thread, because it writes to the descriptor that is closed below.
        self._thread.join()
        is_there = False
        with suppress(OSError):
            # An empty file tells a waiting run that its holder ended properly.
            os.ftruncate(self.descriptor, 0)
            is_there = _is_file_at(self.descriptor, self.path)
            if is_there and fcntl is not None:
                self.path.unlink()
        os.close(self.descriptor)
        if is_there and fcntl is None:
            # Windows cannot delete an open file, and another run may have it open.
            with suppress(OSError):
                self.path.unlink()


def _open_locked(path: Path, patience_seconds: float) -> int:
    """Open and lock the file, waiting for its holder up to `patience_seconds`; return the descriptor."""
    deadline = time.monotonic() + patience_seconds
    has_told = False
    while True:
        # Do not use O_EXCL: after a crash, the file exists without a holder.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked = _lock(descriptor)
        holder = _read(descriptor)
        if is_locked is None or is_locked:
            # If the kernel gave us the lock and the last holder ran on this machine, that process is gone.
            is_own_host = is_locked and holder.get("host") == socket.gethostname()
            if not _is_file_at(descriptor, path):
                # The holder removed the file between our open and our lock, so we locked a file without a name. Try
                # again.
                os.close(descriptor)
                continue
            if not holder or is_own_host or _stands_still(path, holder):
                return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise UserError(
                f"{path.parent} is in use by {_describe(holder)}. Wait for that process, stop it, or choose another "
                f"place to write to. If that process is gone, delete {path}."
            )
        if not has_told:
            logger.warning(
                f"{path.parent} is in use by {_describe(holder)}: waiting {patience_seconds:.0f} s for it to end."
            )
            has_told = True
        time.sleep(0.2)


def _lock(descriptor: int) -> bool | None:
    """Return whether the kernel gave the lock; `None` if the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _stands_still(path: Path, holder: dict) -> bool:
    """Return whether the counter of a holder on another machine stands still."""
    logger.warning(
        f"{path.parent} was in use by {_describe(holder)}: watching its heartbeat for {_SILENCE_SECONDS:.0f} s."
    )
    deadline = time.monotonic() + _SILENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        # Open the file again each time: NFS does not show changes to a file that stays open.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _read(descriptor) != holder:
                return False
        finally:
            os.close(descriptor)
    return True


def _read(descriptor: int) -> dict:
    """Return the holder that the file names; an empty dictionary if the file is empty."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        holder = json.loads(os.read(descriptor, 4096) or b"{}")
    except ValueError:
        # The holder was writing at this moment.
        return {"text": "unreadable"}
    return holder if isinstance(holder, dict) else {"text": "unreadable"}


def _describe(holder: dict) -> str:
    """Return a holder as text for messages."""
    if "host" not in holder:
        return "a process that has just started"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@atexit.register
def _release_all() -> None:
    """Release every lock when the interpreter exits."""
    for path in list(_held):
        _held.pop(path).release()


def _forget() -> None:
    """
    Close the locks in a forked process, such as a data loader worker. An inherited descriptor would keep the lock of a
    killed run.
    """
    for lock in _held.values():
        os.close(lock.descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# Launchers


@cache
def watch_launcher(launcher: str) -> None:
    """
    Stop this process, as after SIGTERM, when its launcher dies.

    A dead launcher can neither forward signals nor end its ranks. A process that a user started (`launcher` is
    `python`) may outlive its shell, so it is not watched.
    """
    if launcher == "python":
        return
    chain = _ancestors(2 if launcher == "deepspeed" else 1)

    def watch() -> None:
        # When a parent dies, the kernel gives its children another parent.
        while _ancestors(len(chain)) == chain:
            time.sleep(1)
        logger.warning(f"The launcher ({launcher}, process {chain[-1]}) is gone. This rank stops, as after SIGTERM.")
        # Send the signal to this process itself: the run then saves a checkpoint and ends, as after a scheduler's
        # signal.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _ancestors(number: int) -> list[int]:
    """
    Return the ids of the `number` nearest ancestors of this process, the parent first. With DeepSpeed there are two
    levels: its runner starts a launcher, which starts the ranks.
    """
    found = [os.getppid()]
    with suppress(psutil.Error):
        while len(found) < number:
            found.append(psutil.Process(found[-1]).ppid())
    return found


__all__ = ["LOCK_NAME", "hold_output_dir", "lock_holder", "release_output_dir", "watch_launcher"]
