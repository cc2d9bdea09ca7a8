"""Stop a run before its last step, on all ranks together. docs/checkpoints.md lists what ends a run."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainingArguments

from ..runtime.ranks import Ranks
from ..runtime.signals import SignalListener


# EX_DATAERR of sysexits.h.
EXIT_NOT_FINITE = 65


class RunStopped(Exception):
    """Exception that ends the training because a signal arrived."""

    def __init__(self, number: int):
        self.number = number


class StopCallback(TrainerCallback):
    """
    Stop a training run once any rank has received a signal: after the step, once its checkpoint is saved, or at once
    during an evaluation. Then raise [`RunStopped`].

    Args:
        begin (`Callable`): called before the first step, after the model is loaded.

    Attributes:
        num_steps (`int`): number of steps since the training began.
        cut_off_evaluation (`bool`): the signal arrived during an evaluation.
        evaluation_is_due (`bool`): the stop left an evaluation out. It runs on resume.
    """

    def __init__(self, ranks: Ranks, signals: SignalListener, *, begin: Callable[[], None] = lambda: None):
        self.ranks, self.signals, self.begin = ranks, signals, begin
        self._is_training = False
        self._reset()

    def _reset(self) -> None:
        self._number = self.num_steps = 0
        self.cut_off_evaluation = self.evaluation_is_due = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._reset()
        self._is_training = True
        self.begin()

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_step_end(self, args, state, control, **kwargs):
        self.num_steps += 1
        # A collective in every step: a signal may reach only one rank, and all must stop after the same step.
        self._number = self.ranks.largest(self.signals.number)
        if self._number:
            self.evaluation_is_due = control.should_evaluate
            control.should_save, control.should_evaluate = True, False

    def on_save(self, args, state, control, **kwargs):
        if self._number:
            raise RunStopped(self._number)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self._is_training and (number := self.ranks.largest(self.signals.number)):
            self.cut_off_evaluation = True
            raise RunStopped(number)


def resume_hint(args: TrainingArguments) -> str:
    """Return sentences that tell the user how to continue from the checkpoint of a stopped run."""
    hint = (
        "It has no optimizer state: start a new run from it with --model_name_or_path."
        if args.save_only_model
        else "Resume with the same command and `--resume_from_checkpoint auto`."
    )
    return f"Its checkpoint is in {args.output_dir}. {hint}"


def end_all_ranks(status: int, signals: SignalListener) -> NoReturn:
    """
    Exit with `status` once all ranks have called this function: launchers kill the remaining ranks as soon as one
    exits.
    """
    # From here on, further signals change nothing.
    signals.is_ending = True
    wait_for_everyone()
    if signals.is_impatient:
        # NOTE: an ordinary exit waits for the threads of huggingface_hub that are still uploading.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
