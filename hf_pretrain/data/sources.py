"""Find the files and embedded parts that users name, and group their pieces into shards, each with one cache entry."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import chain, takewhile
from pathlib import Path

from transformers.utils import logging

from ..runtime.errors import UserError
from ..runtime.names import MODELSCOPE, check_word
from .corpora import EMBEDDED_CORPORA
from .formats import CHUNK_BYTES, COMPRESSIONS, EXTENSIONS, file_format, holds_array
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
        raise UserError(
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
    if not name.strip():
        raise UserError("The name of a dataset is empty. Name a file, a directory, a glob or a dataset on the Hub.")
    path = Path(name).expanduser()
    # A local file takes precedence over a file on the Hub.
    hub_file = None if path.exists() else parse_hub_file(name)
    if hub_file is not None:
        return download_hub_files(hub_file)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = _list_files(name, path, [path])
    elif path.exists():
        # A FIFO or a device cannot be read again for the next epoch or by another rank.
        raise UserError(f"{name} is neither a file nor a directory. Write its content to a file first.")
    elif _is_pattern(name):
        root = Path(*takewhile(lambda part: not _is_pattern(part), path.parts))
        paths = _list_files(name, root, map(Path, glob(str(path), recursive=True)))
    # The path does not exist, but the name looks like one: a mistyped path must not become a query to the Hub.
    elif name.startswith(("/", ".", "~")) or file_format(path) is not None:
        raise UserError(f"There is no file or directory {name}. Check the name.")
    else:
        return None
    for file in paths:
        if file_format(file) is None:
            raise UserError(
                f"{file} has an unknown ending; known are {', '.join(EXTENSIONS)}, "
                f"also with {' or '.join(COMPRESSIONS)}."
            )
        if file.stat().st_size == 0:
            raise UserError(f"{file} is empty. Remove it or write it again.")
    return [str(file) for file in paths]


def _list_files(name: str, root: Path, found: Iterable[Path]) -> list[Path]:
    """
    Return the data files that a directory or glob stands for, each once and in order, and log what is left out.

    A directory, also one that a glob matches, stands for all data files below it, through links too. Hidden files and
    directories below it are left out, and so are the directories of runs, models and tokenizers below `root`:
    otherwise, a run whose output is there would read its own files.

    Args:
        name (`str`): the directory or glob, for messages.
        root (`Path`): the directory, or the part of the glob without patterns.
        found (`Iterable[Path]`): the directory, or the matches of the glob.

    Raises:
        `ValueError`: if there are no data files.
    """
    left_out: dict[str, dict[Path, None]] = {}
    # One name for each file and directory.
    seen = {root.resolve(): root}

    def is_kept(path: Path, *, is_hidden: bool = False) -> bool:
        reason = "hidden names" if is_hidden else _why_left_out(path, root, seen)
        if reason is not None:
            left_out.setdefault(reason, {})[path] = None
        return reason is None

    files: set[Path] = set()
    # Sort, because the order of a directory differs between file systems, and decides between two names of a file.
    for path in sorted(found):
        outer = [path, *path.parents][: len(path.parts) - len(root.parts)]
        if not all(map(is_kept, reversed(outer[1:]))) or not is_kept(path):
            continue
        files |= {path} if path.is_file() else set()
        for directory, names, file_names in os.walk(path, followlinks=True):
            kept = [Path(directory, each) for each in sorted([*names, *file_names])]
            kept = [each for each in kept if is_kept(each, is_hidden=each.name.startswith("."))]
            names[:] = [each.name for each in kept if each.is_dir()]
            files |= {each for each in kept if each.is_file()}
    if left_out:
        reasons = (f"{reason} ({len(paths)}, such as {next(iter(paths))})" for reason, paths in left_out.items())
        logger.warning(f"Data files of {name}: {len(files)}. Left out: {', '.join(reasons)}")
    if not files:
        known = f"{', '.join(EXTENSIONS)} (or these with {', '.join(COMPRESSIONS)})"
        raise UserError(f"No file of {name} ends in {known}.")
    return sorted(files)


def _why_left_out(path: Path, root: Path, seen: dict[Path, Path]) -> str | None:
    """
    Return the reason to skip a file or directory below `root`, or `None`.

    Args:
        path (`Path`): the file or directory.
        root (`Path`): the directory that the user has named, which is always read.
        seen (`dict[Path, Path]`): the names that are read, by their real paths; `path` is added to it.
    """
    if path.is_dir():
        is_run = (path / "run.json").is_file() and (path / "train.log").is_file()
        is_model = any((path / name).is_file() for name in ("tokenizer_config.json", "model.safetensors"))
        if path != root and (is_run or is_model):
            return "directories of runs, models or tokenizers"
    elif not path.is_file() or file_format(path) is None:
        return "other kinds of files"
    # Without this, a link to a directory above it would never end.
    return None if seen.setdefault(path.resolve(), path) == path else "links to what is read already"


def _is_pattern(name: str) -> bool:
    """Return whether a path has the special characters of a glob."""
    return any(character in name for character in "*?[")


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
    is_cut = Path(source).suffix.lower() == ".jsonl" and not holds_array(Path(source))
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
