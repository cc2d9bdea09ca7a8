"""`hf-pretrain doctor`: good parts are ok, each defect comes with advice, and the ranks really run."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.ops.op_builder import builder
from huggingface_hub import constants
from torch.utils import cpp_extension

from hf_pretrain.runtime import health
from hf_pretrain.runtime.findings import BAD, NOTE, OK, Finding
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT, cpu_environment, free_port


def findings(check) -> dict[str, Finding]:
    return {finding.name: finding for finding in check()}


def test_versions_are_compared_with_the_tested_ranges(monkeypatch):
    assert findings(health.check_versions)["transformers"].status == OK
    requires = [
        "transformers>=1,<2",
        "no-such-package>=1",
        'one-more>=1; python_version >= "3"',
        'another-one; extra == "serve"',
        "torch[opt-einsum]<1; extra == 'serve'",
        'numpy>=0; extra == "data"',
    ]
    monkeypatch.setattr(health.importlib.metadata, "requires", lambda name: requires)
    found = findings(health.check_versions)
    # A package of an extra may be missing, but not have another version.
    assert set(found) == {"Python", "transformers", "no-such-package", "one-more", "torch"}
    for name, advice in (
        ("transformers", "transformers<2,>=1"),
        ("no-such-package", "no-such-package>=1"),
        ("one-more", "one-more>=1"),
        ("torch", "torch[opt-einsum]<1"),
    ):
        assert (found[name].status, found[name].advice) == (BAD, f"pip install '{advice}'")
    assert found["torch"].message == f"{torch.__version__}, tested with <1"
    assert found["no-such-package"].message == "is not installed"


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


# The text of `nvcc --version` of CUDA 12.8.
NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Fri_Feb_21_20:23:50_PST_2025
Cuda compilation tools, release 12.8, V12.8.93
Build cuda_12.8.r12.8/compiler.35583870_0
"""


def make_toolkit(home: Path, version: str) -> str:
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\ncat <<'END'\n" + NVCC.replace("12.8", version) + "END\n")
    nvcc.chmod(0o755)
    return str(home)


@pytest.mark.skipif(sys.platform == "win32", reason="the toolkit is a shell script")
@pytest.mark.parametrize("toolkit", ["11.8", "12.8", "12.4", "13.0", "13.1"])
@pytest.mark.parametrize("torch_cuda", ["11.8", "12.8", "13.0"])
def test_the_cuda_toolkit_is_accepted_where_deepspeed_accepts_it(monkeypatch, tmp_path, toolkit, torch_cuda):
    home = make_toolkit(tmp_path, toolkit)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    try:
        builder.assert_no_cuda_mismatch()
        expected = OK
    except builder.CUDAMismatchException:
        expected = NOTE
    found = health._check_toolkit(home, torch_cuda)
    assert (found.name, found.status) == ("CUDA toolkit", expected)
    assert found.message == f"{home}, CUDA {toolkit}; torch was built with {torch_cuda}"
    assert (f"install the CUDA toolkit {torch_cuda}, and set CUDA_HOME" in found.advice) == (expected == NOTE)


def test_a_missing_cuda_toolkit_is_a_note(tmp_path):
    found = health._check_toolkit(None, "13.0")
    assert (found.status, found.message) == (NOTE, "none") and "install the CUDA toolkit 13.0" in found.advice
    # The directory of a toolkit without a compiler.
    found = health._check_toolkit(str(tmp_path), "13.0")
    assert (found.status, found.message) == (NOTE, f"{tmp_path / 'bin/nvcc'} does not run (FileNotFoundError)")


@pytest.mark.skipif(sys.platform == "win32", reason="the toolkit is a shell script")
def test_the_cuda_toolkit_is_looked_for_with_a_cuda_build_of_torch_and_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", make_toolkit(tmp_path / "cuda", "12.8"))
    monkeypatch.setattr(torch.version, "cuda", None)
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "CUDA toolkit" not in findings(health.check_compiler)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert findings(health.check_compiler)["CUDA toolkit"].status == OK


def test_no_config_of_this_repository_compiles_cuda_code():
    # DeepSpeed compiles FusedAdam for an optimizer of the config, and CUDA code for the quantization of ZeRO++.
    for path in (ROOT / "ds_configs").glob("*.json"):
        config = json.loads(path.read_text())
        assert "optimizer" not in config and not [name for name in config["zero_optimization"] if "quantized" in name]
    # Offloading compiles these, also on machines with GPUs.
    for name in ("CPUAdamBuilder", "CPUAdagradBuilder"):
        assert not issubclass(CUDA_Accelerator().get_op_builder(name), builder.CUDAOpBuilder)
    assert issubclass(CUDA_Accelerator().get_op_builder("FusedAdamBuilder"), builder.CUDAOpBuilder)


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
        server.fail = lambda method, path: 429
        found = findings(health.check_hub)["Hub"]
        assert found.status == NOTE and "(429)" in found.message
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    found = findings(health.check_hub)["Hub"]
    assert found.status == NOTE and "cannot be reached" in found.message


def test_a_hub_that_does_not_answer_costs_no_more_than_its_limit(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(health, "get_token", lambda: "hf_token")
    monkeypatch.setattr(health, "_HUB_SECONDS", 0.5)
    # It accepts connections, and sends nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        found = findings(health.check_hub)["Hub"]
        assert time.monotonic() - start < 5
    assert found.status == NOTE and "cannot be reached (ReadTimeout)" in found.message


def test_the_doctor_says_that_the_ranks_are_at_work(monkeypatch, capsys):
    def check_ranks():
        yield Finding("ranks", OK, "a sum")

    monkeypatch.setattr(health, "check_ranks", check_ranks)
    monkeypatch.setattr(health, "CHECKS", (health.check_port, check_ranks))
    assert health.print_findings(as_json=False)
    assert capsys.readouterr().err.startswith("Testing the ranks")
    assert health.print_findings(as_json=True)
    printed = capsys.readouterr()
    assert printed.err == "" and json.loads(printed.out)[-1]["name"] == "ranks"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_doctor_runs_two_ranks_and_prints_json():
    words = [sys.executable, str(ROOT / "recipes/doctor.py"), "--json"]
    result = subprocess.run(words, capture_output=True, text=True, env=cpu_environment())
    found = {entry["name"]: entry for entry in json.loads(result.stdout)}
    for check in ("collective", "complex buffer", "bfloat16", "ZeRO step"):
        assert found[f"{check}, 2 rank(s) on cpu"]["status"] == OK, found
    assert result.returncode == int(any(entry["status"] == BAD for entry in found.values()))
