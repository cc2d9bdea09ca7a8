"""Find the files and embedded parts that users name, and group their pieces into shards, each with one cache entry."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path

from transformers.utils import logging

from ..runtime.names import MODELSCOPE, check_word
from .corpora import EMBEDDED_CORPORA
from .formats import CHUNK_BYTES, COMPRESSIONS, EXTENSIONS, file_format
from .hub_files import download_hub_files, parse_hub_file
from .modelscope_files import download_modelscope_files


logger = logging.get_logger(__name__)

EMBEDDED_SOURCES = {f"embedded:{part}": part for part in EMBEDDED_CORPORA}
# Approximate size of the source data of one cache file.
SHARD_BYTES = 64 << 20


def file_state(source: str) -> tuple[int, int]:
    """Return size and modification time of a file, which show whether it changes; zeros for an embedded part."""
    if source in EMBEDDED_SOURCES:
        return 0, 0
    status = Path(source).stat()
    return status.st_size, status.st_mtime_ns


def check_unchanged(source: str, state: tuple[int, int]) -> None:
    """Raise `ValueError` if a file is no longer in the given state."""
    if file_state(source) != state:
        raise ValueError(
            f"{source} changed while this run was reading it, so its rows are a mixture of two versions. "
            "Start again. If a program still writes to the file, use a copy."
        )


def find_sources(name: str) -> list[str] | None:
    """
    Return the embedded parts or files that a name stands for, in order, or `None` for the Hub id of a whole dataset.
    Download single files on the Hub, and all files on ModelScope.

    Raises:
        `ValueError`: if there is no such part or file, or a file is empty or of an unknown format.
    """
    if name == "embedded":
        return list(EMBEDDED_SOURCES)
    if name.startswith("embedded:"):
        check_word("The dataset", name, ("embedded", *EMBEDDED_SOURCES))
        return [name]
    if name.startswith(MODELSCOPE):
        return download_modelscope_files(name)
    path = Path(name).expanduser()
    # A local file takes precedence over a file on the Hub.
    hub_file = None if path.exists() else parse_hub_file(name)
    if hub_file is not None:
        return download_hub_files(hub_file)
    if path.is_dir():
        # Sort, because the order of a directory differs between file systems. Skip hidden files.
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        paths = [file for file in files if file_format(file) is not None]
        if len(paths) < len(files):
            ignored = next(file for file in files if file_format(file) is None)
            logger.warning(
                f"Ignoring {len(files) - len(paths)} files under {name} that are not data files, such as {ignored}"
            )
        wanted = f"The directory {name} holds no file that ends in"
    elif path.is_file():
        paths = [path]
    elif path.exists():
        # A FIFO or a device cannot be read again for the next epoch or by another rank.
        raise ValueError(f"{name} is neither a file nor a directory. Write its content to a file first.")
    elif any(character in name for character in "*?["):
        paths = [file for file in map(Path, sorted(glob(str(path), recursive=True))) if file.is_file()]
        wanted = f"No file matches the glob {name} and ends in"
    # The path does not exist, but the name looks like one: a mistyped path must not become a query to the Hub.
    elif name.startswith(("/", ".", "~")) or file_format(path) is not None:
        raise ValueError(f"There is no file or directory {name}. Check the name.")
    else:
        return None
    if not paths:
        raise ValueError(f"{wanted} {', '.join(EXTENSIONS)} (or these with {', '.join(COMPRESSIONS)}).")
    for file in paths:
        if file_format(file) is None:
            raise ValueError(
                f"{file} has an unknown ending; known are {', '.join(EXTENSIONS)}, "
                f"also with {' or '.join(COMPRESSIONS)}."
            )
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty. Remove it or write it again.")
    return [str(file) for file in paths]


def is_hub_dataset(source: str) -> bool:
    """Return whether a source is the name of a whole Hub dataset, for which [`find_sources`] returns `None`."""
    # All files that are read have a known ending, and a name with such an ending is always a file.
    return source not in EMBEDDED_SOURCES and file_format(Path(source)) is None


@dataclass(frozen=True)
class Piece:
    """
    A file, an embedded part, or some lines of a file.

    Args:
        source (`str`): path of the file, or name of the embedded part.
        state (`tuple[int, int]`): the [`file_state`] at the beginning of the run.
        start, stop (`int`): range of bytes; a `stop` of `None` means the whole file.
        line (`int`): number of the first line.
        digest (`str`): digest of the content, or version of an embedded part.
    """

    source: str
    state: tuple[int, int]
    start: int = 0
    stop: int | None = None
    line: int = 1
    digest: str | None = None


def cut_sources(sources: list[str]) -> list[list[Piece]]:
    """
    Group the pieces of all sources into shards of about `SHARD_BYTES`.

    Only files that can be cut between lines are cut; all others stay whole.
    """
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in chain.from_iterable(map(_cut_file, sources)):
        shards[-1].append(piece)
        # A piece without `stop` is a whole file, whose size is in `state`.
        size += (piece.stop or piece.state[0]) - piece.start
        if size >= SHARD_BYTES:
            shards.append([])
            size = 0
    return [shard for shard in shards if shard]


def _cut_file(source: str) -> Iterator[Piece]:
    """Yield the pieces of one source. Only uncompressed JSONL files can be cut."""
    state = file_state(source)
    if source in EMBEDDED_SOURCES:
        yield Piece(source, state, digest=EMBEDDED_CORPORA[EMBEDDED_SOURCES[source]].version())
        return
    is_cut = Path(source).suffix.lower() == ".jsonl"
    hasher, start, line, stop, next_line = hashlib.blake2b(digest_size=16), 0, 1, 0, 1
    with open(source, "rb") as file:
        for chunk in iter(partial(file.read, CHUNK_BYTES), b""):
            # Cut after the last whole line of the chunk, once the piece is large enough.
            end_of_line = chunk.rfind(b"\n") + 1
            # A digest covers only its own piece, so a file that grows keeps the cache entries of its first pieces.
            if is_cut and end_of_line and stop + end_of_line - start >= SHARD_BYTES:
                hasher.update(chunk[:end_of_line])
                next_line += chunk.count(b"\n")
                yield Piece(source, state, start, stop + end_of_line, line, hasher.hexdigest())
                # The rest of the chunk belongs to the next piece, so its digest begins with it.
                hasher, start, line = (
                    hashlib.blake2b(chunk[end_of_line:], digest_size=16),
                    stop + end_of_line,
                    next_line,
                )
            else:
                hasher.update(chunk)
                next_line += chunk.count(b"\n")
            stop += len(chunk)
    if start < stop:
        # `start` is 0 for a file that was never cut. Such a file is read as a whole, whatever its format.
        yield Piece(source, state, start, stop if start else None, line, hasher.hexdigest())


__all__ = [
    "EMBEDDED_SOURCES",
    "Piece",
    "check_unchanged",
    "cut_sources",
    "file_state",
    "find_sources",
    "is_hub_dataset",
]
