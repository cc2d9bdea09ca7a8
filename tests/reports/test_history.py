"""`history.jsonl`: the lines that a run writes, and their reader, after resumes and kills."""

import json
import math
import time

import pytest
import torch
from transformers import TrainerCallback

from hf_pretrain.reports.history import HISTORY_NAME, History
from hf_pretrain.reports.page import write_page
from hf_pretrain.reports.runs import RECORD_NAME, read_run, read_runs
from hf_pretrain.training import run_trainer
from tests.training.test_trainer import make_documents, make_model, make_trainer


FLAGS = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "eval_steps": 2, "eval_strategy": "steps"}


def read(directory):
    (directory / RECORD_NAME).write_text("[]")
    return read_run(directory)


def test_the_history_holds_what_the_trainer_logged(tmp_path):
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(num_experts=4), arguments=FLAGS)
    trainer.train()
    run = read(tmp_path)
    assert [entry["kind"] for entry in run.of_kind("start", "checkpoint", "end")] == [
        "start",
        "checkpoint",
        "checkpoint",
        "end",
    ]
    for key in ("loss", "eval_loss", "grad_norm", "tokens_per_second"):
        logged = [entry[key] for entry in trainer.state.log_history if key in entry]
        assert run.series(key)[1] == logged and len(logged) > 1
    # The shares of a layer's experts add up to one.
    load = torch.tensor(run.of_kind("router_load")[-1]["load"])
    assert load.shape == (2, 4)
    assert torch.allclose(load.sum(-1), torch.ones(2))


def test_the_time_of_training_excludes_evaluations_and_all_of_saving(tmp_path, monkeypatch):
    rotate = run_trainer.rotate_checkpoints

    def rotate_slowly(*args, **kwargs):
        time.sleep(0.5)
        rotate(*args, **kwargs)

    monkeypatch.setattr(run_trainer, "rotate_checkpoints", rotate_slowly)
    arguments = FLAGS | {"max_steps": 6, "logging_steps": 1}
    # Trainer evaluates each set of a dictionary within one evaluation.
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(), arguments=arguments)
    trainer.eval_dataset = {"one": trainer.eval_dataset, "two": trainer.eval_dataset}
    trainer.add_callback(SlowEvaluation())
    trainer.train()
    seconds = [entry["training_seconds"] for entry in read(tmp_path).logs if "loss" in entry]
    assert len(seconds) == 6 and 0 < min(seconds) and max(seconds) < 0.4


class SlowEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        time.sleep(0.5)


def test_the_time_of_training_is_the_sum_of_its_intervals(tmp_path):
    history = History(tmp_path, is_writer=True)
    history.begin(0, checkpoint=None)
    history.add("log", 5, loss=3.0, num_input_tokens_seen=1000, training_seconds=10.0)
    history.add("log", 10, loss=2.0, num_input_tokens_seen=3000, training_seconds=40.0)
    history.add("log", 10, eval_loss=2.5, num_input_tokens_seen=3000)
    run = read(tmp_path)
    assert run.training_seconds() == {0: 0.0, 5: 10.0, 10: 50.0}
    assert run.series("eval_loss", over="minutes") == ([50 / 60], [2.5])
    assert run.series("loss") == ([0.001, 0.003], [3.0, 2.0])


def test_without_a_logged_speed_the_time_is_that_on_the_clock(tmp_path):
    lines = [("start", 0, 100), ("log", 0, 103), ("log", 5, 110), ("log", 5, 112), ("log", 6, 120), ("stop", 6, 121)]
    # The step after the checkpoint is trained again. The pause before the resume does not count.
    lines += [("resume", 5, 500), ("log", 6, 509)]
    entries = [{"kind": kind, "step": step, "time": time} for kind, step, time in lines]
    (tmp_path / HISTORY_NAME).write_text("\n".join(map(json.dumps, entries)))
    assert read(tmp_path).training_seconds() == {0: 0.0, 5: 10.0, 6: 21.0}


def test_a_resumed_run_replaces_the_steps_that_it_does_again(tmp_path):
    history = History(tmp_path, is_writer=True)
    history.begin(0, checkpoint=None)
    for step in (1, 2, 3):
        history.add("log", step, loss=float(step))
    history.add("stop", 3, message="SIGTERM")
    history.begin(2, checkpoint="checkpoint-2")
    history.add("log", 3, loss=30.0)
    run = read(tmp_path)
    assert [(entry["step"], entry["loss"]) for entry in run.logs] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [entry["kind"] for entry in run.of_kind("start", "stop", "resume")] == ["start", "stop", "resume"]
    # A new run in the same directory replaces all earlier lines.
    history.begin(0, checkpoint=None)
    assert read(tmp_path).logs == []


def test_a_torn_line_and_a_figure_that_is_not_finite_are_survived(tmp_path):
    history = History(tmp_path, is_writer=True)
    history.begin(0, checkpoint=None)
    history.add("log", 1, loss=math.nan)
    with (tmp_path / HISTORY_NAME).open("a") as file:
        file.write('{"kind": "lo')
    (entry,) = read(tmp_path).logs
    assert entry["loss"] is None
    # The next line does not become a part of the torn one: the resume replaces the step after its checkpoint.
    history.begin(0, checkpoint="checkpoint-0")
    assert read(tmp_path).logs == [] and len(read(tmp_path).of_kind("resume")) == 1
    # Half of a character, as at the end of a full disk.
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write("好".encode()[:2])
    assert len(read(tmp_path).of_kind("resume")) == 1


def test_a_sample_may_hold_any_character(tmp_path):
    history = History(tmp_path, is_writer=True)
    history.begin(0, checkpoint=None)
    text = "a\u2028b\u0085c\nd\udcff"
    history.add("samples", 1, samples=[["prompt", text]])
    run = read(tmp_path)
    assert run.of_kind("samples")[0]["samples"] == [["prompt", text]]
    write_page([run], tmp_path / "report.html")
    assert "a\u2028b" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_evaluation_after_the_end_is_no_point_of_the_curve(tmp_path):
    history = History(tmp_path, is_writer=True)
    history.begin(0, checkpoint=None)
    for step, loss in ((5, 3.3), (10, 4.0)):
        history.add("log", step, eval_loss=loss, num_input_tokens_seen=1000 * step)
    history.add("end", 10)
    # --load_best_model_at_end evaluates the model of step 5 again.
    history.add("log", 10, eval_loss=3.3, num_input_tokens_seen=10_000)
    run = read(tmp_path)
    assert run.series("eval_loss") == ([0.005, 0.01], [3.3, 4.0]) and run.last("eval_loss") == 3.3


def test_only_the_first_process_writes_and_only_a_run(tmp_path):
    History(tmp_path, is_writer=False).begin(0, checkpoint=None)
    History(tmp_path, is_writer=True).add("log", 1, loss=1.0)
    assert not (tmp_path / HISTORY_NAME).exists()


def test_runs_get_the_shortest_names_that_differ(tmp_path):
    directories = [tmp_path / name for name in ("first/out", "second/out", "other")]
    for directory in directories:
        directory.mkdir(parents=True)
        (directory / RECORD_NAME).write_text("[]")
        (directory / HISTORY_NAME).write_text('{"kind": "start", "time": 0, "step": 0}\n')
    (tmp_path / "tokenizer").mkdir()

    def names(*chosen):
        runs, left_out = read_runs(chosen)
        return [run.name for run in runs], len(left_out)

    assert names(directories[0], directories[2]) == (["out", "other"], 0)
    # The same directory, given twice, is one run.
    assert names(*directories, tmp_path / "tokenizer", directories[0])[0][:2] == ["first/out", "second/out"]
    assert names(directories[0], tmp_path / "tokenizer") == (["out"], 1)
    with pytest.raises(ValueError, match="tokenizer holds no run"):
        names(tmp_path / "tokenizer")
    # A mistake ended this run before it began.
    (directories[2] / HISTORY_NAME).unlink()
    assert names(directories[0], directories[2]) == (["out"], 1)
    with pytest.raises(ValueError, match="other holds a run that ended before its training"):
        names(directories[2])
    # A damaged run is no directory without a run.
    (directories[0] / RECORD_NAME).write_text("[")
    with pytest.raises(ValueError, match="run.json is not valid JSON"):
        names(*directories)


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no run: it has no run.json"):
        read_run(tmp_path)
    (tmp_path / RECORD_NAME).write_text("[")
    with pytest.raises(ValueError, match="run.json is not valid JSON"):
        read_run(tmp_path)
