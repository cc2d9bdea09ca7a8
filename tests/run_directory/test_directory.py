"""The lock of a run's directory, and its record `run.json`, which must hold no token."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from hf_pretrain import __file__ as package
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.run_directory import directory as module
from hf_pretrain.run_directory.directory import RunDirectory, now
from hf_pretrain.runtime import writing
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.writing import LOCK_NAME
from hf_pretrain.training.run import begin_run
from hf_pretrain.training.training_arguments import LMTrainingArguments, values_by_name
from tests.invariants.launching import ROOT
from tests.run_directory.mistakes import ALONE
from tests.trainers import make_documents, make_trainer


TOKEN = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"


@pytest.fixture
def make_arguments(tmp_path, monkeypatch):
    """Make the arguments of a run in `tmp_path`, with the token on the command line and in the environment."""

    monkeypatch.setattr(sys, "argv", ["recipes/pretrain.py", f"--run_name={TOKEN}", "--max_steps", "3"])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return partial(LMTrainingArguments, output_dir=str(tmp_path), use_cpu=True, bf16=False)


@pytest.fixture
def in_a_child():
    """Return a function that forks. The child calls a function, reports its return, and waits to be killed."""
    children = []

    def start(action) -> int:
        reading, sending = os.pipe()
        if not (child := os.fork()):
            try:
                # Like a process that did not fork from this one.
                writing._locks.clear()
                action()
                os.write(sending, b".")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        os.close(sending)
        assert os.read(reading, 1) == b"."
        return child

    def kill(child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        children.remove(child)

    start.kill = kill
    yield start
    for child in list(children):
        kill(child)


def test_a_lock_ends_with_its_process(tmp_path, in_a_child):
    """The kernel frees it after `kill -9`, although a worker that the run forked still lives."""
    run = RunDirectory(tmp_path / "run")

    def hold_with_a_worker() -> None:
        run.lock(ALONE)
        if not os.fork():
            signal.alarm(60)
            signal.pause()

    child = in_a_child(hold_with_a_worker)
    with pytest.raises(UserError):
        run.lock(ALONE)
    # A resumed run waits for the end of the earlier one.
    threading.Timer(0.5, in_a_child.kill, (child,)).start()
    run.lock(ALONE, is_resumed=True)
    # The trainer takes the lock that the recipe holds.
    with run.locked(ALONE):
        in_a_child(lambda: None)
    with pytest.raises(AssertionError):
        in_a_child(lambda: run.lock(ALONE))
    run.release()
    assert not list(run.path.iterdir())


def test_a_locked_directory_is_refused_before_anything_is_written(tmp_path, in_a_child):
    """This holds for recipes and for trainers without a recipe."""
    child = in_a_child(lambda: RunDirectory(tmp_path).lock(ALONE))
    with pytest.raises(UserError):
        args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        begin_run("pretrain", args, ModelArguments())
    trainer = make_trainer(tmp_path, make_documents(), arguments={"max_steps": 1})
    with pytest.raises(UserError):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    in_a_child.kill(child)
    trainer.train()
    in_a_child(lambda: RunDirectory(tmp_path).lock(ALONE))


def read(path: Path) -> list[dict]:
    return json.loads((path / "run.json").read_text())


def test_a_run_is_recorded(make_arguments, tmp_path):
    args = make_arguments(max_steps=3)
    run = RunDirectory(tmp_path)
    run.record_start(launcher=args.launcher)
    run.record(arguments=values_by_name(args, [DataArguments(dataset_name=["mine.jsonl"])]))
    (entry,) = read(tmp_path)
    assert "recipes/pretrain.py '--run_name=<token>' --max_steps 3" in entry["command"] and "ended" not in entry
    # The record also has flags that the command line lacks.
    assert entry["arguments"]["dataset_name"] == ["mine.jsonl"] and entry["arguments"]["adam_beta2"] == 0.95
    assert entry["versions"]["torch"] == version("torch") and entry["launcher"] == "python"
    assert entry["commit"] == module._commit()
    run.record(data={"names": ["mine.jsonl"]})
    run.record(ended=now(), metrics={"eval_loss": 2.5}, report=["Held-out loss 2.5"])
    (entry,) = read(tmp_path)
    assert (entry["data"]["names"], entry["metrics"]) == (["mine.jsonl"], {"eval_loss": 2.5})
    assert entry["ended"] >= entry["started"]


def test_a_resumed_run_adds_an_entry_and_no_token_is_recorded(make_arguments, tmp_path, monkeypatch):
    # `hf-pretrain` sets the variable to the command that it prints.
    monkeypatch.setenv("HF_PRETRAIN_COMMAND", f"LOCAL_SIZE=2 deepspeed recipes/pretrain.py --hub_token {TOKEN}")
    run = RunDirectory(tmp_path)
    for checkpoint in (None, "out/checkpoint-2"):
        run.record_start(resumed_from=checkpoint)
        run.record(arguments=make_arguments(run_name=f"of {TOKEN}").to_dict(), report=[f"pushed with {TOKEN}"])
    command = "LOCAL_SIZE=2 deepspeed recipes/pretrain.py --hub_token <token>"
    expected = [(None, command), ("out/checkpoint-2", command)]
    assert [(entry["resumed_from"], entry["command"]) for entry in read(tmp_path)] == expected
    text = (tmp_path / "run.json").read_text()
    assert TOKEN not in text and "of <token>" in text and "pushed with <token>" in text


def test_the_record_names_the_commit_of_the_checkout(tmp_path, monkeypatch):
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert module._commit() in (head, f"{head}-dirty") if head else module._commit() is None
    # An installed package has no commit, whatever repository contains the environment.
    monkeypatch.setattr(module, "__file__", str(tmp_path / "hf_pretrain" / Path(package).name))
    assert module._commit() is None
