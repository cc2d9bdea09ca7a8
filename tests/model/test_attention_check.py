"""The attention check finds kernels that are wrong in one layout, and cuDNN's attention is off."""

import pytest
import torch
import torch.nn.functional as F

from hf_pretrain import MiniMindConfig
from hf_pretrain.model import attention_check
from hf_pretrain.model.attention_check import LENGTHS, LIMITS, attention_errors, check_attention
from hf_pretrain.runtime.machine_checks import BAD, OK


CONFIG = MiniMindConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
PACKED, PADDED = ["packed documents"], ["left padding", "right padding"]
DECODING = ["one token, left padding", "one token"]


def errors(dtype=torch.float32, **kwargs) -> dict[str, float]:
    return attention_errors(CONFIG, torch.device("cpu"), dtype, **kwargs)


def wrong_ones(dtype=torch.float32) -> list[str]:
    return [name for name, error in errors(dtype).items() if error > LIMITS[dtype]]


@pytest.mark.parametrize("implementation", ["packed", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_of_a_cpu_are_right(implementation, dtype):
    found = errors(dtype, implementation=implementation)
    assert [*found] == PACKED + PADDED + DECODING
    assert all(0 < error < LIMITS[dtype] for error in found.values()), found


@pytest.mark.parametrize(
    "break_call, expected",
    [
        # A kernel that ignores the mask leaks padding and later tokens. Packed documents have no mask.
        (lambda kw: kw | {"attn_mask": None} if kw.get("attn_mask") is not None else kw, PADDED + DECODING[:1]),
        (lambda kw: kw | {"is_causal": False}, PACKED),
        (lambda kw: kw | {"scale": kw["scale"] * 1.2}, PACKED + PADDED + DECODING),
    ],
    ids=["no mask", "not causal", "wrong scale"],
)
def test_a_wrong_kernel_is_found(monkeypatch, break_call, expected):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: right(*args, **break_call(kw)))
    assert wrong_ones() == expected


@pytest.mark.parametrize("num_queries", [1, max(LENGTHS)], ids=["decoding", "training"])
def test_one_wrong_head_is_found(monkeypatch, num_queries):
    right = F.scaled_dot_product_attention

    def break_one_head(query, key, value, **kw):
        output = right(query, key, value, **kw)
        if (query.shape[2] == num_queries) or (query.shape[1] == 2 and num_queries == 1):
            output = torch.cat([output[:, :1] * 1.3, output[:, 1:]], dim=1)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", break_one_head)
    assert set(wrong_ones(torch.bfloat16)) >= set(DECODING if num_queries == 1 else PADDED)


def test_gradients_that_are_not_finite_are_found(monkeypatch):
    """As cuDNN gave them, for outputs that were right."""
    right = F.scaled_dot_product_attention

    def attend(*args, **kw):
        output = right(*args, **kw)
        if output.requires_grad and kw.get("attn_mask") is not None:
            output.register_hook(lambda gradient: gradient * torch.nan)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    assert wrong_ones() == PADDED
    assert errors()["left padding"] == torch.inf


def test_the_doctor_reports_the_worst_layout(monkeypatch):
    monkeypatch.setattr(attention_check, "default_device_type", lambda *, use_cpu: "cpu")
    monkeypatch.setattr(attention_check, "PRESETS", {"one": {"hidden_size": 64}})
    assert [finding.status for finding in check_attention()] == [OK, OK]
    monkeypatch.setattr(attention_check, "attention_errors", lambda *args: {"left padding": torch.inf, "packed": 0.0})
    finding = next(check_attention())
    assert finding.status == BAD and finding.advice
    assert finding.message == "float32: inf% off the reference at most (left padding, 8/8 heads of 8)"


def test_cudnn_attention_is_off():
    # Importing the model turns it off; no library turns it on again.
    assert not torch.backends.cuda.cudnn_sdp_enabled()
