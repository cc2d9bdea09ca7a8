"""
Compare `recipes/pipeline.py` with one process of the pretraining recipe: losses, gradient norms and weights of a model
with experts, and a run that moves between both recipes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.driving import STEPS, command, make_workspace
from tests.invariants.launching import launcher_command, start


pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SGD = "--optim sgd --learning_rate 0.1 --weight_decay 0 --max_grad_norm 0.5"
ADAMW = "--optim_preset adamw --learning_rate 1e-3"
# Processes, flags, rows per micro-batch and micro-batches.
WAYS = {
    "gpipe": (2, "--pp_size 2 --pp_schedule gpipe", "2", "4"),
    "1f1b": (2, "--pp_size 2", "2", "4"),
    "interleaved": (2, "--pp_size 2 --pp_schedule interleaved", "2", "4"),
    "pp-tp": (4, "--pp_size 2 --tp_size 2", "2", "4"),
    "3d": (8, "--pp_size 2 --dp_size 2 --tp_size 2", "2", "2"),
}
TOLERANCES = {SGD: 1e-5, ADAMW: 1e-5, "": 2e-3}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Return a directory with a model of four layers with experts, its tokenizer, and sentences of uneven length."""
    return make_workspace(tmp_path_factory.mktemp("pipeline"), num_hidden_layers=4, dropout=0.0, qk_norm=True)


def train(workspace: Path, output_dir: Path, way: str, *words: str) -> list[dict[str, float]]:
    """Train one way, or "python", and return the log entries of its steps."""
    line = command(workspace, output_dir, "--lr_scheduler_type", "cosine", *words)
    if way in WAYS:
        processes, flags, size, accumulation = WAYS[way]
        recipe = line[1].replace("pretrain.py", "pipeline.py")
        sizes = ["--per_device_train_batch_size", size, "--gradient_accumulation_steps", accumulation]
        line = [*launcher_command("torchrun", processes), recipe, *line[2:], *flags.split(), *sizes]
    result = start(line)
    assert result.returncode == 0, f"{way}: {result.stdout[-4000:]}"
    (output_dir / "printed.txt").write_text(result.stdout)
    entries = [json.loads(text) for text in (output_dir / "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def compare(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    for name in ("step", "loss", "learning_rate"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in expected], abs=tolerance), name


def check_meter(way: str, output_dir: Path) -> None:
    printed = (output_dir / "printed.txt").read_text()
    idle, bubble, sent = re.search(r"spent (\d+)% .*: (\d+)%\), and sent (\S+) MB between stages", printed).groups()
    # One of m + 1 slots with m micro-batches, and half a slot for two stages per process.
    assert bubble == {"interleaved": "11", "3d": "33"}.get(way, "20")
    assert 0 < int(idle) < 100
    # Two processes send hidden states or gradients, and a router loss, over one boundary of stages or over three.
    numbers = STEPS * int(WAYS[way][3]) * (2 * 32 * 32 + 1)
    assert float(sent) == pytest.approx(4 * numbers * (3 if way == "interleaved" else 1) / 1e6, abs=0.051)


@pytest.fixture(scope="module")
def one_process(workspace):
    """Return a function that trains one process with an optimizer, once."""
    runs: dict[str, list[dict[str, float]]] = {}

    def get(optimizer: str) -> tuple[Path, list[dict[str, float]]]:
        path = workspace / f"python{list(TOLERANCES).index(optimizer)}"
        if optimizer not in runs:
            runs[optimizer] = train(workspace, path, "python", "--save_strategy", "no", *optimizer.split())
        return path, runs[optimizer]

    return get


@pytest.mark.parametrize(("way", "optimizer"), [*((way, SGD) for way in WAYS), ("interleaved", ADAMW), ("pp-tp", "")])
def test_a_pipeline_equals_one_process(way, optimizer, workspace, one_process, tmp_path):
    path, expected = one_process(optimizer)
    found = train(workspace, tmp_path, way, "--save_strategy", "no", *optimizer.split())
    compare(found, expected, TOLERANCES[optimizer])
    check_meter(way, tmp_path)
    if optimizer == SGD:
        norms = [each["grad_norm"] for each in expected]
        assert [each["grad_norm"] for each in found] == pytest.approx(norms, rel=1e-4)
        weights, others = (load_file(each / "model.safetensors") for each in (path, tmp_path))
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("optimizer", [ADAMW, ""])
def test_a_run_moves_between_both_recipes(optimizer, workspace, one_process, tmp_path):
    _, expected = one_process(optimizer)
    words = ["--save_steps", "1", "--save_total_limit", "9", *optimizer.split()]
    for step, way in enumerate(["python", "3d", "python", "interleaved", "pp-tp", "python", "1f1b"]):
        resume = ["--resume_from_checkpoint", str(tmp_path / f"checkpoint-{step}")] if step else []
        found = train(workspace, tmp_path, way, *words, *resume)
        compare(found, expected, TOLERANCES[optimizer])
    assert len(found) == STEPS
