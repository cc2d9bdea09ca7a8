"""`hf-pretrain from_scratch` plans stages that fit the time, and goes on after it was killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.run_directory.history import RunHistory, read_run
from hf_pretrain.stages import from_scratch
from hf_pretrain.stages.from_scratch import Budget
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.invariants.launching import ROOT, process_options
from tests.toys import write_jsonl


# Tokens per second of the presets, whose numbers of parameters are 2.8, 25.8 and 104 million.
PACES = {"tiny": 1e5, "minimind2-small": 1e5, "minimind2": 3e4}


def make_budget(tmp_path, monkeypatch, seconds: float, **paces: float) -> Budget:
    """Return a budget for a machine on which the presets have these paces."""
    paces = PACES | paces
    monkeypatch.setattr(from_scratch, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(from_scratch, "measure_pace", lambda preset, device_type: paces[preset])
    # 104 million parameters fit, and half a billion do not.
    memory = SimpleNamespace(available=24 * 200_000_000)
    monkeypatch.setattr(from_scratch, "psutil", SimpleNamespace(virtual_memory=lambda: memory))
    return Budget(tmp_path, seconds)


@pytest.mark.parametrize(
    ("seconds", "preset"),
    # Twenty tokens per parameter take tiny 560 seconds, and minimind2-small 5,200 seconds.
    [(100, "tiny"), (1_500, "tiny"), (2_000, "minimind2-small"), (6_000, "minimind2-small"), (50_000, "minimind2")],
)
def test_the_preset_comes_nearest_to_20_tokens_per_parameter(tmp_path, monkeypatch, seconds, preset):
    budget = make_budget(tmp_path, monkeypatch, seconds)
    budget.choose_preset(tuple(PACES), ["--use_cpu"])
    assert (budget.plan["preset"], budget.plan["pace"]) == (preset, PACES[preset])
    # A preset that exceeds the memory ends the choice.
    budget.choose_preset(("tiny", "0.5B"), ["--use_cpu"])
    assert budget.plan["preset"] == "tiny"


def test_a_pace_is_measured_on_this_machine():
    assert 50 < from_scratch.measure_pace("tiny", "cpu") < 1e7


def test_stages_share_the_time_and_read_no_more_data_than_it_can_use(tmp_path, monkeypatch):
    budget = make_budget(tmp_path / "out", monkeypatch, 180.0, tiny=2000)
    budget.choose_preset(("tiny",), ["--use_cpu"])
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", ["x" * 99_987] * 500)
    flags = ["--seed", "1", "--dataset_name", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--use_cpu"]
    num_bytes = from_scratch.count_bytes(flags)
    assert num_bytes == 2 * (tmp_path / "a.jsonl").stat().st_size == pytest.approx(1e8, rel=1e-4)
    budget.plan_stage("pretrain", flags)
    budget.plan["used_seconds"] = 60.0
    budget.plan_stage("sft", flags)
    pretrain, sft = (
        dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in budget.plan["flags"].values()
    )
    assert pretrain["--max_minutes"] == pytest.approx(0.3 * (180 - 2 * 20) / 60, abs=0.01)
    assert sft["--max_minutes"] == pytest.approx((180 - 60 - 20) / 60, abs=0.01)
    # Eight bytes per token of the whole time.
    assert pretrain["--train_fraction"] == sft["--train_fraction"] == pytest.approx(8 * 2000 * 180 / 1e8, abs=1e-4)
    assert pretrain["--validation_fraction"] == sft["--validation_fraction"] == pytest.approx(0.000864, abs=1e-6)
    assert 2e7 < from_scratch.count_bytes(["--dataset_name=embedded:chitchat"]) < from_scratch.count_bytes([])
    # A start that took the whole time leaves a tenth of it for the steps.
    budget.plan["used_seconds"] = 170.0
    budget.plan_stage("sft", flags)
    assert float(budget.plan["flags"]["sft"][-1]) == pytest.approx(0.3)
    # Data that the time could pass over many times are seen four times, all of them.
    budget.plan["pace"] = 1e7
    budget.plan_stage("sft", flags)
    planned = "--train_fraction 1.0000 --validation_fraction 0.000864 --num_train_epochs 4"
    assert budget.plan["flags"]["sft"] == planned.split()
    # The size of a dataset on the Hub is unknown.
    budget.plan_stage("sft", ["--dataset_name", "owner/name"])
    assert budget.plan["flags"]["sft"][-2] == "--max_minutes"


def test_a_stage_starts_by_the_path_of_the_command(tmp_path, monkeypatch):
    # `-m` would let Python import this module, and report a killed stage as 247.
    (tmp_path / "random.py").write_text("raise SystemExit('the working directory is imported')")
    monkeypatch.chdir(tmp_path)
    budget = Budget(tmp_path, 60.0)
    with pytest.raises(SystemExit) as stopped:
        budget.run("sft", "--nproc", "0")
    assert stopped.value.code == 2
    monkeypatch.setattr(from_scratch.hf_pretrain_cli, "__file__", str(tmp_path / "killed.py"))
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(SystemExit) as stopped:
        budget.run("sft")
    assert stopped.value.code == 137


def test_the_page_compares_the_halves_of_stages_with_a_validation_set(tmp_path):
    log = [
        {"eval_loss": loss, "step": step, "num_input_tokens_seen": step}
        # The last evaluation but one may lie near the end.
        for step, loss in ((0, 5.0), (5, 3.0), (9, 2.6), (10, 2.5))
    ]
    first, *notes = Budget(tmp_path, 60).describe([RunHistory("plain", [], []), RunHistory("sft", [], log)])
    assert "0 of 60 seconds" in first and [note[:38] for note in notes] == ["sft: the validation loss fell by 0.500"]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_a_page_and_a_chat_model(tmp_path):
    draw = random.Random(0)
    words = [" ".join(draw.choices("one two three four five red green blue".split(), k=12)) for _ in range(1000)]
    write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in words])
    chats = [[{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text}] for text in words]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats])
    common = "--use_cpu --bf16 false --max_length 64 --logging_steps 1 --validation_fraction 0.1 --dataset_name"
    size = "--vocab_size 300 --config_overrides hidden_size=32,num_hidden_layers=1,num_attention_heads=4"
    command = [sys.executable, "-m", "hf_pretrain_cli", "from_scratch", "--minutes", "0.5", "--preset", "tiny"]
    command += ["--output_dir", str(tmp_path / "out"), "--sft_args", f"{common} {tmp_path}/chats.jsonl"]
    command += ["--pretrain_args", f"{common} {tmp_path}/text.jsonl {size}"]
    # A plan of an earlier launch: the first one has measured.
    (tmp_path / "out").mkdir()
    flags = ["--max_minutes", "0.08", "--train_fraction", "1", "--validation_fraction", "0.1"]
    plan = {"used_seconds": 20.0, "preset": "tiny", "pace": 1e4, "flags": {"pretrain": flags}}
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
    assert 20 < used < plan["used_seconds"] and plan["flags"].keys() == {"pretrain", "sft"}
    base, chat = (read_run(tmp_path / "out" / stage) for stage in ("pretrain", "sft"))
    assert [launch["resumed_from"] is None for launch in base.launches] == [True, False]
    # The rate of the last step depends on how long the step before it took; the schedule reached its end.
    rates = [run.series("learning_rate")[1] for run in (base, chat)]
    assert all(each[-1] < max(each) for each in rates), rates
    states = [
        json.loads((run / "trainer_state.json").read_text())
        for run in (tmp_path / "out/pretrain", tmp_path / "out/sft")
    ]
    assert [state["stateful_callbacks"]["TimeBudget"]["attributes"]["share"] for state in states] == [1.0, 1.0]
    # The budget is too short for an evaluation before the first step.
    assert chat.series("eval_loss")[0][0] > 0
    page = (tmp_path / "out/report.html").read_text()
    assert "in the second half of the steps" in page and "distinct-2 of the answers" in page
    assert second.stdout.rstrip().endswith(f"hf-pretrain chat --model_name_or_path {tmp_path}/out/sft")
    tokenizer = load_tokenizer(str(tmp_path / "out/sft"))
    model = load_model(ModelArguments(model_name_or_path=str(tmp_path / "out/sft")), tokenizer)
    assert model.config.hidden_size == 32 and model.generation_config.do_sample
