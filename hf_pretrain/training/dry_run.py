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
from ..loading.adapters import base_model_of
from ..rows.collators import DataCollatorForPackedRows
from ..runtime.command_line import announce
from ..runtime.texts import Translation, format_rows, translation
from .budgets import BUDGETS, whole_model
from .measurements import flops_per_token, num_active_parameters, peak_memory_bytes
from .training_arguments import optimizer_name


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


NUM_STEPS = 4


def format_plan(trainer: "RunTrainer", *, language: str = "en") -> str:
    """
    Train a few steps, and return the plan. All ranks must call this function.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of a run that began with `settle_dry_run`.
        language (`str`): `en` or `zh`. What the run records, such as the counts of its data, is English.
    """
    t = translation(language)
    # The losses of these steps tell the user nothing.
    for printer in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printer)
    trainer.add_callback(StopAfterFewSteps)
    announce("measuring the time and the memory of a step")
    trainer.train()
    args, state, num_steps = trainer.args, trainer.state, trainer.state.max_steps
    whole = whole_model(base_model_of(trainer.accelerator.unwrap_model(trainer.model)).config)
    number = whole.num_parameters()
    counts = {"total": number, "active": num_active_parameters(whole), "flops": flops_per_token(whole)}
    sizes = {name: f"{count / 1e6:,.1f}" for name, count in counts.items()}
    steps = {"steps": f"{num_steps:,}", "rows": args.rows_per_step, "passes": _describe_passes(trainer, t)}
    lines = [
        ("Model", t("{total} M parameters, {active} M active per token, {flops} MFLOP per token", **sizes)),
        *(("" if i else "Data", line) for i, line in enumerate(trainer.run.facts.data)),
        *(("Budget", f"--{name} {vars(args)[name]}") for name in BUDGETS if vars(args)[name] is not None),
        ("Steps", t("{steps} of {rows} sequences each, {passes}", **steps)),
    ]
    measured = [entry["training_seconds"] for entry in state.log_history if "training_seconds" in entry]
    # The first step also compiles.
    seconds = fmean(measured[1:] or measured)
    tokens = state.num_input_tokens_seen / state.global_step * num_steps
    lines += [
        ("Tokens", t("about {tokens}, {each} per parameter", tokens=f"{tokens:,.0f}", each=f"{tokens / number:.3g}")),
        ("Optimizer", f"{optimizer_name(args)}, {t('peak learning rate')} {args.learning_rate:g}"),
        ("Memory", _describe_memory(trainer, peak_memory_bytes(args.device), t)),
        *_describe_time(args.price_per_hour, seconds * num_steps, num_steps, tokens, t),
        ("Disk", _describe_disk(trainer, t)),
        ("Files", f"{trainer.run.planned_dir}: {t('model, checkpoints, run.json, report.html')}"),
        ("", f"{HF_DATASETS_CACHE}: {t('prepared data')}"),
    ]
    return format_rows(lines, t, width=10)


class StopAfterFewSteps(TrainerCallback):
    """Log each of the first steps, and end the training."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = True
        control.should_training_stop |= state.global_step >= NUM_STEPS


def _describe_passes(trainer: "RunTrainer", t: Translation) -> str:
    dataset, state = trainer.train_dataset, trainer.state
    if not isinstance(dataset, datasets.Dataset):
        return t("streamed")
    # The sampler decides how many steps a pass has. GRPO's repeats each row.
    number = f"{state.max_steps * state.epoch / state.global_step:,.2f}"
    return t("{number} passes over {rows} sequences", number=number, rows=f"{len(dataset):,}")


def _describe_memory(trainer: "RunTrainer", peak_bytes: float, t: Translation) -> str:
    """Return the measured peak of the largest process."""
    peak = f"{max(trainer.run.ranks.gather(peak_bytes)) / 2**30:.2f}"
    text = t("peak of {peak} GiB per process in the measured steps", peak=peak)
    device = trainer.args.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return text + t(", of {total} GiB", total=f"{total / 2**30:.1f}")
    if device.type == "mps":
        limit, free = torch.mps.recommended_max_memory(), psutil.virtual_memory().available
        text += t(", of {limit} GiB that Metal recommends as the most", limit=f"{limit / 2**30:.1f}")
        return text + t("; {free} GiB of the memory that GPU and CPU share are free", free=f"{free / 2**30:.1f}")
    if isinstance(trainer.data_collator, DataCollatorForPackedRows) and trainer.data_collator.max_length:
        return text
    # Where each batch has another length, oneDNN keeps a primitive for each matrix product of each new length.
    return text + t(" (a longer run on a CPU may hold twice as much)")


def _describe_time(
    price_per_hour: float | None, seconds: float, num_steps: int, tokens: float, t: Translation
) -> list[tuple[str, str]]:
    """Return the rows of the time of all steps and, if an hour has a price, of the price."""
    times = {"pace": f"{seconds / num_steps:.3g}", "speed": f"{tokens / seconds:,.0f}"}
    times["all"] = str(timedelta(seconds=round(seconds)))
    rows = [("Time", t("{pace} s per step, {speed} tokens/s, {all} of training, without evaluations", **times))]
    return rows if price_per_hour is None else [*rows, ("Price", f"{price_per_hour * seconds / 3600:.2f}")]


def _describe_disk(trainer: "RunTrainer", t: Translation) -> str:
    args = trainer.args
    size = checkpoint_bytes(trainer.model, args)
    directory = Path(trainer.run.planned_dir).absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    sizes = {"size": f"{size / 1e6:,.0f}", "kept": args.save_total_limit or t("all"), "free": f"{free / 1e9:,.0f}"}
    return t("{size} MB per checkpoint, {kept} kept, of {free} GB free", **sizes)
