"""The flags of what each evaluation of a run measures beside the loss. `evaluation/` measures it."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast, TrainerCallback

from ..rows.preparation import PreparedData
from ..runtime.errors import UserError
from ..runtime.flags import flag
from ..runtime.named import load_named
from .training_arguments import LMTrainingArguments


def check_whole_model(args: LMTrainingArguments, name: str) -> None:
    """Raise `UserError` if the ranks of a run hold only parts of the model."""
    if args.shards_weights:
        raise UserError(f"{name} needs the whole model in each process: start torchrun, or DeepSpeed with ZeRO-2.")


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

    def callbacks(self, training_args: LMTrainingArguments, data: PreparedData) -> list[TrainerCallback]:
        """
        Return the callback of `--eval_tasks`, or none.

        Raises:
            `UserError`: without a validation set, for an unknown task, or if the ranks hold only parts of the model.
        """
        if self.eval_tasks is None:
            return []
        check_whole_model(training_args, "--eval_tasks")
        if data.eval is None:
            raise UserError("--eval_tasks runs with each evaluation, and there is none. Raise --validation_fraction.")
        batch_size = training_args.per_device_eval_batch_size
        return [load_named("hf_pretrain.evaluation.lm_eval_tasks:EvalTasks")(self, data, batch_size=batch_size)]


@dataclass
class EvalQuestionArguments:
    """Questions with known answers, to ask at each evaluation."""

    eval_questions: str | None = flag(
        None,
        "File of prompts with the texts that right answers state, to ask at each evaluation.",
        resume="evaluation",
    )
    general_questions: str | None = flag(
        None,
        "File of further such questions, whose answers the training should keep.",
        resume="evaluation",
    )

    def callbacks(self, tokenizer: PreTrainedTokenizerFast, enable_thinking: bool | None = None) -> list[Any]:
        """Return the [`~evaluation.eval_questions.EvalQuestions`] of each file."""
        classes = {"eval_questions": "EvalQuestions", "general_questions": "GeneralQuestions"}
        return [
            load_named(f"hf_pretrain.evaluation.eval_questions:{classes[name]}")(
                path, tokenizer, enable_thinking=enable_thinking
            )
            for name in classes
            if (path := vars(self)[name]) is not None
        ]
