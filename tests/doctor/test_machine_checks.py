"""`hf-pretrain doctor`: each defect comes with advice, and the ranks really run."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_pretrain.doctor import machine_checks
from hf_pretrain.doctor.machine_checks import BAD, NOTE, OK, Finding
from tests.invariants.launching import ROOT, cpu_environment


def findings(check) -> dict[str, Finding]:
    return {finding.name: finding for finding in check()}


def test_versions_are_compared_with_the_tested_ranges(monkeypatch):
    requires = ["transformers>=1,<2", "no-such-package>=1", "torch>=2", 'numpy<1; extra == "data"']
    monkeypatch.setattr(machine_checks.importlib.metadata, "requires", lambda name: requires)
    found = findings(machine_checks.check_versions)
    assert {name: finding.status for name, finding in found.items()} == {
        **{"Python": OK, "torch": OK},
        **{"transformers": BAD, "no-such-package": BAD},
    }
    assert found["transformers"].advice == "pip install 'transformers<2,>=1'"
    assert found["no-such-package"].message == "not installed, tested with >=1"


def test_defects_of_the_machine_come_with_advice(monkeypatch):
    usage = psutil.virtual_memory()._replace(available=1e8)
    monkeypatch.setattr(machine_checks.psutil, "virtual_memory", lambda: usage)
    monkeypatch.setattr(machine_checks.psutil, "disk_usage", lambda path: SimpleNamespace(free=1e7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = findings(machine_checks.check_space)
    for name in ("memory", "disk", "shared memory"):
        assert found[name].status == NOTE and found[name].advice, name
    monkeypatch.setattr(machine_checks, "find_unused_gpu", lambda: None)
    assert "GPU" not in findings(machine_checks.check_devices)
    monkeypatch.setattr(machine_checks, "find_unused_gpu", lambda: "torch 2.13.0+cpu cannot use it. Run pip.")
    assert findings(machine_checks.check_devices)["GPU"] == (BAD, "GPU", "torch 2.13.0+cpu cannot use it", "Run pip.")


def test_gpus_that_do_not_reach_each_other_come_with_advice(monkeypatch):
    def spawn(function, arguments, nprocs):
        if arguments[0] == "cuda":
            raise RuntimeError(f"a long story\nprocess 0 of {nprocs} terminated with signal SIGABRT")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    found = findings(machine_checks.check_ranks)
    assert found["ranks on cpu"].status == OK and found["ranks on cuda"].status == BAD
    advice = "process 0 of 2 terminated with signal SIGABRT. For several consumer cards, export NCCL_P2P_DISABLE=1"
    assert found["ranks on cuda"].advice == advice


@pytest.mark.slow
@pytest.mark.distributed
def test_the_doctor_runs_two_ranks():
    words = [sys.executable, str(ROOT / "recipes/doctor.py")]
    result = subprocess.run(words, capture_output=True, text=True, env=cpu_environment())
    assert "ok    training, cpu      float32: 0.00% off" in result.stdout, result.stdout + result.stderr
    assert "ok    ranks on cpu       2 add numbers" in result.stdout, result.stdout + result.stderr
    assert result.returncode == int("bad  " in result.stdout)
