"""Budgets, early stopping and own validation data."""

import json
import math
import os
import re
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from hf_pretrain.data.sources import name_eval_sets
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.training import budgets
from hf_pretrain.training.run import Run, train_and_evaluate
from hf_pretrain.training.settling import TrainerData, settle
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.matrix import call
from tests.toys import toy_model
from tests.trainers import AtStep, make_run_trainer


def test_numbers_of_tokens():
    texts = {"2B": 2e9, "500M": 5e8, "1e9": 1e9, "1.5k": 1500, "300": 300}
    assert {text: budgets.parse_tokens(text) for text in texts} == texts
    for text in ("2 B", "B", "-1", "0", "1.2.3", "nan"):
        with pytest.raises(UserError):
            budgets.parse_tokens(text)


def test_names_of_validation_sets():
    names = ["my/news.jsonl", "other/code.v2.txt.gz", "me/chats:long[test_sft]@main", "embedded:idiom"]
    assert list(name_eval_sets(names, [])) == ["news", "code_v2", "chats_long_test_sft_main", "embedded_idiom"]
    assert name_eval_sets(["a.jsonl"], []) == {"": "a.jsonl"} and name_eval_sets(None, ["a"]) == {}
    assert name_eval_sets(["embedded:idiom"], ["embedded:poetry", "a.jsonl"]) == {"": "embedded:idiom"}


def test_a_budget_of_tokens_ends_with_the_step_that_reaches_it(trained):
    state = json.loads(trained("pretrain-budget").text("trainer_state.json"))
    per_step = state["num_input_tokens_seen"] / state["global_step"]
    assert 2000 <= state["num_input_tokens_seen"] < 2000 + per_step and state["global_step"] == state["max_steps"]


def test_a_budget_counts_the_rows_of_a_stream_in_full_and_none_that_drop_last_leaves_out():
    rows = Dataset.from_dict({"input_ids": [[1]] * 29})
    for data, num_tokens, given, expected in (
        # A step of 8 rows of a stream has 512 tokens.
        (rows.to_iterable_dataset(), None, {}, (1, 4)),
        (rows, 400, {}, (2000 / 400, -1)),
        # A pass leaves out 5 of the 29 rows, or 13 where a step takes 16. With 32 to a step, nothing can be trained.
        (rows, 580, {"dataloader_drop_last": True}, (2000 / 480, -1)),
        (rows, 580, {"dataloader_drop_last": True, "gradient_accumulation_steps": 2}, (2000 / 320, -1)),
        (rows, 580, {"dataloader_drop_last": True, "gradient_accumulation_steps": 4}, (2000 / 580, -1)),
    ):
        given |= {"max_tokens": "2K", "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none"}
        args, collator = LMTrainingArguments(**given), DataCollatorForPackedRows(0, max_length=64)
        settle(Run(args), TrainerData(data, None, collator, num_tokens), toy_model())
        assert (args.num_train_epochs, args.max_steps) == pytest.approx(expected)


def test_own_validation_data_are_whole_and_have_their_own_figures(trained, toys):
    run = trained("pretrain-budget")
    assert "Training: 60 documents" in run.output and "Validation code: 40 documents" in run.output
    news, code = (run.series(f"eval_{name}_loss") for name in ("news", "code"))
    assert len(news) == len(code) == 3 and not set(news) & set(code)
    # The first set is the one that chooses, and the one of the report.
    assert run.series("eval_loss") == news
    assert f"Validation loss    {news[-1]:.4f} nats per token ({news[0]:.4f} before)" in run.output
    change = f"{code[-1]:.4f} ({code[0]:.4f} before)"
    assert f"Loss on code       {change}" in run.output
    page = re.sub("<[^>]*>", "", run.text("report.html"))
    assert "loss on code" in page and change in page
    flags = "--model_name_or_path pretrain-budget --eval_dataset_name code.jsonl --max_length 32"
    call(toys, "python", "evaluate", f"{flags} --use_cpu --bf16 false")
    results = json.loads(run.text("evaluation.json"))
    assert results["held_out"]["eval_loss"] == pytest.approx(code[-1], abs=1e-6)
    assert "text of code.jsonl in sequences of 32: 40 documents" in results["data"]


def make_overfitting_trainer(path, **arguments):
    """Return a trainer whose validation loss rises with each step: it never trains the validation token."""
    arguments = {"max_steps": 20, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 1} | arguments
    trainer = make_run_trainer(path, early_stopping_patience=3, **arguments)
    trainer.train_dataset, trainer.eval_dataset = (
        [{"input_ids": [token] * 9, "seq_lengths": [9]}] * 8 for token in (5, 9)
    )
    return trainer


def test_a_run_stops_early_and_keeps_its_best_model_also_after_a_resume(tmp_path, restored):
    trainer = make_overfitting_trainer(tmp_path)
    train_and_evaluate(trainer, checkpoint=None)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.global_step == 4 and min(losses) == losses[0]
    best, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint-1", "."))
    assert all(torch.equal(best[name], saved[name]) for name in best)
    resumed = tmp_path / "resumed"
    stopped = make_overfitting_trainer(resumed)
    stopped.add_callback(AtStep(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit):
        train_and_evaluate(stopped, checkpoint=None)
    for _ in range(2):
        trainer = make_overfitting_trainer(resumed)
        train_and_evaluate(trainer, checkpoint=True)
        assert trainer.state.global_step == 4 and trainer.state.best_global_step == 1


def make_timed_trainer(path: Path, monkeypatch, **arguments):
    """Return a trainer of 20 seconds, whose steps take one second each."""
    clock = count()
    monkeypatch.setattr(budgets, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    arguments = {"max_minutes": 1 / 3, "logging_steps": 1, "warmup_steps": 0.0, "save_steps": 0.25} | arguments
    return make_run_trainer(path, learning_rate=1.0e-3, optim_preset="adamw", **arguments)


def rates(trainer) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_the_last_step_of_a_budget_of_time_is_logged(tmp_path, monkeypatch):
    trainer = make_timed_trainer(tmp_path, monkeypatch, logging_steps=15)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "training_seconds" in entry]
    assert [entry["step"] for entry in logs] == [15, 20]


def test_the_schedule_ends_with_the_time(tmp_path, monkeypatch, restored):
    trainer = make_timed_trainer(tmp_path, monkeypatch)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 20
    # A cosine down to a tenth. The first step, which compiles, does not move it.
    shares = [0, *(step / 19 for step in range(19))]
    assert rates(trainer) == pytest.approx([1e-3 * (0.55 + 0.45 * math.cos(math.pi * share)) for share in shares])
    assert trainer.state.save_steps == 5 and trainer.state.eval_steps == budgets.MIN_EVAL_STEPS
    # A second launch has the rest of the time, and the schedule goes on.
    other = tmp_path / "resumed"
    stopped = make_timed_trainer(other, monkeypatch)
    stopped.add_callback(AtStep(8, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit):
        stopped.train()
    for _ in range(2):
        resumed = make_timed_trainer(other, monkeypatch)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 20
        falling = rates(resumed)
        assert falling == sorted(falling, reverse=True) and 1e-4 < falling[-1] < 1.2e-4
