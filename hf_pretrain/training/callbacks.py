"""Callbacks of a run: progress, log lines, samples, measures of answers, and profiler."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import ProgressCallback, TrainerCallback, TrainerState

from ..runtime.metrics import HEADLINES, named_figures
from .budgets import UNKNOWN_STEPS
from .end_report import choose_questions, generate
from .run_directory import RunDirectory


# Answers that an evaluation of a chat model measures, and their tokens.
NUM_ANSWERS = 32
MAX_TOKENS = 64


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
            RunDirectory(args).record(samples=self.samples)
            prompt, text = texts[0]
            print_step(state, f"{prompt!r} -> {text!r}")


def answer_figures(answers: list[list[int]], *, eos_token_id: int) -> dict[str, float]:
    """
    Return the figures of generated answers. The table of metrics names them.

    - distinct-2: the different bigrams of all answers, divided by all their bigrams (https://arxiv.org/abs/1510.03055).
    - repeated 4-grams: the share of the 4-grams that occurred earlier in the same answer. The divisor is the number of
      all 4-grams, so an answer counts as much as it is long (https://arxiv.org/abs/1908.04319 takes the mean over the
      answers).

    Args:
        answers (`list[list[int]]`): token ids. An answer that ended by itself ends with its stop token, which is no
            part of the n-grams and of the length. A figure without n-grams is left out.
        eos_token_id (`int`): the stop token.
    """
    texts = [[token for token in answer if token != eos_token_id] for answer in answers]
    pairs = list(chain.from_iterable(_ngrams(text, 2) for text in texts))
    fours = [_ngrams(text, 4) for text in texts]
    figures = {
        "eval_ended_answers": fmean(answer[-1:] == [eos_token_id] for answer in answers),
        "eval_answer_tokens": fmean(map(len, texts)),
    }
    if pairs:
        figures["eval_distinct_2"] = len(set(pairs)) / len(pairs)
    if any(fours):
        figures["eval_repeated_4grams"] = 1 - sum(len(set(grams)) for grams in fours) / sum(map(len, fours))
    return figures


def _ngrams(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def measure_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: Dataset
) -> dict[str, float]:
    """
    Return the figures of greedy answers to questions of the validation set, with at most `MAX_TOKENS` tokens each. All
    ranks of a sharded model must call this function with the same arguments.
    """
    prompts = [prompt for _, prompt in choose_questions(tokenizer, conversations, NUM_ANSWERS)]
    # Greedy search ignores these three, and transformers warns about a chat model's own values.
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answers = generate(model, tokenizer, prompts, max_new_tokens=MAX_TOKENS, **settings)
    return answer_figures(answers, eos_token_id=tokenizer.eos_token_id)


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


class AnswerFigures(AddedFigures):
    """Add the figures of [`measure_answers`] to each evaluation; the arguments are those of that function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, conversations: Dataset):
        super().__init__(partial(measure_answers, tokenizer=tokenizer, conversations=conversations))


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
