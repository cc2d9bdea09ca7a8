"""Test `RunTrainer`, the base of every stage's trainer, and `MaskedLossTrainer` in a notebook."""

import os
import re
import signal
import sys

import pytest
import torch

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import launcher_command, start
from tests.toys import toy_model
from tests.trainers import ARGUMENTS, AtStep, make_documents, make_run_trainer, make_trainer


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


def test_an_error_is_recorded_and_raised(tmp_path, monkeypatch):
    def lose_connection(*args, **kwargs):
        raise ConnectionError("closed")

    trainer = make_run_trainer(tmp_path)
    (tmp_path / "run.json").write_text("[{}]")
    monkeypatch.setattr(trainer, "training_step", lose_connection)
    with pytest.raises(ConnectionError):
        trainer.train()
    assert "ConnectionError" in (tmp_path / "run.json").read_text()
    assert "ConnectionError" in (tmp_path / "report.html").read_text()


def test_in_a_notebook_ctrl_c_leaves_handlers_trainer_and_model_usable(tmp_path, restored, monkeypatch):
    # Only interactive sessions have this attribute.
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(tmp_path, make_documents(), arguments={"save_strategy": "steps", "save_steps": 2})
    trainer.add_callback(ctrl_c := AtStep(1, lambda: os.kill(os.getpid(), signal.SIGINT)))
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
    often = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "load_best_model_at_end": True}
    args = LMTrainingArguments(output_dir=str(tmp_path), save_steps=1, logging_steps=1, **ARGUMENTS | often)
    trainer = MaskedLossTrainer(toy_model(vocab_size=64), args, train_dataset=make_documents())
    trainer.train()
    assert trainer.state.global_step == 2
    assert not any(key.startswith("eval_") for entry in trainer.state.log_history for key in entry)


# Both ranks have the same weights and rows.
DROPOUT = """
import sys
import torch
from tests.toys import toy_model
from tests.trainers import make_trainer

rows = [{"input_ids": list(range(2, 18)), "labels": list(range(2, 18)), "seq_lengths": [16]}] * 8
for dropout in (0.0, 0.5):
    model, losses = toy_model(vocab_size=64, dropout=dropout), []
    trainer = make_trainer(f"{sys.argv[1]}/{dropout}", rows, model=model, batch=4, arguments={"max_steps": 1})
    model.register_forward_hook(lambda module, inputs, outputs: losses.append(outputs.loss.detach()))
    trainer.train()
    both = trainer.run.ranks.gather(losses[0])
    if trainer.run.ranks.rank == 0:  # Lines that two ranks print at once mix.
        print("losses", *[loss.item() for loss in both], flush=True)
"""


@pytest.mark.distributed
def test_each_rank_draws_its_own_dropout(tmp_path):
    (tmp_path / "train.py").write_text(DROPOUT)
    result = start([*launcher_command("torchrun"), str(tmp_path / "train.py"), str(tmp_path)])
    pairs = re.findall(r"^losses (\S+) (\S+)$", result.stdout, re.MULTILINE)
    assert [first == second for first, second in pairs] == [True, False]
