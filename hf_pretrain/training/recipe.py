"""The steps that all training recipes share: begin a run, train, evaluate, and report."""

from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import GenerationConfig, PreTrainedModel, PrinterCallback, ProgressCallback, set_seed

from ..checkpoints.directory import remove_leftovers
from ..data.data_arguments import SourceArguments
from ..data.preparation import PreparedData
from ..hub.model_card import RunFacts
from ..hub.pushing import remove_staging
from ..runtime.devices import describe_found
from ..runtime.errors import UserError
from ..runtime.metrics import NATS, find_evaluations
from ..runtime.ranks import leave_process_group, on_main_process
from ..runtime.signals import watch_launcher
from ..runtime.writing import check_output
from ..weights.adapters import AdapterArguments, base_model_of
from ..weights.models import ModelArguments
from .base_trainer import RunTrainer
from .budgets import BUDGETS, apply_token_budget
from .callbacks import AnswerFigures, LogLinesCallback, ProfilerCallback, ProgressBarCallback, SampleCallback
from .dry_run import begin_dry_run, format_plan
from .end_report import (
    format_report,
    next_commands,
    sample_answers,
    sample_continuations,
    unigram_loss,
    write_run_page,
)
from .micro_batch import fit_micro_batch
from .run_directory import RunDirectory, checkpoint_to_resume, is_resumed, now
from .stopping import EarlyStopping
from .training_arguments import LMTrainingArguments


def begin_run(training_args: LMTrainingArguments, model_args: ModelArguments, *others: Any) -> str | None:
    """
    Lock `output_dir`, choose the checkpoint to resume from, seed all random numbers, print the devices, and record the
    run with all its arguments (`run_directory.py`).

    Args:
        training_args ([`LMTrainingArguments`]), model_args ([`ModelArguments`]): the run's arguments.
        others (dataclasses): its other arguments, for the record.

    Returns:
        `str`: the checkpoint directory to resume from; `None` for new runs.

    Raises:
        `ValueError`: for a stream without `--max_steps`, if another run writes into `output_dir`, and in the cases of
            [`~training.run_directory.checkpoint_to_resume`].
    """
    training_args.other_arguments = (model_args, *others)
    _check_arguments(training_args, training_args.other_arguments)
    directory = RunDirectory(training_args)
    if training_args.dry_run:
        if not is_resumed(training_args):
            directory.check_unused()
        begin_dry_run(training_args)
        set_seed(training_args.seed)
        return None
    check_output(training_args.output_dir, "--output_dir")
    # Lock `output_dir` before anything writes into it: log, download or record.
    watch_launcher(training_args.launcher)
    directory.lock(is_resumed=is_resumed(training_args))
    checkpoint = checkpoint_to_resume(training_args)
    # Reseed: launchers consume different amounts of randomness.
    set_seed(training_args.seed)

    def clear() -> None:
        # An earlier run may have been killed in the middle of a save or a push.
        remove_staging(training_args.output_dir)
        remove_leftovers(training_args.output_dir)
        directory.record_start(checkpoint=checkpoint)
        rows = f"{training_args.rows_per_step:,} rows per step"
        print(f"{training_args.launch_description}; {rows}; {describe_found()}")

    on_main_process(training_args, clear)
    return checkpoint


def _check_arguments(args: LMTrainingArguments, others: tuple[Any, ...]) -> None:
    """Raise `UserError` for arguments that do not fit together, before anything is written or read."""
    uses_peft = any(isinstance(part, AdapterArguments) and part.use_peft for part in others)
    if uses_peft and args.optim_preset == "muon":
        raise UserError("--optim_preset muon trains no adapters. Pass --optim_preset adamw with --use_peft.")
    if uses_peft and args.fp8:
        raise UserError(
            "--fp8 trains no adapters: its gains are in the matrices that --use_peft freezes. Leave one out."
        )
    adds_tokens = any(isinstance(part, ModelArguments) and part.add_tokens for part in others)
    if adds_tokens and (uses_peft or args.distributed_config is not None):
        raise UserError(
            "--add_tokens trains new rows, which --use_peft freezes and --fsdp_size shards. Leave one out."
        )
    streams = any(isinstance(part, SourceArguments) and part.streaming for part in others)
    if streams and args.max_steps < 1 and all(vars(args)[name] is None for name in BUDGETS):
        raise UserError(
            "--streaming needs --max_steps, because the length of a stream is unknown. Add --max_steps N, a budget "
            "such as --max_tokens 2B, or leave --streaming out."
        )


def train_and_evaluate(
    trainer: RunTrainer,
    *,
    checkpoint: str | None,
    sample: Callable[[PreTrainedModel], list[tuple[str, str]]] | None = None,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """
    Train, save the model and the log, and evaluate if the last step was not evaluated. All ranks must call this
    function.

    Args:
        trainer ([`RunTrainer`]): the trainer of any stage.
        checkpoint (`str`, *optional*): the checkpoint directory to resume from.
        sample (`Callable`, *optional*): returns prompts and generated texts of a model. Each evaluation calls it.

    Returns:
        `tuple[dict, list]`: the validation metrics of the saved model, an empty `dict` without a validation set; and
        the last prompts and generated texts.
    """
    if trainer.args.dry_run:
        plan = format_plan(trainer)
        if trainer.args.process_index == 0:
            print(plan)
        raise SystemExit
    _add_callbacks(trainer)
    _set_generation_defaults(trainer)
    if sample is not None:
        trainer.add_callback(samples := SampleCallback(sample))
    if trainer.args.process_index == 0:
        facts = trainer.run_facts
        data = {"names": facts.datasets, "counts": facts.data}
        # The trainer has completed the arguments: the width gives the learning rate, the data the steps of a budget.
        # `recipes/chat.py` continues text with a model that was only pretrained.
        fields = {"recipe": facts.recipe, "data": data, "loss_unit": facts.loss_unit}
        RunDirectory(trainer.args).record(arguments=trainer.args.values_by_name, **fields)
    trainer.train(resume_from_checkpoint=checkpoint)
    # Save before evaluating: a crash in the evaluation must not cost the model.
    trainer.save_model()
    metrics: dict[str, float] = {}
    if trainer.eval_dataset is not None:
        metrics = _last_evaluation(trainer) or trainer.evaluate()
    trainer.save_state()
    if sample is None:
        return metrics, []
    # Without an evaluation, sample now.
    return metrics, samples.samples[-1][1] if samples.samples else sample(trainer.model)


def _add_callbacks(trainer: RunTrainer) -> None:
    """Add the callbacks of progress, profiler and early stopping."""
    # Trainer adds one of these two callbacks, depending on `disable_tqdm`. Replace it by ours.
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(ProgressBarCallback)
    trainer.add_callback(LogLinesCallback)
    if trainer.args.profile:
        trainer.add_callback(ProfilerCallback(trainer.args.profile_interval))
    if (patience := trainer.args.early_stopping_patience) is not None:
        if trainer.eval_dataset is None:
            raise UserError("--early_stopping_patience needs validation data. Pass --eval_dataset_name.")
        # It comes after callbacks whose figures may choose the best model, such as those of answers.
        trainer.add_callback(EarlyStopping(patience))


def _set_generation_defaults(trainer: RunTrainer) -> None:
    """
    Set the generation defaults that are saved with the model. After training on text, `do_sample` is `False`;
    `stages.terminal_chat` recognises base models by it.
    """
    model, data_kind = base_model_of(trainer.model), trainer.run_facts.data_kind
    if not model.can_generate():
        return
    if data_kind == "text":
        # Begin anew: transformers refuses to save settings of the sampling, such as those of a chat model, without it.
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.generation_config.do_sample = False
    # Training on preferences or tasks turns a base model into a chat model, and a chat model keeps its own defaults.
    # Without a record of its training, a model that does not sample counts as a base model.
    elif data_kind == "conversations" or model.generation_config.do_sample is False:
        # Servers respect the temperature of a request only if sampling is on.
        model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.9)


def _last_evaluation(trainer: RunTrainer) -> dict[str, float]:
    """Return the validation metrics of the current weights, or an empty `dict` if their step was not evaluated."""
    state = trainer.state
    # With --load_best_model_at_end, the model now has the weights of the best step instead of the last one.
    if trainer.args.load_best_model_at_end and state.best_global_step != state.global_step:
        return {}
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    # Each of several validation sets has an entry.
    return {key: value for entry in entries for key, value in entry.items() if key.startswith("eval_")}


def _end_run(trainer: RunTrainer, metrics: dict[str, float], samples: list[tuple[str, str]]) -> None:
    """Push with `--push_to_hub`, and print and record the report. All ranks must call it."""
    args, facts = trainer.args, trainer.run_facts
    is_main = args.process_index == 0
    # Report after the push, because the report quotes its result.
    if args.push_to_hub:
        trainer.push_to_hub()
    if is_main:
        evaluations = find_evaluations(trainer.state.log_history)
        start = evaluations[0] if evaluations and evaluations[0]["step"] == 0 else None
        report = format_report(args, facts, metrics, samples, start=start, push_report=trainer.pusher.report)
        print(report)
        RunDirectory(args).record(
            ended=now(),
            steps=trainer.state.global_step,
            metrics=metrics,
            report=report.strip().splitlines(),
            next_commands=next_commands(args, facts),
        )
        write_run_page(args, trainer.state)
    # Release the lock only now: the record and the report are written under it.
    RunDirectory(args).release()


def train_on(
    data: PreparedData,
    model: PreTrainedModel,
    trainer_class: Callable[..., RunTrainer],
    *,
    stage: str,
    recipe: str,
    checkpoint: str | None,
    base_model: str | None,
    training_args: LMTrainingArguments,
    loss_unit: str = NATS,
    sample: Callable[[Any, PreTrainedModel], list[tuple[str, str]]] | None = None,
    **kwargs: Any,
) -> None:
    """
    Train a model on prepared data, evaluate, and report. All ranks must call this function.

    Args:
        data ([`~data.preparation.PreparedData`]): the data and the tokenizer.
        model ([`~transformers.PreTrainedModel`]): the model, or an adapted one.
        trainer_class (`type[RunTrainer]`): the trainer of the stage; `kwargs` are its own arguments.
        stage (`str`), recipe (`str`), base_model (`str`, *optional*), loss_unit (`str`): as in
            [`~hub.model_card.RunFacts`].
        checkpoint (`str`, *optional*): the result of [`begin_run`].
        training_args ([`LMTrainingArguments`]): the arguments of the recipe.
        sample (`Callable`, *optional*): returns prompts and generated texts of the trainer and its model; by default
            answers to questions of the validation set, or continuations of its texts.
    """
    facts = RunFacts(stage, recipe, data.names, data.report, base_model, None, loss_unit, data.kind, data.eval_names)
    apply_token_budget(training_args, data, base_model_of(model).config)
    kwargs |= {} if data.collator is None else {"data_collator": data.collator}
    if recipe in ("pretrain", "sft"):
        fit_micro_batch(training_args, model, data.train, data.collator)
    trainer = trainer_class(
        model,
        args=training_args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=data.tokenizer,
        run_facts=facts,
        **kwargs,
    )
    sample_model = partial(sample, trainer) if sample is not None else _make_sampler(data)
    if data.conversations is not None:
        trainer.add_callback(AnswerFigures(data.tokenizer, data.conversations))
    metrics, samples = train_and_evaluate(trainer, checkpoint=checkpoint, sample=sample_model)
    # A stream has no counts over the whole training set.
    if recipe == "pretrain" and data.first_eval is not None and isinstance(data.train, Dataset):
        # Ids may have gaps, so `len(tokenizer)` may be too small.
        vocab_size = base_model_of(model).config.vocab_size
        facts.unigram_loss = unigram_loss(data.train, data.first_eval, vocab_size=vocab_size)
    _end_run(trainer, metrics, samples)
    leave_process_group()


def _make_sampler(data: PreparedData) -> Callable[[PreTrainedModel], list[tuple[str, str]]] | None:
    """Return a function that samples answers or continuations of the validation set; `None` without such texts."""
    if data.conversations is not None:
        return partial(sample_answers, tokenizer=data.tokenizer, conversations=data.conversations)
    # Only packed sequences have a collator.
    if data.first_eval is not None and data.collator is not None:
        return partial(sample_continuations, tokenizer=data.tokenizer, eval_rows=data.first_eval)
    return None
