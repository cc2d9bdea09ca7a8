"""Tasks of lm-eval during training (`--eval_tasks`): with each evaluation, on all ranks."""

import random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.preparation import PreparedData
from ..training.callbacks import AddedFigures
from ..training.evaluation_arguments import EvalTaskArguments
from .lm_eval_tasks import evaluate_tasks, index_tasks


class EvalTasks(AddedFigures):
    """
    With each evaluation, print the metrics of the tasks, and add them to the log and the metrics as
    `eval_<task>_<metric>`. A model that learns to chat gets its chat template.

    Args:
        args ([`EvalTaskArguments`]): the tasks.
        data ([`~data.preparation.PreparedData`]): the data and the tokenizer of the run.
        batch_size (`int`): texts per batch.

    Raises:
        `UserError`: for an unknown task.
    """

    def __init__(self, args: EvalTaskArguments, data: PreparedData, *, batch_size: int):
        super().__init__(self._run, prints=True)
        self.tasks, self.tokenizer, path = str(args.eval_tasks).split(","), data.tokenizer, args.eval_tasks_path
        # Report an unknown task before the training.
        index_tasks(self.tasks, path, "--eval_tasks")
        self.options: dict[str, Any] = {"limit": args.eval_tasks_limit, "include_path": path, "batch_size": batch_size}
        self.options["is_chat"] = data.kind != "text"

    def _run(self, model: PreTrainedModel) -> dict[str, float]:
        # lm-eval seeds all random numbers, and the training must not depend on the tasks. `RunTrainer.evaluate`
        # restores torch's.
        states = random.getstate(), np.random.get_state()
        # A compiled layer would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            results = evaluate_tasks(model.eval(), self.tokenizer, self.tasks, **self.options)
        random.setstate(states[0])
        np.random.set_state(states[1])
        return {
            f"eval_{task}_{name}": metric["value"]
            for task, result in results.items()
            for name, metric in result["metrics"].items()
        }
