"""The loss scale of float16 goes on where it was saved, also in torch's scaler. Whole runs: `tests/invariants`."""

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from hf_pretrain.checkpoints.zero_state import load_loss_scale, loss_scale


# DeepSpeed compiles a kernel.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def process_group():
    """DeepSpeed asks for the rank before it prints an overflow."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    yield
    deepspeed.comm.destroy_process_group()


def engine() -> Any:
    scaler = DynamicLossScaler(256.0, scale_window=5, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)
    return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))


def scales(engine: Any, overflows: list[bool]) -> list[float]:
    found = []
    for overflow in overflows:
        engine.optimizer.loss_scaler.update_scale(overflow)
        found.append(engine.optimizer.loss_scaler.cur_scale)
    return found


def test_the_scale_grows_and_shrinks_as_without_the_resume():
    overflows = [False, True, *([False] * 13), True, *([False] * 12)]
    expected = scales(engine(), overflows)
    assert len(set(expected)) > 3
    for step in range(1, len(overflows)):
        first, second = engine(), engine()
        scales(first, overflows[:step])
        load_loss_scale(second.optimizer.loss_scaler, loss_scale(first))
        assert scales(second, overflows[step:]) == expected[step:], step


def test_the_scale_of_torch():
    first, second = engine(), engine()
    scales(first, [True, *([False] * 8)])
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    load_loss_scale(scaler, loss_scale(first))
    assert scaler.get_scale() == first.optimizer.loss_scaler.cur_scale
    load_loss_scale(second.optimizer.loss_scaler, scaler.state_dict())
    assert scales(second, [False] * 9) == scales(first, [False] * 9)
    scales(first, [False])
    load_loss_scale(scaler, loss_scale(first))
    assert scaler.state_dict()["_growth_tracker"] < 5


def test_other_precisions_have_no_scale():
    assert loss_scale(SimpleNamespace(optimizer=SimpleNamespace())) is None
