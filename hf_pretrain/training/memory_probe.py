"""
The largest batch that fits, measured on the run itself.

At each moment of a step, the memory is a constant plus a part that grows with the number of rows. The constant
(gradients, communication buckets) is never below zero. So `k` times the rows take at most `k` times the memory that a
step adds, and an estimate in proportion never promises too much. It comes closer with more rows, because the constant
becomes small beside the rest. Therefore a few steps repeat their rows two, four and eight times.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import has_length

from ..runtime.allocation import return_freed_blocks
from ..runtime.processes import num_local_processes
from ..weights.adapters import base_model_of
from .efficiency import available_memory_bytes, held_memory_bytes, peak_memory_bytes, reset_peak_memory


# Measure at most this many further steps, and none after one that took so long.
_MAX_STEPS, _MAX_SECONDS = 3, 30


class MemoryProbe(TrainerCallback):
    """
    Measure the memory of the first steps of a dry run, and of further steps that repeat the rows of a batch 2, 4 and 8
    times. Then end the training.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of the dry run.
        after_step (`int`): number of steps before the further ones.
    """

    def __init__(self, trainer: Any, *, after_step: int):
        self.trainer, self.after_step = trainer, after_step
        # Peak of this process in the first steps, and bytes that it can use.
        self.peak = self.free = 0.0
        # Bytes that the process holds before the first step, and bytes that a step of `num_rows` per device adds.
        self.held = self.added = 0.0
        self.num_rows = 0
        # Tokens of the longest row.
        self.length = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Without the memory of the preparation of the data.
        return_freed_blocks()
        reset_peak_memory(args.device)
        self.held = held_memory_bytes(args.device)
        embedding = base_model_of(self.trainer.accelerator.unwrap_model(model)).get_input_embeddings()
        self._hook = embedding.register_forward_pre_hook(self._note_length)

    def _note_length(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self.length = max(self.length, inputs[0].shape[-1])

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < min(self.after_step, state.max_steps):
            return
        number = state.global_step - self.after_step
        if number <= 0:
            self.peak, self.free = peak_memory_bytes(args.device), _usable_bytes(args.device)
        self.num_rows = self._batch_size() * 2 ** max(0, number)
        self.added = peak_memory_bytes(args.device) - self.held
        if self.trainer.ranks.largest(int(self._is_done(number))):
            control.should_training_stop = True
            self._hook.remove()
        else:
            self.trainer.show_longest_step()
            loader = repeat_rows(self.trainer.get_train_dataloader(), 2 ** (number + 1))
            self.trainer.planned_batches = iter(loader)

    def _batch_size(self) -> int:
        """Return the rows per device. A batch cannot have more rows than the data."""
        args, dataset = self.trainer.args, self.trainer.train_dataset
        size: int = args.per_device_train_batch_size
        return min(size, math.ceil(len(dataset) / args.world_size)) if has_length(dataset) else size

    def _is_done(self, number: int) -> bool:
        """Return whether a further step would be too many, take too long, or not fit."""
        took = time.perf_counter() - self._start
        return number >= _MAX_STEPS or took > _MAX_SECONDS or self.held + 2 * self.added > self.free

    def largest_batch(self) -> int:
        """Return the largest number of rows per device that fits on all ranks. All ranks must call this method."""
        # In a longer run, the heap of a CPU process may hold twice as much.
        usable = self.free / 2 if self.trainer.args.device.type == "cpu" else self.free
        largest = int((usable - self.held) * self.num_rows / self.added)
        return max(0, min(self.trainer.ranks.gather(largest)))


def repeat_rows(loader: Any, times: int) -> Any:
    """Change a data loader, possibly wrapped by accelerate, so that its batches repeat their rows. Return it."""
    inner = getattr(loader, "base_dataloader", loader)
    inner.collate_fn = partial(_collate_repeated, inner.collate_fn, times)
    return loader


def _collate_repeated(collate: Callable[[list[Any]], Any], times: int, rows: list[Any]) -> Any:
    return collate(rows * times)


def _usable_bytes(device: torch.device) -> float:
    """Return the bytes that this process can use."""
    free: float = available_memory_bytes(device)
    if device.type != "cpu":
        return free
    # All processes share the free memory of the machine. Each one also keeps what it uses already.
    return free / num_local_processes() + psutil.Process().memory_info().rss


__all__ = ["MemoryProbe", "repeat_rows"]
