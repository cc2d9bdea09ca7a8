"""
The plan of a run (`--dry_run`): model, data, steps, memory, time, disk space and files.

A dry run prepares the data and the model like the run itself, and measures a few steps on the device at hand. It
writes nothing into `output_dir`.
"""

import shutil
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import datasets
import psutil
import torch
from datasets.config import HF_DATASETS_CACHE
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from ..checkpoints.writer import checkpoint_bytes
from ..runtime.command_line import announce
from ..weights.adapters import base_model_of
from .budgets import BUDGETS, whole_model
from .measurements import flops_per_token, num_active_parameters, peak_memory_bytes
from .training_arguments import optimizer_name


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


NUM_STEPS = 4


def format_plan(trainer: "RunTrainer") -> str:
    """
    Train a few steps, and return the plan. All ranks must call this function.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of a run that began with `settle_dry_run`.
    """
    # The losses of these steps tell the user nothing.
    for printer in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printer)
    trainer.add_callback(StopAfterFewSteps)
    announce("measuring the time and the memory of a step")
    trainer.train()
    args, state, num_steps = trainer.args, trainer.state, trainer.state.max_steps
    whole = whole_model(base_model_of(trainer.accelerator.unwrap_model(trainer.model)).config)
    number = whole.num_parameters()
    lines = [
        (
            "Model",
            f"{number / 1e6:,.1f} M parameters, {num_active_parameters(whole) / 1e6:,.1f} M active per token, "
            f"{flops_per_token(whole) / 1e6:,.0f} MFLOP per token",
        ),
        *(("" if i else "Data", line) for i, line in enumerate(trainer.run.facts.data)),
        *(("Budget", f"--{name} {vars(args)[name]}") for name in BUDGETS if vars(args)[name] is not None),
        ("Steps", f"{num_steps:,} of {args.rows_per_step} sequences each, {_describe_passes(trainer)}"),
    ]
    times = [entry["training_seconds"] for entry in state.log_history if "training_seconds" in entry]
    # The first step also compiles.
    seconds = fmean(times[1:] or times)
    duration = timedelta(seconds=round(seconds * num_steps))
    tokens = state.num_input_tokens_seen / state.global_step * num_steps
    lines += [
        ("Tokens", f"about {tokens:,.0f}, {tokens / number:.3g} per parameter"),
        ("Optimizer", f"{optimizer_name(args)}, peak learning rate {args.learning_rate:g}"),
        ("Memory", _describe_memory(trainer, peak_memory_bytes(args.device))),
        ("Time", f"{seconds:.3g} s per step, {duration} of training, without evaluations"),
        ("Disk", _describe_disk(trainer)),
        ("Files", f"{trainer.run.planned_dir}: model, checkpoints, run.json, report.html"),
        ("", f"{HF_DATASETS_CACHE}: prepared data"),
    ]
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


class StopAfterFewSteps(TrainerCallback):
    """Log each of the first steps, and end the training."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = True
        control.should_training_stop |= state.global_step >= NUM_STEPS


def _describe_passes(trainer: "RunTrainer") -> str:
    dataset, state = trainer.train_dataset, trainer.state
    if not isinstance(dataset, datasets.Dataset):
        return "streamed"
    # The sampler decides how many steps a pass has. GRPO's repeats each row.
    return f"{state.max_steps * state.epoch / state.global_step:,.2f} passes over {len(dataset):,} sequences"


def _describe_memory(trainer: "RunTrainer", peak_bytes: float) -> str:
    """Return the measured peak of the largest process."""
    text = f"peak of {max(trainer.run.ranks.gather(peak_bytes)) / 2**30:.2f} GiB per process in the measured steps"
    device = trainer.args.device
    if device.type == "cuda":
        return f"{text}, of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    if device.type == "mps":
        limit, free = torch.mps.recommended_max_memory(), psutil.virtual_memory().available
        return (
            f"{text}, of {limit / 2**30:.1f} GiB that Metal recommends as the most; {free / 2**30:.1f} GiB of the "
            "memory that GPU and CPU share are free"
        )
    # Blocks of different sizes fill the heap: a run of `tiny` held 0.83 GiB after 3 steps, and 1.6 after 260.
    return f"{text} (a longer run on a CPU may hold twice as much)"


def _describe_disk(trainer: "RunTrainer") -> str:
    args = trainer.args
    size = checkpoint_bytes(trainer.model, args)
    directory = Path(trainer.run.planned_dir).absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    return f"{size / 1e6:,.0f} MB per checkpoint, {args.save_total_limit or 'all'} kept, of {free / 1e9:,.0f} GB free"
