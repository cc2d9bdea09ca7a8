"""`hf-pretrain from_scratch` plans stages that fit the time, and goes on after it was killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from hf_pretrain.reports.run_files import Run, read_run
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.from_scratch import PRETRAINING_SHARE, SAFETY, Budget, Pace
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.models import ModelArguments, load_model
from tests.invariants.launching import ROOT, process_options
from tests.toys import write_jsonl


PLAN = """
Steps      900 of 8 sequences each, 5.33 passes over 1,200 sequences
Tokens     about 331,200, {tokens} per parameter
Memory     peak of 0.54 GiB per process in the measured steps
Time       {seconds} s per step, 108 s of training, without evaluations
"""


def make_budget(tmp_path, monkeypatch, plans: dict[str, tuple[float, float]], seconds: float) -> Budget:
    """Return a budget whose dry runs take 10 seconds, and print tokens per parameter and seconds of a step."""
    budget = Budget(tmp_path, seconds)

    def run(stage, *words):
        budget.plan["used_seconds"] += 10
        preset = words[words.index("--preset") + 1]
        if preset not in plans:
            # As after torch.OutOfMemoryError.
            raise SystemExit(1)
        tokens, seconds = plans[preset]
        return PLAN.format(tokens=tokens, seconds=seconds)

    monkeypatch.setattr(budget, "run", run)
    return budget


@pytest.mark.parametrize(
    ("seconds", "preset"),
    # Per second, the presets see 1, 0.1 and 0.001 tokens per parameter. Each dry run takes 10 seconds.
    [(10 + 5, "small"), (20 + 40, "small"), (20 + 90, "middle"), (30 + 20000, "large")],
)
def test_the_preset_comes_nearest_to_20_tokens_per_parameter(tmp_path, monkeypatch, seconds, preset):
    plans = {"small": (90, 0.1), "middle": (9, 0.1), "large": (0.09, 0.1)}
    budget = make_budget(tmp_path, monkeypatch, plans, seconds)
    budget.plan_pretraining(tuple(plans), [])
    assert budget.plan["preset"] == preset


def test_a_preset_that_exceeds_the_memory_ends_the_choice(tmp_path, monkeypatch):
    budget = make_budget(tmp_path, monkeypatch, {"small": (90, 0.1)}, 20000)
    budget.plan_pretraining(("small", "huge"), [])
    assert budget.plan["preset"] == "small"
    with pytest.raises(SystemExit):
        budget.plan_pretraining(("huge", "small"), [])


def test_a_plan_without_passes_is_refused(tmp_path, monkeypatch):
    budget = make_budget(tmp_path, monkeypatch, {"small": (90, 0.1)}, 20000)
    streamed = re.sub("[^ ]* passes over .*", "streamed", PLAN).format(tokens=90, seconds=0.1)
    monkeypatch.setattr(budget, "run", lambda *words: streamed)
    with pytest.raises(UserError, match="Leave out --streaming"):
        budget.measure("pretrain")


def test_steps_fill_the_time_but_repeat_the_data_at_most_four_times(tmp_path, monkeypatch):
    assert Pace(5.0, 2.0, 100.0, 0.1).count_steps(60) == 28
    assert Pace(5.0, 0.001, 100.0, 0.1).count_steps(60) == 400
    budget = make_budget(tmp_path, monkeypatch, {"tiny": (900, 0.5)}, 110.0)
    budget.plan_pretraining(("tiny",), [])
    # The dry run took 10 seconds, 8 without its four steps; two stages start in the 100 seconds that are left.
    assert budget.plan["steps"] == {"pretrain": int(SAFETY * PRETRAINING_SHARE * (100 - 2 * 8) / 0.5)}
    # A start that takes the whole time leaves a tenth of it for the steps.
    late = make_budget(tmp_path / "late", monkeypatch, {"tiny": (900, 0.1)}, 12.0)
    late.plan_pretraining(("tiny",), [])
    assert late.plan["steps"] == {"pretrain": 11}


def test_the_page_compares_the_halves_of_stages_with_a_validation_set(tmp_path):
    log = [
        {"eval_loss": loss, "step": step, "num_input_tokens_seen": step} for step, loss in enumerate([5.0, 3.0, 2.5])
    ]
    first, *notes = Budget(tmp_path, 60).describe([Run("plain", [], []), Run("sft", [], log)])
    assert "0 of 60 seconds" in first and [note[:38] for note in notes] == ["sft: the validation loss fell by 0.500"]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_a_page_and_a_chat_model(tmp_path):
    draw = random.Random(0)
    words = [" ".join(draw.choices("one two three four five red green blue".split(), k=12)) for _ in range(1000)]
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in words])
    chats = [[{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text}] for text in words]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats])
    common = "--use_cpu --bf16 false --max_length 64 --validation_fraction 0.1 --dataset_name"
    size = "--vocab_size 300 --config_overrides hidden_size=32,num_hidden_layers=1,num_attention_heads=4"
    command = [sys.executable, "-m", "hf_pretrain_cli", "from_scratch", "--minutes", "1.2", "--preset", "tiny"]
    command += ["--output_dir", str(tmp_path / "out"), "--sft_args", f"{common} {tmp_path}/chats.jsonl"]
    command += ["--pretrain_args", f"{common} {tmp_path}/text.jsonl {size} --logging_steps 1"]
    # A plan of an earlier launch: the first one has measured.
    (tmp_path / "out").mkdir()
    plan = {"used_seconds": 20.0, "preset": "tiny", "steps": {"pretrain": 100}}
    (tmp_path / "out/plan.json").write_text(json.dumps(plan))

    # Another run in the directory that the preset names by default does not disturb.
    (tmp_path / "out/sft-tiny/checkpoint-1").mkdir(parents=True)
    options = process_options(PYTHONPATH=str(ROOT)) | {"cwd": tmp_path}
    first = subprocess.Popen(command, **options, start_new_session=True)
    deadline = time.monotonic() + 300
    while not [*tmp_path.glob("out/pretrain/checkpoint-*")]:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0]
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    used = json.loads((tmp_path / "out/plan.json").read_text())["used_seconds"]
    second = subprocess.run(command, timeout=500, **options)
    assert second.returncode == 0, second.stdout
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert 20 < used < plan["used_seconds"] and plan["steps"]["pretrain"] == 100 and plan["steps"]["sft"] >= 2
    base, chat = (read_run(tmp_path / "out" / stage) for stage in ("pretrain", "sft"))
    assert [launch["resumed_from"] is None for launch in base.launches] == [True, False]
    assert [run.log[-1]["step"] for run in (base, chat)] == [100, plan["steps"]["sft"]]
    page = (tmp_path / "out/report.html").read_text()
    assert "in the second half of the steps" in page and "distinct-2 of the answers" in page
    assert second.stdout.rstrip().endswith(f"hf-pretrain chat --model_name_or_path {tmp_path}/out/sft")
    tokenizer = load_tokenizer(str(tmp_path / "out/sft"))
    model = load_model(ModelArguments(model_name_or_path=str(tmp_path / "out/sft")), tokenizer)
    assert model.config.hidden_size == 32 and model.generation_config.do_sample
