"""Signals and other events that end a run, tested in this process."""

import json
import os
import shutil
import signal

import pytest
import torch
from transformers import TrainerCallback

from hf_pretrain.checkpoints.manifest import find_damage
from hf_pretrain.run_directory.directory import RECORD_NAME, REPORT_NAME
from tests.toys import toy_model
from tests.trainers import AtStep, make_documents, make_trainer


def test_a_closed_terminal_stops_a_run_at_a_step_whose_page_says_so(tmp_path, restored, capfd):
    (tmp_path / RECORD_NAME).write_text("[{}]")
    hang_up = AtStep(3, lambda: os.kill(os.getpid(), signal.SIGHUP))
    with pytest.raises(SystemExit) as status:
        make_trainer(tmp_path, make_documents(), callbacks=[hang_up], arguments={"logging_steps": 2}).train()
    assert status.value.code == 129 and "Stopped by SIGHUP after step 3" in capfd.readouterr().err
    assert find_damage(tmp_path / "checkpoint-3") == []
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    assert state["log_history"][-1]["step"] == 2
    assert ": after step 3: SIGHUP" in (tmp_path / REPORT_NAME).read_text(encoding="utf-8")


def test_under_nohup_a_closed_terminal_does_not_stop_a_run(tmp_path, restored):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = AtStep(2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    trainer = make_trainer(tmp_path, make_documents(), callbacks=[hang_up])
    trainer.train()
    assert trainer.state.global_step == 6
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(("evaluated", "step"), [(0, 1), (2, 3), (6, 6)])
def test_a_signal_in_an_evaluation_stops_the_run_after_the_next_save(tmp_path, restored, capfd, evaluated, step):
    """The evaluation ends. The resumed run has the bits and the evaluations of an uninterrupted one."""
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 6}
    arguments |= {"eval_on_start": True}

    class InEvaluation(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == evaluated:
                os.kill(os.getpid(), signal.SIGTERM)

    def trainer(name: str, **kwargs):
        model = toy_model(vocab_size=64, dropout=0.1)
        return make_trainer(tmp_path / name, make_documents(), model=model, arguments=arguments, **kwargs)

    with pytest.raises(SystemExit) as status:
        trainer("run", callbacks=[InEvaluation()]).train()
    assert status.value.code == 143 and f"Stopped by SIGTERM after step {step}." in capfd.readouterr().err
    (resumed := trainer("run")).train(resume_from_checkpoint=True)
    (whole := trainer("whole")).train()
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name))
    evaluated_steps = [[e["step"] for e in t.state.log_history if "eval_loss" in e] for t in (resumed, whole)]
    assert evaluated_steps[0] == evaluated_steps[1] == [0, 2, 4, 6]


@pytest.mark.parametrize("is_above", [True, False])
def test_a_directory_that_is_renamed_or_deleted_does_not_end_a_run(tmp_path, is_above, monkeypatch):
    """A relative path follows the renamed working directory. A deleted output directory is made again."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)

    def act():
        project.rename(tmp_path / "elsewhere") if is_above else shutil.rmtree(project / "run")

    arguments = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer("run", make_documents(), arguments=arguments, callbacks=[AtStep(3, act)])
    trainer.train()
    trainer.save_model()
    run = (tmp_path / "elsewhere" if is_above else project) / "run"
    assert (run / "config.json").is_file() and find_damage(run / "checkpoint-6") == []


@pytest.mark.parametrize(
    "arguments",
    [{"save_steps": 3}, {"logging_steps": 3}, {"eval_strategy": "steps", "eval_steps": 3}, {"save_steps": 2}, {}],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_of_a_step_with_a_broken_gradient_gets_out(tmp_path, restored, capfd, arguments, is_late):
    """A GPU's host reads the norm late (`is_late`): in the next step, or before it logs, evaluates or saves."""
    quiet = {"save_strategy": "steps", "save_steps": 100, "logging_steps": 100, "eval_steps": 100, "max_steps": 6}
    trainer = make_trainer(tmp_path, make_documents(), arguments=quiet | arguments)
    trainer.finite_check.is_late = is_late
    weight = trainer.model.model.norm.weight
    weight.register_hook(lambda gradient: gradient * float("nan" if trainer.state.global_step == 2 else 1))
    with pytest.raises(SystemExit) as status:
        trainer.train()
    assert status.value.code == 65 and "The gradient's norm is nan in step 3" in capfd.readouterr().err
    # Only a late check finds out after the update, in the next step if nothing is due in this one.
    assert trainer.state.global_step == (3 if is_late else 2)
    assert all(entry["step"] < 3 for entry in trainer.state.log_history)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == (
        {"checkpoint-2"} & {f"checkpoint-{arguments.get('save_steps')}"}
    )
