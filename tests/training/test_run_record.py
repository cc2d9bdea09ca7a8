"""The content of `run.json`, which must hold no token."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_pretrain_cli
from hf_pretrain import __file__ as package
from hf_pretrain.data.arguments import DataArguments
from hf_pretrain.training import run_record
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.resuming import checkpoint_to_resume
from hf_pretrain.training.run_record import add_to_record, begin_record, end_record
from tests.invariants.launching import ROOT, launcher_command, process_options


TOKEN = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"


@pytest.fixture
def make_arguments(tmp_path, monkeypatch):
    """Return the arguments of a run in `tmp_path`, with the token on the command line and in the environment."""

    def make(**fields) -> LMTrainingArguments:
        words = ["recipes/pretrain.py", f"--run_name={TOKEN}", "--max_steps", "3"]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        fields = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False} | fields
        return LMTrainingArguments(**fields)

    return make


def read(path: Path) -> list[dict]:
    return json.loads((path / "run.json").read_text())


def test_a_run_is_recorded(make_arguments, tmp_path):
    args = make_arguments(max_steps=3)
    begin_record(args, (DataArguments(dataset_name=["mine.jsonl"]),), checkpoint=None)
    (entry,) = read(tmp_path)
    assert "recipes/pretrain.py --run_name=<token> --max_steps 3" in entry["command"]
    # The record also has flags that the command line lacks.
    assert entry["arguments"]["dataset_name"] == ["mine.jsonl"] and entry["arguments"]["adam_beta2"] == 0.95
    assert entry["versions"]["torch"] == torch.__version__ and entry["launcher"] == "python"
    assert entry["commit"] == run_record._commit()
    assert "ended" not in entry
    add_to_record(args, data={"names": ["mine.jsonl"]})
    end_record(args, metrics={"eval_loss": 2.5}, report=["Held-out loss 2.5"])
    (entry,) = read(tmp_path)
    assert entry["data"]["names"] == ["mine.jsonl"] and entry["metrics"] == {"eval_loss": 2.5}
    assert entry["ended"] >= entry["started"]


def test_the_command_of_hf_pretrain_comes_first(make_arguments, tmp_path, monkeypatch):
    printed = f"LOCAL_SIZE=2 deepspeed recipes/pretrain.py --hub_token {TOKEN}"
    monkeypatch.setenv("HF_PRETRAIN_COMMAND", printed)
    begin_record(make_arguments(), (), checkpoint=None)
    assert read(tmp_path)[0]["command"] == printed.replace(TOKEN, "<token>")


def test_hf_pretrain_passes_on_the_command_that_it_prints(monkeypatch, capsys):
    passed = {}
    monkeypatch.setattr(hf_pretrain_cli, "start", lambda command, environment: passed.update(environment))
    monkeypatch.setattr("sys.argv", ["hf-pretrain", "pretrain", "--nproc", "2", "--use_cpu"])
    hf_pretrain_cli.main()
    assert capsys.readouterr().err == f"$ {passed['HF_PRETRAIN_COMMAND']}\n"
    assert "torchrun" in passed["HF_PRETRAIN_COMMAND"]


def test_without_a_launcher_above_it_the_command_of_a_rank_names_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr("sys.argv", ["recipes/pretrain.py", "--local_rank=1", "--max_steps", "3"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = run_record._find_command()
    assert command.endswith(f"WORLD_SIZE=2 {sys.executable} recipes/pretrain.py --max_steps 3")


def test_a_shell_understands_the_command_of_a_process(monkeypatch):
    class Process:
        """A rank of the deepspeed launcher, which itself is not visible."""

        def cmdline(self) -> list[str]:
            return ["python", "recipes/pretrain.py", "--local_rank=1", "--run_name", "two words"]

        def environ(self) -> dict[str, str]:
            return {"CUDA_VISIBLE_DEVICES": "2, 0"}

        def parents(self) -> list:
            return []

    monkeypatch.setattr("sys.argv", ["recipes/pretrain.py"])
    monkeypatch.setattr(run_record.psutil, "Process", Process)
    command = run_record._find_command()
    assert command == "CUDA_VISIBLE_DEVICES='2, 0' python recipes/pretrain.py --run_name 'two words'"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["python", "torchrun", "deepspeed", "accelerate:ddp"])
def test_the_command_is_the_one_that_the_user_typed(launcher, tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import os\nfrom hf_pretrain.training.run_record import _find_command\n"
        "print('FOUND', _find_command()) if os.environ.get('RANK', '0') == '0' else None\n"
    )
    words = [*launcher_command(launcher), str(probe), "--run_name", "two words"]
    result = subprocess.run(words, **process_options(WORLD_SIZE="2") if launcher == "python" else process_options())
    (found,) = [line for line in result.stdout.splitlines() if "FOUND" in line]
    # A launcher is a script of Python. Its command holds the rank of no process.
    assert found.endswith(shlex.join(words)) and "LOCAL_SIZE=2 OMP_NUM_THREADS=1 " in found
    assert ("WORLD_SIZE=2" in found) == (launcher == "python")


def test_no_token_is_recorded(make_arguments, tmp_path):
    args = make_arguments(run_name=f"of {TOKEN}")
    begin_record(args, (), checkpoint=None)
    end_record(args, report=[f"pushed with {TOKEN}"])
    text = (tmp_path / "run.json").read_text()
    assert TOKEN not in text and "of <token>" in text and "pushed with <token>" in text


def test_a_resumed_run_adds_an_entry(make_arguments, tmp_path):
    args = make_arguments()
    for checkpoint in (None, "out/checkpoint-2"):
        begin_record(args, (), checkpoint=checkpoint)
        end_record(args)
    assert [entry["resumed_from"] for entry in read(tmp_path)] == [None, "out/checkpoint-2"]


def test_a_record_that_cannot_be_read_is_kept(make_arguments, tmp_path):
    (tmp_path / "run.json").write_text('[{"started": ')
    begin_record(make_arguments(), (), checkpoint=None)
    assert len(read(tmp_path)) == 1 and (tmp_path / "unreadable-run.json").read_text() == '[{"started": '


def test_a_full_disk_does_not_matter(make_arguments, tmp_path):
    args = make_arguments()
    (tmp_path / ".run.json").mkdir()
    begin_record(args, (), checkpoint=None)
    end_record(args)


def test_a_run_that_did_not_start_may_be_repeated(make_arguments, tmp_path):
    args = make_arguments()
    begin_record(args, (), checkpoint=None)
    # A run that stops in its first step also writes its page.
    (tmp_path / "report.html").write_text("")
    assert checkpoint_to_resume(args) is None


def test_the_record_names_the_commit_of_the_checkout(tmp_path, monkeypatch):
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert run_record._commit() in (head, f"{head}-dirty") if head else run_record._commit() is None
    # An installed package has no commit, whatever repository contains the environment.
    monkeypatch.setattr(run_record, "__file__", str(tmp_path / "hf_pretrain" / Path(package).name))
    assert run_record._commit() is None
