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
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
from datasets.config import HF_DATASETS_CACHE
from torch import nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from ..checkpoints.writer import checkpoint_bytes
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.activity import announce
from ..runtime.allocation import return_freed_blocks
from ..runtime.ranks import num_local_processes, on_main_process
from ..weights.adapters import base_model_of
from .arguments import MIN_EVAL_STEPS, LMTrainingArguments, optimizer_name
from .efficiency import (
    flops_per_token,
    held_memory_bytes,
    num_active_parameters,
    peak_memory_bytes,
    reset_peak_memory,
    synchronize,
)


NUM_STEPS = 4
# The forward pass alone takes about a third of a step.
_FORWARD_SHARE = 1 / 3
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
    Measure the time, the tokens and the memory of the first steps, and end the training.

    Args:
        trainer ([`~training.run_trainer.RunTrainer`]): the trainer of the dry run.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        # The beginning of the training, and the end of each step.
        self.times: list[float] = []
        self.tokens_per_step = 0.0
        # Bytes that this process holds before the first step, holds at most in a step, and can use.
        self.held_bytes = self.peak_bytes = self.usable_bytes = 0.0
        # (rows, tokens per row) of the passes that compute gradients.
        self._shapes: set[tuple[int, int]] = set()

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, without the first one, which also compiles, unless it is the only one."""
        first = min(1, len(self.times) - 2)
        return (self.times[-1] - self.times[first]) / (len(self.times) - 1 - first)

    @property
    def row_length(self) -> int:
        """Tokens of the longest row."""
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

    def on_step_end(self, args, state, control, **kwargs):
        synchronize(args.device)
        self.times.append(time.perf_counter())
        if state.global_step == min(NUM_STEPS, state.max_steps):
            self._hook.remove()
            self.peak_bytes, self.usable_bytes = peak_memory_bytes(args.device), _usable_bytes(args.device)
            # Trainer counts the tokens when it logs.
            control.should_log = control.should_training_stop = True

    def on_log(self, args, state, control, **kwargs):
        self.tokens_per_step = state.num_input_tokens_seen / state.global_step

    def largest_batch(self) -> int:
        """
        Return a number of rows per device that fits on all ranks. All ranks must call this method.

        At each moment of a step, the memory is a constant (gradients, optimizer) plus a part in proportion to the
        rows. So `k` times the rows take at most `k` times the memory, and this number is never too large.
        """
        # In a longer run, the heap of a CPU process may hold twice as much.
        usable = self.usable_bytes / 2 if self.trainer.args.device.type == "cpu" else self.usable_bytes
        # The data may have fewer rows than a batch.
        num_rows = min(self.trainer.args.per_device_train_batch_size, max(rows for rows, _ in self._shapes))
        largest = int((usable - self.held_bytes) * num_rows / (self.peak_bytes - self.held_bytes))
        return max(0, min(self.trainer.ranks.gather(largest)))


def _usable_bytes(device: torch.device) -> float:
    """Return the bytes that this process can use, with those that it holds."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    # All processes share the free memory of the machine.
    return psutil.virtual_memory().available / num_local_processes() + held_memory_bytes(device)


def _describe_passes(trainer: Any) -> str:
    dataset, state = trainer.train_dataset, trainer.state
    if not isinstance(dataset, datasets.Dataset):
        return "streamed"
    # The sampler decides how many steps a pass has. GRPO's repeats each row.
    return f"{state.max_steps * state.epoch / state.global_step:,.2f} passes over {len(dataset):,} sequences"


def _describe_memory(measured: StepMeasurement) -> str:
    """Return the measured peak of the largest process, and a batch that fits."""
    trainer = measured.trainer
    peak, usable = max(trainer.ranks.gather(measured.peak_bytes)), min(trainer.ranks.gather(measured.usable_bytes))
    text = f"peak of {peak / 2**30:.2f} GiB per process in the measured steps, of {usable / 2**30:.1f} GiB"
    if trainer.args.device.type == "cpu":
        # Blocks of different sizes fill the heap: a run of `tiny` held 0.83 GiB after 3 steps, and 1.6 after 260.
        text += " (a longer run on a CPU may hold twice as much)"
    # The completions of reinforcement learning get longer.
    if trainer.run_facts.data_kind != "tasks":
        text += f"; --per_device_train_batch_size {measured.largest_batch():,} fits at {measured.row_length} tokens"
    return text


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


__all__ = ["begin_dry_run", "format_plan"]
