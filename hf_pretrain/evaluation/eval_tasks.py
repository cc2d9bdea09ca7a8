"""Tasks of lm-eval during training (`--eval_tasks`): with each evaluation, on all ranks."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.trainer_callback import TrainerCallback

from ..data.preparation import PreparedData
from ..runtime.errors import UserError
from ..runtime.flags import flag
from ..training.samples import AddedFigures
from ..training.training_arguments import LMTrainingArguments


@dataclass
class EvalTaskArguments:
    """Tasks of lm-eval that each evaluation runs."""

    eval_tasks: str | None = flag(
        None, "Tasks of lm-eval to run with each evaluation, separated by commas.", resume="evaluation"
    )
    eval_tasks_limit: float | None = flag(
        100,
        "Number of examples per task of --eval_tasks, or a share if below 1.",
        bounds="above 0",
        resume="evaluation",
    )
    eval_tasks_path: list[str] | None = flag(
        None, "Directories with further task YAMLs for --eval_tasks.", resume="evaluation", names="code"
    )


def check_whole_model(args: LMTrainingArguments, flag: str) -> None:
    """Raise `UserError` if the ranks of a run hold only parts of the model."""
    if args.shards_weights:
        raise UserError(f"{flag} needs the whole model in each process: start torchrun, or DeepSpeed with ZeRO-2.")


def task_callbacks(
    args: EvalTaskArguments, training_args: LMTrainingArguments, data: PreparedData
) -> list[TrainerCallback]:
    """
    Return the callback of `--eval_tasks`, or none. With each evaluation, it prints the metrics of the tasks, and adds
    them to the log and the metrics as `eval_<task>_<metric>`. A model that learns to chat gets its chat template.

    Raises:
        `UserError`: without a validation set, for an unknown task, or if the ranks hold only parts of the model.
    """
    if args.eval_tasks is None:
        return []
    check_whole_model(training_args, "--eval_tasks")
    if data.eval is None:
        raise UserError("--eval_tasks runs with each evaluation, and there is none. Raise --validation_fraction.")
    # lm-eval is an optional package.
    from .lm_eval_tasks import evaluate_tasks, index_tasks

    tasks, path = args.eval_tasks.split(","), args.eval_tasks_path
    # Report an unknown task before the training.
    index_tasks(tasks, path, "--eval_tasks")
    options: dict[str, Any] = {"limit": args.eval_tasks_limit, "include_path": path, "is_chat": data.kind != "text"}
    options["batch_size"] = training_args.per_device_eval_batch_size

    def measure(model: PreTrainedModel) -> dict[str, float]:
        # lm-eval seeds all random numbers, and the training must not depend on the tasks. `RunTrainer.evaluate`
        # restores torch's.
        states = random.getstate(), np.random.get_state()
        # A compiled layer would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            results = evaluate_tasks(model.eval(), data.tokenizer, tasks, **options)
        random.setstate(states[0])
        np.random.set_state(states[1])
        return {
            f"eval_{task}_{name}": metric["value"]
            for task, result in results.items()
            for name, metric in result["metrics"].items()
        }

    return [AddedFigures(measure, prints=True)]
