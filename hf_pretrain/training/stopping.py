"""Stop a run before its last step, on all ranks together. docs/checkpoints.md lists what ends a run."""

import atexit
import os
import sys
from typing import NoReturn

from accelerate.utils import wait_for_everyone
from transformers import TrainerCallback, TrainingArguments

from ..runtime.ranks import Ranks
from ..runtime.signals import SignalListener


class EvaluationStopped(Exception):
    """Exception that ends an evaluation because a signal arrived."""

    def __init__(self, number: int):
        self.number = number


class StopEvaluationCallback(TrainerCallback):
    """Raise [`EvaluationStopped`] in the evaluations of a training run, once any rank has received a signal."""

    def __init__(self, ranks: Ranks, signals: SignalListener):
        self.ranks, self.signals = ranks, signals
        self.is_training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.is_training = True

    def on_train_end(self, args, state, control, **kwargs):
        self.is_training = False

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.is_training and (number := self.ranks.largest(self.signals.number)):
            raise EvaluationStopped(number)


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
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)


__all__ = ["EvaluationStopped", "StopEvaluationCallback", "end_all_ranks", "resume_hint"]
