"""`--dry_run`: the plan agrees with the run, and the output directory stays untouched."""

import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from hf_pretrain.training.plan import StepMeasurement, begin_dry_run, format_plan
from tests.invariants.launching import ROOT, launcher_command
from tests.test_recipes import start
from tests.toys import toy_model, write_jsonl
from tests.training.test_run_trainer import make_run_trainer
from tests.training.test_trainer import make_trainer


def field(plan: str, label: str) -> str:
    return re.search(rf"^{label}\s+(.*)$", plan, re.MULTILINE)[1]


def planned(tmp_path, dataset=None, **arguments) -> str:
    trainer = make_run_trainer(tmp_path / "run", **arguments)
    if arguments.get("per_device_train_batch_size") == 64:
        # Thirteen rows do not fill a batch of 64, so each step is an epoch.
        trainer.train_dataset = Dataset.from_list(trainer.train_dataset)
    begin_dry_run(trainer.args)
    return format_plan(trainer)


@pytest.mark.parametrize(
    ("arguments", "label", "expected"),
    [
        # By default, a run evaluates at most every 50 steps.
        ({"max_steps": 100, "eval_strategy": "steps"}, "Time", "; 2 evaluations"),
        ({"max_steps": 100, "eval_strategy": "steps", "eval_steps": 0.1}, "Time", "; 10 evaluations"),
        (
            {"max_steps": 5, "eval_strategy": "epoch", "eval_on_start": True, "per_device_train_batch_size": 64},
            "Time",
            "; 6 evaluations",
        ),
        ({"max_steps": 7, "eval_strategy": "no"}, "Time", "; 1 evaluation of about"),
        ({"max_steps": 20, "per_device_train_batch_size": 64}, "Steps", "20.00 passes over 13 sequences"),
    ],
)
def test_evaluations_and_passes_are_those_of_the_run(tmp_path, arguments, label, expected):
    assert expected in field(planned(tmp_path, **arguments), label)


def test_the_plan_has_the_figures_of_the_run(tmp_path):
    trainer = make_run_trainer(tmp_path / "run", max_steps=50, save_steps=10, save_total_limit=2)
    begin_dry_run(trainer.args)
    trainer.run_facts.data = ["Training: 13 documents"]
    plan = format_plan(trainer)
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert field(plan, "Model").startswith(f"{number / 1e6:,.1f} M parameters")
    assert field(plan, "Data") == "Training: 13 documents"
    assert field(plan, "Steps").startswith("50 of 8 sequences each")
    assert re.match(r"\d+\.\d\d s per step, ", field(plan, "Time"))
    assert field(plan, "Disk").startswith(f"{12 * number / 1e6:,.0f} MB per checkpoint, 2 kept")
    assert field(plan, "Files").startswith(f"{tmp_path / 'run'}: ")


WORDS = ["--max_length", "32", "--use_cpu", "--bf16", "false", "--vocab_size", "300", "--report_to", "none"]
WORDS += ["--config_overrides", "hidden_size=32,num_hidden_layers=1,num_attention_heads=4", "--dry_run"]
WORDS += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3"]


def plan_recipe(tmp_path, texts: list[str], *words: str, launcher: str = "python") -> str:
    """Return the output of a dry run of the recipe, which leaves no output directory."""
    data = write_jsonl(tmp_path / "a.jsonl", texts)
    words = ("--dataset_name", data, "--output_dir", str(tmp_path / "out"), *WORDS, *words)
    result = start([*launcher_command(launcher), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode == 0, result.stdout
    assert not (tmp_path / "out").exists()
    return result.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.distributed
def test_two_ranks_plan_together(tmp_path, launcher):
    words = ["--deepspeed", str(ROOT / "ds_configs/zero3.json")] if launcher == "deepspeed" else []
    texts = [f"{number} is a number, {number + 1} the next." for number in range(60)]
    plan = plan_recipe(tmp_path, texts, "--max_steps", "200", *words, launcher=launcher)
    # Two processes, each with three batches of two rows.
    assert "200 of 12 sequences each" in plan and "fits at 32 tokens" in plan


def test_a_stream_is_planned_without_its_length(tmp_path):
    texts = [" ".join(f"{number} is a number." for number in range(start, start + 300)) for start in range(20)]
    plan = plan_recipe(tmp_path, texts, "--max_steps", "40", "--streaming")
    assert field(plan, "Steps") == "40 of 6 sequences each, streamed"
    # Almost all rows are full.
    tokens = int(re.match(r"about ([\d,]+)", field(plan, "Tokens"))[1].replace(",", ""))
    assert tokens == pytest.approx(40 * 6 * 32, rel=0.03)
    for label in ("Model", "Data", "Optimizer", "Memory", "Time", "Disk", "Files"):
        assert field(plan, label)


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    words = ["--output_dir", str(tmp_path / "used"), "--use_cpu", "--dry_run", "--max_steps", "5"]
    result = start([*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode != 0 and "is not empty" in result.stdout


# The largest batch of a plan, against the peak of processes that really train with that batch.

KINDS = {"plain": {}, "recomputed": {"activation_checkpointing": True}, "accumulated": {"accumulation": 2}}


def make_larger_trainer(directory: Path, *, batch: int, num_rows: int = 4096, accumulation: int = 1, **arguments):
    # Large enough that activations, not gradients, are the peak.
    model = toy_model(vocab_size=512, hidden_size=64, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 512, (64,), generator=generator).tolist()} for _ in range(num_rows)]
    kwargs = {"max_steps": 12, "optim": "adamw_torch", "learning_rate": 1e-3, **arguments}
    return make_trainer(directory, rows, model=model, batch=batch, arguments=kwargs, accumulation=accumulation)


def measure(trainer, *callbacks: TrainerCallback) -> StepMeasurement:
    measured = StepMeasurement(trainer)
    for callback in (measured, *callbacks):
        trainer.add_callback(callback)
    trainer.train()
    return measured


def find_fitting_batch(directory: Path, kind: str, room: float) -> tuple[int, float]:
    """Return the batch of a plan for a process that may grow by `room` bytes, and the bytes in all."""
    measured = measure(make_larger_trainer(directory, batch=128, **KINDS[kind]))
    # A plan leaves half of the memory to the allocator.
    measured.usable_bytes = 2 * (measured.held_bytes + room)
    return measured.largest_batch(), measured.held_bytes + room


def measure_peak(directory: Path, kind: str, batch: int) -> float:
    make_larger_trainer(directory, batch=batch, **KINDS[kind] | {"max_steps": 3}).train()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def in_new_process(function, *args):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_fits(tmp_path, kind):
    batch, limit = in_new_process(find_fitting_batch, tmp_path / "planned", kind, 700e6)
    assert 0.7 * limit < in_new_process(measure_peak, tmp_path / "real", kind, batch) < 1.02 * limit


class Generation(TrainerCallback):
    """Continuous batching generates all completions in one row, without gradients."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model(torch.ones(1, 100, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "num_rows", "num_steps"),
    [({}, 4, 4), ({"batch": 8, "num_rows": 3}, 3, 4), ({"max_steps": 2}, 4, 2)],
    ids=["four steps", "fewer rows than a batch", "a short run"],
)
def test_the_measured_rows(tmp_path, arguments, num_rows, num_steps):
    trainer = make_larger_trainer(tmp_path, **{"batch": 4} | arguments)
    measured = measure(trainer, Generation())
    assert (trainer.state.global_step, measured.row_length) == (num_steps, 64)
    room, taken = measured.usable_bytes / 2 - measured.held_bytes, measured.peak_bytes - measured.held_bytes
    assert measured.largest_batch() == max(0, int(room * num_rows / taken))
    # The smallest of all ranks decides.
    alone = measured.largest_batch()
    trainer.ranks.gather = lambda value: [value, value - 100]
    assert measured.largest_batch() == max(0, alone - 100)
