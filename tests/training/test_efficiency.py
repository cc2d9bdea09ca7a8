"""Compare FLOPs and memory with counts written out and with the measured memory of a process."""

import re
import subprocess
import sys

import pytest
import torch

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.training import efficiency
from hf_pretrain.training.efficiency import (
    PeakRate,
    estimate_memory,
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


def test_gemm_rate_is_a_rate():
    assert 1e9 < measure_gemm_rate(torch.device("cpu"), torch.float32) < 1e15


def test_the_peak_is_the_best_measurement_and_never_below_the_reached_rate(monkeypatch, caplog):
    rates = iter([1e9, 4e9, 2e9, 3e9, 2e9])
    monkeypatch.setattr(efficiency, "measure_gemm_rate", lambda *args, **kwargs: next(rates))
    peak = PeakRate(torch.device("cpu"), torch.float32)
    assert [peak.update(reached) for reached in (2e9, 2e9)] == [4e9, 4e9] and not caplog.records
    assert [peak.update(reached) for reached in (5e9, 1e9)] == [5e9, 5e9]
    assert "The run reaches 5e+09 FLOP/s, and matrix products reached 4e+09" in caplog.text


def test_a_run_faster_than_the_data_sheet_shows_full_use_and_warns(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    peak = PeakRate(torch.device("cuda"), torch.bfloat16)
    assert peak.update(100e12) == 121e12 and not caplog.records
    assert peak.update(130e12) == 130e12
    # One wrong interval does not change the peak of the others.
    assert peak.update(100e12) == 121e12
    assert "1.3e+14 FLOP/s, and the data sheet of this GPU says 1.21e+14" in caplog.text
    assert peak.update(131e12) == 131e12 and len(caplog.records) == 1


def test_fixed_memory_equals_the_zero_papers():
    """Table 1 of the ZeRO paper: 16 bytes per parameter for Adam in half precision, divided as in each stage."""
    model = toy_model()
    number = sum(parameter.numel() for parameter in model.parameters())
    expected = {"zero1": 4 + 12 / 4, "zero2": 2 + 14 / 4, "zero3": 16 / 4}
    for strategy, bytes_a_parameter in expected.items():
        estimate = estimate_memory(model, max_length=32, strategy=strategy, world_size=4)
        # Before a step, a rank also holds the gradients of its share in float32.
        fixed = estimate.parameters + estimate.gradients + estimate.optimizer - number
        assert fixed == pytest.approx(bytes_a_parameter * number)
    with pytest.raises(ValueError, match="strategy='zero9' is unknown; there are ddp, fsdp"):
        estimate_memory(model, max_length=32, strategy="zero9")
    with pytest.raises(ValueError, match="optimizer='moun' is unknown; there are adamw, muon"):
        estimate_memory(model, max_length=32, optimizer="moun")


def kept_by_a_forward_pass(config: MiniMindConfig, length: int, dtype: torch.dtype) -> int:
    """Return the bytes per row of the real tensors that are kept for the backward pass."""
    config._attn_implementation, config._experts_implementation = "packed", "eager"
    model = MiniMindForCausalLM(config).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    totals = []
    for num_rows in (1, 2):
        kept: dict[int, torch.UntypedStorage] = {}

        def note(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        ids = torch.randint(3, 160, (num_rows, length), generator=torch.Generator().manual_seed(0))
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
        ):
            outputs = model(ids, labels=ids, skip_logits=True, use_cache=False)
        assert outputs.loss.requires_grad
        totals.append(sum(storage.nbytes() for storage in kept.values()))
    return totals[1] - totals[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "tolerance"), [({}, 0), (EXPERTS, 0.05)], ids=["dense", "moe"])
def test_estimated_activations_equal_those_of_a_forward_pass(experts, tolerance, dtype):
    model = toy_model(vocab_size=160, hidden_size=64, num_key_value_heads=2, **experts)
    found = estimate_memory(model, max_length=96, dtype=dtype).activations_per_row
    assert found == pytest.approx(kept_by_a_forward_pass(model.config, 96, dtype), rel=tolerance)


def test_an_estimate_runs_no_forward_pass():
    """Estimate for 104M parameters and 2,048 tokens without values. A GPU's kernel keeps no attention weights."""
    with torch.device("meta"):
        model = MiniMindForCausalLM(MiniMindConfig(**PRESETS["minimind2"]))
    gpu, cpu = (
        estimate_memory(model, max_length=2048, strategy="zero2", world_size=8, device_type=device_type)
        for device_type in ("cuda", "cpu")
    )
    assert 2**29 < gpu.activations_per_row < cpu.activations_per_row < 2**31


def test_4_bit_weights_count_as_unpacked_weights():
    class Params4bit(torch.nn.Parameter):
        """Two weights in a byte, as in bitsandbytes."""

    model, packed = toy_model(), toy_model()
    for module in packed.modules():
        if isinstance(module, torch.nn.Linear) and module is not packed.lm_head:
            storage = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = Params4bit(storage, requires_grad=False)
    assert num_active_parameters(packed) == num_active_parameters(model)


def test_largest_batch_is_the_one_that_fits():
    estimate = estimate_memory(toy_model(), max_length=32)
    memory = estimate.total(7)
    assert estimate.largest_batch(memory) == 7 and estimate.largest_batch(memory - 1) == 6
    assert estimate.largest_batch(0) == 0


MEASURE = """
import torch
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.training.efficiency import peak_memory_bytes

cpu = torch.device("cpu")
torch.randn(512, 512) @ torch.randn(512, 512)
before = peak_memory_bytes(cpu)
config = MiniMindConfig(**PRESETS["minimind2-small"])
config._attn_implementation = "packed"
model = MiniMindForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids = torch.randint(6400, (6, 512))
for _ in range(2):
    model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("TAKEN", peak_memory_bytes(cpu) - before)
"""


@pytest.mark.slow
def test_the_peak_memory_excludes_the_parent_process():
    """It must not include the parent process, unlike getrusage's peak."""
    words = [sys.executable, "-c", "from hf_pretrain.training.efficiency import *; import torch"]
    words[-1] += "; print(peak_memory_bytes(torch.device('cpu')))"
    held = bytearray(2**31)
    result = subprocess.run(words, cwd=ROOT, env=cpu_environment(), capture_output=True, text=True, timeout=500)
    assert 2**27 < int(result.stdout) < len(held)


@pytest.mark.slow
def test_the_estimate_is_near_the_measured_memory():
    """
    The estimate is within 15 % of the resident memory of a training process, most of it activations. It is in
    float32, because bfloat16 takes minutes on a CPU without units for it.
    """
    words = [sys.executable, "-c", MEASURE]
    # The allocator returns freed memory, so that holes in the heap do not count.
    environment = cpu_environment(MALLOC_MMAP_THRESHOLD_="1000000")
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-2000:]
    taken = int(re.search(r"TAKEN (\d+)", result.stdout)[1])
    config = MiniMindConfig(**PRESETS["minimind2-small"])
    config._attn_implementation = "packed"
    estimate = estimate_memory(MiniMindForCausalLM(config).train(), max_length=512, dtype=torch.float32)
    assert estimate.total(6) == pytest.approx(taken, rel=0.15)
