"""
What a checkpoint consists of: `manifest.json` names every file with its size and sha256, and the run that wrote it.

A directory is written, flushed to the disk, described, and only then given its name (`checkpointing.py`). Whatever is
lost, changed or added afterwards shows in [`find_damage`].
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


MANIFEST_NAME = "manifest.json"


def write_manifest(directory: Path, run: dict[str, Any]) -> None:
    """
    Describes all files below `directory`, as they are on the disk, and the `run` that wrote them. Files, manifest and
    directories are flushed to the disk.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        flush(path)
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    content = {"files": files, "run": run}
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps({"sha256": _seal(content), **content}, indent=1), encoding="utf-8")
    flush(manifest)
    for path in [*filter(Path.is_dir, directory.rglob("*")), directory]:
        flush(path)


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """
    The manifest of a checkpoint: `files`, and under `run` what [`write_manifest`] was given.

    Raises:
        `ValueError`: where there is none, or it was changed.
    """
    path = Path(directory, MANIFEST_NAME)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seal = content.pop("sha256")
        if seal != _seal(content) or not isinstance(content["files"], dict) or not isinstance(content["run"], dict):
            raise ValueError("its own sha256 is another one")
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST_NAME} is damaged ({error})") from None
    return content


def find_damage(directory: str | Path) -> list[str]:
    """What is missing, changed or too much in a checkpoint, a line each; nothing if it is as it was written."""
    directory = Path(directory)
    try:
        expected = read_manifest(directory)["files"]
    except ValueError as error:
        return [str(error)]
    found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    damage = [f"{name} is missing" for name in expected.keys() - found.keys()]
    damage += [f"{name} was added" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        try:
            damage += _compare(name, found[name], expected[name])
        except OSError as error:
            damage.append(f"{name} cannot be read ({error.strerror})")
    return sorted(damage)


def _compare(name: str, path: Path, expected: dict[str, Any]) -> list[str]:
    if path.is_symlink():
        return [f"{name} is a link"]
    size = path.stat().st_size
    if size != expected["size"]:
        return [f"{name} has {size:,} bytes instead of {expected['size']:,}"]
    return [f"{name} has another sha256"] if _sha256(path) != expected["sha256"] else []


def _files(directory: Path) -> list[Path]:
    paths = sorted(directory.rglob("*"))
    return [path for path in paths if not path.is_dir() and path != directory / MANIFEST_NAME]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """
    Makes what was written to a file, or renamed in a directory, last.

    NOTE: Windows opens no directory, and flushes only what is open for writing.
    """
    is_directory = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_directory or not os.access(path, os.W_OK) else os.O_RDWR)
    except PermissionError:
        if is_directory:
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["MANIFEST_NAME", "find_damage", "flush", "read_manifest", "write_manifest"]
