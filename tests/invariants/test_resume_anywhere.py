"""
A run that changes its launcher and its number of processes has the losses of one that never stopped.

Each launch of a chain resumes from the next checkpoint, which the launch before it wrote.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.faults.driving import STEPS, command, make_workspace, run, zero
from tests.invariants.launching import ROOT


pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAUNCHES = {
    "one process": ("python", 1, []),
    "DDP": ("torchrun", 2, []),
    "FSDP2": ("torchrun", 2, ["--fsdp_size", "2"]),
    **{f"ZeRO-{stage}": ("deepspeed", 2, zero(stage)) for stage in range(4)},
    "ZeRO-2, one process": ("deepspeed", 1, zero(2)),
    "ZeRO-3, four processes": ("deepspeed", 4, [*zero(3), "--per_device_train_batch_size", "1"]),
    "ZeRO-2, offloaded": ("deepspeed", 2, ["--deepspeed", str(ROOT / "ds_configs/zero2_offload.json")]),
}
CHAINS = {
    "adamw": ("ZeRO-2", "one process", "ZeRO-3", "FSDP2", "ZeRO-1", "DDP", "ZeRO-2, one process", "ZeRO-0"),
    "muon": ("ZeRO-2", "FSDP2", "ZeRO-3, four processes", "one process", "ZeRO-2, offloaded", "ZeRO-1", "DDP"),
}
TOLERANCES = {"adamw": 1e-5, "muon": 2e-3}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("anywhere"))


def train(workspace: Path, output_dir: Path, optimizer: str, name: str, step: int = 0) -> list[float]:
    """Start a run, or resume its checkpoint of a step, and return the losses of all its steps."""
    launcher, processes, words = LAUNCHES[name]
    words = [*words, "--optim_preset", optimizer, "--config_overrides", "dropout=0.0", "--save_steps", "1"]
    words += ["--lr_scheduler_type", "cosine", "--save_total_limit", "9"]
    if step:
        words += ["--resume_from_checkpoint", str(output_dir / f"checkpoint-{step}")]
    result = run(command(workspace, output_dir, *words, launcher=launcher, processes=processes))
    assert result.returncode == 0, f"{name}: {result.stdout[-4000:]}"
    # Two processes saved the checkpoint that one process resumes.
    assert not step or name != "one process" or re.search(r"was saved by \d process", result.stdout)
    history = json.loads((output_dir / f"checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize("optimizer", CHAINS)
def test_a_run_goes_on_under_each_launcher(optimizer, workspace, tmp_path):
    expected = train(workspace, tmp_path / "whole", optimizer, "one process")
    for step, name in enumerate(CHAINS[optimizer]):
        losses = train(workspace, tmp_path / "chain", optimizer, name, step)
        assert losses == pytest.approx(expected, abs=TOLERANCES[optimizer]), name
    # Each launcher saved one state, with the names and the whole tensors of one process.
    for step in range(1, STEPS + 1):
        state, other = (
            torch.load(tmp_path / run / f"checkpoint-{step}/optimizer.pt", weights_only=True)["state"]
            for run in ("chain", "whole")
        )
        assert state.keys() == other.keys()
        for parameter, values in other.items():
            for key, value in values.items():
                found = state[parameter][key]
                assert found.shape == value.shape
                if optimizer == "adamw":
                    torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-5, msg=f"{parameter} {key}")


def test_an_optimizer_and_a_scheduler_of_deepspeed_resume(workspace, tmp_path, monkeypatch):
    """
    Muon's momentum has the same name as SGD's, and another place in the memory of the ranks. DeepSpeed's schedulers
    note no initial rate.
    """
    config = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    config |= {
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_allow_untested_optimizer": True,
    }
    path = tmp_path / "sgd.json"
    path.write_text(json.dumps(config))
    monkeypatch.setitem(LAUNCHES, "SGD", ("deepspeed", 2, ["--deepspeed", str(path)]))
    expected = train(workspace, tmp_path / "run", "adamw", "SGD")
    weights = (tmp_path / "run/model.safetensors").read_bytes()
    assert train(workspace, tmp_path / "run", "adamw", "SGD", 5) == expected
    assert (tmp_path / "run/model.safetensors").read_bytes() == weights
