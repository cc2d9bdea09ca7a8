"""Test `RunTrainer`, the base of every stage's trainer, and `MaskedLossTrainer` in a notebook."""

import os
import signal
import sys

import pytest
import torch
from transformers import TrainerCallback

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.checkpoints.manifest import MANIFEST_NAME
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.training.base_trainer import RunTrainer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import toy_model
from tests.training.test_masked_loss_trainer import make_documents, make_trainer


ARGUMENTS = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "eval_strategy": "no"}


def make_run_trainer(output_dir, **arguments) -> RunTrainer:
    """Return a trainer without the masked loss, as in the TRL stages."""
    arguments = ARGUMENTS | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2} | arguments
    return RunTrainer(
        model=toy_model(vocab_size=64),
        args=LMTrainingArguments(output_dir=str(output_dir), **arguments),
        data_collator=DataCollatorForPackedRows(0),
        train_dataset=make_documents(),
        eval_dataset=make_documents(),
    )


def test_a_finished_run_trains_no_more_steps(tmp_path):
    # An epoch has two steps, so that the run ends within the second epoch.
    arguments = {"max_steps": 3, "save_steps": 1}
    make_run_trainer(tmp_path, **arguments).train()
    finished = make_run_trainer(tmp_path, **arguments)
    before = {name: parameter.clone() for name, parameter in finished.model.named_parameters()}
    finished.train(resume_from_checkpoint=True)
    assert finished.state.global_step == 3
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    # The trainer has loaded the weights of the last checkpoint.
    assert any(not torch.equal(before[name], value) for name, value in finished.model.named_parameters())


def test_the_newest_checkpoint_may_lack_a_manifest_if_the_resume_may_be_inexact(tmp_path):
    make_run_trainer(tmp_path).train()
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).unlink()
    with pytest.raises(ValueError, match=MANIFEST_NAME):
        make_run_trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer = make_run_trainer(tmp_path, max_steps=5, allow_inexact_resume=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5 and trainer._checkpoint == str(tmp_path / "checkpoint-4")


def test_an_error_is_recorded_and_raised(tmp_path, monkeypatch):
    def lose_connection(*args, **kwargs):
        raise ConnectionError("closed")

    trainer = make_run_trainer(tmp_path)
    (tmp_path / "run.json").write_text("[{}]")
    monkeypatch.setattr(trainer, "training_step", lose_connection)
    with pytest.raises(ConnectionError, match="closed"):
        trainer.train()
    assert "ConnectionError" in (tmp_path / "run.json").read_text()
    assert "ConnectionError" in (tmp_path / "report.html").read_text()


def test_in_a_notebook_ctrl_c_leaves_handlers_trainer_and_model_usable(tmp_path, restored, monkeypatch):
    class CtrlC(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    # Only interactive sessions have this attribute.
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(tmp_path, make_documents(), arguments={"save_strategy": "steps", "save_steps": 2})
    trainer.add_callback(ctrl_c := CtrlC())
    with pytest.raises(SystemExit) as status:
        trainer.train()
    assert status.value.code == 130 and trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGINT) == handler
    trainer.remove_callback(ctrl_c)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    # Make a new trainer for the same model, whose config the first run has changed.
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    again = make_trainer(tmp_path, make_documents(), model=trainer.model, arguments=arguments)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


def test_our_arguments_need_no_validation_set(tmp_path):
    """Use the example of `hf_pretrain.training`."""
    args = LMTrainingArguments(output_dir=str(tmp_path), **{k: v for k, v in ARGUMENTS.items() if k[:4] != "eval"})
    trainer = MaskedLossTrainer(toy_model(vocab_size=64), args, train_dataset=make_documents())
    trainer.train()
    assert trainer.state.global_step == 2


def test_training_does_not_depend_on_how_often_it_is_evaluated(tmp_path):
    def trained(name: str, **arguments) -> dict[str, torch.Tensor]:
        model = toy_model(vocab_size=64, dropout=0.1)
        trainer = make_trainer(tmp_path / name, make_documents(), model=model, arguments=arguments)
        trainer.train()
        return dict(trainer.model.named_parameters())

    never, often = trained("never"), trained("often", eval_strategy="steps", eval_steps=1)
    assert all(torch.equal(weight, often[name]) for name, weight in never.items())
