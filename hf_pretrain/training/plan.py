"""
The plan of a run (`--dry_run`): model, data, steps, learning rate, memory, time, disk space and files.

A dry run prepares the data and the model like the run itself, and trains four steps. It times the last three. A few
further steps measure the memory (`memory_probe.py`). A dry run writes nothing into `output_dir`.
"""

import atexit
import itertools
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.config import HF_DATASETS_CACHE
from torch import nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from ..checkpoints.writer import checkpoint_bytes
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.activity import activity
from ..runtime.processes import on_main_process
from ..weights.adapters import adapter_base, base_model_of, is_adapted
from .arguments import MIN_EVAL_STEPS, LMTrainingArguments
from .efficiency import flops_per_token, num_active_parameters
from .memory_probe import MemoryProbe
from .optimizers import optimizer_name
from .row_source import is_stream


NUM_STEPS = 4
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60
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
    args.planned = {name: getattr(args, name) for name in ("output_dir", *_TURNED_OFF)}
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
    clock, probe = _Clock(), MemoryProbe(trainer, after_step=NUM_STEPS)
    # The losses of these steps tell the user nothing.
    for printer in (PrinterCallback, ProgressCallback):
        trainer.pop_callback(printer)
    trainer.add_callback(clock)
    trainer.add_callback(probe)
    activity.begin("measuring the time and the memory of a step")
    trainer.train()
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    num_steps = trainer.state.max_steps
    tokens = clock.tokens_per_step * num_steps
    whole = _on_meta(model)
    number = sum(parameter.numel() for parameter in whole.parameters())
    lines = [
        (
            "Model",
            f"{number / 1e6:,.1f} M parameters, {num_active_parameters(whole) / 1e6:,.1f} M active per token, "
            f"{flops_per_token(whole) / 1e6:,.0f} MFLOP per token",
        ),
        *(("" if i else "Data", line) for i, line in enumerate(trainer.run_facts.data)),
        ("Steps", f"{num_steps:,} of {args.rows_per_step} sequences each, {_passes(trainer, num_steps)}"),
    ]
    if tokens:
        ratio = tokens / number
        # Short runs see far less than a token per parameter.
        lines.append(("Tokens", f"about {tokens:,.0f}, {ratio:{',.1f' if ratio >= 1 else '.2g'}} per parameter"))
    if hasattr(args, "num_generations"):
        lines.append(("Rollouts", _describe_rollouts(args)))
    lines.append(("Optimizer", f"{optimizer_name(args)}, peak learning rate {args.learning_rate:g}"))
    if curve := _draw_schedule(trainer, num_steps):
        lines.append(("Learning rate", curve))
    lines += [
        *trainer._plan_lines(),
        ("Memory", _describe_memory(trainer, probe)),
        ("", _describe_largest_batch(trainer, probe)),
        ("Time", _describe_time(trainer, clock, num_steps)),
        ("Disk", _describe_disk(trainer, num_steps)),
        (
            "Files",
            f"{args.planned['output_dir']}: model, checkpoints, run.json, history.jsonl, report.html, train.log",
        ),
        ("", f"{HF_DATASETS_CACHE}: prepared data"),
        ("Hub", args.hub_model_id or "your namespace" if args.planned["push_to_hub"] else "the run pushes nothing"),
        ("Random", _describe_randomness(trainer)),
    ]
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


class _Clock(TrainerCallback):
    """
    Time the first steps, and count their tokens. The first step counts only if it is the only one: it also compiles.
    """

    def __init__(self) -> None:
        # The beginning of the training, and the end of each timed step.
        self.times: list[float] = []
        self.tokens_per_step = 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps that count."""
        return max(1, len(self.times) - 2)

    @property
    def step_seconds(self) -> float:
        return (self.times[-1] - self.times[-1 - self.num_steps]) / self.num_steps

    def describe(self) -> str:
        """Return the mean time of a step, its range if the steps differ by a fifth."""
        times = self.times[-1 - self.num_steps :]
        seconds = sorted(end - start for start, end in itertools.pairwise(times))
        differ = seconds[-1] > 1.2 * seconds[0]
        spread = f", from {seconds[0]:.2f} to {seconds[-1]:.2f}" if differ else ""
        return f"{self.step_seconds:.2f} s per step (mean of {self.num_steps}{spread})"

    def on_train_begin(self, args, state, control, **kwargs):
        self.times = [time.perf_counter()]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step <= NUM_STEPS:
            if args.device.type != "cpu":
                torch.accelerator.synchronize()
            self.times.append(time.perf_counter())
        if state.global_step == min(NUM_STEPS, state.max_steps):
            # Trainer counts the tokens when it logs.
            control.should_log = True

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == min(NUM_STEPS, state.max_steps):
            self.tokens_per_step = state.num_input_tokens_seen / state.global_step


def _on_meta(model: Any) -> MiniMindForCausalLM:
    """Return the whole model on the meta device. A rank may hold only a part of the model."""
    with torch.device("meta"):
        return MiniMindForCausalLM(base_model_of(model).config)


def _passes(trainer: Any, num_steps: int) -> str:
    dataset, state = trainer.train_dataset, trainer.state
    if isinstance(dataset, datasets.Dataset):
        # The sampler decides how many steps a pass has. GRPO's repeats each row.
        return f"{num_steps * state.epoch / state.global_step:,.2f} passes over {len(dataset):,} sequences"
    return "streamed"


def _describe_rollouts(args: Any) -> str:
    reference = "with a reference model" if getattr(args, "beta", 0) else "without a reference model"
    return (
        f"{args.num_generations} completions per prompt, each of at most {args.max_completion_length} tokens, "
        f"{reference}"
    )


def _draw_schedule(trainer: Any, num_steps: int) -> str:
    """Return the learning rate over the run as one line of bars; "" for a schedule that depends on metrics."""
    schedule = trainer.lr_scheduler
    # accelerate wraps the schedule.
    schedule = getattr(schedule, "scheduler", schedule)
    if not hasattr(schedule, "lr_lambdas"):
        return ""
    steps = [round(i * (num_steps - 1) / (_CURVE_WIDTH - 1)) for i in range(_CURVE_WIDTH)]
    factors = [schedule.lr_lambdas[0](step) for step in steps]
    bars = "".join(_BARS[min(len(_BARS) - 1, int(factor * len(_BARS)))] for factor in factors)
    return f"{bars} ends at {factors[-1] * trainer.args.learning_rate:.3g}"


def _describe_memory(trainer: Any, probe: MemoryProbe) -> str:
    """Return the measured peak of the largest process."""
    peak, free = (trainer.ranks.gather(value) for value in (probe.peak_bytes, probe.usable_bytes))
    text = f"peak of {max(peak) / 2**30:.2f} GiB per process in the measured steps, of {min(free) / 2**30:.1f} GiB"
    if trainer.args.device.type == "cpu":
        # Blocks of different sizes fill the heap: a run of `tiny` held 0.83 GiB after 3 steps, and 1.6 after 260.
        text += " (a longer run may hold twice as much, because the allocator keeps freed memory)"
    return text


def _describe_largest_batch(trainer: Any, probe: MemoryProbe) -> str:
    """Return the estimated largest batch."""
    rows = _ROW_NAMES.get(trainer.run_facts.data_kind, "sequences")
    fit = f"at least {probe.largest_batch():,} {rows} of {probe.row_length} tokens fit"
    fewer = ", fewer if longer ones come" if probe.lengths_differ else ""
    return f"{fit} (--per_device_train_batch_size){fewer}"


def _in_steps(interval: float, num_steps: int) -> int:
    """Return an interval in steps. Below 1, it is a share of all steps, which Trainer rounds up."""
    return int(interval) if interval >= 1 else math.ceil(interval * num_steps)


def _describe_time(trainer: Any, clock: _Clock, num_steps: int) -> str:
    args = trainer.args
    training = clock.step_seconds * num_steps
    text = f"{clock.describe()}, {_duration(training)} of training"
    # Each run ends with an evaluation.
    evaluations = 1 + args.planned["eval_on_start"]
    if args.planned["eval_strategy"] == "steps":
        interval = _in_steps(args.eval_steps, num_steps)
        if args.spaces_evaluations:
            interval = max(interval, MIN_EVAL_STEPS)
        evaluations = math.ceil(num_steps / interval) + args.planned["eval_on_start"]
    elif args.planned["eval_strategy"] == "epoch":
        evaluations = _num_epochs(trainer, num_steps) + args.planned["eval_on_start"]
    if trainer.eval_dataset is not None:
        each = len(trainer.eval_dataset) / args.rows_per_step * clock.step_seconds
        # In reinforcement learning, each row of the validation set is a prompt, and generation takes most of a step.
        each *= getattr(trainer, "num_generations_eval", _FORWARD_SHARE)
        text += f"; {evaluations} evaluation{'s' if evaluations > 1 else ''} of about {_duration(each)} each"
    return text


def _num_epochs(trainer: Any, num_steps: int) -> int:
    """Return the number of epochs that a run begins, each of at least one step; 1 for a stream of unknown length."""
    number: int = trainer.state.num_train_epochs
    return number if number <= num_steps else 1


def _describe_disk(trainer: Any, num_steps: int) -> str:
    args = trainer.args
    size = checkpoint_bytes(trainer.model, args, uses_deepspeed=trainer.is_deepspeed_enabled)
    number = 0
    if args.planned["save_strategy"] == "steps":
        number = math.ceil(num_steps / _in_steps(args.save_steps, num_steps))
    elif args.planned["save_strategy"] == "epoch":
        number = _num_epochs(trainer, num_steps)
    kept = min(number, args.save_total_limit or number)
    directory = Path(args.planned["output_dir"]).absolute()
    while not directory.exists():
        directory = directory.parent
    # While a checkpoint is written, the oldest one still exists.
    needed = (kept + (number > kept)) * size
    return (
        f"{number} checkpoints of {size / 1e6:,.0f} MB, {kept} kept: {needed / 1e6:,.0f} MB of "
        f"{shutil.disk_usage(directory).free / 1e9:,.0f} GB free"
    )


def _describe_randomness(trainer: Any) -> str:
    """Return what is random in the run, and which seeds determine it."""
    args, base_model = trainer.args, trainer.run_facts.base_model
    generates = trainer.run_facts.data_kind == "tasks"
    # Streams are shuffled when they are loaded, and TRL shuffles tasks, both by --seed.
    has_data_seed = args.data_seed is not None and not generates and not is_stream(trainer.train_dataset)
    parts = {
        "initial weights": base_model is None,
        "weights of a new adapter": is_adapted(trainer.model) and adapter_base(base_model) is None,
        "order of the data": not has_data_seed,
        "sampled completions": generates and not args.use_vllm,
        "dropout": any(isinstance(module, nn.Dropout) and module.p > 0 for module in trainer.model.modules()),
    }
    seeded = [part for part, is_seeded in parts.items() if is_seeded]
    lines = {
        f"--seed {args.seed} determines {', '.join(seeded)}": bool(seeded),
        # --seed still draws the documents of a mixture, so this is only the order of the rows.
        f"--data_seed {args.data_seed} determines order of the rows": has_data_seed,
        "vLLM samples completions by seeds of its own": generates and args.use_vllm,
        f"the weights come from {base_model}": base_model is not None,
    }
    return "; ".join(line for line, applies in lines.items() if applies)


def _duration(seconds: float) -> str:
    """Return seconds as text with a fitting unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


__all__ = ["begin_dry_run", "format_plan"]
