"""Signals to a training process, in this one."""

import os
import signal

import pytest
from transformers import TrainerCallback

from hf_pretrain.manifest import find_damage
from tests.test_trainer import make_documents, make_trainer


class AtStep(TrainerCallback):
    """Does something after a step, once."""

    def __init__(self, step: int, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


@pytest.fixture
def restored():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_closed_terminal_stops_a_run_at_a_step(tmp_path, restored, capfd):
    hang_up = AtStep(2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    with pytest.raises(SystemExit) as status:
        make_trainer(tmp_path, make_documents(), callbacks=[hang_up]).train()
    assert status.value.code == 129 and "Stopped by SIGHUP after step 2" in capfd.readouterr().err
    assert find_damage(tmp_path / "checkpoint-2") == []


def test_under_nohup_it_does_not(tmp_path, restored):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = AtStep(2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    trainer = make_trainer(tmp_path, make_documents(), callbacks=[hang_up])
    trainer.train()
    assert trainer.state.global_step == 6
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
