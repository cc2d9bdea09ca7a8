"""
Write checkpoints and models completely or not at all.

The writer puts all files into `.saving/` inside the output directory, flushes them to the disk and only then renames
them. A checkpoint also gets a manifest (`manifest.py`), and the writer reads it back and compares it after the rename.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import CONFIG_NAME

from ..runtime.command_line import EXIT_NOT_SAVED
from .directory import SAVING, remove_leftovers, set_aside, summarize
from .manifest import find_damage, flush, write_manifest


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


class CheckpointWriter:
    """
    Give files their final names once all of them are on the disk.

    Args:
        checkpoint_bytes (`Callable`): returns an estimate of a checkpoint's size in bytes.
        is_writer (`bool`): whether this process writes files. Others only take part in reporting a full disk.
    """

    def __init__(self, checkpoint_bytes: Callable[[], int], *, is_writer: bool = True):
        self.checkpoint_bytes = checkpoint_bytes
        self.is_writer = is_writer

    def make_room(self, source: Path, target: Path) -> None:
        """Remove the files that a killed run left, and create `source`, the directory to write into."""
        with self.reporting_full_disks(target):
            remove_leftovers(target.parent)
            source.mkdir(parents=True)

    def publish_checkpoint(self, source: Path, target: Path, run: dict[str, Any]) -> None:
        """
        Write the manifest of the checkpoint in `source`, rename the directory to `target` and read it back.

        Args:
            source (`Path`): a directory in `.saving/`.
            target (`Path`): `checkpoint-N`. An existing one is replaced.
            run (`dict`): the description of the run for the manifest.

        Raises:
            `OSError`: if the files read back differ. They are renamed to `damaged-checkpoint-N`.
        """
        with self.reporting_full_disks(target):
            write_manifest(source, run)
            if target.exists():
                # A run that resumed from an older checkpoint reaches this step again. `os.rename` cannot replace a
                # directory that holds files, so the old one makes way first.
                os.rename(target, source.with_name("replaced"))
            os.rename(source, target)
            # The new name is an entry of the parent directory, which must reach the disk as well.
            flush(target.parent)
            # Some file systems report a successful write of data that they then lose.
            damage = find_damage(target)
            if damage:
                aside = set_aside(target)
                raise OSError(errno.EIO, f"the files written to {aside} read back differently: {summarize(damage)}")
            shutil.rmtree(source.parent)

    def publish_model(self, source: Path, target: Path) -> None:
        """
        Move the files of a model from `source` into the directory `target`.

        `config.json` comes last, because a directory without it does not count as a model.
        """
        with self.reporting_full_disks(target / CONFIG_NAME):
            # Before any rename: after a power failure, a file that was renamed first could be empty.
            for path in (*source.rglob("*"), source):
                flush(path)
            written = {path.name for path in source.iterdir()}
            # Saving an adapter writes no weights, and those in the directory stay.
            if any(map(_WEIGHTS.fullmatch, written)):
                for path in target.iterdir():
                    # A shard of an earlier model that had a different number of shards.
                    if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                        path.unlink()
            for name in sorted(written, key=lambda name: (name == CONFIG_NAME, name)):
                if (target / name).is_dir():
                    # os.replace cannot replace a directory by a file.
                    shutil.rmtree(target / name)
                os.replace(source / name, target / name)
            flush(target)
            shutil.rmtree(source.parent)

    def check_space(self, output_dir: Path, *, num_checkpoints: int) -> None:
        """End the process with `EXIT_NOT_SAVED` if `num_checkpoints` more checkpoints do not fit on the disk."""
        with self.reporting_full_disks(output_dir / "the first checkpoint"):
            # `disk_usage` needs an existing directory.
            output_dir.mkdir(parents=True, exist_ok=True)
            needed, free = num_checkpoints * self.checkpoint_bytes(), shutil.disk_usage(output_dir).free
            if free < needed:
                raise OSError(
                    errno.ENOSPC, f"{num_checkpoints} checkpoint(s) take about {_mib(needed)}, {_mib(free)} are free"
                )

    @contextmanager
    def reporting_full_disks(self, target: Path) -> Iterator[None]:
        """End the process with `EXIT_NOT_SAVED` if the disk refuses to write `target`. Earlier checkpoints stay."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            # NOTE: the writers of safetensors and torch raise errors without an errno.
            free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
            # A RuntimeError may have any cause. It counts as a full disk only if a writer raised it and the free space
            # is too small for a checkpoint.
            is_writers = isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error)
            is_full = free < self.checkpoint_bytes() and is_writers
            if getattr(error, "errno", None) not in _DISK_ERRORS and not is_full:
                raise
            if self.is_writer:
                shutil.rmtree(target.parent / SAVING, ignore_errors=True)
            self._end_unsaved(target, error, free)

    def _end_unsaved(self, target: Path, error: Exception, free: int) -> NoReturn:
        """Print which file was not saved and what to do, and end the process."""
        kept = sort_checkpoints(str(target.parent)) if target.parent.is_dir() else []
        advice = (
            f"{kept[-1]} is intact: make room and resume with `--resume_from_checkpoint auto`."
            if kept
            else "All earlier files are intact. Make room, or choose another --output_dir."
        )
        print(
            f"{target} could not be saved: {error}. A checkpoint takes about {_mib(self.checkpoint_bytes())}, "
            f"{_mib(free)} were free. {advice}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_NOT_SAVED)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


__all__ = ["CheckpointWriter"]
