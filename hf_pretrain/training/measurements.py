"""
Measure a run: its losses, tokens and speed between two logs, its FLOPs, and its memory.

Model FLOPs count the matrix products with parameters, forward and backward: 6 per parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1). Experts count only for the tokens that are routed to them. The count
leaves out attention's own products, so that it does not depend on the length of documents, and the recomputation of
activation checkpointing.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn


class Throughput:
    """
    Measure the time and the speed of the training between two logs, without evaluations and saving.

    Args:
        num_tokens (`int`): tokens that the run has seen before this launch.
    """

    def __init__(self, num_tokens: int = 0):
        self.reset(num_tokens)

    def reset(self, num_tokens: int) -> None:
        """Forget all steps. `num_tokens` are the tokens that the run has seen."""
        self._num_tokens = num_tokens
        # The beginning of the interval, moved forward by each pause; `None` before `begin`.
        self._start: float | None = None
        # Time of earlier intervals without new tokens.
        self._seconds = 0.0
        self._is_paused = False

    def begin(self) -> None:
        """Start the clock, unless it runs already. A resumed run first skips the rows that it has trained on."""
        if self._start is None:
            self._start = time.perf_counter()

    def measure(self, num_tokens: int) -> dict[str, float]:
        """
        Return `training_seconds` since the last call, and `tokens_per_second` if there are new tokens.

        In reinforcement learning, several steps use the completions of one generation. The time of steps without new
        tokens counts for the next speed.

        Args:
            num_tokens (`int`): all tokens that the run has seen.
        """
        self.begin()
        now = time.perf_counter()
        logs = {"training_seconds": now - self._start}
        self._start = now
        self._seconds += logs["training_seconds"]
        if num_tokens != self._num_tokens:
            logs["tokens_per_second"] = (num_tokens - self._num_tokens) / self._seconds
            self._num_tokens, self._seconds = num_tokens, 0.0
        return logs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block, such as an evaluation. A block within the block changes nothing."""
        if self._start is None or self._is_paused:
            yield
            return
        self._is_paused, start = True, time.perf_counter()
        try:
            yield
        finally:
            self._is_paused = False
            self._start += time.perf_counter() - start


class Meter:
    """
    Add up losses and tokens on the device. Read them back only once per log, because each read waits for the device.

    Args:
        flops_per_token (`float`): FLOPs of a forward and backward pass for one token.
        peak (`float`, *optional*): the peak FLOPs per second of one device.
        world_size (`int`): number of devices that train.
        add_up (`Callable`): returns the sums of tensors over the ranks.
    """

    def __init__(
        self,
        flops_per_token: float,
        peak: float | None,
        *,
        world_size: int = 1,
        add_up: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = lambda sums: sums,
    ):
        self.flops_per_token = flops_per_token
        self.peak = peak
        self.world_size = world_size
        self.add_up = add_up
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.num_steps = 0
        self._losses: torch.Tensor | None = None
        self._names: tuple[str, ...] = ()
        self._new_tokens: torch.Tensor | None = None

    def add_step(self, num_tokens: torch.Tensor) -> None:
        """Add one step and its tokens, given as an integer tensor that stays on the device."""
        self._new_tokens = num_tokens if self._new_tokens is None else self._new_tokens + num_tokens
        self.num_steps += 1

    def add_losses(self, parts: dict[str, torch.Tensor]) -> None:
        """Add the parts of a micro-batch's loss: scalar tensors, keyed by their names in the log."""
        self._names = tuple(parts)
        # One tensor for all parts: a log then needs one reduction over the ranks and one transfer.
        losses = torch.stack(list(parts.values())).detach()
        self._losses = losses if self._losses is None else self._losses + losses

    def read_tokens(self) -> int:
        """Return the number of tokens since the last call. This waits for the device."""
        if self._new_tokens is None:
            return 0
        num_tokens, self._new_tokens = int(self._new_tokens.item()), None
        return num_tokens

    def measure(self, tokens_per_second: float | None) -> dict[str, float]:
        """
        Return mean losses and FLOPs since the last call, and reset the sums. All ranks call this method.

        Args:
            tokens_per_second (`float`, *optional*): the speed of all devices together, if there is one.

        Returns:
            `dict`: the mean of each part, `model_flops_per_second` of all devices together, and, with a known peak,
            `mfu` as a share of it.
        """
        if self._losses is None:
            return {}
        (losses,) = self.add_up((self._losses,))
        logs = dict(zip(self._names, (losses / self.num_steps).tolist(), strict=True))
        self._losses, self.num_steps = None, 0
        if tokens_per_second is not None:
            logs["model_flops_per_second"] = tokens_per_second * self.flops_per_token
            if self.peak is not None:
                logs["mfu"] = logs["model_flops_per_second"] / self.world_size / self.peak
        return logs


# FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets. The first match wins, so "H100 PCIe" must stand
# before "H100". The T4 has float16 alone.
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
    "RTX 3060 Ti": 32e12,
    "RTX 3060": 25.5e12,
    "T4": 65e12,
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
    """Return the FLOP/s of a GPU in half precision from its data sheet; `None` elsewhere, and for a part of a GPU."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        return None
    return next((peak for part, peak in PEAK_FLOPS_PER_SECOND.items() if re.search(rf"\b{part}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """
    Return the peak memory of this process in bytes: allocated GPU memory on CUDA and on Apple GPUs, otherwise resident
    memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        # torch counts no peak there. The driver's memory includes blocks that torch keeps for later steps.
        return torch.mps.driver_allocated_memory()
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    if sys.platform == "darwin":
        # Windows has no such module.
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # NOTE: on Linux, ru_maxrss of a new process starts at the peak of the process that started it. VmHWM does not.
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
