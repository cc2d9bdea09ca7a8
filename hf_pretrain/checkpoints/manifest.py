"""
The content of a checkpoint: `manifest.json` names every file with its size and sha256, and the run that wrote it.

A checkpoint is written, described, flushed to the disk, and only then given its name (`checkpoints/writer.py`).
[`find_damage`] shows every file that is lost, changed or added afterwards.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..runtime.writing import MANIFEST_NAME


def write_manifest(directory: Path, run: dict[str, Any]) -> None:
    """Describe all files below `directory`, and the `run` that wrote them."""
    files = {
        path.relative_to(directory).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(directory)
    }
    # The manifest's own checksum covers `files` and `run`: without it, damage to the manifest itself would not show.
    content = {"files": files, "run": run}
    text = json.dumps({"sha256": _seal(content), **content}, indent=1)
    Path(directory, MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """
    Return the manifest of a checkpoint: its `files`, and the `run` that [`write_manifest`] was given.

    Raises:
        `UserError`: if it is missing or was changed.
    """
    path = Path(directory, MANIFEST_NAME)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("sha256") != _seal(content):
            raise UserError("its own sha256 does not match")
    except FileNotFoundError:
        raise UserError(f"{MANIFEST_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{MANIFEST_NAME} is damaged ({error})") from None
    return content


def find_damage(directory: str | Path) -> list[str]:
    """Return one line for every file that is missing, changed or added; an empty list for an intact checkpoint."""
    directory = Path(directory)
    try:
        expected = read_manifest(directory)["files"]
    except ValueError as error:
        return [str(error)]
    found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    # Additional files count as damage: transformers and DeepSpeed read every file that they find in the directory.
    damage = [f"{name} is missing" for name in expected.keys() - found.keys()]
    damage += [f"{name} was added" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        try:
            damage += _compare(name, found[name], expected[name])
        except OSError as error:
            damage.append(f"{name} cannot be read ({error.strerror})")
    return sorted(damage)


def _compare(name: str, path: Path, expected: dict[str, Any]) -> list[str]:
    """Return the damage of one file. A link counts as damage: its target may change later."""
    if path.is_symlink():
        return [f"{name} is a link"]
    size = path.stat().st_size
    # The size is free to check; the sha256 of a large file takes seconds.
    if size != expected["size"]:
        return [f"{name} has {size:,} bytes instead of {expected['size']:,}"]
    return [f"{name} has a different sha256"] if _sha256(path) != expected["sha256"] else []


def _files(directory: Path) -> list[Path]:
    """Return all files below `directory` but the manifest."""
    paths = sorted(directory.rglob("*"))
    return [path for path in paths if not path.is_dir() and path != directory / MANIFEST_NAME]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(content: dict[str, Any]) -> str:
    """Return the checksum of the manifest's own content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
