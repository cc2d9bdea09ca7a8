"""
The plan of a run (`--dry_run`): model, data, steps, memory, time, disk space and files.

A dry run prepares the data and the model like the run itself, and measures a few steps on the device at hand. It
writes nothing into `output_dir`.
"""

import atexit
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.config import HF_DATASETS_CACHE
from torch import nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from ..checkpoints.writer import checkpoint_bytes
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.activity import announce
from ..runtime.allocation import return_freed_blocks
from ..runtime.processes import num_local_processes, on_main_process
from ..weights.adapters import base_model_of
from .arguments import MIN_EVAL_STEPS, LMTrainingArguments
from .efficiency import (
    available_memory_bytes,
    flops_per_token,
    held_memory_bytes,
    num_active_parameters,
    peak_memory_bytes,
    reset_peak_memory,
)
from .optimizers import optimizer_name
from .row_source import inner_loader


NUM_TIMED_STEPS = 4
# Measure the memory of at most this many further steps, and of none after one that took so long.
_MAX_FURTHER_STEPS, _MAX_SECONDS = 4, 30
# The forward pass alone takes about a third of a step.
_FORWARD_SHARE = 1 / 3
# Unit of `--per_device_train_batch_size`, by kind of data.
_ROW_NAMES = {"preferences": "rows", "tasks": "completions"}
# A dry run neither saves, evaluates, pushes nor reports to trackers.
_TURNED_OFF: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": [],
}


def begin_dry_run(args: LMTrainingArguments) -> None:
    """
    Turn off saving, evaluation, pushes and trackers, and replace `output_dir` by a temporary directory. All ranks must
    call this function.
    """
    args.planned = {name: vars(args)[name] for name in ("output_dir", *_TURNED_OFF)}
    for name, value in _TURNED_OFF.items():
        setattr(args, name, value)
    args.output_dir = on_main_process(args, lambda: tempfile.mkdtemp(prefix="hf_pretrain-dry-run-"))
    # Another machine has no such directory yet.
    os.makedirs(args.output_dir, exist_ok=True)
    atexit.register(shutil.rmtree, args.output_dir, ignore_errors=True)


def format_plan(trainer: Any) -> str:
    """
    Train a few steps, and return the plan. All ranks must call this function.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of the run, after [`begin_dry_run`].
    """
    measured = StepMeasurement(trainer)
    # The losses of these steps tell the user nothing.
    for printer in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printer)
    trainer.add_callback(measured)
    announce("measuring the time and the memory of a step")
    trainer.train()
    args, num_steps = trainer.args, trainer.state.max_steps
    # A rank may hold only a part of the model.
    with torch.device("meta"):
        whole = MiniMindForCausalLM(base_model_of(trainer.accelerator.unwrap_model(trainer.model)).config)
    number = sum(parameter.numel() for parameter in whole.parameters())
    lines = [
        (
            "Model",
            f"{number / 1e6:,.1f} M parameters, {num_active_parameters(whole) / 1e6:,.1f} M active per token, "
            f"{flops_per_token(whole) / 1e6:,.0f} MFLOP per token",
        ),
        *(("" if i else "Data", line) for i, line in enumerate(trainer.run_facts.data)),
        ("Steps", f"{num_steps:,} of {args.rows_per_step} sequences each, {_describe_passes(trainer)}"),
    ]
    tokens = measured.tokens_per_step * num_steps
    if tokens:
        ratio = tokens / number
        # Short runs see far less than a token per parameter.
        lines.append(("Tokens", f"about {tokens:,.0f}, {ratio:{',.1f' if ratio >= 1 else '.2g'}} per parameter"))
    lines += [
        ("Optimizer", f"{optimizer_name(args)}, peak learning rate {args.learning_rate:g}"),
        *trainer._plan_lines(),
        ("Memory", _describe_memory(measured)),
        ("", _describe_largest_batch(measured)),
        ("Time", _describe_time(trainer, measured.step_seconds)),
        ("Disk", _describe_disk(trainer)),
        ("Files", f"{args.planned['output_dir']}: model, checkpoints, run.json, report.html"),
        ("", f"{HF_DATASETS_CACHE}: prepared data"),
        ("Hub", args.hub_model_id or "your namespace" if args.planned["push_to_hub"] else "the run pushes nothing"),
    ]
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


class StepMeasurement(TrainerCallback):
    """
    Time the first steps of a dry run, and count their tokens. Then measure the memory of further steps, which use the
    rows of a batch 1, 2, 4 and 8 times, and end the training.

    At each moment of a step, the memory is a constant (gradients, communication buckets) plus a part in proportion to
    the rows. So `k` times the rows take at most `k` times the memory, and scaling the measured memory with the number
    of rows never underestimates it. The error shrinks as the rows grow.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of the dry run.
        num_timed_steps (`int`): number of steps before the further ones.
    """

    def __init__(self, trainer: Any, num_timed_steps: int = NUM_TIMED_STEPS):
        self.trainer, self.num_timed_steps = trainer, num_timed_steps
        # The beginning of the training, and the end of each step.
        self.times: list[float] = []
        self.tokens_per_step = 0.0
        # Peak of this process in the timed steps, and bytes that it can use.
        self.peak_bytes = self.usable_bytes = 0.0
        # Bytes that the process holds before the first step, and bytes that a step of `num_rows` per device adds.
        self.held_bytes = self.added_bytes = 0.0
        self.num_rows = 0
        # (rows, tokens per row) of the passes of the last step that compute gradients, and all lengths of rows so far.
        self._shapes: set[tuple[int, int]] = set()
        self.row_lengths: set[int] = set()

    @property
    def step_seconds(self) -> float:
        """Mean time of the timed steps, without the first one, which also compiles, unless it is the only one."""
        times = self.times[: self.num_timed_steps + 1]
        first = min(1, len(times) - 2)
        return (times[-1] - times[first]) / (len(times) - 1 - first)

    @property
    def row_length(self) -> int:
        """Tokens per row in the last step."""
        return max(length for _, length in self._shapes)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # Exclude the memory that the preparation of the data used.
        return_freed_blocks()
        reset_peak_memory(args.device)
        self.held_bytes = held_memory_bytes(args.device)
        embedding = base_model_of(self.trainer.accelerator.unwrap_model(model)).get_input_embeddings()
        self._hook = embedding.register_forward_pre_hook(self._note_shape)
        self.times = [time.perf_counter()]

    def _note_shape(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        # Generation computes no gradients, and its passes have other shapes.
        if torch.is_grad_enabled():
            self._shapes.add(tuple(inputs[0].shape))
            self.row_lengths.add(inputs[0].shape[1])

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= self.num_timed_steps:
            self._shapes = set()

    def on_step_end(self, args, state, control, **kwargs):
        if args.device.type != "cpu":
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())
        number = state.global_step - min(self.num_timed_steps, state.max_steps)
        if number < 0:
            return
        if number == 0:
            # Trainer counts the tokens when it logs.
            control.should_log = True
            self.peak_bytes, self.usable_bytes = peak_memory_bytes(args.device), _usable_bytes(args.device)
            # The data may have fewer rows than a batch.
            self._batch_size = min(args.per_device_train_batch_size, max(rows for rows, _ in self._shapes))
        self.num_rows = self._batch_size * 2 ** max(0, number - 1)
        self.added_bytes = peak_memory_bytes(args.device) - self.held_bytes
        if state.global_step == state.max_steps or self.trainer.ranks.largest(int(self._is_done(number))):
            control.should_training_stop = True
            self._hook.remove()
        else:
            self.trainer.show_longest_step()
            self.trainer.planned_batches = iter(repeat_rows(self.trainer.get_train_dataloader(), 2**number))

    def _is_done(self, number: int) -> bool:
        """Return whether a further step would be too many, take too long, or not fit."""
        # The first further step repeats nothing.
        needed = self.held_bytes + (2 if number else 1) * self.added_bytes
        is_slow = self.times[-1] - self.times[-2] > _MAX_SECONDS
        return number >= _MAX_FURTHER_STEPS or is_slow or needed > self.usable_bytes

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == min(self.num_timed_steps, state.max_steps):
            self.tokens_per_step = state.num_input_tokens_seen / state.global_step

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


def _describe_passes(trainer: Any) -> str:
    dataset, state = trainer.train_dataset, trainer.state
    if not isinstance(dataset, datasets.Dataset):
        return "streamed"
    # The sampler decides how many steps a pass has. GRPO's repeats each row.
    return f"{state.max_steps * state.epoch / state.global_step:,.2f} passes over {len(dataset):,} sequences"


def _describe_memory(measured: StepMeasurement) -> str:
    """Return the measured peak of the largest process."""
    gather = measured.trainer.ranks.gather
    peak, usable = max(gather(measured.peak_bytes)), min(gather(measured.usable_bytes))
    text = f"peak of {peak / 2**30:.2f} GiB per process in the measured steps, of {usable / 2**30:.1f} GiB"
    if measured.trainer.args.device.type == "cpu":
        # Blocks of different sizes fill the heap: a run of `tiny` held 0.83 GiB after 3 steps, and 1.6 after 260.
        text += " (a longer run may hold twice as much, because the allocator keeps freed memory)"
    return text


def _describe_largest_batch(measured: StepMeasurement) -> str:
    rows = _ROW_NAMES.get(measured.trainer.run_facts.data_kind, "sequences")
    fit = f"at least {measured.largest_batch():,} {rows} of {measured.row_length} tokens fit"
    fewer = ", fewer if longer ones come" if len(measured.row_lengths) > 1 else ""
    return f"{fit} (--per_device_train_batch_size){fewer}"


def _describe_time(trainer: Any, step_seconds: float) -> str:
    args, num_steps = trainer.args, trainer.state.max_steps
    text = f"{step_seconds:.2f} s per step, {_format_duration(step_seconds * num_steps)} of training"
    if trainer.eval_dataset is None:
        return text
    # Each run ends with an evaluation.
    number = 1
    if args.planned["eval_strategy"] == "steps":
        # Below 1, it is a share of all steps, which Trainer rounds up.
        interval = args.eval_steps if args.eval_steps >= 1 else math.ceil(args.eval_steps * num_steps)
        number = math.ceil(num_steps / max(interval, MIN_EVAL_STEPS if args.spaces_evaluations else 1))
    elif args.planned["eval_strategy"] == "epoch":
        # A stream of unknown length has no last epoch.
        epochs = trainer.state.num_train_epochs
        number = epochs if epochs <= num_steps else 1
    number += args.planned["eval_on_start"]
    # In reinforcement learning, each row of the validation set is a prompt, and generation takes most of a step.
    share = trainer.num_generations_eval if trainer.run_facts.data_kind == "tasks" else _FORWARD_SHARE
    each = len(trainer.eval_dataset) / args.rows_per_step * step_seconds * share
    return f"{text}; {number} evaluation{'s' if number > 1 else ''} of about {_format_duration(each)} each"


def _describe_disk(trainer: Any) -> str:
    args = trainer.args
    size = checkpoint_bytes(trainer.model, args, uses_deepspeed=trainer.is_deepspeed_enabled)
    directory = Path(args.planned["output_dir"]).absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    return f"{size / 1e6:,.0f} MB per checkpoint, {args.save_total_limit or 'all'} kept, of {free / 1e9:,.0f} GB free"


def _format_duration(seconds: float) -> str:
    """Return seconds as text with a fitting unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


__all__ = ["StepMeasurement", "begin_dry_run", "format_plan", "repeat_rows"]
