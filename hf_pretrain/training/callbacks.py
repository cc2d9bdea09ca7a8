"""Callbacks of a run: figures of the log, progress, log lines, samples, and profiler."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.trainer_callback import ProgressCallback, TrainerCallback, TrainerState
from transformers.utils import logging

from ..run_directory.directory import RunDirectory
from ..run_directory.metrics import HEADLINES, first_figures, named_figures
from .budgets import UNKNOWN_STEPS
from .measurements import Meter, Throughput, peak_memory_bytes
from .step_loss import FiniteCheck


logger = logging.get_logger(__name__)


class RunFigures(TrainerCallback):
    """
    Add the figures of a run to each log: speed, memory and, with a meter, tokens and parts of the loss. Check the norm
    of the last step's gradients before anything is logged.

    It must be the first callback, so that trackers see its figures.

    Args:
        finite_check ([`~training.step_loss.FiniteCheck`]): the check of the run.
        eval_sets (`Callable`): returns the validation data, as Trainer takes them.
    """

    def __init__(self, finite_check: FiniteCheck, eval_sets: Callable[[], Any]):
        self.finite_check, self.eval_sets = finite_check, eval_sets
        self.throughput = Throughput()
        # `MaskedLossTrainer` sets it.
        self.meter: Meter | None = None

    def read_tokens(self, state: TrainerState) -> None:
        """Add the tokens since the last call to the state. This waits for the device."""
        if self.meter is not None:
            state.num_input_tokens_seen += self.meter.read_tokens()

    def on_train_begin(self, args, state, control, **kwargs):
        self.throughput.reset(state.num_input_tokens_seen)
        if self.meter is not None:
            self.meter.reset()

    def on_step_begin(self, args, state, control, **kwargs):
        self.throughput.begin()

    def on_log(self, args, state, control, logs=None, **kwargs):
        # Trainer has recorded a copy. A step with a broken gradient must leave none.
        entry = state.log_history.pop()
        self.finite_check.read()
        if self.meter is not None:
            self.read_tokens(state)
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if "loss" in logs:
            logs["peak_memory_gib"] = peak_memory_bytes(args.device) / 2**30
            logs |= self.throughput.measure(state.num_input_tokens_seen)
            if self.meter is not None:
                logs |= self.meter.measure(logs.get("tokens_per_second"))
        logs |= first_figures(logs, self.eval_sets())
        state.log_history.append(entry | logs)


class SaveBest(TrainerCallback):
    """
    Save each new best model for `--load_best_model_at_end`. Trainer keeps it only if it saves at that step anyway.

    It must come after the callbacks whose figures may choose the best model.
    """

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        # Of several validation sets, only one has the metric.
        value = metrics.get(f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}")
        if args.load_best_model_at_end and value is not None:
            sign = 1 if args.greater_is_better else -1
            control.should_save |= state.best_metric is None or sign * value > sign * state.best_metric


class ProgressBarCallback(ProgressCallback):
    """Trainer's progress bars, without its lines."""

    def on_log(self, args, state, control, **kwargs):
        """Do nothing: [`LogLinesCallback`] prints the lines."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # With --max_minutes, it is an estimate.
            self.training_bar.total = state.max_steps
        super().on_step_end(args, state, control, **kwargs)


class LogLinesCallback(TrainerCallback):
    """One plain line per log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        shown = [(metric.label, logs[metric.key]) for metric in HEADLINES if metric.key in logs]
        shown += [(label, logs[key]) for key, label in named_figures(logs).items()]
        figures = ", ".join(f"{label} {value:.4f}" for label, value in shown)
        if "loss" in logs:
            figures = f"loss {logs['loss']:.4f}"
            if "reward" in logs:
                figures += f", reward {logs['reward']:.4f}"
            if "tokens_per_second" in logs:
                figures += f", {logs['tokens_per_second']:,.0f} tokens/s"
            if "mfu" in logs:
                figures += f", mfu {logs['mfu']:.0%}"
        if figures:
            print_step(state, figures)


def print_step(state: TrainerState, text: str) -> None:
    """Print a line about the current step, above the progress bars."""
    total = f"/{state.max_steps}" if state.max_steps < UNKNOWN_STEPS else ""
    tqdm.write(f"step {state.global_step}{total}: {text}")
    # Python buffers redirected output. Flush, so that `tail -f` shows each step.
    sys.stdout.flush()


class LogFileCallback(TrainerCallback):
    """Write each log entry to `log.jsonl` at once, so that others can watch the run."""

    def on_train_begin(self, args, state, control, **kwargs):
        self._write(args, state, state.log_history, anew=True)

    def on_log(self, args, state, control, **kwargs):
        self._write(args, state, state.log_history[-1:])

    def _write(self, args, state, entries: list[dict[str, Any]], *, anew: bool = False) -> None:
        if state.is_world_process_zero:
            known = {"max_steps": state.max_steps} if state.max_steps < UNKNOWN_STEPS else {}
            RunDirectory(args.output_dir).write_log((entry | known for entry in entries), anew=anew)


class SampleCallback(TrainerCallback):
    """
    Generate texts for the same prompts at each evaluation, and print the first one.

    Args:
        sample (`Callable`): returns pairs of a prompt and the text that a model generates. All ranks call it.
    """

    def __init__(self, sample: Callable[[PreTrainedModel], list[tuple[str, str]]]):
        self.sample = sample
        # Steps, and the prompts and texts of each.
        self.samples: list[tuple[int, list[tuple[str, str]]]] = []

    def on_evaluate(self, args, state, control, model=None, metrics=None, **kwargs):
        if "eval_runtime" not in metrics:
            # Only the first of several validation sets has figures with plain names.
            return
        texts = self.sample(model)
        self.samples.append((state.global_step, texts))
        if state.is_world_process_zero and texts:
            RunDirectory(args.output_dir).record(samples=self.samples)
            prompt, text = texts[0]
            print_step(state, f"{prompt!r} -> {text!r}")


class AddedFigures(TrainerCallback):
    """
    Add figures to the metrics and the log of each evaluation of the first validation set.

    Args:
        measure (`Callable`): returns the figures of a model by name. All ranks call it.
        prints (`bool`): whether to print the figures, too.
    """

    def __init__(self, measure: Callable[[PreTrainedModel], dict[str, float]], *, prints: bool = False):
        self.measure, self.prints = measure, prints

    def on_evaluate(self, args, state, control, model=None, metrics=None, **kwargs):
        # Only the first of several validation sets has figures with plain names.
        if "eval_runtime" in metrics:
            figures = self.measure(model)
            metrics.update(figures)
            # Trainer has already logged a copy of `metrics`.
            state.log_history[-1].update(figures)
            if self.prints and state.is_world_process_zero:
                pairs = (f"{name.removeprefix('eval_')} {value:.4f}" for name, value in figures.items())
                print_step(state, ", ".join(pairs))


class ProfilerCallback(TrainerCallback):
    """
    Trace one step per `interval` steps, with memory and shapes, into
    `<output_dir>/profile/step-<step>-rank-<rank>.json`, and print the ten most expensive operators of rank 0.
    https://ui.perfetto.dev shows the files.

    Args:
        interval (`int`): steps per trace, at least 2.
    """

    def __init__(self, interval: int):
        self.interval = interval
        self._profiler: profile | None = None

    def on_step_end(self, args, state, control, **kwargs):
        is_cuda = args.device.type == "cuda"
        if self._profiler is not None:
            self._profiler.stop()
            directory = Path(args.output_dir, "profile")
            directory.mkdir(parents=True, exist_ok=True)
            name = f"step-{state.global_step}-rank-{args.process_index}.json"
            self._profiler.export_chrome_trace(str(directory / name))
            if args.process_index == 0:
                key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
                print(self._profiler.key_averages().table(sort_by=key, row_limit=10, max_name_column_width=60))
            self._profiler = None
        # A step begins with its data.
        if (state.global_step + 1) % self.interval == 0 and state.global_step < state.max_steps:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
            self._profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
            self._profiler.start()
