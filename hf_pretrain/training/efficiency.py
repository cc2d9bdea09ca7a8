"""
Model FLOPs, the peak rate of a device, and memory: the figures that show how much of the machine a run uses.

Model FLOPs count the matrix products with parameters, forward and backward: 6 per parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1). Experts count only for the tokens that are routed to them. The count
leaves out attention's own products, so that it does not depend on the length of documents, and the recomputation of
activation checkpointing.
"""

import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers.utils import logging


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

    For bfloat16 and float16 on a known GPU, this is the figure of the data sheet. Otherwise it is measured, and the
    speed of the run raises it: other busy processes make a measurement too low.

    Args:
        device (`torch.device`): the device to measure.
        dtype (`torch.dtype`): the dtype of the matrix products.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        is_known = device.type == "cuda" and dtype != torch.float32
        known = known_peak(torch.cuda.get_device_name(device)) if is_known else None
        self.flops_per_second = known or measure_gemm_rate(device, dtype)

    def update(self, reached: float) -> float:
        """Return the peak in FLOP/s, which is never lower than the FLOP/s that the run has reached."""
        if reached > self.flops_per_second:
            logger.warning_once(
                f"The run reaches {reached:.3g} FLOP/s, more than the measured or published peak of this device, "
                f"{self.flops_per_second:.3g}. mfu now uses the run's own speed as the peak, and was too high before."
            )
            self.flops_per_second = reached
        return self.flops_per_second


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several large square matrix products."""
    # Matrices must be large enough to keep all threads busy, and small enough to take milliseconds.
    size = 8192 if device.type == "cuda" else 1024 if torch.get_num_threads() <= 4 else 2048
    left, right, product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    if device.type == "cuda":
        # The matrices above do not count as memory of the run.
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best


def held_memory_bytes(device: torch.device) -> int:
    """Return the memory of this process in bytes: allocated GPU memory on CUDA, otherwise resident memory."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated GPU memory on CUDA, otherwise resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        # Windows has no such module.
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # NOTE: on Linux, ru_maxrss of a new process starts at the peak of the process that started it. VmHWM does not.
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def reset_peak_memory(device: torch.device) -> None:
    """Let [`peak_memory_bytes`] count anew. On a CPU, only Linux can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


__all__ = [
    "PeakRate",
    "flops_per_token",
    "held_memory_bytes",
    "known_peak",
    "measure_gemm_rate",
    "num_active_parameters",
    "peak_memory_bytes",
    "reset_peak_memory",
    "synchronize",
]
