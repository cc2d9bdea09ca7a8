"""After `settle`, nothing assigns to an argument."""

import pytest
import torch
from datasets import Dataset

from hf_pretrain.training.settling import overriding
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
