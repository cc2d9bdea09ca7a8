"""
Budgets of a run instead of a number of steps: tokens (`--max_tokens`, `--tokens_per_parameter`) and time
(`--max_minutes`). The schedule of the learning rate ends with the budget.

A budget of tokens becomes a number of epochs once the rows are packed, so Trainer computes the steps.

A budget of minutes has no number of steps. The learning rate follows the share of the time that has passed instead,
so it reaches its end with the time, however fast the steps are. The ranks agree on the time in each step.
"""

import math
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.ranks import Ranks


# Flags that say when a run ends, instead of steps or epochs.
BUDGETS = ("max_tokens", "tokens_per_parameter", "max_minutes")
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# More steps than a budget of minutes can hold, until the first step gives an estimate.
UNKNOWN_STEPS = 10**9
# A schedule of transformers needs a number of steps. It gets this number of equal parts of the time.
PARTS_OF_TIME = 10_000
# After this number of steps of a launch, their pace gives the steps between evaluations, checkpoints and logs.
MEASURED_STEPS = 10
# Fewest steps between evaluations, unless `--eval_steps` is given.
MIN_EVAL_STEPS = 50


def parse_tokens(text: str) -> float:
    """Return the number of tokens that `2B`, `500M` or `1e9` stands for. Raise `UserError` for other texts."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--max_tokens {text} is no number of tokens. Write it as 2B, 500M or 1e9.")
    return float(match[1]) * _UNITS[match[2].upper()]


def check_budget(args: Any) -> None:
    """Raise `UserError` for budgets that exclude each other or cannot be kept."""
    given = [f"--{name}" for name in BUDGETS if vars(args)[name] is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other. Pass one of them.")
    if args.max_tokens is not None:
        parse_tokens(args.max_tokens)
    if args.max_minutes is not None and args.warmup_steps >= 1:
        raise UserError(f"--warmup_steps {args.warmup_steps:g} must be a share below 1 with --max_minutes.")


def space_evaluations(args: Any, state: TrainerState) -> None:
    """Widen the interval of evaluations once a share of all steps has become a number: in short runs, it is small."""
    if args.spaces_evaluations:
        state.eval_steps = max(state.eval_steps, MIN_EVAL_STEPS)


def whole_model(config: MiniMindConfig) -> MiniMindForCausalLM:
    """Return a model without storage, to count its parameters: a rank may hold only a part of the trained model."""
    with torch.device("meta"):
        return MiniMindForCausalLM(config)


def token_budget(args: Any, config: MiniMindConfig) -> float | None:
    """Return the tokens that a run trains on by `--max_tokens` or `--tokens_per_parameter`; `None` without them."""
    if args.max_tokens is not None:
        return parse_tokens(args.max_tokens)
    if args.tokens_per_parameter is not None:
        return args.tokens_per_parameter * whole_model(config).num_parameters()
    return None


class TimeBudget(TrainerCallback, ExportableState):
    """
    End the training after some minutes of training, evaluations and checkpoints.

    The schedule stands still in the first step of a launch, which compiles and reads the data, and then reaches its
    end with the time. Checkpoints keep its position and the time of earlier launches.

    Args:
        minutes (`float`): the time.
        ranks ([`~runtime.ranks.Ranks`]): the ranks that agree on it.
    """

    def __init__(self, minutes: float, ranks: Ranks):
        self.seconds, self.ranks = 60 * minutes, ranks
        # Seconds of all launches, and the share of the schedule that is over.
        self.spent = self.share = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.spent >= self.seconds

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"spent": self.spent, "share": self.share}}

    def follow(self, scheduler: Any) -> LambdaLR:
        """Let the factors of a scheduler, made for `PARTS_OF_TIME` steps, follow the time instead of its steps."""
        if not isinstance(scheduler, LambdaLR):
            raise UserError("--max_minutes needs a schedule that depends on the step. Leave out --lr_scheduler_type.")
        scheduler.lr_lambdas = [partial(self._factor, factor) for factor in scheduler.lr_lambdas]
        return scheduler

    def _factor(self, factor: Callable[[float], float], step: int) -> float:
        return factor(self.share * PARTS_OF_TIME)

    def on_train_begin(self, args, state, control, **kwargs):
        self._start, self._num_steps = time.monotonic(), 0

    # Trainer steps the schedule between this event and the end of the step.
    def on_optimizer_step(self, args, state, control, **kwargs):
        now = self.ranks.largest(round(1000 * (time.monotonic() - self._start))) / 1000
        self._num_steps += 1
        if self._num_steps == 1:
            self._first, self._before, self._from = now, self.spent, self.share
        self.spent, passed = self._before + now, now - self._first
        # The steps since the last log count, too: in a short run, they are a large part.
        control.should_log |= self.is_over
        left = self.seconds - self._before - self._first
        done = 1.0 if self.is_over else passed / left
        self.share = self._from + (1 - self._from) * done
        # The mean time of a step, without the first one, tells how many steps remain.
        pace = max(1e-3, passed / (self._num_steps - 1) if passed else now)
        remaining = 0 if self.is_over else math.ceil((self.seconds - self.spent) / pace)
        state.max_steps = state.global_step + 1 + remaining
        if self._num_steps == MEASURED_STEPS:
            # Intervals that are a share of all steps.
            state.compute_steps(args, state.max_steps)
            space_evaluations(args, state)
