"""
Compare `recipes/pipeline.py` with one process of the pretraining recipe: losses, gradient norms and weights of a model
with experts, and a run that moves between both recipes.
"""

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.faults.driving import STEPS, command, make_workspace, zero
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


def command_line(workspace: Path, output_dir: Path, way: str, *words: str) -> list[str]:
    """Return the command of one way, of "python", or of ZeRO-1."""
    if way == "zero1":
        return command(workspace, output_dir, "--lr_scheduler_type", "cosine", *words, *zero(1), launcher="deepspeed")
    line = command(workspace, output_dir, "--lr_scheduler_type", "cosine", *words)
    if way in WAYS:
        processes, flags, size, accumulation = WAYS[way]
        recipe = line[1].replace("pretrain.py", "pipeline.py")
        sizes = ["--per_device_train_batch_size", size, "--gradient_accumulation_steps", accumulation]
        line = [*launcher_command("torchrun", processes), recipe, *line[2:], *flags.split(), *sizes]
    return line


def train(workspace: Path, output_dir: Path, way: str, *words: str) -> list[dict[str, float]]:
    """Train one way, and return the log entries of its steps."""
    result = start(command_line(workspace, output_dir, way, *words))
    assert result.returncode == 0, f"{way}: {result.stdout[-4000:]}"
    (output_dir / "printed.txt").write_text(result.stdout)
    entries = [json.loads(text) for text in (output_dir / "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def compare(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float) -> None:
    for name in ("loss", "ce_loss", "aux_loss"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in expected], abs=tolerance), name
    for name in ("step", "learning_rate", "epoch", "num_input_tokens_seen"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in expected], rel=1e-6), name


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


def test_new_settings_and_the_state_of_deepspeed_are_taken_as_in_pretraining(workspace, tmp_path):
    # Under DeepSpeed, Muon has other groups of parameters.
    words = ["--save_steps", "3", "--logging_steps", "2"]
    train(workspace, tmp_path / "zero", "zero1", *words, "--max_steps", "3")
    words += ["--learning_rate", "2e-3", "--allow_inexact_resume", "--save_dtype", "bfloat16"]
    words += ["--resume_from_checkpoint", str(tmp_path / "zero/checkpoint-3")]
    runs = {way: train(workspace, tmp_path / way, way, *words)[-2:] for way in ("python", "1f1b")}
    compare(runs["1f1b"], runs["python"], 2e-3)
    assert [each["step"] for each in runs["python"]] == [6, 8] and runs["python"][0]["learning_rate"] < 2e-3
    assert {each.dtype for each in load_file(tmp_path / "1f1b/model.safetensors").values()} == {torch.bfloat16}


def test_a_signal_stops_all_stages_with_a_checkpoint(workspace, tmp_path):
    line = command_line(workspace, tmp_path, "1f1b", "--max_steps", "900", "--save_steps", "900")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        printed = next(text for text in process.stdout if text.startswith("step 3/"))
        ranks = [each for each in psutil.Process(process.pid).children() if "pipeline.py" in " ".join(each.cmdline())]
        assert len(ranks) == 2, printed
        ranks[1].send_signal(signal.SIGTERM)
        printed = process.stdout.read()
    step = re.search(r"Stopped by SIGTERM after step (\d+). Its checkpoint", printed)[1]
    assert process.returncode == 1 and printed.count("exitcode  : 143") >= 1
    assert "SIGTERM" in (tmp_path / "report.html").read_text()
    # A run that has ended trains no further.
    words = ["--max_steps", step, "--resume_from_checkpoint", "auto", "--allow_inexact_resume"]
    assert train(workspace, tmp_path, "1f1b", *words)[-1]["step"] == int(step)


def test_a_loss_that_is_not_finite_stops_all_stages(workspace, tmp_path):
    line = command_line(workspace, tmp_path / "run", "1f1b")
    place = line.index("--model_name_or_path")
    # Such weights overflow in the first step.
    overflowing = ["--preset", "tiny", "--tokenizer_name_or_path", line[place + 1]]
    overflowing += ["--config_overrides", "initializer_range=1e18"]
    result = start([*line[:place], *overflowing, *line[place + 2 :]])
    assert result.returncode == 65, result.stdout[-3000:]
    assert "in step 1. The run stopped before it saved anything" in result.stdout
    assert not list((tmp_path / "run").glob("**/*.safetensors"))
