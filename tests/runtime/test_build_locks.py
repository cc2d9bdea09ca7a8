"""Locks of kernel builds: those of killed processes are removed, and those of running builds stay."""

import sys

import pytest
from torch.utils.file_baton import FileBaton

from hf_pretrain.runtime.build_locks import remove_stale_build_locks


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere the open files of a process are not looked at.")
def test_only_locks_of_killed_builds_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale, held = tmp_path / "py311_cpu/killed/lock", tmp_path / "running/lock"
    for path in (stale, held):
        path.parent.mkdir(parents=True)
    stale.touch()
    # As torch does: the process that builds keeps the lock open.
    baton = FileBaton(str(held))
    assert baton.try_acquire()
    remove_stale_build_locks()
    assert not stale.exists() and held.exists()
    # Two processes of the deepspeed launcher on this machine.
    stale.touch()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_SIZE", "2"), ("CROSS_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    remove_stale_build_locks()
    assert not stale.exists()
    # Only the first process of a machine looks, and nobody does in a run on two machines.
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_RANK", "0")):
        stale.touch()
        monkeypatch.setenv(name, value)
        remove_stale_build_locks()
        assert stale.exists()
        monkeypatch.setenv("WORLD_SIZE", "4")
    baton.release()
