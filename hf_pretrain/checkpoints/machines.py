"""Copy files between the machines of a run, which share no storage (`--save_on_each_node`)."""

import errno
import hashlib
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.utils import logging

from ..runtime.errors import UserError
from ..runtime.processes import on_saving_processes
from ..runtime.writing import ASIDE
from .directory import remove_leftovers, set_aside, summarize
from .manifest import MANIFEST_NAME, find_damage, flush


logger = logging.get_logger(__name__)

_CHUNK_BYTES = 64 * 2**20


def equalize(directory: Path, args: TrainingArguments, *, reporting: Callable[[Any], Any] = lambda step: step) -> None:
    """
    Give all machines the same files in `directory`. All ranks must call this function.

    Of files with the same name, the one of the first machine replaces the others. The path of the directory may differ
    between the machines.

    Args:
        reporting (`Callable`, *optional*): decorates the functions that access the disk of this machine.

    Raises:
        `OSError`: on all ranks, if one disk refuses to read or to write, or if a copy reads back differently.
    """
    group = _group_of_first_processes(args.ddp_timeout)
    listings = on_saving_processes(args, reporting(lambda: _list_files(directory)))
    on_saving_processes(args, reporting(lambda: _copy_files(directory, listings, group)))


def share_checkpoint(path: Path, args: TrainingArguments, *, source: int) -> None:
    """
    Give all machines the checkpoint `path` of the rank `source`. Set aside another checkpoint of this name. All ranks
    must call this function.

    Raises:
        `OSError`: if a disk refuses to read or to write, or if the copy reads back differently.
    """
    manifests = on_saving_processes(args, lambda: _manifest(path))
    is_missing = args.should_save and manifests[args.process_index] != manifests[source]
    directory = path.parent / ASIDE / path.name if is_missing else path

    def make_room() -> None:
        if is_missing:
            remove_leftovers(path.parent)
            directory.mkdir(parents=True)

    on_saving_processes(args, make_room)
    equalize(directory, args)

    def publish() -> None:
        if not is_missing:
            return
        damage = find_damage(directory) if manifests[source] else []
        if damage:
            raise OSError(errno.EIO, f"the copy of {path} reads back differently: {summarize(damage)}")
        if path.exists():
            set_aside(path, "abandoned")
        for written in (*directory.rglob("*"), directory):
            flush(written)
        directory.rename(path)
        flush(path.parent)
        remove_leftovers(path.parent)
        logger.warning(f"{path} was copied to this machine from that of rank {source}.")

    on_saving_processes(args, publish)


def require_same_files(path: Path, args: TrainingArguments) -> None:
    """
    Check that all machines have the same files in the checkpoint `path`, which lies outside of `output_dir`. All ranks
    must call this function.

    Raises:
        `ValueError`: if the files differ. The run cannot copy them, because `path` may belong to another run.
    """
    listings = on_saving_processes(args, lambda: _list_files(path))

    def compare() -> None:
        if listings[args.process_index] != listings[0]:
            copy = Path(args.output_dir, path.name)
            raise UserError(
                f"--resume_from_checkpoint {path} on {socket.gethostname()} is missing, or differs from that of the "
                f"first machine. A run copies only checkpoints in its own --output_dir: copy this one to {copy} on "
                f"the first machine, and pass --resume_from_checkpoint {copy} on all machines."
            )

    on_saving_processes(args, compare)


def _manifest(path: Path) -> str | None:
    """Return the text of the manifest of a checkpoint, empty if it has none; `None` if there is no checkpoint."""
    if not path.is_dir():
        return None
    manifest = path / MANIFEST_NAME
    return manifest.read_text(encoding="utf-8") if manifest.is_file() else ""


def _list_files(directory: Path) -> dict[str, tuple[int, str]]:
    """Return size and sha256 of all files below a directory, by name."""
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {name: (path.stat().st_size, _sha256(path)) for name, path in paths.items()}


def _copy_files(directory: Path, listings: list[dict[str, tuple[int, str]] | None], group: dist.ProcessGroup) -> None:
    """Send each file that is not the same on all machines. `listings` has an entry for each rank."""
    machines = {rank: files for rank, files in enumerate(listings) if files is not None}
    mine, error = machines[dist.get_rank()], None
    for name in sorted(set().union(*machines.values())):
        source = next(rank for rank, files in machines.items() if name in files)
        expected = machines[source][name]
        # Machines with the same file must take part in the broadcast, too.
        if any(files.get(name) != expected for files in machines.values()):
            try:
                _broadcast(directory / name, *expected, source, group, is_written=mine.get(name) != expected)
            except OSError as raised:
                # The other machines wait for the next file.
                error = error or raised
    if error is not None:
        raise error


def _broadcast(path: Path, size: int, sha256: str, source: int, group: dist.ProcessGroup, *, is_written: bool) -> None:
    """Send a file from the rank `source`. Write it and read it back where `is_written`."""
    is_source, error = dist.get_rank() == source, None
    file: Any = None
    try:
        if is_written:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("rb" if is_source else "wb") if is_source or is_written else None
    except OSError as raised:
        error = raised
    for start in range(0, size, _CHUNK_BYTES):
        chunk = torch.zeros(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
        try:
            if is_source and error is None and file.readinto(chunk.numpy()) < len(chunk):
                raise OSError(errno.EIO, f"{path} has become shorter")
        except OSError as raised:
            error = raised
        # After an error, take part until the end of the file, so that the other machines do not wait.
        dist.broadcast(chunk, source, group=group)
        try:
            if is_written and error is None:
                file.write(chunk.numpy())
        except OSError as raised:
            error = raised
    if file is not None:
        file.close()
    if error is not None:
        raise error
    if is_written and _sha256(path) != sha256:
        raise OSError(errno.EIO, f"the copy of {path.name} differs from the file of rank {source}")


@cache
def _group_of_first_processes(timeout_seconds: float) -> dist.ProcessGroup:
    """Return a gloo group of the first process of each machine. All ranks must call this function."""
    local_ranks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(local_ranks, dist.get_node_local_rank(fallback_rank=0))
    first = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    return dist.new_group(first, backend="gloo", timeout=timedelta(seconds=timeout_seconds))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["equalize", "require_same_files", "share_checkpoint"]
