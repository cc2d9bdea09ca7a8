"""After `settle`, nothing assigns to an argument. A resumed run continues the same tracked run."""

import os

import pytest
import torch
from datasets import Dataset

from hf_pretrain.run_directory.directory import RunDirectory
from hf_pretrain.training import training_arguments
from hf_pretrain.training.settling import overriding, settle_name
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import launcher_command, start
from tests.trainers import frozen, make_documents, make_trainer


@pytest.mark.parametrize(
    "given", [{"max_minutes": 0.02, "max_steps": -1}, {"lr_scheduler_type": "warmup_stable_decay"}]
)
def test_nothing_assigns_to_an_argument_during_a_run(tmp_path, monkeypatch, given):
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    best = {"load_best_model_at_end": True, "eval_on_start": True, "dataloader_drop_last": True, "warmup_steps": 0.1}
    for checkpoint in (None, True):
        trainer = make_trainer(tmp_path, make_documents(), batch=4, arguments=often | best | given)
        with frozen(monkeypatch, trainer.args):
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.save_model()


def test_an_argument_is_shown_for_a_moment(tmp_path):
    args = LMTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", save_total_limit=3)
    with pytest.raises(ZeroDivisionError), overriding(args, save_total_limit=7):
        assert args.save_total_limit == 7
        raise ZeroDivisionError
    assert args.save_total_limit == 3


def test_a_notebook_gets_a_run_of_its_own(tmp_path):
    rows = Dataset.from_list(make_documents()).to_iterable_dataset()
    trainer = make_trainer(tmp_path, rows, arguments={"optim": None, "optim_preset": "muon", "learning_rate": None})
    args = trainer.args
    # Our toy model has width 32, and the default rate of Muon is 8e-3 at width 192.
    assert args.learning_rate == pytest.approx(8e-3 * 192 / 32) and args.dataloader_num_workers == 0
    assert args.include_num_input_tokens_seen == "no" and not args.remove_unused_columns
    assert trainer.run.checkpoint is None and torch.device(args.device).type == "cpu"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function that launches a run, and returns its name and the variables of Weights & Biases."""
    (tmp_path / "run").mkdir()

    def begin(checkpoint: str | None, **arguments) -> tuple[str, str, str]:
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

    return begin


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


# Midnight falls between the starts of the ranks.
DATES = """
import os, sys
from hf_pretrain.training import settling
from hf_pretrain.training.training_arguments import LMTrainingArguments

settling.now = lambda: f"2001-02-0{1 + int(os.environ['RANK'])}T00:00:00+00:00"
args = LMTrainingArguments(output_dir=sys.argv[1], use_cpu=True, report_to="none")
settling.settle_date(args, None)
with open(f"{sys.argv[1]}/{args.process_index}", "w") as file:
    file.write(args.date)
"""


@pytest.mark.distributed
def test_all_ranks_have_the_date_of_the_first(tmp_path):
    (tmp_path / "dates.py").write_text(DATES)
    result = start([*launcher_command("torchrun"), str(tmp_path / "dates.py"), str(tmp_path)])
    assert result.returncode == 0, result.stdout
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2001-02-01T00:00:00+00:00"] * 2
