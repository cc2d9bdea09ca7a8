"""A loss or gradient that is not finite in step 5: the run makes no update with it, and reports its rows."""

import json
import re

import pytest

from tests.faults.driving import RECIPE, command, run, zero
from tests.invariants.launching import ROOT


# Each rank counts its passes, two per step. For a loss, the run knows the micro-batch; for a gradient, only the step.
CASES = {
    "loss": ("python", [], "loss:9:0", 4),
    "gradient": ("python", [], "gradient:9:0", 8),
    "gradient, AdamW": ("python", ["--optim_preset", "adamw"], "gradient:9:0", 8),
    "loss, DDP": ("torchrun", [], "loss:9:1", 2),
    "gradient, DDP": ("torchrun", [], "gradient:9:1", 8),
    "loss, FSDP2": ("torchrun", ["--fsdp_size", "2"], "loss:9:1", 2),
    "loss, ZeRO-2": ("deepspeed", zero(2), "loss:9:1", 2),
    "gradient, ZeRO-2": ("deepspeed", zero(2), "gradient:9:0", 8),
    "gradient, ZeRO-2, AdamW": ("deepspeed", [*zero(2), "--optim_preset", "adamw"], "gradient:9:0", 8),
    "loss, ZeRO-3": ("deepspeed", zero(3), "loss:9:1", 2),
}

pytestmark = [pytest.mark.slow]


def poisoned(workspace, output_dir, launcher, arguments, poison):
    words = command(workspace, output_dir, *arguments, launcher=launcher)
    words[words.index(RECIPE)] = str(ROOT / "tests/faults/poisoned.py")
    return run(words, POISON=poison, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("gradient", "loss, DDP") else pytest.mark.faults) for n in CASES]
)
def test_the_run_stops_before_the_update(name, workspace, tmp_path, record):
    launcher, arguments, poison, num_rows = CASES[name]
    result = poisoned(workspace, tmp_path / "run", launcher, arguments, poison)
    report = tmp_path / "run/nonfinite-5.json"
    # torchrun always ends with 1, and prints the status of each rank.
    status = result.returncode == 65 or (launcher == "torchrun" and result.stdout.count("exitcode  : 65") == 2)
    survived = status and report.is_file() and not (tmp_path / "run/checkpoint-6").exists()
    record(f"not finite: {name}", survived)
    assert survived, result.stdout[-3000:]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "the run was stopped: The " in page and "--resume_from_checkpoint auto</pre>" in page
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == num_rows and all(row["is_finite"] == (num_rows == 8) for row in rows)
    texts = [json.loads(line)["text"] for line in (workspace / "train.jsonl").read_text().splitlines()]
    assert all(texts[row["row_number"]].startswith(re.sub(r"<\|.*?\|>", "", row["text"])) for row in rows)
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


@pytest.mark.parametrize(
    ("launcher", "poison"), [("python", "loss:9:0"), pytest.param("torchrun", "loss:9:1", marks=pytest.mark.faults)]
)
def test_the_step_is_skipped(launcher, poison, workspace, tmp_path, record):
    result = poisoned(workspace, tmp_path / "run", launcher, ["--on_nonfinite", "skip"], poison)
    assert result.returncode == 0 and "The run skips the step (1 of 10)" in result.stdout, result.stdout[-3000:]
    history = json.loads((tmp_path / "run/trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 6, 7, 8]
    assert all(entry["loss"] < 7 and entry["ce_loss"] < 7 for entry in steps)
    assert [entry.get("skipped_steps") for entry in steps] == [None] * 4 + [1] * 3
    record("not finite: --on_nonfinite skip", True)


def test_skipping_is_refused_under_deepspeed(workspace, tmp_path):
    arguments = ["--on_nonfinite", "skip", *zero(2)]
    result = run(command(workspace, tmp_path / "run", *arguments, launcher="deepspeed"))
    assert result.returncode != 0 and "--on_nonfinite skip is not possible under DeepSpeed" in result.stdout


def test_an_unknown_reaction_is_refused(workspace, tmp_path):
    result = run(command(workspace, tmp_path / "run", "--on_nonfinite", "never"))
    assert result.returncode != 0 and "--on_nonfinite never is unknown. All: stop, skip." in result.stdout
