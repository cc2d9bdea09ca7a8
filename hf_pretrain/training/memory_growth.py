"""
How the memory of a training step grows with the batch, measured on the run itself.

The allocator's record of a step gives the bytes that are live at each moment. A second step with the same rows twice
gives the same moments once more. What is larger there grows with the batch: activations, logits and the cache of
generation. What is equal does not: gradients, communication buckets, and the update. So any run can be measured,
whatever its loss, its layers and its sharding.
"""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.profiler import ProfilerActivity
from transformers.trainer_callback import TrainerCallback

from ..runtime.processes import num_local_processes
from ..weights.adapters import base_model_of
from .efficiency import available_memory_bytes, peak_memory_bytes


# Steps that are measured: at most this many, and none after one that took so long.
_MAX_STEPS, _MAX_SECONDS = 4, 30
# A severity of torch's log.
_ERROR = 2
# Events that two records must have in common to be at the same moment, and how far to look for that.
_NUM_ALIKE, _MAX_GAP = 64, 4096


class AllocationRecord:
    """
    The live bytes of a device over a stretch of time, from the events of torch's memory profiler.

    NOTE: `torch.profiler` records each operator as well, which takes 2 GB for a step that generates. Its functions in
    C++ can leave the operators out.
    """

    def begin(self) -> None:
        """Begin to record. The threads of the backward pass record, too."""
        # The profiler would print its beginning and its end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        _silence_unknown_blocks()
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        _prepare_profiler(config, {ProfilerActivity.CPU})
        # The stubs of torch lack the scopes, and `nbytes` below.
        _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]

    def end(self, device: torch.device) -> torch.Tensor:
        """Return the live bytes after each event, above those at the beginning; a float64 tensor on the CPU."""
        changes = [
            event.nbytes()  # type: ignore[attr-defined]
            for event in _disable_profiler().events()
            if event.name() == "[memory]" and event.device_type().name.lower() == device.type
        ]
        # The beginning counts, too: no record is empty.
        return torch.tensor([0, *changes], dtype=torch.float64).cumsum(0)


def _silence_unknown_blocks() -> None:
    """
    Hide torch's warnings about freed blocks that are older than the record. The record does not need them.

    NOTE: torch reads TORCH_CPP_LOG_LEVEL only when it is imported.
    """
    library = Path(torch.__file__).parent / "lib/libc10.so"
    if library.exists():
        # A build with glog has no such variable.
        with suppress(ValueError):
            ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level").value = _ERROR


@dataclass
class MemoryGrowth:
    """
    The memory of a step as a function of the batch: at each moment, some bytes plus some bytes per row.

    Args:
        batch_size (`int`): rows per device of the first record.
        held (`float`): bytes that the process holds between steps.
        once (`torch.Tensor`): record of a step.
        twice (`torch.Tensor`, *optional*): record of a step with the same rows twice. Without it, all bytes that the
            step adds count as growing, so that the result is too low rather than too high.
    """

    batch_size: int
    held: float
    once: torch.Tensor
    twice: torch.Tensor | None = None

    def __post_init__(self) -> None:
        once, twice = _align(self.once, 2 * self.once if self.twice is None else self.twice)
        self._at_batch_size = self.held + once
        self._per_row = (twice - once).clamp(min=0) / self.batch_size

    def total(self, batch_size: int) -> float:
        """Return the bytes at the peak of a step with `batch_size` rows per device."""
        return float((self._at_batch_size + (batch_size - self.batch_size) * self._per_row).max())

    def largest_batch(self, memory_bytes: float) -> int | None:
        """
        Return the largest number of rows per device that fit into `memory_bytes`; 0 if none do, and `None` if nothing
        grows, as on a device whose allocator torch does not record.
        """
        if not self._per_row.any():
            return None
        grows = self._per_row > 0
        if (self._at_batch_size[~grows] > memory_bytes).any():
            return 0
        rows = self.batch_size + (memory_bytes - self._at_batch_size[grows]) / self._per_row[grows]
        return max(0, int(rows.min()))


def _align(once: torch.Tensor, twice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the two records in equal length, so that a position is the same moment of the step.

    Both steps allocate and free in the same order, except where the code depends on the number of rows: the loss may
    compute more chunks. There, compare the maximum of these chunks with the maximum of as many events before.
    """
    # A record begins with the value before the first event.
    values = once[1:], twice[1:]
    changes = once.diff(), twice.diff()
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([once[:1]], [twice[:1]])
    done = [0, 0]
    while True:
        rest = changes[0][done[0] :], changes[1][done[1] :]
        num_alike = int(_are_alike(*rest).int().cumprod(0).sum())
        gaps = _find_gaps(rest[0][num_alike:], rest[1][num_alike:])
        for side, gap in enumerate(gaps):
            start, end = done[side], done[side] + num_alike
            parts[side].append(values[side][start:end])
            done[side] = end + gap
            if any(gaps):
                parts[side].append(values[side][max(0, done[side] - max(gaps)) : done[side]].max()[None])
        if not any(gaps):
            return torch.cat(parts[0]), torch.cat(parts[1])


def _are_alike(once: torch.Tensor, twice: torch.Tensor) -> torch.Tensor:
    """Return which events may be the same: a tensor of the batch is twice as large, and other tensors are equal."""
    length = min(len(once), len(twice))
    ratio = twice[:length] / once[:length]
    # Experts may get somewhat more or fewer tokens.
    return (ratio > 0.75) & (ratio < 2.5)


def _find_gaps(once: torch.Tensor, twice: torch.Tensor) -> tuple[int, int]:
    """Return the number of events on either side until both continue alike; all that are left if they never do."""
    for gap in range(1, min(_MAX_GAP, max(len(once), len(twice)))):
        for gaps in ((0, gap), (gap, 0)):
            alike = _are_alike(once[gaps[0] :][:_NUM_ALIKE], twice[gaps[1] :][:_NUM_ALIKE])
            if len(alike) == _NUM_ALIKE and alike.all():
                return gaps
    return len(once), len(twice)


def repeat_rows(loader: Any, times: int) -> Any:
    """Change a data loader, possibly wrapped by accelerate, so that its batches repeat their rows. Return it."""
    inner = getattr(loader, "base_dataloader", loader)
    inner.collate_fn = partial(_collate_repeated, inner.collate_fn, times)
    return loader


def _collate_repeated(collate: Callable[[list[Any]], Any], times: int, rows: list[Any]) -> Any:
    return collate(rows * times)


class MemoryProbe(TrainerCallback):
    """
    Record the memory of steps that repeat the same rows 1, 2, 4, ... times. End the training.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of a dry run.
        after_step (`int`): number of steps before the first measured one.
    """

    def __init__(self, trainer: Any, *, after_step: int):
        self.trainer, self.after_step = trainer, after_step
        self.record = AllocationRecord()
        self.records: list[torch.Tensor] = []
        # Peak of this process in usual steps, and bytes that it can use.
        self.peak = self.free = 0.0
        # Tokens of the longest row.
        self.length = 0

    @property
    def held(self) -> float:
        """Bytes that this process holds between steps."""
        return self.peak - float(self.records[0].max())

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step < self.after_step:
            return
        self.trainer._show_longest_step()
        embedding = base_model_of(self.trainer.accelerator.unwrap_model(model)).get_input_embeddings()
        self._hook = embedding.register_forward_pre_hook(self._note_length)
        self._start = time.perf_counter()
        self.record.begin()

    def _note_length(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self.length = max(self.length, inputs[0].shape[-1])

    def on_step_end(self, args, state, control, **kwargs):
        if not self.records:
            # Before the record ends, because its list of events takes memory, too.
            self.peak, self.free = peak_memory_bytes(args.device), _usable_bytes(args.device)
        if state.global_step > self.after_step:
            self._hook.remove()
            self.records.append(self.record.end(args.device))
        if state.global_step < self.after_step:
            return
        if self.trainer.ranks.largest(int(self._is_done())):
            control.should_training_stop = True
        else:
            loader = repeat_rows(self.trainer.get_train_dataloader(), 2 ** len(self.records))
            self.trainer.planned_batches = iter(loader)

    def _is_done(self) -> bool:
        """Return whether a further step would not fit, take too long, or tell nothing new."""
        peaks = [float(record.max()) for record in self.records]
        if not peaks:
            return False
        if len(peaks) == _MAX_STEPS or self.held + 2 * peaks[-1] > self.free:
            return True
        # A loss with chunks of a maximum size grows up to that size only. Go on until the growth is the same.
        grows_alike = len(peaks) > 2 and peaks[-1] - peaks[-2] > 1.9 * (peaks[-2] - peaks[-3])
        return grows_alike or (len(peaks) > 1 and time.perf_counter() - self._start > _MAX_SECONDS)

    def growth(self) -> MemoryGrowth:
        """Return the growth between the last two steps."""
        batch_size = self.trainer.args.per_device_train_batch_size * 2 ** max(0, len(self.records) - 2)
        return MemoryGrowth(batch_size, self.held, *self.records[-2:])

    def largest_batch(self) -> int | None:
        """Return the largest batch size that fits on all ranks; `None` without an estimate. All ranks must call it."""
        is_cpu = self.trainer.args.device.type == "cpu"
        # In a longer run, a CPU's allocator may hold twice as much.
        largest = self.growth().largest_batch(self.free / (1 + is_cpu)) if self.records else None
        found = self.trainer.ranks.gather(largest)
        return None if None in found else min(found)


def _usable_bytes(device: torch.device) -> float:
    """Return the bytes that this process can use."""
    free: float = available_memory_bytes(device)
    if device.type != "cpu":
        return free
    # All processes share the free memory of the machine. Each one also keeps what it uses already.
    return free / num_local_processes() + psutil.Process().memory_info().rss


__all__ = ["AllocationRecord", "MemoryGrowth", "MemoryProbe", "repeat_rows"]
