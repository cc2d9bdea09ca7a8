"""
Read the files of a run. Anyone can write them, a disk can damage them, and the run may write them at this moment: what
is damaged is left out.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging


logger = logging.get_logger(__name__)

# A larger file is no record of a run.
_MOST_BYTES = 256 << 20
# What readers of a record rely on.
_SHAPE: dict[str, Any] = {"arguments": {}, "versions": {}, "data": {"counts": [""]}, "unigram_loss": 0.0}
_SHAPE |= {"samples": [[0, [["", ""]]]], "next_commands": [["", ""]], "recipe": "", "loss_unit": ""}
_SHAPE |= {"command": "", "directory": "", "stopped": ""}
# By file: the number of bytes that were read, the last of them, and the entries that they hold.
_read_logs: dict[Path, tuple[int, bytes, list[dict[str, Any]]]] = {}


def read_json(path: Path) -> Any:
    """Return what a record holds; `None` if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning(f"{path} is damaged ({error}), so it is left out.")
        return None


def read_log(path: Path) -> list[dict[str, Any]] | None:
    """
    Return the figures in a log; `None` without one. Of a log that has only grown since the last call, read only what
    is new.
    """
    if not (path.is_file() and path.stat().st_size < _MOST_BYTES):
        return None
    size, last, entries = _read_logs.get(path, (0, b"", []))
    with path.open("rb") as file:
        file.seek(size - len(last))
        if file.read(len(last)) != last:
            # A resumed launch has written it anew.
            size, last, entries = file.seek(0), b"", []
        new = file.read()
    # The last line may not be complete yet.
    new = new[: new.rfind(b"\n") + 1]
    entries = [*entries, *figures_in(_parse(new.split(b"\n")))]
    _read_logs[path] = size + len(new), (last + new)[-500:], entries
    return entries


def figures_in(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the numbers in entries of a log. Leave out entries without a step, and integers that are no floats."""
    found = [
        {name: each for name, each in entry.items() if _is_number(each)}
        for entry in entries
        if isinstance(entry, dict)
    ]
    return [figures for figures in found if isinstance(figures.get("step"), int)]


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1e300)


def _parse(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects in lines. Leave out a line that was cut off or is damaged."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                yield entry


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of JSON lines, if it exists."""
    # Texts may hold other ends of lines.
    return list(_parse(path.read_bytes().split(b"\n") if path.is_file() else ()))


def keep_well_formed(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the fields of launches that have another type than a run writes."""
    return [{name: each for name, each in launch.items() if _fits({name: each}, _SHAPE)} for launch in launches]


def _fits(value: Any, shape: Any) -> bool:
    """Return whether a value has the types of a shape, which holds an example of each part."""
    if isinstance(shape, list) and isinstance(value, list):
        shapes = shape * len(value) if len(shape) == 1 else shape
        return len(value) == len(shapes) and all(map(_fits, value, shapes))
    if isinstance(shape, dict) and isinstance(value, dict):
        return all(_fits(value[name], shape[name]) for name in shape.keys() & value.keys())
    return isinstance(value, type(shape))
