"""Callbacks of a run: progress, log lines, samples, evaluation interval and profiler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule
from transformers import PreTrainedModel
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..reports.history import History
from ..runtime.activity import Phase, activity
from ..runtime.metrics import HEADLINES


logger = logging.get_logger(__name__)


class ProgressLinesCallback(PrinterCallback):
    """One plain line per log, and the phases of the training for the display ([`~runtime.activity`])."""

    def __init__(self) -> None:
        self.training, self.evaluating = Phase("training"), Phase("evaluating")

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = activity.begin("training", state.max_steps, state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.training.done = state.global_step

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if activity.phase is not self.evaluating:
            self.evaluating = activity.begin(
                "evaluating", len(eval_dataloader) if has_length(eval_dataloader) else None
            )
        self.evaluating.done += 1

    def on_evaluate(self, args, state, control, **kwargs):
        activity.phase = self.training

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        figures = ", ".join(f"{metric.label} {logs[metric.key]:.4f}" for metric in HEADLINES if metric.key in logs)
        if "loss" in logs:
            figures = f"loss {logs['loss']:.4f}"
            if "reward" in logs:
                figures += f", reward {logs['reward']:.4f}"
            if "tokens_per_second" in logs:
                figures += f", {logs['tokens_per_second']:,.0f} tokens/s"
            if "mfu" in logs:
                figures += f", mfu {logs['mfu']:.0%}"
        if figures:
            # Python buffers redirected output. Flush, so that `tail -f` shows each step.
            print(f"step {state.global_step}/{state.max_steps}: {figures}", flush=True)


class SampleCallback(TrainerCallback):
    """
    Generate texts for the same prompts at each evaluation, and print the first one.

    Args:
        sample (`Callable`): returns pairs of a prompt and the text that a model generates. All ranks call it.
        history ([`~reports.history.History`]): keeps the texts.
    """

    def __init__(self, sample: Callable[[PreTrainedModel], list[tuple[str, str]]], history: History):
        self.sample, self.history = sample, history
        self.latest: list[tuple[str, str]] = []

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        with activity.during("generating samples"):
            self.latest = self.sample(model)
        self.history.add("samples", state.global_step, samples=self.latest)
        if state.is_world_process_zero and self.latest:
            prompt, text = self.latest[0]
            print(f"step {state.global_step}/{state.max_steps}: {prompt!r} -> {text!r}", flush=True)


class EvaluationIntervalCallback(TrainerCallback):
    """Evaluate at most every `min_steps` steps. In short runs, a tenth of all steps would be too few."""

    def __init__(self, min_steps: int):
        self.min_steps = min_steps

    def on_train_begin(self, args, state, control, **kwargs):
        # Trainer has just converted a share of all steps into a number of steps.
        state.eval_steps = max(state.eval_steps, self.min_steps)


class ProfilerCallback(TrainerCallback):
    """
    Trace one step per `interval` steps, with memory and shapes, into
    `<output_dir>/profile/step-<step>-rank-<rank>.json`, and print the ten most expensive operators of rank 0.
    https://ui.perfetto.dev shows the files.

    Args:
        interval (`int`): steps per trace, at least 2: one for the profiler's warm-up and one that is traced.
    """

    def __init__(self, interval: int):
        self.interval = interval
        self._profiler: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_over = False
        directory = Path(args.output_dir, "profile")
        directory.mkdir(parents=True, exist_ok=True)
        is_cuda = args.device.type == "cuda"

        def write(profiler: Any) -> None:
            if self._is_over:
                # `stop` also calls this function, for the unfinished step after the last one.
                return
            profiler.export_chrome_trace(str(directory / f"step-{state.global_step}-rank-{args.process_index}.json"))
            if args.process_index == 0:
                key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
                print(profiler.key_averages().table(sort_by=key, row_limit=10, max_name_column_width=60))

        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])],
            # The profiler starts slowly, so one step of warm-up comes before the traced one.
            schedule=schedule(wait=self.interval - 2, warmup=1, active=1),
            on_trace_ready=write,
            profile_memory=True,
            record_shapes=True,
        )
        self._profiler.start()

    def on_step_end(self, args, state, control, **kwargs):
        self._profiler.step()

    def on_train_end(self, args, state, control, **kwargs):
        self._is_over = True
        self._profiler.stop()


__all__ = [
    "EvaluationIntervalCallback",
    "ProfilerCallback",
    "ProgressLinesCallback",
    "SampleCallback",
]
