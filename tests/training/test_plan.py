"""`--dry_run`: the plan agrees with the run, and the output directory stays untouched."""

import re

import pytest
from datasets import Dataset

from hf_pretrain.training import plan
from hf_pretrain.training.memory_probe import MemoryProbe
from hf_pretrain.training.plan import begin_dry_run, format_plan
from tests.invariants.launching import ROOT, launcher_command
from tests.test_recipes import start
from tests.toys import write_jsonl
from tests.training.test_run_trainer import make_run_trainer


def field(plan: str, label: str) -> str:
    return re.search(rf"^{label}\s+(.*)$", plan, re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("interval", "num_steps", "expected"), [(10, 95, 10), (0.1, 100, 10), (0.34, 900, 3), (0.5, 7, 2), (200, 100, 1)]
)
def test_the_number_of_saves_is_that_of_trainer(tmp_path, interval, num_steps, expected):
    # Trainer rounds a share of all steps up to whole steps, and saves at its multiples and after the last step.
    trainer = make_run_trainer(tmp_path / "run", max_steps=num_steps, save_steps=interval, save_total_limit=None)
    begin_dry_run(trainer.args)
    assert field(format_plan(trainer), "Disk").startswith(f"{expected} checkpoints")


@pytest.mark.parametrize(("max_steps", "eval_steps", "expected"), [(100, None, 2), (1000, None, 10), (100, 0.1, 10)])
def test_the_number_of_evaluations_is_that_of_the_run(tmp_path, max_steps, eval_steps, expected):
    # By default, a run evaluates at most every 50 steps.
    trainer = make_run_trainer(tmp_path / "run", max_steps=max_steps, eval_strategy="steps", eval_steps=eval_steps)
    begin_dry_run(trainer.args)
    assert f"; {expected} evaluations" in field(format_plan(trainer), "Time")


def test_evaluations_and_saves_of_every_epoch_are_counted(tmp_path):
    # Thirteen rows do not fill a batch of 64, so each step is an epoch.
    def planned(**arguments) -> str:
        trainer = make_run_trainer(tmp_path / "run", per_device_train_batch_size=64, **arguments)
        trainer.train_dataset = Dataset.from_list(trainer.train_dataset)
        begin_dry_run(trainer.args)
        return format_plan(trainer)

    saves = planned(max_steps=7, save_strategy="epoch", save_total_limit=None)
    assert field(saves, "Disk").startswith("7 checkpoints")
    evaluations = planned(max_steps=5, eval_strategy="epoch", eval_on_start=True)
    assert "; 6 evaluations" in field(evaluations, "Time")
    assert "; 1 evaluation of about" in field(planned(max_steps=7, eval_strategy="no"), "Time")


def test_a_run_shorter_than_the_dry_run_is_not_exceeded(tmp_path):
    trainer = make_run_trainer(tmp_path / "run", max_steps=1)
    begin_dry_run(trainer.args)
    plan = format_plan(trainer)
    assert trainer.state.global_step == 1
    assert "mean of 1" in field(plan, "Time") and not field(plan, "Time").startswith("0.00 s")


def test_passes_follow_from_the_steps_of_a_pass(tmp_path):
    # Thirteen rows do not fill a batch of 64, so each step is a pass.
    trainer = make_run_trainer(tmp_path / "run", max_steps=20, per_device_train_batch_size=64)
    trainer.train_dataset = Dataset.from_list(trainer.train_dataset)
    begin_dry_run(trainer.args)
    assert "20.00 passes over 13 sequences" in field(format_plan(trainer), "Steps")


def test_the_plan_names_what_is_random(tmp_path):
    def random_parts(base_model: str | None, dropout: float = 0.0, **arguments) -> str:
        trainer = make_run_trainer(tmp_path / "run", max_steps=1, **arguments)
        trainer.run_facts.base_model = base_model
        trainer.model.model.dropout.p = dropout
        begin_dry_run(trainer.args)
        return field(format_plan(trainer), "Random")

    assert random_parts(None) == "--seed 42 determines initial weights, order of the data"
    assert random_parts(None, dropout=0.1) == "--seed 42 determines initial weights, order of the data, dropout"
    from_checkpoint = "--seed 7 determines order of the data; the weights come from out/pretrain"
    assert random_parts("out/pretrain", seed=7) == from_checkpoint
    with_data_seed = "--seed 42 determines initial weights; --data_seed 3 determines order of the rows"
    assert random_parts(None, data_seed=3) == with_data_seed


def test_only_the_weights_of_a_new_adapter_are_random(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "is_adapted", lambda model: True)
    saved = tmp_path / "adapter"
    saved.mkdir()
    (saved / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    trainer = make_run_trainer(tmp_path / "run")
    for base_model, is_new in ((tmp_path, True), (saved, False)):
        trainer.run_facts.base_model = str(base_model)
        assert ("weights of a new adapter" in plan._describe_randomness(trainer)) == is_new


def test_the_peak_is_the_one_of_the_largest_process(tmp_path):
    trainer = make_run_trainer(tmp_path / "run", max_steps=1)
    probe = MemoryProbe(trainer, after_step=4)
    probe.peak_bytes, probe.usable_bytes, probe.num_rows, probe.added_bytes = 2.0 * 2**30, 8.0 * 2**30, 4, 1e6
    probe._shapes = {(4, 32)}
    trainer.ranks.gather = lambda value: [value, 3 * value]
    assert "peak of 6.00 GiB per process in the measured steps, of 8.0 GiB" in plan._describe_memory(trainer, probe)


def test_the_time_of_a_step_has_a_range_if_the_steps_differ():
    clock = plan._Clock()
    # The first step takes 9 s and does not count.
    clock.times = [0.0, 9.0, 10.0, 11.1, 12.0]
    assert clock.describe() == "1.00 s per step (mean of 3, from 0.90 to 1.10)"
    clock.times = [0.0, 9.0, 10.0, 11.1, 12.1]
    assert clock.describe() == "1.03 s per step (mean of 3)"


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.distributed
def test_two_ranks_plan_together(tmp_path, launcher):
    data = write_jsonl(tmp_path / "a.jsonl", [f"{number} is a number, {number + 1} the next." for number in range(60)])
    words = ["--dataset_name", data, "--output_dir", str(tmp_path / "out"), "--max_length", "32", "--use_cpu"]
    words += ["--bf16", "false", "--vocab_size", "300", "--max_steps", "200", "--dry_run", "--report_to", "none"]
    words += ["--config_overrides", "hidden_size=32,num_hidden_layers=1,num_attention_heads=4"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3"]
    if launcher == "deepspeed":
        words += ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]
    result = start([*launcher_command(launcher), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode == 0, result.stdout
    # Two processes, each with three batches of two rows.
    assert "200 of 12 sequences each" in result.stdout and "sequences of 32 tokens fit" in result.stdout


def test_a_stream_is_planned_without_its_length(tmp_path):
    texts = [" ".join(f"{number} is a number." for number in range(start, start + 300)) for start in range(20)]
    data = write_jsonl(tmp_path / "a.jsonl", texts)
    words = ["--dataset_name", data, "--output_dir", str(tmp_path / "out"), "--max_length", "32", "--use_cpu"]
    words += ["--bf16", "false", "--vocab_size", "300", "--max_steps", "40", "--dry_run", "--report_to", "none"]
    words += ["--config_overrides", "hidden_size=32,num_hidden_layers=1,num_attention_heads=4", "--streaming"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3"]
    result = start([*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode == 0, result.stdout
    assert field(result.stdout, "Steps") == "40 of 6 sequences each, streamed"
    # Almost all rows are full.
    tokens = int(re.match(r"about ([\d,]+)", field(result.stdout, "Tokens"))[1].replace(",", ""))
    assert tokens == pytest.approx(40 * 6 * 32, rel=0.03)
    assert re.search(r"^ +at least [\d,]+ sequences of 32 tokens fit", result.stdout, re.MULTILINE)
    # --seed orders a stream when it is loaded.
    assert field(result.stdout, "Random") == "--seed 42 determines initial weights, order of the data"
    assert not (tmp_path / "out").exists()


def test_the_plan_has_the_figures_of_the_run(tmp_path):
    trainer = make_run_trainer(tmp_path / "run", max_steps=50, save_steps=10, save_total_limit=2)
    before = {name: getattr(trainer.args, name) for name in ("save_strategy", "output_dir")}
    begin_dry_run(trainer.args)
    trainer.run_facts.data = ["Training: 13 documents"]
    plan = format_plan(trainer)
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert field(plan, "Model").startswith(f"{number / 1e6:,.1f} M parameters")
    assert field(plan, "Data") == "Training: 13 documents"
    assert field(plan, "Steps").startswith("50 of 8 sequences each")
    assert re.match(r"\d+\.\d\d s per step \(mean of 3(, from \S+ to \S+)?\)", field(plan, "Time"))
    assert field(plan, "Disk").startswith(f"5 checkpoints of {12 * number / 1e6:,.0f} MB, 2 kept")
    assert field(plan, "Files").startswith(f"{before['output_dir']}: ")
    # The curve begins low, is at its peak after the warm-up, and ends at a tenth of the peak.
    curve, end = re.match(r"(\S{60}) ends at (\S+)", field(plan, "Learning rate")).groups()
    assert curve[0] in "▁▂" and "█" in curve[:5] and curve[-1] == "▁"
    assert float(end) == pytest.approx(0.1 * trainer.args.learning_rate, rel=0.05)


def test_a_dry_run_writes_nothing_into_the_output_directory(tmp_path):
    data = write_jsonl(
        tmp_path / "a.jsonl", [f"{number} is a number, {number + 1} the next." for number in range(300)]
    )
    words = ["--dataset_name", data, "--output_dir", str(tmp_path / "out"), "--max_length", "32", "--use_cpu"]
    words += ["--bf16", "false", "--vocab_size", "300", "--max_steps", "200", "--dry_run", "--report_to", "none"]
    words += ["--config_overrides", "hidden_size=32,num_hidden_layers=1,num_attention_heads=4"]
    result = start([*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode == 0, result.stdout
    for label in (
        "Model",
        "Data",
        "Steps",
        "Tokens",
        "Optimizer",
        "Learning rate",
        "Memory",
        "Time",
        "Disk",
        "Random",
    ):
        assert field(result.stdout, label)
    assert "200 of 8 sequences each" in result.stdout and "sequences of 32 tokens fit" in result.stdout
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    words = ["--output_dir", str(tmp_path / "used"), "--use_cpu", "--dry_run", "--max_steps", "5"]
    result = start([*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), *words])
    assert result.returncode != 0 and "is not empty" in result.stdout
