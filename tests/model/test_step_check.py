import pytest
import torch

from hf_pretrain import MiniMindConfig
from hf_pretrain.model import step_check
from hf_pretrain.model.attention_check import LIMITS, attention_errors
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.runtime.machine_checks import BAD, OK
from tests.toys import LikeMPS


@pytest.mark.parametrize(("factor", "status"), [(1.0, OK), (1.001, OK), (1.02, BAD), (torch.nan, BAD)])
def test_gradients_that_differ_from_the_cpu_are_found(monkeypatch, factor, status):
    found = {}

    def find_gradients(device, **fields):
        # In place of an accelerator: the CPU with a wrong result.
        found[device] = compute("cpu", **fields) * (factor if device == "mps" else 1.0)
        return found[device]

    compute = step_check.find_gradients
    monkeypatch.setattr(step_check, "find_gradients", find_gradients)
    monkeypatch.setattr(step_check, "default_device_type", lambda use_cpu: "mps")
    findings = list(step_check.check_step())
    assert [finding.status for finding in findings] == [status] * 2
    assert found["cpu"].isfinite().all() and (found["cpu"] != 0).float().mean() > 0.5
    monkeypatch.setattr(step_check, "default_device_type", lambda use_cpu: "cpu")
    assert list(step_check.check_step()) == []


def test_the_checks_run_on_apple_gpus():
    with LikeMPS():
        for fields in step_check.MODELS.values():
            step_check.find_gradients("cpu", **fields)
        for dtype, limit in LIMITS.items():
            errors = attention_errors(MiniMindConfig(**PRESETS["minimind2"]), torch.device("cpu"), dtype)
            assert max(errors.values()) < limit, errors
