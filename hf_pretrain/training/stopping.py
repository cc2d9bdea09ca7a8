"""
Stop a run before its last step, on all ranks together. docs/checkpoints.md lists what ends a run.

The functions that take a `trainer` take a [`~training.base_trainer.RunTrainer`].
"""

import os
import sys
from collections.abc import Callable
from signal import Signals
from typing import TYPE_CHECKING, NoReturn

from accelerate.utils import wait_for_everyone
from transformers import EarlyStoppingCallback, TrainerCallback

from ..runtime.ranks import Ranks, leave_process_group
from ..runtime.signals import SignalListener
from .budgets import TimeBudget
from .reporting import write_page


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


# EX_DATAERR of sysexits.h.
EXIT_NOT_FINITE = 65


class RunStopped(Exception):
    """Exception that ends the training because a signal arrived."""

    def __init__(self, number: int):
        self.number = number


class StopCallback(TrainerCallback):
    """
    Stop a training run once any rank has received a signal: after the step, its evaluation and its checkpoint, raise
    [`RunStopped`].

    Args:
        begin (`Callable`): called before the first step, after the model is loaded.
    """

    def __init__(self, ranks: Ranks, signals: SignalListener, *, begin: Callable[[], None] = lambda: None):
        self.ranks, self.signals, self.begin = ranks, signals, begin

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin()

    def on_step_end(self, args, state, control, **kwargs):
        # A collective in every step: a signal may reach only one rank, and all must stop after the same step.
        control.should_save |= self.ranks.largest(self.signals.number) > 0

    def on_save(self, args, state, control, **kwargs):
        if number := self.ranks.largest(self.signals.number):
            raise RunStopped(number)


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, which also accepts evaluations of several validation sets."""

    @property
    def is_over(self) -> bool:
        """Whether the training has stopped."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        # Trainer calls it for each set, and only one has the metric that chooses the best model.
        if f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


def restore_endings(trainer: "RunTrainer") -> None:
    """
    Give the callbacks that end a run the attributes that its checkpoint holds. If one has ended it, train no more.

    NOTE: transformers' `restore_callback_states_from_checkpoint` would make new callbacks with the old arguments.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStopping | TimeBudget):
            # Without the default, the next save would fail if the run that wrote the checkpoint had no such callback.
            saved = trainer.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
            for name, value in saved["attributes"].items():
                setattr(callback, name, value)
            trainer.control.should_training_stop |= callback.is_over


def end_stopped_run(trainer: "RunTrainer", number: int) -> NoReturn:
    """End all ranks after a signal, whose checkpoint is saved."""
    # Callbacks close their files and trackers here.
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    hint = (
        "It has no optimizer state: start a new run from it with --model_name_or_path."
        if trainer.args.save_only_model
        else "Resume with the same command and `--resume_from_checkpoint auto`."
    )
    message = f"after step {trainer.state.global_step}. Its checkpoint is in {trainer.args.output_dir}. {hint}"
    _end_run(trainer, 128 + number, Signals(number).name, f"Stopped by {Signals(number).name} {message}")


def end_nonfinite_run(trainer: "RunTrainer", cause: str, step: int) -> NoReturn:
    """
    End the run before anything of a step leaves the device. All ranks call this function.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of the run.
        cause (`str`): what is not finite.
        step (`int`): the number of the step.
    """
    message = (
        f"{cause} in step {step}. The run stopped before it saved anything of this step, and the checkpoints in "
        f"{trainer.args.output_dir} are intact. Resume with a lower --learning_rate and --allow_inexact_resume."
    )
    _end_run(trainer, EXIT_NOT_FINITE, message, message)


def record_stop(trainer: "RunTrainer", why: str) -> None:
    """Record the reason, and write the page, which shows how to resume."""
    if trainer.is_world_process_zero():
        write_page(trainer.run.directory, trainer.state, stopped=why)


def _end_run(trainer: "RunTrainer", status: int, why: str, message: str) -> NoReturn:
    """Record and print the reason, wait for the pushes, and end all ranks together."""
    record_stop(trainer, why)
    if trainer.is_world_process_zero():
        print(message, file=sys.stderr, flush=True)
    if trainer.run.pushes:
        trainer.pusher.finish()
    # From here on, further signals change nothing.
    trainer.run.signals.is_ending = True
    # Launchers kill the remaining ranks as soon as one exits.
    wait_for_everyone()
    if trainer.run.signals.is_impatient:
        # NOTE: an ordinary exit waits for the threads of huggingface_hub that are still uploading.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    leave_process_group()
    raise SystemExit(status)
