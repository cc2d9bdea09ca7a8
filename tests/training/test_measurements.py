"""FLOPs and memory against counts written out, and the peak rate of a GPU."""

import subprocess
import sys

import pytest
import torch

from hf_pretrain.training.measurements import flops_per_token, known_peak, num_active_parameters
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


def test_peaks_match_the_name_of_the_gpu(monkeypatch):
    def peak(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return known_peak(torch.device("cuda"), dtype)

    assert peak("NVIDIA L40") == 181e12 and peak("NVIDIA L4") == 121e12
    assert peak("NVIDIA H100 80GB HBM3") == 989e12 > peak("NVIDIA H100 PCIe")
    assert peak("NVIDIA GeForce RTX 4090") == 165e12 and peak("Tesla K80") is None
    # A part of a GPU has a part of its speed.
    assert peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    # The data sheets' figures are those of half precision.
    assert peak("NVIDIA L40", torch.float32) is None and known_peak(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.slow
def test_the_peak_memory_excludes_the_parent_process():
    """It must not include the parent process, unlike getrusage's peak."""
    words = [sys.executable, "-c", "from hf_pretrain.training.measurements import *; import torch"]
    words[-1] += "; print(peak_memory_bytes(torch.device('cpu')))"
    held = bytearray(2**31)
    result = subprocess.run(words, cwd=ROOT, env=cpu_environment(), capture_output=True, text=True, timeout=500)
    assert 2**27 < int(result.stdout) < len(held)
