"""Write results completely or not at all, one process at a time."""

import errno
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME

from .errors import UserError


LOCK_NAME = ".lock"
# The beginning of the names of directories that hold unfinished files.
ASIDE = ".saving"
MANIFEST_NAME = "manifest.json"
# A directory with these files is a checkpoint. Every additional or changed file counts as damage there.
_CHECKPOINT_FILES = (MANIFEST_NAME, "trainer_state.json")
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}
_REFUSALS = (
    "No space left on device|disk is full|Disk quota exceeded|Not enough disk space|PytorchStreamWriter|unexpected pos"
    r"|requested and \d+ written|could not be (written|saved)"
)


def check_output(path: str | Path, flag: str) -> None:
    """Raise `UserError` for an output path inside a checkpoint. The parser refuses an empty one."""
    resolved = Path(path).expanduser().resolve()
    for directory in (resolved, *resolved.parents):
        if all((directory / name).is_file() for name in _CHECKPOINT_FILES):
            raise UserError(
                f"{flag} {path} is inside the checkpoint {directory}. A run cannot resume from a checkpoint with "
                "other files. Choose another place."
            )


def check_empty(directory: str | Path, flag: str) -> None:
    """Raise `UserError` for an output directory that holds files, and in the cases of [`check_output`]."""
    check_output(directory, flag)
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{flag} {directory} is a file, not a directory. Choose another name.")
    if directory.exists() and not all(map(is_unfinished, directory.iterdir())):
        raise UserError(f"{flag} {directory} is not empty. Choose another directory, or remove this one.")


def is_unfinished(path: Path) -> bool:
    """Return whether a file or directory belongs to a write that has not ended, or was killed."""
    return path.name == LOCK_NAME or path.name.startswith(ASIDE)


def refused_write(error: BaseException) -> bool:
    """Return whether an error means that a disk, a quota or a limit refused a write."""
    number = error.errno if isinstance(error, OSError) else None
    # NOTE: the writers of safetensors, torch, NumPy and `datasets` raise errors without an errno. SQLite, in which
    # Trackio and MLflow write, and worker processes only have a text.
    if code := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(code[1])
    return number in _DISK_ERRORS or re.search(_REFUSALS, str(error)) is not None


# What reading a file raises that holds no holder, or one of a process that has ended.
_NO_HOLDER = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, psutil.Error)
# The locks of this process, by the path that the caller gave: a relative path stays right if a directory above it is
# renamed. `FileLock` counts how often one object is acquired.
_locks: dict[Path, FileLock] = {}


def take_lock(path: Path, *, patience_seconds: float = 0.0) -> None:
    """
    Lock a file until [`release_lock`] or the end of this process, which may take a lock several times.

    `FileLock` is a kernel lock (flock): the kernel frees it however the process ends, also after `kill -9` while data
    loader workers that it forked still live. A network file system must support flock, as NFS does.

    Raises:
        `UserError`: if another process holds the lock for `patience_seconds`.
    """
    lock = _locks.get(path) or FileLock(path)
    try:
        lock.acquire(timeout=patience_seconds)
    except Timeout as error:
        raise UserError(
            f"{path.parent} is in use by another process, which holds {path}. Wait for it, stop it, or choose another "
            "place to write to."
        ) from error
    _locks[path] = lock
    if lock.lock_counter == 1:
        write_holder(path, os.getpid())


def write_holder(path: Path, pid: int, **fields: str | bool) -> None:
    """Write into a file which process uses what the file stands for, with more fields about it."""
    # The system gives the number of a process that has ended to another one, which has started later.
    holder = {"pid": pid, "created": psutil.Process(pid).create_time(), "host": socket.gethostname()}
    # NOTE: Windows lets nobody else write to a locked file.
    with suppress(OSError):
        path.write_text(json.dumps(holder | fields), encoding="utf-8")


def leave_reason(reason: str) -> None:
    """Write into the locks of this process why it ends. They stay behind, and the next holder overwrites them."""
    for path in _locks:
        write_holder(path, os.getpid(), error=reason)


def find_reason(path: Path) -> str | None:
    """Return what [`leave_reason`] has written into a lock."""
    with suppress(*_NO_HOLDER):
        return str(read_holder(path)["error"])
    return None


def find_holder(path: Path) -> psutil.Process | None:
    """Return the process that [`write_holder`] wrote into a file, if it lives and runs on this machine."""
    with suppress(*_NO_HOLDER):
        holder = read_holder(path)
        process = psutil.Process(holder["pid"])
        # A child that has ended stays in the table until its parent asks for its status.
        is_same = abs(process.create_time() - holder["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        return process if is_same and holder["host"] == socket.gethostname() else None
    return None


def read_holder(path: Path) -> dict[str, Any]:
    """Return what [`write_holder`] wrote into a file; nothing of what is no file, because a FIFO has no end."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        return dict(json.loads(file.read(1 << 16)))


def release_lock(path: Path) -> None:
    """Release a lock as often as [`take_lock`] took it. Delete the file with the last release."""
    lock = _locks[path]
    if lock.lock_counter == 1:
        del _locks[path]
        # Waiting processes notice that the file has no name any more. Windows does not delete an open file.
        with suppress(OSError):
            path.unlink()
    lock.release()


@contextmanager
def locked(path: Path, *, patience_seconds: float = 0.0) -> Iterator[None]:
    """Lock a file within the block, as [`take_lock`] does."""
    take_lock(path, patience_seconds=patience_seconds)
    try:
        yield
    finally:
        release_lock(path)


def flush(path: Path) -> None:
    """
    Flush a file, or the entries of a directory, to the disk.

    NOTE: Windows cannot open a directory, and flushes only files that are open for writing.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def moved_when_whole(directory: Path, name: str | None = None) -> Iterator[Path]:
    """
    Yield an empty directory in `directory` to write into. When the block ends, flush its contents to the disk, and
    move them into `directory`. If the block fails, remove them.

    Args:
        directory (`Path`): is created if necessary.
        name (`str`, *optional*): the name of the empty directory, if no other process writes there under this name.
            Files that a killed process has left in it are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if name is None:
        scratch = Path(tempfile.mkdtemp(prefix=f"{ASIDE}-", dir=directory))
    else:
        scratch = directory / name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    try:
        yield scratch
        # Before any rename: after a power failure, a file that was renamed first could be empty.
        for path in (*scratch.rglob("*"), scratch):
            flush(path)
        # A directory without config.json does not count as a model.
        for path in sorted(scratch.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            place = directory / path.name
            if path.is_dir() and place.is_dir():
                # A rename replaces no directory that holds files, such as `ref/`, the reference of an adapter.
                os.rename(place, scratch / f"replaced-{path.name}")
            # Within one file system a rename is atomic, so a reader sees each file whole or not at all.
            os.replace(path, place)
        # The new names are entries of the directory.
        flush(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def written_whole(directory: str | Path, *, lock: str | None = None) -> Iterator[Path]:
    """
    Yield an empty directory to write into, and move its contents into `directory` when the block ends.

    They replace files and directories of the same names. If the block fails, `directory` is as it was before.
    config.json arrives last, so a directory with a config is complete even if the process is killed.

    Args:
        directory (`str` or `Path`): is created if necessary.
        lock (`str`, *optional*): the name of a lock file in `directory`, which is held within the block. Without it,
            another process may write the same files meanwhile; one of them then wins.

    Raises:
        `UserError`: if another process holds the lock.
        `OSError`: if a disk refuses a write. The message names the directory.
    """
    directory = Path(directory)
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory / lock) if lock else nullcontext():
            with moved_when_whole(directory, lock and f"{ASIDE}{lock}") as scratch:
                yield scratch
    except (OSError, SafetensorError, RuntimeError) as error:
        if not refused_write(error):
            raise
        raise OSError(f"{directory} could not be written, and nothing was kept: {error}") from error
    finally:
        if is_new:
            # After an error, the directory is empty.
            with suppress(OSError):
                directory.rmdir()
