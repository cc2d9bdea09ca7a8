"""
The largest batch that fits, measured on the run itself.

At each moment of a step, the memory is a constant (gradients, communication buckets) plus a part in proportion to the
rows. So `k` times the rows take at most `k` times the memory, and scaling the measured memory with the number of rows
never underestimates it. The error shrinks as the rows grow, so further steps repeat their rows up to eight times.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from ..runtime.allocation import return_freed_blocks
from ..runtime.processes import num_local_processes
from ..weights.adapters import base_model_of
from .efficiency import available_memory_bytes, held_memory_bytes, peak_memory_bytes, reset_peak_memory
from .row_source import inner_loader


# Measure at most this many further steps, and none after one that took so long.
_MAX_STEPS, _MAX_SECONDS = 4, 30


class MemoryProbe(TrainerCallback):
    """
    Measure the memory of the first steps of a dry run, and of further steps that use the rows of a batch 1, 2, 4 and 8
    times. Then end the training.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of the dry run.
        after_step (`int`): number of steps before the further ones.
    """

    def __init__(self, trainer: Any, *, after_step: int):
        self.trainer, self.after_step = trainer, after_step
        # Peak of this process in the first steps, and bytes that it can use.
        self.peak_bytes = self.usable_bytes = 0.0
        # Bytes that the process holds before the first step, and bytes that a step of `num_rows` per device adds.
        self.held_bytes = self.added_bytes = 0.0
        self.num_rows = 0
        # (rows, tokens per row) of the passes that compute gradients, in the first steps and in the last step.
        self._first_shapes: set[tuple[int, int]] = set()
        self._shapes: set[tuple[int, int]] = set()

    @property
    def row_length(self) -> int:
        """Tokens per row in the last step."""
        return max(length for _, length in self._shapes)

    @property
    def lengths_differ(self) -> bool:
        """Whether the rows of different steps have different lengths."""
        return len({length for _, length in self._first_shapes | self._shapes}) > 1

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Exclude the memory that the preparation of the data used.
        return_freed_blocks()
        reset_peak_memory(args.device)
        self.held_bytes = held_memory_bytes(args.device)
        embedding = base_model_of(self.trainer.accelerator.unwrap_model(model)).get_input_embeddings()
        self._hook = embedding.register_forward_pre_hook(self._note_shape)

    def _note_shape(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        # Generation computes no gradients, and its passes have other shapes.
        if torch.is_grad_enabled():
            self._shapes.add(tuple(inputs[0].shape))

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()
        if state.global_step >= self.after_step:
            self._shapes = set()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < min(self.after_step, state.max_steps):
            return
        number = max(0, state.global_step - self.after_step)
        if number == 0:
            self.peak_bytes, self.usable_bytes = peak_memory_bytes(args.device), _usable_bytes(args.device)
            self._first_shapes = self._shapes
            # The data may have fewer rows than a batch.
            self._batch_size = min(args.per_device_train_batch_size, max(rows for rows, _ in self._shapes))
        self.num_rows = self._batch_size * 2 ** max(0, number - 1)
        self.added_bytes = peak_memory_bytes(args.device) - self.held_bytes
        if state.global_step == state.max_steps or self.trainer.ranks.largest(int(self._is_done(number))):
            control.should_training_stop = True
            self._hook.remove()
        else:
            self.trainer.show_longest_step()
            loader = repeat_rows(self.trainer.get_train_dataloader(), 2**number)
            self.trainer.planned_batches = iter(loader)

    def _is_done(self, number: int) -> bool:
        """Return whether a further step would be too many, take too long, or not fit."""
        took = time.perf_counter() - self._start
        # The first further step repeats nothing.
        needed = self.held_bytes + (2 if number else 1) * self.added_bytes
        return number >= _MAX_STEPS or took > _MAX_SECONDS or needed > self.usable_bytes

    def largest_batch(self) -> int:
        """Return the largest number of rows per device that fits on all ranks. All ranks must call this method."""
        # In a longer run, the heap of a CPU process may hold twice as much.
        usable = self.usable_bytes / 2 if self.trainer.args.device.type == "cpu" else self.usable_bytes
        largest = int((usable - self.held_bytes) * self.num_rows / self.added_bytes)
        return max(0, min(self.trainer.ranks.gather(largest)))


def repeat_rows(loader: Any, times: int) -> Any:
    """Change a data loader, possibly wrapped by accelerate, so that its batches repeat their rows. Return it."""
    inner = inner_loader(loader)
    inner.collate_fn = partial(_collate_repeated, inner.collate_fn, times)
    return loader


def _collate_repeated(collate: Callable[[list[Any]], Any], times: int, rows: list[Any]) -> Any:
    return collate(rows * times)


def _usable_bytes(device: torch.device) -> float:
    """Return the bytes that this process can use, with those that it holds."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    # All processes share the free memory of the machine.
    return available_memory_bytes(device) / num_local_processes() + held_memory_bytes(device)


__all__ = ["MemoryProbe", "repeat_rows"]
