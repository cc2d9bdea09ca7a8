"""FLOPs and memory against counts written out, and the peak rate of a device."""

import subprocess
import sys

import pytest
import torch

from hf_pretrain.training import efficiency
from hf_pretrain.training.efficiency import (
    PeakRate,
    flops_per_token,
    known_peak,
    measure_gemm_rate,
    num_active_parameters,
)
from tests.invariants.launching import ROOT, cpu_environment
from tests.toys import EXPERTS, toy_model


def test_active_parameters_and_flops():
    dense = toy_model(vocab_size=100)
    number = sum(parameter.numel() for parameter in dense.parameters())
    assert num_active_parameters(dense) == number and flops_per_token(dense) == 6 * number
    # An untied embedding is a lookup without a matrix product.
    untied = toy_model(vocab_size=100, tie_word_embeddings=False)
    assert num_active_parameters(untied) == number
    moe = toy_model(vocab_size=100, **EXPERTS)
    experts = sum(parameter.numel() for name, parameter in moe.named_parameters() if ".experts." in name)
    total = sum(parameter.numel() for parameter in moe.parameters())
    assert num_active_parameters(moe) == total - experts / 2
    # Frozen weights need no gradient.
    dense.model.embed_tokens.weight.requires_grad_(False)
    assert flops_per_token(dense) == 6 * number - 2 * dense.model.embed_tokens.weight.numel()


def test_peaks_match_the_name_of_the_gpu():
    assert known_peak("NVIDIA L40") == 181e12 and known_peak("NVIDIA L4") == 121e12
    assert known_peak("NVIDIA H100 80GB HBM3") == 989e12 > known_peak("NVIDIA H100 PCIe")
    assert known_peak("NVIDIA GeForce RTX 4090") == 165e12 and known_peak("Tesla K80") is None


def test_the_peak_is_never_below_the_reached_rate(monkeypatch, caplog):
    assert 1e9 < measure_gemm_rate(torch.device("cpu"), torch.float32) < 1e15
    monkeypatch.setattr(efficiency, "measure_gemm_rate", lambda *args: 4e9)
    peak = PeakRate(torch.device("cpu"), torch.float32)
    assert peak.update(2e9) == 4e9 and not caplog.records
    assert [peak.update(reached) for reached in (5e9, 1e9)] == [5e9, 5e9]
    assert "The run reaches 5e+09 FLOP/s" in caplog.text


@pytest.mark.slow
def test_the_peak_memory_excludes_the_parent_process():
    """It must not include the parent process, unlike getrusage's peak."""
    words = [sys.executable, "-c", "from hf_pretrain.training.efficiency import *; import torch"]
    words[-1] += "; print(peak_memory_bytes(torch.device('cpu')))"
    held = bytearray(2**31)
    result = subprocess.run(words, cwd=ROOT, env=cpu_environment(), capture_output=True, text=True, timeout=500)
    assert 2**27 < int(result.stdout) < len(held)
