"""
Model FLOPs, the published peak rate of a GPU, and memory: the figures that show how much of the machine a run uses.

Model FLOPs count the matrix products with parameters, forward and backward: 6 per parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1). Experts count only for the tokens that are routed to them. The count
leaves out attention's own products, so that it does not depend on the length of documents, and the recomputation of
activation checkpointing.
"""

import re
import sys
from pathlib import Path

import psutil
import torch
from torch import nn


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


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU in half precision from its data sheet; `None` elsewhere."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_SECOND.items() if re.search(rf"\b{part}\b", name)), None)


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
