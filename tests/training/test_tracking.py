"""A resumed run continues the same tracked run."""

import os

import pytest

from hf_pretrain.run_directory.directory import RunDirectory
from hf_pretrain.training import training_arguments
from hf_pretrain.training.settling import settle_name
from hf_pretrain.training.training_arguments import LMTrainingArguments


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that launches a run, and returns its name and the variables of Weights & Biases."""
    (tmp_path / "run").mkdir()

    def start(checkpoint: str | None, **arguments) -> tuple[str, str, str]:
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            # Setting a variable first lets monkeypatch remove it after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        args = LMTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", **arguments)
        directory = RunDirectory(args.output_dir)
        settle_name(args, directory.launches if checkpoint else [])
        directory.record_start(resumed_from=checkpoint)
        directory.record(arguments=args.to_dict())
        return args.run_name, os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]

    return start


def test_a_resumed_run_keeps_its_name(launch):
    first = launch(None)
    assert first[0].startswith("run-") and first == (first[0], first[0], "allow")
    assert launch("checkpoint-2") == first and launch("checkpoint-4") == first
    assert launch(None) != first
    assert launch(None, run_name="mine")[:2] == ("mine", "mine")
    assert launch("checkpoint-2")[0] == "mine"


def test_the_users_variables_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_RESUME", "must")
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    settle_name(args, [])
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("mine", "must")


@pytest.mark.parametrize("is_installed", [True, False])
def test_trackio_is_the_default_where_it_is_installed(monkeypatch, tmp_path, is_installed):
    installed = ["trackio"] if is_installed else []
    monkeypatch.setattr(training_arguments, "get_available_reporting_integrations", lambda: installed)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.report_to == installed
    # With --push_to_hub, transformers would publish the figures unless this is False.
    assert args.trackio_static_space_id is False
