"""Mistakes with the directory of a run."""

from types import SimpleNamespace

from filelock import FileLock

from hf_pretrain.run_directory import directory
from hf_pretrain.run_directory.directory import RunDirectory
from hf_pretrain.runtime.writing import LOCK_NAME
from tests.mistakes import Mistake


# The arguments of a run in one process.
ALONE = SimpleNamespace(process_index=0, local_process_index=0, world_size=1)


def lock_twice(tmp_path):
    with FileLock(tmp_path / LOCK_NAME):
        RunDirectory(tmp_path).lock(ALONE)


def lock_another_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "_VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr(directory, "on_main_process", lambda args, decide: decide() + 1)
    RunDirectory(tmp_path).lock(ALONE)


MISTAKES = [
    Mistake("is in use by another process, which holds .*Wait for it, stop it, or choose", lock_twice),
    Mistake("is not the directory of this name on the first machine. Use a directory that", lock_another_directory),
]
