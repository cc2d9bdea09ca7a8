"""A run resumed from any checkpoint ends with the same bits as an uninterrupted run, or is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.driving import STEPS, command, mostly_faults, run, start, steps_of, wait_for, zero


WAYS = {
    "one process": ("python", []),
    "two loader workers": ("python", ["--dataloader_num_workers", "2"]),
    "a stream": ("python", ["--streaming"]),
    "a stream, two loader workers": ("python", ["--streaming", "--dataloader_num_workers", "2"]),
    "DDP": ("torchrun", []),
    "DDP, a stream": ("torchrun", ["--streaming"]),
    "FSDP2": ("torchrun", ["--fsdp_size", "2"]),
    "ZeRO-1": ("deepspeed", zero(1)),
    "ZeRO-2": ("deepspeed", zero(2)),
    "ZeRO-3": ("deepspeed", zero(3)),
}
# Steps to resume from: within the first pass of four steps, at its end, within the second pass, and at the end.
STEPS_OF = {
    **{"one process": (2, 4, 6, 8), "a stream": (2, 4, 6, 8)},
    **{"FSDP2": (4, 6), "ZeRO-1": (6,), "ZeRO-2": (4, 6), "ZeRO-3": (6,)},
}
QUICK = (*(("one process", step) for step in (6, 8)), ("a stream", 8), ("DDP, a stream", 6))


@pytest.fixture
def interrupted(reference, tmp_path):
    """Return a function that makes an output directory with one checkpoint of a reference run."""

    def make(step: int, launcher: str = "python", *arguments: str):
        source = reference(launcher, *arguments) / f"checkpoint-{step}"
        return shutil.copytree(source, tmp_path / "run" / source.name).parent

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", mostly_faults([(way, step) for way in WAYS for step in STEPS_OF.get(way, (2, 4, 6))], *QUICK)
)
def test_bit_for_bit(case, interrupted, ends_like):
    way, step = case
    launcher, arguments = WAYS[way]
    output_dir = interrupted(step, launcher, *arguments)
    ends_like(output_dir, launcher, *arguments)
    seen = json.loads((output_dir / f"checkpoint-{STEPS}/trainer_state.json").read_text())["num_input_tokens_seen"]
    assert seen > 0


@pytest.mark.faults
@pytest.mark.parametrize("sharding", [[], ["--fsdp_size", "2"]], ids=["DDP", "FSDP2"])
def test_the_best_model_at_the_end(sharding, workspace, tmp_path):
    """Check every rank. Here the largest loss is the best, so that the first checkpoint is the best one."""
    arguments = ["--validation_fraction", "0.2", "--eval_strategy", "steps", "--eval_steps", "2"]
    arguments += ["--load_best_model_at_end", "--metric_for_best_model", "eval_loss", "--greater_is_better", "true"]
    output_dir = tmp_path / "run"
    words = command(workspace, output_dir, *arguments, *sharding, "--save_total_limit", "1", launcher="torchrun")
    result = run(words)
    assert result.returncode == 0 and "Could not locate the best model" not in result.stdout, result.stdout[-3000:]
    assert steps_of(output_dir) == [2]
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert evaluations[-1] == evaluations[0] != evaluations[-2]
    best, last = (load_file(path / "model.safetensors") for path in (output_dir / "checkpoint-2", output_dir))
    assert all(torch.equal(weight, last[name]) for name, weight in best.items())


@pytest.mark.faults
def test_a_signal_at_a_step_with_an_evaluation(workspace, tmp_path, ends_like):
    arguments = ["--validation_fraction", "0.2", "--eval_strategy", "steps", "--eval_steps", "1"]
    with start(command(workspace, tmp_path / "run", "--save_total_limit", "9", *arguments)) as process:
        wait_for((tmp_path / "run/checkpoint-2").is_dir, process)
        process.terminate()
        process.communicate(timeout=500)
    assert process.returncode == 143
    ends_like(tmp_path / "run", "python", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        ("torchrun", []),
        ("torchrun", ["--fsdp_size", "2"]),
        pytest.param("deepspeed", zero(2), marks=pytest.mark.faults),
        ("deepspeed", [*zero(3), "--optim_preset", "adamw"]),
    ],
)
def test_a_new_learning_rate_takes_effect_under_every_launcher(launcher, arguments, workspace, interrupted):
    """With a rate of 0, no optimizer changes the weights."""
    output_dir = interrupted(6, launcher, *arguments)
    before = load_file(output_dir / "checkpoint-6/model.safetensors")
    flags = ["--learning_rate", "0", "--allow_inexact_resume", "--resume_from_checkpoint", "auto"]
    result = run(command(workspace, output_dir, *arguments, *flags, launcher=launcher))
    assert result.returncode == 0, result.stdout[-3000:]
    after = load_file(output_dir / f"checkpoint-{STEPS}/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
