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
from transformers.trainer_callback import PrinterCallback

from ..checkpoints.directory import find_newest_run
from ..inference.inference_arguments import with_engine
from ..inference.served_model import ServedModel
from ..rows.chat_arguments import ChatArguments
from ..rows.collators import DataCollatorForPackedRows
from ..rows.preparation import PreparedData, load_rows
from ..run_directory.metrics import METRICS, named_figures
from ..runtime.errors import UserError, install_command
from ..runtime.flags import flag
from ..runtime.names import public_name
from ..runtime.writing import check_output, written_whole
from ..tokenizer.pretrained import load_tokenizer
from ..training.evaluation_arguments import check_whole_model
from ..training.masked_loss_trainer import MaskedLossTrainer
from ..training.training_arguments import LMTrainingArguments
from .tool_call_task import OPTIONS, TASK, evaluate_tool_calls, format_failures


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
    """Validation set: text or conversations, as the model was trained on."""

    dataset_kind: str | None = flag(
        None, "Records: text, by default of base models; or conversations.", choices=("auto", "text")
    )


@dataclass
class EvaluationArguments(LMTrainingArguments):
    """
    Arguments of the evaluation, and all arguments of a training run. With the `--config` of a run, the evaluation
    reproduces the figures of that run.

    Raises:
        `UserError`: for tasks if lm-eval is not installed, or if the processes share one model.
    """

    # An evaluation trains nothing, so it must not refuse a DeepSpeed config that Muon cannot follow.
    default_optim_preset = "adamw"
    # There is no run to plan and nothing to train on, so these are no flags here.
    dry_run: bool = field(default=False, init=False)
    preview: int = field(default=0, init=False)
    output_dir: str | None = flag(
        None, "The run to evaluate without --model_name_or_path; by default the newest one in out/."
    )
    results_dir: str | None = flag(None, "Place of the results; by default the model's.")
    tasks: str | None = flag(None, f"Tasks of lm-eval, {TASK}, or {' or '.join(GROUPS)}, separated by commas.")
    apply_chat_template: bool | None = flag(
        None, "Put questions of tasks into the chat template; by default, except for base models."
    )
    include_path: list[str] | None = flag(None, "Directories with further task YAMLs.")
    num_fewshot: int | None = flag(None, "Examples before each question of a task.")
    limit: float | None = flag(None, "Number of examples per task, or a share if below 1.", bounds="above 0")
    engine: str = flag("transformers", f"What generates the answers of {TASK}.", choices=("llama.cpp", "transformers"))
    tool_cases: str | None = flag(None, f"A file of tools and questions for {TASK}, instead of its own.")
    max_new_tokens: int = flag(256, f"Limit of one answer to {TASK}.", bounds="at least 1")
    temperature: float = flag(0.0, f"Divisor of the logits in {TASK}; 0 takes the most probable token.")
    top_p: float = flag(1.0, f"Sample from the likeliest tokens in {TASK}.", bounds="above 0 and at most 1")
    api_base_url: str | None = flag(None, f"Ask the model that is served at this address the questions of {TASK}.")
    api_model: str = flag("default", "Its name there, which hf-pretrain serve ignores.")
    api_key: str = flag("none", "The key that the server asks for.")
    against: str | None = flag(
        None,
        "A second model, to compare the first one with on the same examples; against.html shows both.",
        names="model",
    )

    def __post_init__(self):
        # In a training config, --output_dir names the run to evaluate. `find_model` later sets it to the directory of
        # the results.
        self.run_dir = self.output_dir
        self.tasks = self.tasks or (TASK if self.api_base_url else None)
        if self.api_base_url and (self.against or set(expand_tasks(self.tasks or TASK)) != {TASK}):
            raise UserError(f"--api_base_url asks the questions of {TASK}. Leave other --tasks and --against out.")
        if set(expand_tasks(self.tasks or TASK)) != {TASK} and importlib.util.find_spec("lm_eval") is None:
            raise UserError(f"--tasks {self.tasks} needs lm-eval: {install_command('eval')}")
        super().__post_init__()
        # The number of processes is known only after transformers' constructor.
        for name in ("tasks", "against"):
            if vars(self)[name]:
                check_whole_model(self, f"--{name}")
        # The recipe evaluates once, by itself, even if a training config asks for more evaluations.
        self.eval_strategy = "no"
        # It pushes nothing, even if the training does.
        self.push_to_hub = False

    def find_model(self, model_name_or_path: str | None) -> str:
        """
        Return the model to evaluate, and set `output_dir` to the directory of its results.

        Raises:
            `UserError`: if there is no model or no place for the results, or `results_dir` is in a checkpoint.
        """
        name = model_name_or_path or self.run_dir or find_newest_run()
        if model_name_or_path is None and not Path(name, "config.json").is_file():
            raise UserError(f"{name} holds no model to evaluate. Train it, or name one: --model_name_or_path DIR.")
        if self.results_dir is None and not Path(name).is_dir():
            raise UserError(f"{name} is no directory here: name a directory for the results with --results_dir DIR.")
        self.output_dir = self.results_dir or name
        check_output(self.output_dir, "--results_dir")
        if self.against is not None:
            # Name a mistake before the first model is evaluated.
            load_tokenizer(self.against)
        return name


def load_validation(
    data_args: ValidationArguments, training_args: EvaluationArguments, tokenizer: PreTrainedTokenizerFast
) -> PreparedData:
    """
    Return the validation data as packed sequences: `--eval_dataset_name` whole, or the documents that a hash of the
    text has left out of the training.

    Raises:
        `UserError`: if there is neither a document nor a task to evaluate on.
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


def make_trainer(
    model: PreTrainedModel, args: EvaluationArguments, data: PreparedData, tokenizer: PreTrainedTokenizerFast
) -> MaskedLossTrainer:
    """Return the trainer that evaluates a model on the validation set of `data`."""
    collator = DataCollatorForPackedRows(tokenizer.pad_token_id)
    trainer = MaskedLossTrainer(model, args, collator, eval_dataset=data.eval, processing_class=tokenizer)
    # The table of results holds the figures that this callback would print.
    trainer.remove_callback(PrinterCallback)
    return trainer


def begin_results(
    metrics: dict[str, float], data: PreparedData, *, max_length: int, limit: float | None
) -> dict[str, Any]:
    """
    Return the content of `evaluation.json` without results of tasks.

    Args:
        metrics (`dict[str, float]`): the metrics of the validation set; empty without one.
        data ([`~rows.preparation.PreparedData`]): the validation set.
        max_length (`int`): tokens per packed sequence.
        limit (`float`, *optional*): the number of examples per task, or their share.
    """
    names = ", ".join(map(public_name, data.eval_names or data.names)) or "unnamed"
    report = "; ".join(data.report).removeprefix("Validation: ")
    return {
        # This key keeps its older name for programs that read the file.
        "held_out": {metric.key: metrics[metric.key] for metric in METRICS if metric.key in metrics}
        | {key: metrics[key] for key in named_figures(metrics)},
        "data": f"{data.kind} of {names} in sequences of {max_length}: {report}",
        "tasks": {},
        "limit": limit,
        "versions": {name: importlib.metadata.version(name) for name in ("hf_pretrain", "torch", "transformers")},
    }


def run_tasks(
    args: EvaluationArguments, model: Any, tokenizer: PreTrainedTokenizerFast | None, *, is_chat: bool
) -> dict[str, dict[str, Any]]:
    """
    Return the results of `--tasks`, as [`~evaluation.lm_eval_tasks.evaluate_tasks`] describes them. `is_chat` puts the
    questions into the chat template. The results of `tool_call`, and with `--against` of all tasks, hold `examples`.
    """
    names, results = expand_tasks(args.tasks or ""), {}
    if TASK in names:
        names.remove(TASK)
        # A served model has no tokenizer here.
        answering = with_engine(model, args.engine) if tokenizer is not None else model
        results[TASK] = evaluate_tool_calls(answering, tokenizer, **{name: vars(args)[name] for name in OPTIONS})
    if not names:
        return results
    # Only these tasks need lm-eval, an optional package.
    from .lm_eval_tasks import evaluate_tasks

    options: dict[str, Any] = {name: vars(args)[name] for name in ("include_path", "num_fewshot", "limit")}
    options |= {"batch_size": args.per_device_eval_batch_size, "is_chat": is_chat}
    options["keeps_examples"] = args.against is not None
    return results | evaluate_tasks(model, tokenizer, names, **options)


def evaluate_served(args: EvaluationArguments) -> str:
    """Ask the model at `--api_base_url` the questions of `tool_call`, and return the results as a table."""
    model = ServedModel(str(args.api_base_url), args.api_model, args.api_key)
    results = {"held_out": {}, "tasks": run_tasks(args, model, None, is_chat=True), "inference_rope_scaling": None}
    del results["tasks"][TASK]["examples"]
    place = f"\nResults   {write_results(results, args.results_dir)}" if args.results_dir else ""
    return f"\nModel     {model.name} at {public_name(model.url)}{place}\n\n{format_results(results)}"


def format_results(results: dict[str, Any]) -> str:
    """Return the results as tables for the terminal."""
    table = [("on", "metric", "value", "")]
    figures = results["held_out"]
    for metric in METRICS:
        if metric.key in figures:
            label = metric.name.replace("_", " ") + (f" ({metric.unit})" if metric.unit else "")
            table.append(("validation", label, f"{figures[metric.key]:.4f}", ""))
    table += [("validation", label, f"{figures[key]:.4f}", "") for key, label in named_figures(figures).items()]
    for task, result in results["tasks"].items():
        # A group such as cmmlu has dozens of parts, and its own mean.
        for metric, entry in result["metrics"].items() if result["group"] is None else ():
            error = f"± {entry['stderr']:.4f}" if entry["stderr"] is not None else ""
            table.append((task, metric, f"{entry['value']:.4f}", error))
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    if TASK in results["tasks"]:
        lines.append(format_failures(results["tasks"][TASK]))
    return "\n".join(lines)


def write_results(results: dict[str, Any], directory: str | Path) -> Path:
    """
    Write `evaluation.json` into a directory, and return its path. With `--inference_rope_scaling 512:4`, the file is
    `evaluation-512x4.json`: its figures are those of another model.
    """
    scaling = results["inference_rope_scaling"]
    name = RESULTS_NAME if scaling is None else f"evaluation-{scaling.replace(':', 'x')}.json"
    with written_whole(directory) as scratch:
        (scratch / name).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(directory, name)
