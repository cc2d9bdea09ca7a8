"""
Model FLOPs, the peak rate of a device, and memory: the figures that show how much of the machine a run uses.

Model FLOPs count the matrix products with parameters, forward and backward: 6 per parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1). Experts count only for the tokens that are routed to them. The count
leaves out attention's own products, so that it does not depend on the length of documents, and the recomputation of
activation checkpointing.
"""

import copy
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..model.experts import MiniMindExperts
from ..model.loss import MAX_LOGITS
from ..model.modeling_minimind import MiniMindForCausalLM
from ..model.packed_attention import PackedDocuments
from ..runtime.errors import UserError
from .optimizers import OPTIM_PRESETS, is_matrix_of_muon


try:
    import resource
except ImportError:
    # Windows has no such module.
    resource = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

# FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets. The first match wins, so "H100 PCIe" must stand
# before "H100".
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
    Return the number of parameters that take part in the matrix products of one token.

    A head that is tied to the embedding counts once. An untied embedding is a lookup and does not count. Routed
    experts count with the share `num_experts_per_tok / num_experts`.

    Args:
        model (`nn.Module`): a model with a MiniMind or similar config.
        trainable (`bool`): count only parameters that require gradients.
    """
    total = 0.0
    config = model.config
    num_experts = getattr(config, "num_experts", 0)
    for name, parameter in model.named_parameters():
        if trainable and not parameter.requires_grad:
            continue
        if "embed_tokens" in name and not config.tie_word_embeddings:
            continue
        # NOTE: under ZeRO-3 a parameter is empty between its uses, and DeepSpeed keeps its size in `ds_numel`.
        number = parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
        if type(parameter).__name__ == "Params4bit":
            # NOTE: bitsandbytes packs two 4-bit weights into a byte.
            number *= 2 * parameter.element_size()
        is_routed = ".experts." in name and num_experts
        total += number * (config.num_experts_per_tok / num_experts if is_routed else 1)
    return total


def flops_per_token(model: nn.Module) -> float:
    """
    Return the FLOPs of training per token. Each parameter costs 2 in the forward pass and 2 for the gradient of the
    input; a trainable parameter costs 2 more for its own gradient.
    """
    return 4 * num_active_parameters(model) + 2 * num_active_parameters(model, trainable=True)


def known_peak(name: str) -> float | None:
    """Return the FLOP/s of a GPU in half precision by its name; `None` for an unknown GPU."""
    for part, peak in PEAK_FLOPS_PER_SECOND.items():
        if re.search(rf"\b{part}\b", name):
            return peak
    return None


class PeakRate:
    """
    The peak FLOP/s of a device.

    For bfloat16 and float16 on a known GPU, this is the figure of the data sheet. Otherwise it is the best of several
    measurements, because other busy processes make a measurement too low.

    Args:
        device (`torch.device`): the device to measure.
        dtype (`torch.dtype`): the dtype of the matrix products.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        is_known = device.type == "cuda" and dtype != torch.float32
        self._known = known_peak(torch.cuda.get_device_name(device)) if is_known else None
        self.flops_per_second = self._known or measure_gemm_rate(device, dtype)
        # Measure accelerators only once: during training they may have no memory left for large matrices.
        self._num_measurements_left = 10 if device.type == "cpu" else 0
        self._was_exceeded = False

    def update(self, reached: float) -> float:
        """
        Return the peak in FLOP/s. The first ten calls measure it once more on a CPU.

        Args:
            reached (`float`): FLOP/s that the run has reached. The result is never lower.
        """
        if self._num_measurements_left > 0:
            self._num_measurements_left -= 1
            rate = measure_gemm_rate(self.device, self.dtype, num_products=2)
            self.flops_per_second = max(self.flops_per_second, rate)
        if reached <= self.flops_per_second:
            return self.flops_per_second
        if not self._was_exceeded:
            self._was_exceeded = True
            source = "the data sheet of this GPU says" if self._known else "matrix products reached"
            disturbed = (
                "" if self._known else " Other processes disturbed the measurement, so mfu was too high before."
            )
            logger.warning(
                f"The run reaches {reached:.3g} FLOP/s, and {source} {self.flops_per_second:.3g}. mfu now uses the "
                f"run's own speed as the peak.{disturbed}"
            )
        if self._known is None:
            self.flops_per_second = reached
        return reached


def measure_gemm_rate(device: torch.device, dtype: torch.dtype, *, num_products: int = 5) -> float:
    """Return the FLOP/s of the fastest of `num_products` large square matrix products."""
    # Matrices must be large enough to keep all threads busy, and small enough to take milliseconds.
    size = 8192 if device.type == "cuda" else 1024 if torch.get_num_threads() <= 4 else 2048
    left, right, product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(num_products):
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    if device.type == "cuda":
        # The matrices above do not count as memory of the run.
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def held_memory_bytes(device: torch.device) -> int:
    """Return the memory of this process in bytes: allocated GPU memory on CUDA, otherwise resident memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated GPU memory on CUDA, otherwise resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return psutil.Process().memory_info().peak_wset
    # Windows has no `resource`. macOS counts ru_maxrss in bytes, Linux in KiB.
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # NOTE: on Linux, ru_maxrss of a new process starts at the peak of the process that started it. VmHWM does not.
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def reset_peak_memory(device: torch.device) -> None:
    """Let [`peak_memory_bytes`] count anew. On a CPU, only Linux can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


# Bucket size in ds_configs/zero1.json and zero2.json. DeepSpeed fills one bucket while it sends another.
NUM_BUCKET_ELEMENTS = 12_500_000
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass
class MemoryEstimate:
    """
    Estimate of the bytes that each process holds at the peak of a step.

    The estimate counts tensors. On a CPU, the allocator keeps freed memory, so the process may hold more.

    Args:
        parameters (`float`): bytes of the parameters, held all the time.
        optimizer (`float`): bytes of the optimizer state, held all the time.
        gradients (`float`): bytes of all gradients, with DDP's buckets and DeepSpeed's float32 copies. All of them
            exist only at the end of the backward pass, when the activations are free.
        workspace (`float`): bytes in use together with the activations: half-precision or gathered copies of weights,
            communication buckets, and one chunk of logits.
        activations_per_row (`float`): bytes that one row keeps from the forward to the backward pass.
    """

    parameters: float
    optimizer: float
    gradients: float
    workspace: float
    activations_per_row: float

    def total(self, batch_size: int) -> float:
        """Return the bytes for `batch_size` rows per device and micro-batch."""
        # The backward pass frees activations while it adds gradients, so the two peaks do not coincide.
        forward = self.workspace + batch_size * self.activations_per_row
        return self.parameters + self.optimizer + max(forward, self.gradients)

    def largest_batch(self, memory_bytes: float) -> int:
        """Return the largest number of rows per device and micro-batch that fit into `memory_bytes`; 0 if none do."""
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
    Estimate the memory per process that training a model takes.

    Forward passes with fake tensors give the activations. All other figures follow from the number of parameters, as
    in https://arxiv.org/abs/1910.02054 (ZeRO, sections 3 and 5).

    Args:
        model ([`MiniMindForCausalLM`]): the whole model; its parameters may be on the meta device.
        max_length (`int`): tokens per row.
        strategy (`str`): one of `STRATEGIES`; use `ddp` for one process too.
        world_size (`int`): number of processes.
        optimizer (`str`): `adamw` with two states per parameter, or `muon` with one state for the matrices of the
            layers.
        dtype (`torch.dtype`): the dtype of autocast; float32 for none.
        device_type (`str`): the kind of device that trains, `cpu` or a kind of GPU.

    Raises:
        `ValueError`: for an unknown strategy or optimizer.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"strategy={strategy!r} is unknown; there are {', '.join(STRATEGIES)}.")
    if optimizer not in OPTIM_PRESETS:
        raise UserError(f"optimizer={optimizer!r} is unknown; there are {', '.join(OPTIM_PRESETS)}.")
    number = sum(parameter.numel() for parameter in model.parameters())
    # AdamW keeps two float32 moments, Muon one.
    states = 8 * number
    if optimizer == "muon":
        states -= 4 * sum(p.numel() for name, p in model.named_parameters() if is_matrix_of_muon(name, p))
    embedding = model.get_input_embeddings().weight.numel()
    is_half = dtype != torch.float32
    width = 2 if is_half else 4
    share = 1 / world_size
    # Logits and their gradients, in float32 and in the computing dtype.
    workspace = MAX_LOGITS[device_type == "cpu"] * (2 * 4 + 2 * width)
    if strategy.startswith("zero"):
        # DeepSpeed trains in half precision and keeps float32 weights in the optimizer state. ZeRO-3 keeps gathered
        # weights that it needs again soon; in a model of this size, these are all weights.
        stage = int(strategy[-1])
        parameters = width * number * (share if stage == 3 else 1)
        optimizer_states = (states + 4 * number) * share
        # For the update, DeepSpeed copies this rank's share of the gradients to float32.
        gradients = width * number * (share if stage >= 2 else 1) + 4 * number * share * is_half
        workspace += width * number if stage == 3 else 2 * width * NUM_BUCKET_ELEMENTS
        parameter_dtype = dtype
    else:
        parameter_dtype = torch.float32
        is_sharded = strategy == "fsdp"
        parameters, gradients, optimizer_states = (
            n * (share if is_sharded else 1) for n in (4 * number, 4 * number, states)
        )
        # Autocast keeps half-precision copies of all weights.
        workspace += 2 * number * is_half
        if is_sharded:
            # FSDP gathers the embedding and two layers at a time: the current one, and the next one in advance.
            workspace += 4 * (embedding + 2 * (number - embedding) / model.config.num_hidden_layers)
        elif world_size > 1:
            # DDP holds a second copy of all gradients in its buckets.
            workspace, gradients = workspace + 4 * number, 2 * gradients
    activations = _activations(
        model.config, max_length, dtype, parameter_dtype=parameter_dtype, device_type=device_type
    )
    return MemoryEstimate(parameters, optimizer_states, gradients, workspace, activations)


def _activations(
    config: PreTrainedConfig, length: int, dtype: torch.dtype, *, parameter_dtype: torch.dtype, device_type: str
) -> float:
    """
    Return the bytes that the forward pass of one row keeps for the backward pass. The row holds one document. Fake
    tensors have shapes but no values, so this computes nothing.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "packed"
    # Choose the implementation that packed attention uses on that device.
    in_groups = device_type == "cpu" or dtype == torch.float32
    with FakeTensorMode():
        model = MiniMindForCausalLM._from_config(config, dtype=parameter_dtype).train()
        # NOTE: fake tensors have no data pointer; the address of the storage object identifies them.
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def pass_once(num_rows: int) -> int:
            ids = torch.zeros(num_rows, length, dtype=torch.int64)
            starts = torch.zeros(num_rows + 1, dtype=torch.int32)
            documents = PackedDocuments(starts, length, in_groups=in_groups, groups=[(num_rows, length)])
            # Fake tensors have no values, so nothing can check their positions or route their tokens.
            model.model._check_positions = lambda position_ids, length: None
            for module in model.modules():
                if isinstance(module, MiniMindExperts):
                    module.forward = partial(_run_one_expert, module)  # type: ignore[method-assign]
            kept: dict[int, torch.UntypedStorage] = {}

            # Autograd calls this for each tensor that it saves. Parameters do not count, and views share a storage.
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
                # Without gradients autograd saves nothing, and the estimate would be 0.
                assert outputs.loss.requires_grad
                return sum(storage.nbytes() for storage in kept.values())

        # The difference removes tensors that do not depend on the number of rows, such as half-precision copies of
        # weights. `workspace` counts those.
        return pass_once(2) - pass_once(1)


def _run_one_expert(
    experts: MiniMindExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    Send all tokens through one expert. This keeps as many bytes as the real routing does, because the experts together
    process the same number of tokens.
    """
    top_k = top_k_index.shape[-1]
    tokens = hidden_states.repeat_interleave(top_k, dim=0)
    gate, up = F.linear(tokens, experts.gate_up_proj[0]).chunk(2, dim=-1)
    output = F.linear(experts.act_fn(gate) * up, experts.down_proj[0]) * top_k_weights.flatten()[:, None]
    return output.type_as(hidden_states).unflatten(0, (-1, top_k)).sum(1)


def available_memory_bytes(device: torch.device) -> int:
    """Return the bytes that training can use: a GPU's whole memory, or the memory that the machine has available."""
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
    "held_memory_bytes",
    "known_peak",
    "measure_gemm_rate",
    "num_active_parameters",
    "peak_memory_bytes",
    "reset_peak_memory",
]
