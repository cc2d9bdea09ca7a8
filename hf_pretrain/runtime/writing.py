"""Write results completely or not at all, one process at a time."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def check_output(path: str | Path, flag: str) -> None:
    """Raise `ValueError` for an output path inside a checkpoint. The parser refuses an empty one."""
    resolved = Path(path).expanduser().resolve()
    for directory in (resolved, *resolved.parents):
        if all((directory / name).is_file() for name in _CHECKPOINT_FILES):
            raise UserError(
                f"{flag} {path} is inside the checkpoint {directory}. A run cannot resume from a checkpoint with "
                "other files. Choose another place."
            )


def check_empty(directory: str | Path, flag: str) -> None:
    """Raise `ValueError` for an output directory that holds files, and in the cases of [`check_output`]."""
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
    # NOTE: the writers of safetensors, torch, NumPy and `datasets` raise errors without an errno.
    if isinstance(error, SafetensorError):
        code = re.search(r"\(os error (\d+)\)", str(error))
        return code is not None and int(code[1]) in _DISK_ERRORS
    if isinstance(error, RuntimeError):
        return "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)
    if not isinstance(error, OSError):
        return False
    return error.errno in _DISK_ERRORS or bool(
        re.search(r"Not enough disk space|requested and \d+ written|could not be (written|saved)", str(error))
    )


# The locks of this process, by the path that the caller gave: a relative path stays right if a directory above it is
# renamed. `FileLock` counts how often one object is acquired.
_locks: dict[Path, FileLock] = {}


def take_lock(path: Path, *, patience_seconds: float = 0.0) -> None:
    """
    Lock a file until [`release_lock`] or the end of this process, which may take a lock several times.

    `FileLock` is a kernel lock (flock): the kernel frees it however the process ends, also after `kill -9` while data
    loader workers that it forked still live. A network file system must support flock, as NFS does.

    Raises:
        `ValueError`: if another process holds the lock for `patience_seconds`.
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
def written_whole(directory: str | Path, *, lock: str | None = None) -> Iterator[Path]:
    """
    Yield an empty directory to write into, and move its files into `directory` when the block ends.

    The files replace others of the same names. If the block fails, `directory` is as it was before. config.json
    arrives last, so a directory with a config is complete even if the process is killed.

    Args:
        directory (`str` or `Path`): is created if necessary.
        lock (`str`, *optional*): the name of a lock file in `directory`, which is held within the block. Without it,
            another process may write the same files meanwhile; one of them then wins.

    Raises:
        `ValueError`: if another process holds the lock.
        `OSError`: if a disk refuses a write. The message names the directory.
    """
    directory = Path(directory)
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{ASIDE}{lock or ''}-"
    scratch = None
    if lock is not None:
        take_lock(directory / lock)
    try:
        if lock is not None:
            # Killed processes left them under the same lock.
            for path in directory.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        yield scratch
        for path in sorted(scratch.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            # Within one file system a rename is atomic, so a reader sees each file whole or not at all.
            os.replace(path, directory / path.name)
    except (OSError, SafetensorError, RuntimeError) as error:
        if not refused_write(error):
            raise
        raise OSError(f"{directory} could not be written, and nothing was kept: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            release_lock(directory / lock)
        if is_new:
            # After an error, the directory is empty.
            with suppress(OSError):
                directory.rmdir()
