"""`hf-pretrain doctor`: good parts are ok, each defect comes with advice, and the ranks really run."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import constants
from torch.utils.cpp_extension import _get_build_directory

from hf_pretrain.runtime import health, probe
from hf_pretrain.runtime.health import BAD, NOTE, OK
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT, cpu_environment, free_port


def findings(check) -> dict[str, health.Finding]:
    return {finding.name: finding for finding in check()}


def test_versions_are_compared_with_the_tested_ranges(monkeypatch):
    assert findings(health.check_versions)["transformers"].status == OK
    requires = ["transformers>=1,<2", "no-such-package>=1", 'another-one; extra == "serve"']
    monkeypatch.setattr(health.importlib.metadata, "requires", lambda name: requires)
    found = findings(health.check_versions)
    assert found["transformers"].status == BAD and "pip install 'transformers<2,>=1'" in found["transformers"].advice
    assert found["no-such-package"].status == BAD and "another-one" not in found


def test_a_driver_without_a_gpu_in_torch_is_a_defect(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(health.shutil, "which", lambda name: None)
    assert findings(health.check_devices)["GPU"].status == NOTE
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/usr/bin/{name}")
    found = findings(health.check_devices)["GPU"]
    assert found.status == BAD and "install a CUDA build of torch" in found.advice


def test_a_directory_that_cannot_be_written_is_a_defect(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "HF_HOME", str(tmp_path / "not/there/yet"))
    assert findings(health.check_disk)["caches"].message.startswith(f"{tmp_path}: ")
    monkeypatch.setattr(health.os, "access", lambda path, mode: False)
    assert findings(health.check_disk)["caches"].status == BAD


def test_little_memory_and_space_are_reported_with_advice(monkeypatch):
    usage = psutil.virtual_memory()._replace(available=1e8)
    monkeypatch.setattr(health.psutil, "virtual_memory", lambda: usage)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2e8, 1e8, 1e7))
    found = findings(health.check_devices) | findings(health.check_disk)
    assert found["memory"].status == BAD and "Stop other programs" in found["memory"].advice
    assert found["disk"].status == NOTE and "--output_dir" in found["disk"].advice
    if sys.platform == "linux":
        assert found["shared memory"].status == NOTE and "--shm-size" in found["shared memory"].advice


def test_a_missing_compiler_is_reported_with_advice(monkeypatch):
    monkeypatch.setattr(health.shutil, "which", lambda name, path=None: None)
    found = findings(health.check_compiler)
    assert found["C++ compiler"].status == NOTE and "apt-get install g++" in found["C++ compiler"].advice
    assert found["ninja"].status == NOTE and "pip install ninja" in found["ninja"].advice


def test_visible_devices_come_with_a_note_on_the_deepspeed_launcher(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert findings(health.check_visible_devices) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    found = findings(health.check_visible_devices)["CUDA_VISIBLE_DEVICES"]
    assert found.status == NOTE and found.message == "'1,2'"
    assert "`deepspeed --include` ignores this variable" in found.advice


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        monkeypatch.setattr(health, "_PORT", listener.getsockname()[1])
        assert findings(health.check_port)["port"].status == NOTE
    assert findings(health.check_port)["port"].status == OK


def test_the_hub_login_is_checked_and_the_token_never_shown(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(health, "get_token", lambda: None)
        assert findings(health.check_hub)["Hub"].advice.endswith("hf auth login")
        for token, status in ((server.token, OK), ("hf_wrong", BAD)):
            monkeypatch.setenv("HF_TOKEN", token)
            monkeypatch.setattr(health, "get_token", lambda token=token: token)
            found = findings(health.check_hub)["Hub"]
            assert found.status == status and token not in found.message + found.advice
        assert "401" in found.message
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    found = findings(health.check_hub)["Hub"]
    assert found.status == NOTE and "cannot be reached" in found.message


def test_a_wrong_result_of_a_rank_is_a_defect(monkeypatch):
    monkeypatch.setattr(probe.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 2)
    # This all-reduce leaves the value unchanged.
    monkeypatch.setattr(probe.dist, "all_reduce", lambda tensor: None)
    with pytest.raises(ValueError, match="the sum over the ranks is 1.0 instead of 3.0"):
        probe.check_collective(torch.device("cpu"))


def test_the_doctor_says_that_the_ranks_are_at_work(monkeypatch, capsys):
    def check_ranks():
        yield health.Finding("ranks", OK, "a sum")

    monkeypatch.setattr(health, "check_ranks", check_ranks)
    monkeypatch.setattr(health, "CHECKS", (health.check_port, check_ranks))
    assert health.print_findings(as_json=False)
    assert capsys.readouterr().err.startswith("Testing the ranks")
    assert health.print_findings(as_json=True)
    printed = capsys.readouterr()
    assert printed.err == "" and json.loads(printed.out)[-1]["name"] == "ranks"


@pytest.mark.distributed
def test_ranks_without_an_answer_are_ended(monkeypatch):
    monkeypatch.setattr(health, "_PROBE_SECONDS", 1)
    for load, status, advice in ((0.1, BAD, "A firewall"), (100.0, NOTE, "Stop other programs")):
        monkeypatch.setattr(health.psutil, "getloadavg", lambda load=load: (load, 0, 0))
        (found,) = health._probe("cpu", 2, [])
        assert found.status == status and advice in found.advice and found.message.startswith("no answer in 1 s")
    assert next(health._probe("cpu", 2, ["zero"])).name == "ZeRO step, 2 rank(s) on cpu"
    # Ranks that outlived torchrun would be children of another process.
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if "hf_pretrain.runtime.probe" in (process.info["cmdline"] or [])
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the name of a process is that of its file")
def test_the_time_of_a_compiler_does_not_count(monkeypatch, tmp_path):
    shutil.copy("/bin/sleep", tmp_path / "ninja")
    answer = json.dumps({"check": "ZeRO step", "is_ok": True, "message": "a step"})
    ranks = tmp_path / "python"
    ranks.write_text(f"#!/bin/sh\n{tmp_path / 'ninja'} 4\necho '{answer}'\n")
    ranks.chmod(0o755)
    monkeypatch.setattr(health, "_PROBE_SECONDS", 2)
    monkeypatch.setattr(health.sys, "executable", str(ranks))
    (found,) = health._probe("cpu", 2, ["zero"])
    assert (found.name, found.status) == ("ZeRO step, 2 rank(s) on cpu", OK)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="DeepSpeed's CPU kernel needs Linux")
def test_the_zero_step_leaves_no_shared_memory_and_ignores_the_lock_of_a_killed_build(tmp_path):
    # A copy, because other tests use the kernel. Without a kernel to copy, the ranks build one.
    kernel, built = tmp_path / "deepspeed_shm_comm", Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    shutil.copytree(built, kernel, ignore=shutil.ignore_patterns("lock"))
    (kernel / "lock").touch()
    port = str(free_port())
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    words += ["-m", "hf_pretrain.runtime.probe", "cpu", "zero"]
    env = cpu_environment(LOCAL_SIZE="2", TORCH_EXTENSIONS_DIR=str(tmp_path))
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, cwd=ROOT, timeout=300)
    assert result.returncode == 0 and '"is_ok": true' in result.stdout, result.stderr[-3000:]
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_doctor_runs_two_ranks_and_prints_json():
    words = [sys.executable, str(ROOT / "recipes/doctor.py"), "--json"]
    result = subprocess.run(words, capture_output=True, text=True, env=cpu_environment())
    found = {entry["name"]: entry for entry in json.loads(result.stdout)}
    for check in ("collective", "complex buffer", "bfloat16", "ZeRO step"):
        assert found[f"{check}, 2 rank(s) on cpu"]["status"] == OK, found
    assert result.returncode == int(any(entry["status"] == BAD for entry in found.values()))
