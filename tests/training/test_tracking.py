"""A resumed run continues the same tracked run."""

import os

import pytest
from transformers.integrations import TensorBoardCallback

from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.run_record import add_to_record, begin_record
from hf_pretrain.training.tracking import continue_tracking, direct_tensorboard


VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "SWANLAB_RUN_ID", "SWANLAB_RESUME")


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that launches a run, and returns what the trackers get."""

    def start(checkpoint: str | None, **arguments) -> dict[str, str]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", **arguments)
        (tmp_path / "run").mkdir(exist_ok=True)
        tracking_id = continue_tracking(args, checkpoint=checkpoint)
        begin_record(args, (), checkpoint=checkpoint)
        add_to_record(args, tracking_id=tracking_id)
        return {"id": tracking_id, "name": args.run_name} | {name: os.environ[name] for name in VARIABLES}

    return start


def test_a_resumed_run_has_the_same_id_everywhere(launch):
    first = launch(None)
    assert launch("checkpoint-2") == first and launch("checkpoint-4") == first
    assert first["WANDB_RUN_ID"] == first["SWANLAB_RUN_ID"] == first["id"] and len(first["id"]) == 21
    assert first["WANDB_RESUME"] == first["SWANLAB_RESUME"] == "allow"
    assert first["name"].startswith("run-")


def test_tensorboard_gets_one_directory_per_run(tmp_path):
    pytest.importorskip("tensorboard")
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", run_name="mine")
    callback = TensorBoardCallback()
    direct_tensorboard([callback], args)
    assert callback.logging_dir == str(tmp_path / "runs/mine")


def test_a_new_run_has_a_new_id_and_the_users_name_stays(launch):
    first = launch(None)
    assert launch(None)["id"] != first["id"]
    assert launch(None, run_name="mine")["name"] == "mine"


def test_two_runs_in_one_process_are_two_runs(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("a", "b"):
        args = LMTrainingArguments(output_dir=str(tmp_path / name), use_cpu=True, report_to="none")
        assert continue_tracking(args, checkpoint=None) == os.environ["WANDB_RUN_ID"]


def test_the_users_variables_stay(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    args = LMTrainingArguments(output_dir=str(tmp_path / "other"), use_cpu=True, report_to="none")
    continue_tracking(args, checkpoint=None)
    assert os.environ["WANDB_RUN_ID"] == "mine"


@pytest.mark.parametrize("is_installed", [True, False])
def test_trackio_is_the_default_where_it_is_installed(monkeypatch, tmp_path, is_installed):
    from hf_pretrain.training import arguments

    find_spec = arguments.importlib.util.find_spec
    found = object() if is_installed else None
    monkeypatch.setattr(
        arguments.importlib.util, "find_spec", lambda name: found if name == "trackio" else find_spec(name)
    )
    monkeypatch.setattr(arguments, "_check_trackers", lambda names: None)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.report_to == (["trackio"] if is_installed else [])
