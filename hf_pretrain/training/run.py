"""
A run from its beginning to its report, for all training recipes: [`begin_run`], then [`train`] with the data and the
model, which first settles the arguments (`settling.py`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from datasets import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ..loading.adapters import AdapterArguments, base_model_of
from ..loading.model_arguments import ModelArguments
from ..rows.data_arguments import DataArguments
from ..rows.preparation import PreparedData
from ..rows.unigram import unigram_loss
from ..run_directory.directory import RunDirectory
from ..run_directory.facts import RunFacts
from ..run_directory.metrics import NATS
from ..runtime.command_line import is_lack_of_memory, print_result
from ..runtime.devices import describe_found
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.ranks import Ranks, leave_process_group, on_main_process
from ..runtime.signals import SignalListener
from ..runtime.stages import STAGES
from ..runtime.texts import terminal_language
from ..runtime.writing import check_output
from .budgets import BUDGETS
from .callbacks import (
    AddedFigures,
    LogFileCallback,
    LogLinesCallback,
    ProfilerCallback,
    ProgressBarCallback,
    SampleCallback,
)
from .deepspeed_support import import_deepspeed_late
from .dry_run import format_plan
from .launch import announce_first_message
from .optimizers import OPTIMIZERS, describe_own_optimizer
from .reporting import report
from .resuming import checkpoint_to_resume, is_resumed
from .settling import TrainerData, check_best_metric, settle, settle_date, settle_dry_run, settle_name
from .stopping import EarlyStopping
from .training_arguments import LMTrainingArguments, values_by_name


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


class SavedState(Protocol):
    """A state that checkpoints hold beside Trainer's. All ranks call its methods."""

    def save(self, trainer: Any, directory: Path) -> None:
        """Write the state into a checkpoint."""

    def load(self, trainer: Any, checkpoint: str) -> None:
        """Read the state, before the first step of a resumed run."""


class Run:
    """
    One run: its arguments, its output directory, and what its parts share.

    Args:
        args ([`LMTrainingArguments`]): the training arguments.
        others (`Iterable` of dataclasses): the other arguments. A resume compares them.
        facts ([`~run_directory.facts.RunFacts`], *optional*): facts for the report and the model card.
        planned_dir (`str`, *optional*): the directory of the run that a dry run plans.

    Attributes:
        checkpoint (`str`, *optional*): the checkpoint directory to resume from; `None` for new runs.
        pushes (`bool`): whether the run pushes to the Hub.
        callbacks (`list[TrainerCallback]`): its callbacks, in their order.
        saved_states (`list[SavedState]`): states that checkpoints hold beside Trainer's.
        fixed_weights (`dict[str, str]`): digests of weights that training does not change, by their role.
        own_optimizer (`tuple[str, dict]`, *optional*): the class and the settings of an optimizer of the user.
    """

    def __init__(
        self,
        args: LMTrainingArguments,
        others: Iterable[Any] = (),
        *,
        facts: RunFacts | None = None,
        planned_dir: str | None = None,
    ):
        self.args, self.others, self.facts = args, tuple(others), facts or RunFacts()
        self.planned_dir = planned_dir or args.output_dir
        self.directory = RunDirectory(args.output_dir)
        self.ranks = Ranks(args.world_size, args.process_index, timeout_seconds=args.ddp_timeout)
        self.signals = SignalListener()
        self.checkpoint: str | None = None
        self.pushes = args.push_to_hub
        self.callbacks: list[TrainerCallback] = []
        self.saved_states: list[SavedState] = []
        self.fixed_weights: dict[str, str] = {}
        self.own_optimizer: tuple[str, dict[str, Any]] | None = None

    @classmethod
    def of_trainer(
        cls, args: TrainingArguments | None, model: PreTrainedModel, data: dict[str, Any], *, collator: Any = None
    ) -> "Run":
        """
        Return a settled run for a trainer without a recipe.

        Args:
            args ([`~transformers.TrainingArguments`], *optional*), model: as the trainer gets them.
            data (`dict`): may hold `train_dataset`, `eval_dataset` and an optimizer.
            collator (`Callable`, *optional*): the collator of packed sequences.
        """
        own = isinstance(args, LMTrainingArguments)
        # The caller may pass its arguments to another trainer, whose model and data settle them differently.
        args = copy.copy(args) if own else LMTrainingArguments.of(args or TrainingArguments())
        # The arguments of an evaluation have neither.
        for name in ("dry_run", "preview"):
            _refuse_unread(name, vars(args).get(name))
        run = cls(args)
        run.own_optimizer = describe_own_optimizer(data)
        settle(run, TrainerData(data.get("train_dataset"), data.get("eval_dataset"), collator), model)
        return run


def begin_run(recipe: str, *arguments: Any, detail: str = "", loss_unit: str | None = None) -> Run:
    """
    Check the arguments together, lock `output_dir`, choose the checkpoint to resume from, record the run
    (`run.json`), print the devices, and seed all random numbers. A dry run or a preview only checks and seeds.

    Args:
        recipe (`str`): the file in `recipes/`, without its ending.
        arguments (dataclasses): the run's arguments. One of them is an [`LMTrainingArguments`].
        detail (`str`): completes the method of the stage, for the model card.
        loss_unit (`str`, *optional*): the unit of the loss, by default that of the stage.

    Raises:
        `UserError`: for arguments that do not fit together, if another run writes into `output_dir`, and in the cases
            of [`~training.resuming.checkpoint_to_resume`].
    """
    (args,) = (part for part in arguments if isinstance(part, LMTrainingArguments))
    others = [part for part in arguments if part is not args]
    _check_arguments(args, others)
    announce_first_message(args)
    bases = [part.model_name_or_path for part in others if isinstance(part, ModelArguments)]
    method, unit = STAGES[recipe].method.format(detail), loss_unit or STAGES[recipe].loss_unit or NATS
    facts = RunFacts(method, recipe, base_model=bases[0], loss_unit=unit)
    planned_dir, writes = args.output_dir, not (args.dry_run or args.preview)
    if not writes:
        if not (is_resumed(args) or args.preview):
            RunDirectory(args.output_dir).check_unused()
        settle_dry_run(args)
        if args.process_index == 0:
            print(f"{'Preview' if args.preview else 'Dry run'}: {args.launch_description}")
    run = Run(args, others, facts=facts, planned_dir=planned_dir)
    if writes:
        check_output(args.output_dir, "--output_dir")
        # Lock `output_dir` before anything writes into it: log, download or record.
        run.directory.lock(args, is_resumed=is_resumed(args))
        run.checkpoint = checkpoint_to_resume(args)
        settle_date(args, run.checkpoint)
        on_main_process(args, partial(_clear_and_record, run))
    import_deepspeed_late()
    # Reseed: launchers consume different amounts of randomness.
    set_seed(args.seed)
    return run


def _clear_and_record(run: Run) -> None:
    # An earlier run may have been killed in the middle of a save or a push.
    run.directory.remove_leftovers()
    args = run.args
    settle_name(args, run.directory.launches if run.checkpoint else [])
    run.directory.record_start(
        date=args.date,
        launcher=args.launcher,
        launch=args.launch_description,
        rows_per_step=args.rows_per_step,
        resumed_from=run.checkpoint,
    )
    print(f"{args.launch_description}; {args.rows_per_step:,} rows per step; {describe_found()}")


def _check_arguments(args: LMTrainingArguments, others: list[Any]) -> None:
    """Raise `UserError` for arguments that do not fit together, before anything is written or read."""
    uses_peft = any(isinstance(part, AdapterArguments) and part.use_peft for part in others)
    if uses_peft and OPTIMIZERS[args.optim_preset].build is not None:
        raise UserError(
            f"--optim_preset {args.optim_preset} trains no adapters. Pass --optim_preset adamw with --use_peft."
        )
    if uses_peft and args.fp8:
        raise UserError(
            "--fp8 trains no adapters: its gains are in the matrices that --use_peft freezes. Leave one out."
        )
    adds_tokens = any(isinstance(part, ModelArguments) and part.add_tokens for part in others)
    if adds_tokens and (uses_peft or args.distributed_config is not None):
        raise UserError(
            "--add_tokens trains new rows, which --use_peft freezes and --fsdp_size shards. Leave one out."
        )
    streams = any(isinstance(part, DataArguments) and part.streaming for part in others)
    if streams and args.max_steps < 1 and all(vars(args)[name] is None for name in BUDGETS):
        raise UserError(
            "--streaming needs --max_steps, because the length of a stream is unknown. Add --max_steps N, a budget "
            "such as --max_tokens 2B, or leave --streaming out."
        )


def train(
    run: Run,
    data: PreparedData,
    model: PreTrainedModel,
    trainer_class: Callable[..., "RunTrainer"],
    *,
    sample: Callable[["RunTrainer", PreTrainedModel], list[tuple[str, str]]] | None = None,
    **kwargs: Any,
) -> None:
    """
    Train a model on prepared data, evaluate, and report. All ranks must call this function.

    Args:
        run ([`Run`]): the result of [`begin_run`].
        data ([`~rows.preparation.PreparedData`]): the data and the tokenizer.
        model ([`~transformers.PreTrainedModel`]): the model, or an adapted one.
        trainer_class (`type[RunTrainer]`): the trainer of the stage; `kwargs` are its own arguments.
        sample (`Callable`, *optional*): returns prompts and generated texts of the trainer and its model; by default
            answers to questions of the validation set, or continuations of its texts.
    """
    args, facts = run.args, run.facts
    facts.datasets, facts.data = data.names, data.report
    facts.data_kind, facts.eval_datasets = data.kind, data.eval_names
    settle(run, data, model)
    check_best_metric(run, data)
    if data.conversations is not None:
        measure = load_named("hf_pretrain.inference.samples:measure_answers")
        options = {"tokenizer": data.tokenizer, "conversations": data.conversations}
        run.callbacks.append(AddedFigures(partial(measure, **options)))
    trainer = trainer_class(
        model,
        run=run,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=data.tokenizer,
        callbacks=run.callbacks,
        **({} if data.collator is None else {"data_collator": data.collator}),
        **kwargs,
    )
    if args.dry_run:
        with _explaining_memory(trainer):
            plan = format_plan(trainer, language=terminal_language())
        if args.process_index == 0:
            print_result(plan)
        raise SystemExit
    make_sampler = load_named("hf_pretrain.inference.samples:make_sampler")
    sample_model = make_sampler(data) if sample is None else partial(sample, trainer)
    with _explaining_memory(trainer):
        metrics, samples = train_and_evaluate(trainer, checkpoint=run.checkpoint, sample=sample_model)
    # A stream has no counts over the whole training set.
    if STAGES[facts.recipe].trains_on_text and data.first_eval is not None and isinstance(data.train, Dataset):
        # Ids may have gaps, so `len(tokenizer)` may be too small.
        vocab_size = base_model_of(model).config.vocab_size
        facts.unigram_loss = unigram_loss(data.train, data.first_eval, vocab_size=vocab_size)
    report(trainer, metrics, samples)
    leave_process_group()


@contextmanager
def _explaining_memory(trainer: "RunTrainer") -> Iterator[None]:
    """Let a run whose memory does not suffice end with the flags that fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_lack_of_memory(error):
            raise
        raise load_named("hf_pretrain.doctor.memory:explain")(trainer, error) from error


def _set_callbacks(trainer: "RunTrainer", *last: TrainerCallback) -> None:
    """
    Complete the callbacks of a run. Their order: the figures of the log, Trainer's own and its trackers, those of the
    recipe (`Run.callbacks`), the budget of time and the stop, and these.
    """
    args = trainer.args
    # Trainer adds one of these two callbacks, depending on `disable_tqdm`. Replace it by ours.
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    callbacks: list[TrainerCallback] = [] if args.disable_tqdm else [ProgressBarCallback()]
    callbacks += [LogLinesCallback(), LogFileCallback()]
    if args.profile:
        callbacks.append(ProfilerCallback(args.profile_interval))
    if (patience := args.early_stopping_patience) is not None:
        if trainer.eval_dataset is None:
            raise UserError("--early_stopping_patience needs validation data. Pass --eval_dataset_name.")
        # It comes after callbacks whose figures may choose the best model, such as those of answers.
        callbacks.append(EarlyStopping(patience))
    for callback in (*callbacks, *last):
        trainer.add_callback(callback)


def check_callbacks(trainer: "RunTrainer") -> None:
    """Raise `UserError` for arguments that callbacks of [`train_and_evaluate`] read, if the trainer has none."""
    for name, kind in (("profile", ProfilerCallback), ("early_stopping_patience", EarlyStopping)):
        if not any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
            _refuse_unread(name, vars(trainer.args)[name])


def _refuse_unread(name: str, value: Any) -> None:
    if value not in (None, False):
        raise UserError(
            f"Only recipes know `{name}`. Leave it out, and pass callbacks of transformers, such as "
            "EarlyStoppingCallback, to the trainer."
        )


def train_and_evaluate(
    trainer: "RunTrainer",
    *,
    checkpoint: str | None = None,
    sample: Callable[[PreTrainedModel], list[tuple[str, str]]] | None = None,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """
    Train, save the model and the log, and evaluate if the last step was not evaluated. All ranks must call this
    function.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of any stage.
        checkpoint (`str`, *optional*): the checkpoint directory to resume from.
        sample (`Callable`, *optional*): returns prompts and generated texts of a model. Each evaluation calls it.

    Returns:
        `tuple[dict, list]`: the validation metrics of the saved model, an empty `dict` without a validation set; and
        the last prompts and generated texts.
    """
    samples = SampleCallback(sample) if sample is not None else None
    _set_callbacks(trainer, *([samples] if samples is not None else []))
    set_generation_defaults(trainer)
    if trainer.args.process_index == 0:
        run, facts = trainer.run, trainer.run.facts
        # `recipes/chat.py` continues text with a model that was only pretrained.
        data = {"names": facts.datasets, "counts": facts.data}
        fields = {"recipe": facts.recipe, "data": data, "loss_unit": facts.loss_unit}
        run.directory.record(arguments=values_by_name(trainer.args, run.others), **fields)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyError as error:
        # Trainer's own error at the first evaluation names the figures that there are.
        if "metric_for_best_model" not in str(error):
            raise
        raise UserError(error.args[0]) from error
    # Save before evaluating: a crash in the evaluation must not cost the model.
    trainer.save_model()
    metrics: dict[str, float] = {}
    if trainer.eval_dataset is not None:
        metrics = _last_evaluation(trainer) or trainer.evaluate()
    trainer.save_state()
    if samples is None:
        return metrics, []
    # Without an evaluation, sample now.
    return metrics, samples.samples[-1][1] if samples.samples else samples.sample(trainer.model)


def set_generation_defaults(trainer: "RunTrainer") -> None:
    """
    Set the generation defaults that are saved with the model. After training on text, `do_sample` is `False`;
    `inference.terminal_chat` recognises base models by it.
    """
    model, data_kind = base_model_of(trainer.model), trainer.run.facts.data_kind
    if not model.can_generate():
        return
    if data_kind == "text":
        # Begin anew: transformers refuses to save settings of the sampling, such as those of a chat model, without it.
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.generation_config.do_sample = False
    # Every other training turns a base model into a chat model, and a chat model keeps its own defaults. Without a
    # record of its training, a model that does not sample counts as a base model.
    elif (samples := model.generation_config.do_sample) is False or samples is None and data_kind == "conversations":
        # Servers respect the temperature of a request only if sampling is on.
        model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.9)


def _last_evaluation(trainer: "RunTrainer") -> dict[str, float]:
    """Return the validation metrics of the current weights, or an empty `dict` if their step was not evaluated."""
    state = trainer.state
    # With --load_best_model_at_end, the model now has the weights of the best step instead of the last one.
    if trainer.args.load_best_model_at_end and state.best_global_step != state.global_step:
        return {}
    entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
    # Each of several validation sets has an entry.
    return {key: value for entry in entries for key, value in entry.items() if key.startswith("eval_")}
