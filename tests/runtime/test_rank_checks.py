"""The doctor's ranks: they really run, all their results are shown, and ranks that hang are ended in time."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.cpp_extension import _get_build_directory

from hf_pretrain.runtime import probe, rank_checks
from hf_pretrain.runtime.findings import BAD, NOTE, OK
from tests.invariants.launching import ROOT, cpu_environment, free_port


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(rank_checks.psutil, "getloadavg", lambda: (0.1, 0, 0))


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """Return a function that replaces Python, and so torchrun, by a shell script."""

    def replace(script: str):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(rank_checks.sys, "executable", str(path))

    return replace


def answer(check: str) -> str:
    return json.dumps({"check": check, "is_ok": True, "message": "a message"})


def processes_with(word: str) -> list[psutil.Process]:
    """Return all processes of this machine that started with `word` in an environment variable."""
    found = psutil.process_iter(["environ"])
    return [process for process in found if word in " ".join((process.info["environ"] or {}).values())]


def test_a_wrong_result_of_a_rank_is_a_defect(monkeypatch):
    monkeypatch.setattr(probe.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 2)
    # This all-reduce leaves the value unchanged.
    monkeypatch.setattr(probe.dist, "all_reduce", lambda tensor: None)
    with pytest.raises(ValueError, match="the sum over the ranks is 1.0 instead of 3.0"):
        probe.check_collective(torch.device("cpu"))


@pytest.mark.distributed
def test_a_backend_that_hangs_is_one_finding_in_bounded_time(monkeypatch, tmp_path, idle):
    # Python imports this module when it starts. Rank 1 never joins, so rank 0 waits within gloo.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(rank_checks, "_RANKS_SECONDS", 15)
    start = time.monotonic()
    (found,) = rank_checks.check_ranks()
    assert time.monotonic() - start < 29
    assert (found.name, found.status) == ("collective, 2 rank(s) on cpu", BAD)
    assert found.message == "no answer in 15 s; not tested: complex buffer, bfloat16, ZeRO step"
    assert "A firewall" in found.advice and found.advice.endswith("-m hf_pretrain.runtime.probe cpu")
    # Ranks that outlived torchrun would be children of another process.
    assert not processes_with(str(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun is a shell script")
def test_ranks_that_hang_in_a_later_check_keep_their_results(monkeypatch, launcher, idle):
    names = ["collective", "complex buffer", "bfloat16"]
    monkeypatch.setattr(rank_checks, "_RANKS_SECONDS", 2)
    for number, late in ((3, "ZeRO step"), (4, "shutdown")):
        launcher("\n".join(f"echo '{answer(name)}'" for name in [*names, "ZeRO step"][:number]) + "\nsleep 3600")
        *earlier, found = rank_checks.check_ranks()
        assert [(entry.name.split(",")[0], entry.status) for entry in earlier][:3] == [(name, OK) for name in names]
        assert (found.name, found.message) == (f"{late}, 2 rank(s) on cpu", "no answer in 2 s")


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun is a shell script")
def test_backends_that_hang_cost_their_time_once(monkeypatch, launcher, idle):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(rank_checks, "_RANKS_SECONDS", 8)
    launcher("sleep 3600")
    start = time.monotonic()
    on_cpu, on_gpu = rank_checks.check_ranks()
    assert time.monotonic() - start < 15
    # DeepSpeed uses the GPU.
    assert (on_cpu.name, on_gpu.name) == ("collective, 2 rank(s) on cpu", "collective, 1 rank(s) on cuda")
    assert on_cpu.message == "no answer in 8 s; not tested: complex buffer, bfloat16"
    assert on_gpu.message == "no answer in 8 s; not tested: complex buffer, bfloat16, ZeRO step"


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun is a shell script")
def test_ranks_without_an_answer_on_a_busy_machine_are_no_defect(monkeypatch, launcher):
    monkeypatch.setattr(rank_checks, "_RANKS_SECONDS", 1)
    monkeypatch.setattr(rank_checks.psutil, "getloadavg", lambda: (100.0, 0, 0))
    launcher("sleep 3600")
    (found,) = rank_checks.check_ranks()
    assert found.status == NOTE and "with a load of 100 on" in found.message and "Stop other programs" in found.advice


@pytest.mark.skipif(sys.platform != "linux", reason="the name of a process is that of its file")
def test_the_time_of_a_compiler_does_not_count(monkeypatch, tmp_path, launcher, idle):
    shutil.copy("/bin/sleep", tmp_path / "ninja")
    monkeypatch.setattr(rank_checks, "_RANKS_SECONDS", 2)
    launcher(f"{tmp_path / 'ninja'} 4\necho '{answer('ZeRO step')}'")
    (found,) = rank_checks.check_ranks()
    assert (found.name, found.status) == ("ZeRO step, 2 rank(s) on cpu", OK)


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun is a shell script")
def test_ranks_that_fail_come_with_the_last_error(launcher):
    launcher("echo 'RuntimeError: no such host' >&2\nexit 1")
    (found,) = rank_checks.check_ranks()
    assert (found.name, found.status, found.message) == ("2 rank(s) on cpu", BAD, "RuntimeError: no such host")
    assert found.advice.startswith("For the traceback, run ")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed's CPU kernel needs Linux")
def test_the_ranks_ignore_the_lock_of_a_killed_build(monkeypatch, tmp_path):
    # A copy, because other tests use the kernel. Without a kernel to copy, the ranks build one.
    kernel, built = tmp_path / "deepspeed_shm_comm", Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    shutil.copytree(built, kernel, ignore=shutil.ignore_patterns("lock"))
    (kernel / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = [(finding.name, finding.status) for finding in rank_checks.check_ranks()]
    names = ("collective", "complex buffer", "bfloat16", "ZeRO step")
    assert found == [(f"{name}, 2 rank(s) on cpu", OK) for name in names]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed's CPU kernel needs Linux")
def test_the_zero_step_leaves_no_shared_memory():
    port = str(free_port())
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    words += ["-m", "hf_pretrain.runtime.probe", "cpu"]
    result = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=cpu_environment(LOCAL_SIZE="2"),
        cwd=ROOT,
        timeout=300,
    )
    assert result.returncode == 0 and '"is_ok": true' in result.stdout, result.stderr[-3000:]
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
