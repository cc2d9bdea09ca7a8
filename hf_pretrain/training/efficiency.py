"""
How much of the machine a run uses: model FLOPs, the device's peak, memory.

Model FLOPs are those of the matrix products with parameters, forward and backward: 6 a parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1), of experts those that a token is sent to. Attention's own products are left
out, so that the figure does not depend on how long documents are; so is what activation checkpointing computes again.
"""

import copy
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from ..model.experts import MiniMindExperts
from ..model.loss import MAX_LOGITS
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.packed_attention import PackedDocuments
from .optimizers import OPTIM_PRESETS, is_matrix_of_muon


try:
    import resource
except ImportError:
    # Windows.
    resource = None  # type: ignore[assignment]


# FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets.
PEAK_FLOPS_PER_SECOND = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def num_active_parameters(model: nn.Module, *, trainable: bool = False) -> float:
    """
    Parameters that a token is multiplied with, or those of them that are trained. A head tied to the embedding counts once,
    an embedding of its own does not; of experts, `num_experts_per_tok` count.
    """
    total = 0.0
    config = model.config
    num_experts = getattr(config, "num_experts", 0)
    for name, parameter in model.named_parameters():
        if trainable and not parameter.requires_grad:
            continue
        if "embed_tokens" in name and not config.tie_word_embeddings:
            continue
        # Under ZeRO-3 a parameter has no elements between its uses.
        number = parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
        if type(parameter).__name__ == "Params4bit":
            # bitsandbytes packs two weights into a byte.
            number *= 2 * parameter.element_size()
        is_routed = ".experts." in name and num_experts
        total += number * (config.num_experts_per_tok / num_experts if is_routed else 1)
    return total


def flops_per_token(model: nn.Module) -> float:
    """Of training: 2 a parameter forward, 2 for the gradient of what goes in, 2 for that of a trained parameter."""
    return 4 * num_active_parameters(model) + 2 * num_active_parameters(model, trainable=True)


def known_peak(name: str) -> float | None:
    """FLOP/s in half precision of the GPU of that name."""
    for part, peak in PEAK_FLOPS_PER_SECOND.items():
        if re.search(rf"\b{part}\b", name):
            return peak
    return None


class PeakRate:
    """
    The peak FLOP/s of a device: the data sheet's figure for `dtype` bfloat16 or float16 on a GPU that is known, else the best
    measurement so far. While other processes are busy a measurement is too low, so that one alone does not suffice.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        is_known = device.type == "cuda" and dtype != torch.float32
        self._known = known_peak(torch.cuda.get_device_name(device)) if is_known else None
        self.flops_per_second = self._known or measure_gemm_rate(device, dtype)
        # An accelerator may have no memory left for large matrices while it trains.
        self._num_measurements_left = 10 if device.type == "cpu" else 0

    def update(self, reached: float) -> float:
        """Measure once more, the first ten times, and return the peak. It is never below what a run `reached`."""
        if self._known is None:
            self.flops_per_second = max(self.flops_per_second, reached)
            if self._num_measurements_left > 0:
                self._num_measurements_left -= 1
                rate = measure_gemm_rate(self.device, self.dtype, num_products=2)
                self.flops_per_second = max(self.flops_per_second, rate)
        return self.flops_per_second


def measure_gemm_rate(device: torch.device, dtype: torch.dtype, *, num_products: int = 5) -> float:
    """Measure the FLOP/s of the best of some large square matrix products."""
    # Large enough to keep all threads busy, small enough to take milliseconds.
    size = 8192 if device.type == "cuda" else 1024 if torch.get_num_threads() <= 4 else 2048
    left, right, product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(num_products):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held: of the GPU's memory, or resident of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in ru_maxrss what the process held that started this one.
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


# Of ds_configs, stages 1 and 2; there are two buckets, one on its way.
NUM_BUCKET_ELEMENTS = 12_500_000
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass
class MemoryEstimate:
    """
    Bytes of the tensors that each process holds at the peak of a step. An allocator may hold more: glibc's, on a CPU, two
    fifths, unless the environment has MALLOC_MMAP_THRESHOLD_=1000000.

    Args:
        parameters, optimizer (`float`): held throughout.
        gradients (`float`): complete at the end of the backward pass, when activations are gone; with DDP's buckets, and
            DeepSpeed's copies in float32.
        workspace (`float`): held beside activations: copies of weights in half precision or gathered from other ranks,
            buckets, and the logits that are in memory at a time.
        activations_per_row (`float`): kept from the forward to the backward pass, for one row.
    """

    parameters: float
    optimizer: float
    gradients: float
    workspace: float
    activations_per_row: float

    def total(self, batch_size: int) -> float:
        """With so many rows a process and micro-batch."""
        forward = self.workspace + batch_size * self.activations_per_row
        return self.parameters + self.optimizer + max(forward, self.gradients)

    def largest_batch(self, memory_bytes: float) -> int:
        """Rows a process and micro-batch that fit into so much memory."""
        left = memory_bytes - self.parameters - self.optimizer
        if left < max(self.workspace, self.gradients):
            return 0
        return int((left - self.workspace) // self.activations_per_row)


def estimate_memory(
    model: MiniMindForCausalLM,
    *,
    max_length: int,
    strategy: str = "ddp",
    world_size: int = 1,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cpu",
) -> MemoryEstimate:
    """
    What training a model takes. Activations are those of forward passes of one and two rows without values; the rest
    follows from the number of parameters, after https://arxiv.org/abs/1910.02054 (sections 3 and 5).

    Args:
        model ([`MiniMindForCausalLM`]): whole; its parameters may be on the meta device.
        max_length (`int`): tokens a row.
        strategy (`str`): one of `STRATEGIES`; `ddp` is also what one process does.
        optimizer (`str`): `adamw` with two states a parameter, or `muon` with one for the matrices of the layers.
        dtype (`torch.dtype`): of autocast, or float32 for none.
        device_type (`str`): what is to train it, `cpu` or a kind of GPU.

    Raises:
        `ValueError`: for an unknown strategy or optimizer, and for Muon with ZeRO-3, which does not exist.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; there are {', '.join(STRATEGIES)}.")
    if optimizer not in OPTIM_PRESETS:
        raise ValueError(f"optimizer={optimizer!r} is unknown; there are {', '.join(OPTIM_PRESETS)}.")
    if optimizer == "muon" and strategy == "zero3":
        raise ValueError("Muon needs whole matrices: not possible with ZeRO-3.")
    number = sum(parameter.numel() for parameter in model.parameters())
    states = 8 * number
    if optimizer == "muon":
        states -= 4 * sum(p.numel() for name, p in model.named_parameters() if is_matrix_of_muon(name, p))
    embedding = model.get_input_embeddings().weight.numel()
    is_half = dtype != torch.float32
    width = 2 if is_half else 4
    share = 1 / world_size
    workspace = MAX_LOGITS[device_type == "cpu"] * (2 * 4 + 2 * width)
    if strategy.startswith("zero"):
        # DeepSpeed trains in the half precision itself; the float32 weights are part of the optimizer's state. ZeRO-3 gives
        # back no weights that are soon needed again, which are all of a model of this size.
        stage = int(strategy[-1])
        parameters = width * number * (share if stage == 3 else 1)
        optimizer_states = (states + 4 * number) * share
        gradients = width * number * (share if stage >= 2 else 1) + 4 * number * share * is_half
        workspace += width * number if stage == 3 else 2 * width * NUM_BUCKET_ELEMENTS
        parameter_dtype = dtype
    else:
        parameter_dtype = torch.float32
        is_sharded = strategy == "fsdp"
        parameters, gradients, optimizer_states = (
            n * (share if is_sharded else 1) for n in (4 * number, 4 * number, states)
        )
        workspace += 2 * number * is_half
        if is_sharded:
            # The embedding and two layers at a time.
            workspace += 4 * (embedding + 2 * (number - embedding) / model.config.num_hidden_layers)
        elif world_size > 1:
            workspace, gradients = workspace + 4 * number, 2 * gradients
    activations = _activations(
        model.config, max_length, dtype, parameter_dtype=parameter_dtype, device_type=device_type
    )
    return MemoryEstimate(parameters, optimizer_states, gradients, workspace, activations)


def _activations(
    config: PreTrainedConfig, length: int, dtype: torch.dtype, *, parameter_dtype: torch.dtype, device_type: str
) -> float:
    """
    Bytes of all tensors that the forward pass of a row of one document keeps for the backward pass. Nothing is computed:
    fake tensors have shapes and no values.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "packed"
    in_groups = device_type == "cpu" or dtype == torch.float32
    with FakeTensorMode():
        model = MiniMindForCausalLM._from_config(config, dtype=parameter_dtype).train()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def pass_once(num_rows: int) -> int:
            ids = torch.zeros(num_rows, length, dtype=torch.int64)
            starts = torch.zeros(num_rows + 1, dtype=torch.int32)
            documents = PackedDocuments(starts, length, in_groups=in_groups, groups=[(num_rows, length)])
            # What would look at values.
            model.model._check_positions = lambda position_ids, length: None
            for module in model.modules():
                if isinstance(module, MiniMindExperts):
                    module.forward = partial(_run_one_expert, module)  # type: ignore[method-assign]
            kept: dict[int, torch.UntypedStorage] = {}

            def note(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
                torch.autocast("cpu", dtype=dtype, enabled=dtype != model.dtype),
            ):
                outputs = model(ids, labels=ids, skip_logits=True, use_cache=False, packed_documents=documents)
                assert outputs.loss.requires_grad
                return sum(storage.nbytes() for storage in kept.values())

        # What does not depend on the number of rows, such as copies of weights in half precision, is counted elsewhere.
        return pass_once(2) - pass_once(1)


def _run_one_expert(
    experts: MiniMindExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One for all tokens keeps what all of them keep, whichever token meets which."""
    top_k = top_k_index.shape[-1]
    tokens = hidden_states.repeat_interleave(top_k, dim=0)
    gate, up = F.linear(tokens, experts.gate_up_proj[0]).chunk(2, dim=-1)
    output = F.linear(experts.act_fn(gate) * up, experts.down_proj[0]) * top_k_weights.flatten()[:, None]
    return output.type_as(hidden_states).unflatten(0, (-1, top_k)).sum(1)


def available_memory_bytes(device: torch.device) -> int:
    """All of a GPU's memory, or what the machine has left for new processes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().available


__all__ = [
    "STRATEGIES",
    "MemoryEstimate",
    "PeakRate",
    "available_memory_bytes",
    "estimate_memory",
    "flops_per_token",
    "known_peak",
    "measure_gemm_rate",
    "num_active_parameters",
    "peak_memory_bytes",
]
