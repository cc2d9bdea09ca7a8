"""The doctor's comparison with plain attention finds kernels that are wrong in one layout."""

import pytest
import torch
import torch.nn.functional as F

from hf_pretrain.doctor import step_check
from hf_pretrain.doctor.machine_checks import BAD, OK
from hf_pretrain.doctor.step_check import LAYOUTS, LIMITS, PRESETS, check_steps, find_errors
from tests.toys import LikeMPS


PACKED, PADDING, GENERATION = LAYOUTS


@pytest.fixture
def one_preset(monkeypatch):
    monkeypatch.setattr(step_check, "PRESETS", {"minimind2": PRESETS["minimind2"]})
    monkeypatch.setattr(step_check, "default_device_type", lambda *, use_cpu: "cpu")


def wrong_ones(dtype=torch.float32) -> list[str]:
    found = [(error, *name.split(", ")) for error, name in find_errors("cpu", dtype)]
    return [layout for error, layout, model in found if error > LIMITS[dtype] and model != "experts"]


def test_the_kernels_of_a_cpu_are_right(one_preset):
    for dtype in (torch.float32, torch.bfloat16):
        errors = {name: error for error, name in find_errors("cpu", dtype)}
        models = ["8/2 heads of 96", *(["experts"] if dtype == torch.float32 else [])]
        assert [*errors] == [f"{layout}, {model}" for model in models for layout in LAYOUTS]
        assert all(0 < error < LIMITS[dtype] for error in errors.values()), errors
    with LikeMPS():
        assert wrong_ones() == wrong_ones(torch.bfloat16) == []


def wrong_head(right):
    def attend(*args, **kw):
        output = right(*args, **kw)
        return torch.cat([output[:, :1] * 1.3, output[:, 1:]], dim=1)

    return attend


def not_a_number(right):
    """As cuDNN gave them: gradients that are not finite, for outputs that are right."""

    def attend(*args, **kw):
        output = right(*args, **kw)
        if output.requires_grad and kw.get("attn_mask") is not None:
            output.register_hook(lambda gradient: gradient * torch.nan)
        return output

    return attend


@pytest.mark.parametrize(
    "break_kernel, expected",
    [
        # A kernel that ignores the mask leaks padding and later tokens. Packed documents have no mask.
        (lambda right: lambda *args, **kw: right(*args, **kw | {"attn_mask": None}), [PADDING, GENERATION]),
        (lambda right: lambda *args, **kw: right(*args, **kw | {"is_causal": False}), [PACKED]),
        (lambda right: lambda *args, **kw: right(*args, **kw | {"scale": kw["scale"] * 1.2}), list(LAYOUTS)),
        (wrong_head, list(LAYOUTS)),
        (not_a_number, [PADDING]),
    ],
    ids=["no mask", "not causal", "wrong scale", "a wrong head", "not finite"],
)
def test_a_wrong_kernel_is_found(one_preset, monkeypatch, break_kernel, expected):
    monkeypatch.setattr(F, "scaled_dot_product_attention", break_kernel(F.scaled_dot_product_attention))
    assert wrong_ones() == expected


def test_the_doctor_reports_the_worst(one_preset, monkeypatch):
    assert [finding.status for finding in check_steps()] == [OK, OK]
    found = [(0.0, "padding, experts"), (torch.inf, "packed documents, experts")]
    monkeypatch.setattr(step_check, "find_errors", lambda *args: found)
    finding = next(check_steps())
    assert finding.status == BAD and finding.advice
    assert finding.message == "float32: inf% off the reference at most (packed documents, experts)"
