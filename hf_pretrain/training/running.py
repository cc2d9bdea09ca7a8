"""What every training recipe does before and after its own part."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..checkpoints.directory import remove_leftovers
from ..data.arguments import ChatArguments
from ..hub.model_card import CURVE_NAME
from ..hub.repository import remove_staging
from ..runtime.devices import describe_search
from ..runtime.locking import release_output_dir, watch_launcher
from ..runtime.metrics import find_evaluations
from ..runtime.processes import on_main_process
from ..tokenizer.chat_template import mark_template
from .arguments import MIN_EVAL_STEPS, LMTrainingArguments
from .callbacks import EvaluationIntervalCallback, ProfilerCallback, TrainingLinesCallback, TrainingProgressCallback
from .reporting import format_report, plot_loss_curve, sample_answers
from .resume_from_hub import pull_checkpoint
from .resuming import checkpoint_to_resume, occupy_output_dir
from .run_description import describe_data
from .run_log import LOG_NAME, begin_log, end_log
from .run_record import add_to_record, begin_record, end_record
from .run_trainer import RunTrainer


def begin_run(training_args: LMTrainingArguments, *others: Any, streaming: bool = False) -> str | None:
    """
    The checkpoint that a run goes on from, if any, fetched from the Hub where that is asked for. Seeds everything,
    says on what the run trains, and records it with all arguments, those of the `others` included (`run_record.py`).

    Raises:
        `ValueError`: for a run on a stream without an end, if another run writes into `output_dir`, and as
            [`~hub.repository.pull_checkpoint`] and [`~training.resuming.checkpoint_to_resume`] do.
    """
    if streaming and training_args.max_steps < 1:
        raise ValueError(
            "--streaming needs --max_steps: nobody knows how many rows a stream holds. Add --max_steps N, or leave "
            "--streaming out."
        )
    watch_launcher(training_args.launcher)
    on_main_process(training_args, partial(occupy_output_dir, training_args))
    is_main = training_args.process_index == 0
    begin_log(Path(training_args.output_dir, LOG_NAME) if is_main else None)
    pull_checkpoint(training_args)
    checkpoint = checkpoint_to_resume(training_args)
    set_seed(training_args.seed)

    def clear() -> None:
        remove_staging(training_args.output_dir)
        remove_leftovers(training_args.output_dir)
        begin_record(training_args, others, checkpoint=checkpoint)
        print(f"{training_args.launch_description}; {describe_search()}")

    on_main_process(training_args, clear)
    return checkpoint


@dataclass
class ConversationRows:
    """
    Conversations that are ready to train on.

    Args:
        train ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): rows of [`~data.packing.prepare_rows`].
        eval ([`~datasets.Dataset`], *optional*): held-out rows, if there are any.
        conversations ([`~datasets.Dataset`], *optional*): what these rows were made of, unless that is text.
        report (`list[str]`): what was counted, for people.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    conversations: Dataset | None
    report: list[str]


def load_conversations(
    data_args: ChatArguments, training_args: LMTrainingArguments, tokenizer: PreTrainedTokenizerFast
) -> ConversationRows:
    """
    Conversations (or text) as rows with weights. The main process does the work, the others read its cache. Marks the chat
    template of the tokenizer if need be, and turns evaluation off where nothing is held out.

    Raises:
        `ValueError`: as [`~data.loading.load_documents`], [`~data.packing.prepare_rows`] and
            [`~tokenizer.chat_template.mark_template`] do.
    """
    if data_args.encoder is not None:
        mark_template(tokenizer, data_args.chat_template)
    with training_args.main_process_first(desc="preparing the data"):
        train_documents, eval_documents = data_args.load_documents(training_args)
        train_rows, packing_report = data_args.prepare_rows(train_documents, tokenizer)
        eval_rows, eval_report = data_args.prepare_rows(eval_documents, tokenizer)
    if eval_rows is None:
        training_args.evaluate_never()
    report = [f"Training: {packing_report or 'streamed'}", f"Validation: {eval_report or 'nothing'}"]
    if training_args.process_index == 0:
        print("\n".join(report))
    has_answers = eval_rows is not None and data_args.encoder is not None
    return ConversationRows(train_rows, eval_rows, eval_documents if has_answers else None, report)


def train_and_evaluate(trainer: RunTrainer, *, checkpoint: str | None) -> dict[str, float]:
    """
    Trains, saves, evaluates where there are held-out rows and the last step was not evaluated, and writes the log.
    Returns the held-out metrics.
    """
    for theirs, ours in ((ProgressCallback, TrainingProgressCallback), (PrinterCallback, TrainingLinesCallback)):
        if trainer.pop_callback(theirs) is not None:
            trainer.add_callback(ours)
    if trainer.args.profile:
        trainer.add_callback(ProfilerCallback(trainer.args.profile_interval))
    if trainer.args.spaces_evaluations:
        trainer.add_callback(EvaluationIntervalCallback(MIN_EVAL_STEPS))
    if trainer.args.process_index == 0:
        facts, held_out = trainer.run_facts, trainer.eval_dataset
        data = {"train": describe_data(trainer.train_dataset), "held_out": describe_data(held_out)}
        add_to_record(trainer.args, data={"names": facts.datasets, "counts": facts.data, **data})
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics: dict[str, float] = {}
    if trainer.eval_dataset is not None:
        metrics = _last_evaluation(trainer) or trainer.evaluate()
    trainer.save_state()
    return metrics


def _last_evaluation(trainer: RunTrainer) -> dict[str, float]:
    """What was measured of the model as it is at the end; nothing if it was measured at other steps alone."""
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_global_step != state.global_step:
        return {}
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    evaluations = [entry for entry in entries if any(key.startswith("eval_") for key in entry)]
    return {key: value for entry in evaluations[-1:] for key, value in entry.items() if key.startswith("eval_")}


def end_run(trainer: RunTrainer, metrics: dict[str, float], *, samples: list[tuple[str, str]] | None = None) -> None:
    """Plots the loss curve, pushes where that is asked for, and prints the report."""
    training_args, facts, history = trainer.args, trainer.run_facts, trainer.state.log_history
    evaluations = find_evaluations(history)
    is_main = training_args.process_index == 0
    if is_main:
        curve = Path(training_args.output_dir, CURVE_NAME)
        plot_loss_curve(history, curve, unigram=facts.unigram_loss, loss_unit=facts.loss_unit)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    if is_main:
        report = format_report(
            training_args,
            metrics=metrics,
            unigram=facts.unigram_loss,
            samples=samples or [],
            start=evaluations[0] if evaluations and evaluations[0]["step"] == 0 else None,
            loss_unit=facts.loss_unit,
            push_report=trainer.push_report,
        )
        print(report)
        end_record(training_args, steps=trainer.state.global_step, metrics=metrics, report=report.strip().splitlines())
    end_log()
    release_output_dir(training_args.output_dir)


def train_on_conversations(trainer: RunTrainer, rows: ConversationRows, *, checkpoint: str | None) -> None:
    """A run from its first step to its report, with answers to questions that were held out."""
    metrics = train_and_evaluate(trainer, checkpoint=checkpoint)
    samples = None
    if rows.conversations is not None:
        samples = sample_answers(trainer.model, trainer.processing_class, rows.conversations)
    end_run(trainer, metrics, samples=samples)


__all__ = [
    "ConversationRows",
    "begin_run",
    "end_run",
    "load_conversations",
    "train_and_evaluate",
    "train_on_conversations",
]
