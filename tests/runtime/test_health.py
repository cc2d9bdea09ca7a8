"""`hf-pretrain doctor`: each defect comes with advice, and the ranks really run."""

import subprocess
import sys

import psutil
import pytest
import torch
from huggingface_hub import constants

from hf_pretrain.runtime import health
from hf_pretrain.runtime.health import BAD, NOTE, OK, Finding
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT, cpu_environment


def findings(check) -> dict[str, Finding]:
    return {finding.name: finding for finding in check()}


def test_versions_are_compared_with_the_tested_ranges(monkeypatch):
    requires = ["transformers>=1,<2", "no-such-package>=1", "torch>=2", 'numpy<1; extra == "data"']
    monkeypatch.setattr(health.importlib.metadata, "requires", lambda name: requires)
    found = findings(health.check_versions)
    assert {name: finding.status for name, finding in found.items()} == {
        **{"Python": OK, "torch": OK},
        **{"transformers": BAD, "no-such-package": BAD},
    }
    assert found["transformers"].advice == "pip install 'transformers<2,>=1'"
    assert found["no-such-package"].message == "not installed, tested with >=1"


def test_defects_of_the_machine_come_with_advice(monkeypatch):
    usage = psutil.virtual_memory()._replace(available=1e8)
    monkeypatch.setattr(health.psutil, "virtual_memory", lambda: usage)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda path: health.shutil._ntuple_diskusage(2e8, 1e8, 1e7))
    monkeypatch.setattr(health.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = (health.check_devices, health.check_disk, health.check_compiler)
    found = {name: finding for check in checks for name, finding in findings(check).items()}
    assert "GPU" not in found
    for name in ("memory", "disk", "caches", "shared memory", "ninja"):
        assert found[name].status == NOTE and found[name].advice, name
    # The usual cause is a CPU build of torch.
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert findings(health.check_devices)["GPU"].status == BAD


def test_the_hub_login_is_checked_and_the_token_never_shown(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(health, "get_token", lambda: None)
        assert findings(health.check_hub)["Hub"].advice.endswith("hf auth login")
        for token, status in ((server.token, OK), ("hf_wrong", NOTE)):
            monkeypatch.setenv("HF_TOKEN", token)
            monkeypatch.setattr(health, "get_token", lambda token=token: token)
            found = findings(health.check_hub)["Hub"]
            assert found.status == status and token not in found.message + found.advice


@pytest.mark.slow
@pytest.mark.distributed
def test_the_doctor_runs_two_ranks():
    words = [sys.executable, str(ROOT / "recipes/doctor.py")]
    result = subprocess.run(words, capture_output=True, text=True, env=cpu_environment())
    assert "ok    ranks on cpu       2 add numbers" in result.stdout, result.stdout + result.stderr
    assert result.returncode == int("bad  " in result.stdout)
