"""
Arguments of `recipes/evaluate.py`, and its outputs: `evaluation.json` and tables.
"""

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..checkpoints.directory import find_newest_run
from ..data.chat_arguments import ChatArguments
from ..data.preparation import PreparedData, load_rows
from ..hub.model_card import public_name
from ..runtime.errors import UserError, install_command
from ..runtime.metrics import METRICS, named_figures
from ..runtime.writing import check_output, written_whole
from ..training.training_arguments import LMTrainingArguments
from .eval_tasks import check_whole_model
from .tool_call_task import TASK, evaluate_tool_calls, format_failures


RESULTS_NAME = "evaluation.json"
# Names that `--tasks` accepts in addition to lm-eval's.
GROUPS = {
    # The table of MiniMind's README.
    "minimind": ("ceval-valid", "cmmlu", "arc_easy", "piqa", "openbookqa", "hellaswag", "social_iqa"),
    # Pairs of a grammatical and an ungrammatical sentence. Models with a few million parameters beat chance here.
    "small": ("blimp", "zhoblimp"),
}


def expand_tasks(names: str) -> list[str]:
    """Return the tasks of a comma-separated list without repetitions, and with each group replaced by its tasks."""
    tasks = [task for name in names.split(",") for task in GROUPS.get(name.strip(), (name.strip(),))]
    return list(dict.fromkeys(tasks))


@dataclass
class ValidationArguments(ChatArguments):
    """Validation set: text, or conversations with `--dataset_kind auto`."""

    dataset_kind: str = field(
        default="text",
        metadata={"help": "Kind of the records: text, or auto for conversations.", "choices": ("auto", "text")},
    )


@dataclass
class EvaluationArguments(LMTrainingArguments):
    """
    Arguments of the evaluation, and all arguments of a training run. With the `--config` of a run, the evaluation
    reproduces the figures of that run.

    Raises:
        `ValueError`: for tasks if lm-eval is not installed, or if the processes share one model.
    """

    # An evaluation trains nothing, so it must not refuse a DeepSpeed config that Muon cannot follow.
    default_optim_preset = "adamw"
    # There is no run to plan, so this is no flag here.
    dry_run: bool = field(default=False, init=False)
    output_dir: str | None = field(
        default=None,
        metadata={"help": "The run to evaluate without --model_name_or_path; by default the newest one in out/."},
    )
    results_dir: str | None = field(
        default=None, metadata={"help": "Directory for the results; by default the model's own."}
    )
    tasks: str | None = field(
        default=None,
        metadata={"help": f"Tasks of lm-eval, {TASK}, or the groups {' and '.join(GROUPS)}, separated by commas."},
    )
    apply_chat_template: bool | None = field(
        default=None,
        metadata={
            "help": "Put the questions of the tasks into the chat template. On by default, except for base models."
        },
    )
    include_path: list[str] | None = field(default=None, metadata={"help": "Directories with further task YAMLs."})
    num_fewshot: int | None = field(default=None, metadata={"help": "Examples before each question of a task."})
    limit: float | None = field(default=None, metadata={"help": "Number of examples per task, or a share if below 1."})
    loss_by_position: bool = field(
        default=False,
        metadata={"help": "Also measure the loss by position in the document; with YaRN, without it too."},
    )

    def __post_init__(self):
        # In a training config, --output_dir names the run to evaluate. `settle` later sets it to the directory of the
        # results.
        self.run_dir = self.output_dir
        if set(expand_tasks(self.tasks or TASK)) != {TASK} and importlib.util.find_spec("lm_eval") is None:
            raise UserError(f"--tasks {self.tasks} needs lm-eval: {install_command('eval')}")
        if self.limit is not None and self.limit <= 0:
            raise UserError(f"--limit {self.limit:g} leaves no example: use a number of examples, or a share below 1.")
        super().__post_init__()
        # The number of processes is known only after transformers' constructor.
        if self.loss_by_position and self.world_size > 1:
            raise UserError(
                f"--loss_by_position needs a single process, and {self.world_size} were started: launch with python."
            )
        if self.tasks:
            check_whole_model(self, "--tasks")
        # The recipe evaluates once, by itself, even if a training config asks for more evaluations.
        self.eval_strategy = "no"
        # It pushes nothing, even if the training does.
        self.push_to_hub = False

    def settle(self, model_name_or_path: str | None) -> str:
        """
        Return the model to evaluate, and set `output_dir` to the directory of its results.

        Raises:
            `ValueError`: if there is no model or no place for the results, or `results_dir` is in a checkpoint.
        """
        name = model_name_or_path or self.run_dir or find_newest_run()
        if model_name_or_path is None and not Path(name, "config.json").is_file():
            raise UserError(
                f"{name} holds no model to evaluate. Train it first, or name one: --model_name_or_path DIR."
            )
        if self.results_dir is None and not Path(name).is_dir():
            raise UserError(
                f"{name} is not a directory here: name a directory for the results with --results_dir DIR."
            )
        self.output_dir = self.results_dir or name
        check_output(self.output_dir, "--results_dir")
        return name


def load_validation(
    data_args: ValidationArguments, training_args: EvaluationArguments, tokenizer: PreTrainedTokenizerFast
) -> PreparedData:
    """
    Return the validation data as packed sequences: `--eval_dataset_name` whole, or the documents that a hash of the
    text has left out of the training.

    Raises:
        `ValueError`: if there is neither a document nor a task to evaluate on.
    """
    if data_args.validation_fraction > 0 or data_args.eval_dataset_name:
        # rejected.jsonl belongs to the training run, so an evaluation writes none.
        data = load_rows(data_args, training_args, tokenizer, is_evaluation=True, keep_rejected=False)
    else:
        data = PreparedData(tokenizer, ["Validation: nothing"], data_args.dataset_name, data_args.kind_name)
    if data.eval is None and not training_args.tasks:
        raise UserError(
            f"--validation_fraction {data_args.validation_fraction:g} selects no document of "
            f"{', '.join(data_args.dataset_name)} to evaluate on. Pass the test data as --eval_dataset_name, or raise "
            f"--max_length {data_args.max_length} if the data are conversations."
        )
    return data


def begin_results(
    metrics: dict[str, float], data: PreparedData, *, max_length: int, limit: float | None
) -> dict[str, Any]:
    """
    Return the content of `evaluation.json` without results of tasks.

    Args:
        metrics (`dict[str, float]`): the metrics of the validation set; empty without one.
        data ([`~data.preparation.PreparedData`]): the validation set.
        max_length (`int`): tokens per packed sequence.
        limit (`float`, *optional*): the number of examples per task, or their share.
    """
    names = ", ".join(map(public_name, data.eval_names or data.names)) or "unnamed"
    report = "; ".join(data.report).removeprefix("Validation: ")
    return {
        # This key keeps its older name for programs that read the file.
        "held_out": {metric.key: metrics[metric.key] for metric in METRICS if metric.key in metrics}
        | {key: metrics[key] for key in named_figures(metrics)},
        "data": f"{names} in sequences of {max_length}: {report}",
        "tasks": {},
        "limit": limit,
        "versions": {name: importlib.metadata.version(name) for name in ("hf_pretrain", "torch", "transformers")},
    }


def run_tasks(
    args: EvaluationArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[str, dict[str, Any]]:
    """Return the results of `--tasks`, as [`~stages.lm_eval_tasks.evaluate_tasks`] describes them."""
    names, results = expand_tasks(args.tasks or ""), {}
    if TASK in names:
        names.remove(TASK)
        results[TASK] = evaluate_tool_calls(model, tokenizer, limit=args.limit)
    if not names:
        return results
    # Only these tasks need lm-eval, an optional package.
    from .lm_eval_tasks import evaluate_tasks

    return results | evaluate_tasks(
        model,
        tokenizer,
        names,
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        batch_size=args.per_device_eval_batch_size,
        is_chat=bool(args.apply_chat_template),
    )


def format_results(results: dict[str, Any]) -> str:
    """Return the results as tables for the terminal."""
    rows = [("on", "metric", "value", "")]
    figures = results["held_out"]
    for metric in METRICS:
        if metric.key in figures:
            label = metric.name.replace("_", " ") + (f" ({metric.unit})" if metric.unit else "")
            rows.append(("validation", label, f"{figures[metric.key]:.4f}", ""))
    rows += [("validation", label, f"{figures[key]:.4f}", "") for key, label in named_figures(figures).items()]
    for row in results.get("loss_by_position", []):
        names = [name for name in row if name.startswith("loss")]
        on = f"positions {row['first']}-{row['last']}"
        rows += [(on, name.replace("_", " "), f"{row[name]:.4f}", f"{row['tokens']:,} tokens") for name in names]
    for task, result in _whole_tasks(results["tasks"]).items():
        for metric, entry in result["metrics"].items():
            error = f"± {entry['stderr']:.4f}" if entry["stderr"] is not None else ""
            rows.append((task, metric, f"{entry['value']:.4f}", error))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if TASK in results["tasks"]:
        lines.append(format_failures(results["tasks"][TASK]))
    return "\n".join(lines)


def _whole_tasks(tasks: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks that are no part of a group. A group such as cmmlu has dozens of parts, and its own mean."""
    return {name: result for name, result in tasks.items() if result["group"] is None}


def write_results(results: dict[str, Any], directory: str | Path) -> Path:
    """Write `evaluation.json` into a directory, and return its path."""
    with written_whole(directory) as scratch:
        (scratch / RESULTS_NAME).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(directory, RESULTS_NAME)
