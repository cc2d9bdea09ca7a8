"""`--dry_run`: the plan agrees with the run, and the output directory stays untouched."""

import re

import pytest
import torch
from datasets import Dataset

from hf_pretrain.runtime.texts import translation
from hf_pretrain.training.dry_run import _describe_memory, format_plan
from hf_pretrain.training.measurements import peak_memory_bytes
from hf_pretrain.training.settling import settle_dry_run
from tests.matrix import TEXTS, ZERO, call
from tests.toys import write_jsonl
from tests.trainers import make_run_trainer


def field(plan: str, label: str) -> str:
    return re.search(rf"^{label}\s+(.*)$", plan, re.MULTILINE)[1]


def test_the_plan_has_the_figures_of_the_run(tmp_path):
    # Thirteen rows do not fill a batch of 64, so each step is an epoch.
    sizes = {"max_steps": 50, "save_steps": 10, "save_total_limit": 2, "per_device_train_batch_size": 64}
    # 72 per hour are 0.02 per second.
    sizes["price_per_hour"] = 72.0
    trainer = make_run_trainer(tmp_path / "run", **sizes)
    trainer.train_dataset = Dataset.from_list(trainer.train_dataset)
    settle_dry_run(trainer.args)
    trainer.run.facts.data = ["Training: 13 documents"]
    plan = format_plan(trainer)
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert field(plan, "Model").startswith(f"{number / 1e6:,.1f} M parameters")
    assert field(plan, "Data") == "Training: 13 documents"
    assert field(plan, "Steps").startswith("50 of 64 sequences each")
    assert "50.00 passes over 13 sequences" in field(plan, "Steps")
    pace, speed = re.match(r"([\d.e-]+) s per step, ([\d,]+) tokens/s, \d:\d\d:\d\d of", field(plan, "Time")).groups()
    tokens = int(re.match(r"about ([\d,]+)", field(plan, "Tokens"))[1].replace(",", "")) / 50
    assert float(speed.replace(",", "")) == pytest.approx(tokens / float(pace), rel=0.01)
    assert float(field(plan, "Price")) == pytest.approx(50 * float(pace) * 0.02, rel=0.01, abs=0.00501)
    assert field(plan, "Disk").startswith(f"{12 * number / 1e6:,.0f} MB per checkpoint, 2 kept")
    assert field(plan, "Files").startswith(f"{tmp_path / 'run'}: ")
    chinese = format_plan(trainer, language="zh")
    assert field(chinese, "步数") == "50，每步 64 个序列，遍历 13 个序列 50.00 遍"
    # All texts begin at the same column, and a Chinese character takes two.
    assert "\n步数       50" in chinese and "\n优化器     " in chinese


def test_the_plan_names_the_memory_of_an_apple_gpu(tmp_path, monkeypatch):
    trainer = make_run_trainer(tmp_path / "run")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 * 2**30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * 2**30)
    device = torch.device("mps")
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.args), "device", device)
        text = _describe_memory(trainer, peak_memory_bytes(device), translation("en"))
    assert text.startswith("peak of 3.00 GiB per process in the measured steps, of 24.0 GiB that Metal recommends")
    assert re.search(r"; \d+\.\d GiB of the memory that GPU and CPU share are free$", text)


def plan_recipe(toys, tmp_path, launcher: str, flags: str) -> str:
    """Return the output of a dry run of the recipe, which leaves no output directory."""
    flags = f"{TEXTS} --use_cpu --bf16 false --report_to none --dry_run --output_dir {tmp_path}/out {flags}"
    flags += " --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    output = call(toys, launcher, "pretrain", flags)
    assert not (tmp_path / "out").exists()
    return output


@pytest.mark.parametrize(("launcher", "flags"), [("torchrun", ""), ("deepspeed", f"{ZERO}3.json")])
@pytest.mark.distributed
def test_two_ranks_plan_together(toys, tmp_path, launcher, flags):
    # Two processes, each with three batches of two rows.
    assert "200 of 12 sequences each" in plan_recipe(toys, tmp_path, launcher, f"--max_steps 200 {flags}")


def test_a_stream_is_planned_without_its_length(toys, tmp_path):
    texts = [" ".join(f"{number} is a number." for number in range(start, start + 300)) for start in range(20)]
    data = write_jsonl(tmp_path / "a.jsonl", texts)
    plan = plan_recipe(toys, tmp_path, "python", f"--dataset_name {data} --max_steps 40 --streaming")
    assert field(plan, "Steps") == "40 of 6 sequences each, streamed"
    # Almost all rows are full.
    tokens = int(re.match(r"about ([\d,]+)", field(plan, "Tokens"))[1].replace(",", ""))
    assert tokens == pytest.approx(40 * 6 * 32, rel=0.03)
    for label in ("Model", "Data", "Optimizer", "Memory", "Time", "Disk", "Files"):
        assert field(plan, label)
