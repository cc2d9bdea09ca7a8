"""Write the files of a directory completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME


# Subdirectory for files that a save or an export has not finished yet.
ASIDE = ".saving"


def check_writable(directory: Path, *, overwrite: bool = False) -> None:
    """
    Raise `ValueError` for a directory that is not empty; with `overwrite`, for one that holds anything but a model's
    files.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, not a directory; choose another name.")
    entries = [path for path in directory.iterdir() if path.name != ASIDE] if directory.exists() else []
    if not entries:
        return
    if not overwrite:
        raise ValueError(
            f"{directory} exists and is not an empty directory; choose another, or replace it with --overwrite."
        )
    # Never delete directories: some hold a run's checkpoints.
    others = [path.name for path in entries if path.is_dir() and not path.is_symlink()]
    if others or not any(path.name == CONFIG_NAME or path.suffix == ".gguf" for path in entries):
        found = f"the directory {others[0]}" if others else f"no model, but {entries[0].name}"
        raise ValueError(
            f"--overwrite replaces the files of a model, and {directory} holds {found}; choose another, or delete it."
        )


@contextmanager
def written_whole(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """
    Yield a directory to write into, and move its files into `directory` when the block ends.

    The earlier files in `directory` are deleted. config.json arrives last, so a directory with a config is complete.
    If the block fails, nothing in `directory` changes.

    Raises:
        `ValueError`: in the cases of [`check_writable`], before anything is written.
        `OSError`: if writing failed. The message names the directory.
    """
    check_writable(directory, overwrite=overwrite)
    is_new = not directory.exists()
    aside = directory / ASIDE
    # A killed process may have left its files.
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in directory.iterdir():
            if path != aside:
                path.unlink()
        for path in sorted(aside.iterdir(), key=lambda path: (path.name == CONFIG_NAME, path.name)):
            # Within one file system a rename is atomic, so a reader sees each file whole or not at all.
            os.replace(path, directory / path.name)
        aside.rmdir()
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            directory.rmdir()
        # safetensors reports a full disk with its own type of exception.
        if isinstance(error, (OSError, SafetensorError)):
            raise OSError(f"{directory} could not be written, and nothing was kept: {error}") from error
        raise


__all__ = ["ASIDE", "check_writable", "written_whole"]
