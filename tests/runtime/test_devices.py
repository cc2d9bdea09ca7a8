"""Which precision a device has."""

import pytest
import torch

from hf_pretrain.runtime.devices import has_bfloat16_units


@pytest.mark.parametrize(("macos", "expected"), [((13, 6), False), ((14, 0), True), ((26, 1), True)], ids=str)
def test_apple_gpus_have_bfloat16_from_macos_14_on(monkeypatch, macos, expected):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos >= (major, minor))
    assert has_bfloat16_units("mps") is expected
