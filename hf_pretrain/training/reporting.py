"""
What a run reports: the text and the page at its end, and its model card. This module names the parts that write them.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from huggingface_hub.constants import REPOCARD_NAME
from transformers import TrainerState
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..run_directory.directory import RunDirectory, now
from ..runtime.named import load_named
from ..runtime.texts import terminal_language
from .training_arguments import LMTrainingArguments, optimizer_name


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


logger = logging.get_logger(__name__)


def report(trainer: "RunTrainer", metrics: dict[str, float], samples: list[tuple[str, str]]) -> None:
    """Push with `--push_to_hub`, and print and record the report. All ranks must call it."""
    args, run = trainer.args, trainer.run
    # Report after the push, because the report quotes its result.
    if run.pushes:
        trainer.push_to_hub()
    if args.process_index == 0:
        first = [entry for entry in trainer.state.log_history if entry["step"] == 0]
        start = {name: value for entry in first for name, value in entry.items()}
        output_dir, facts = str(args.output_dir), run.facts
        commands = load_named("hf_pretrain.reports.end_report:next_commands")(output_dir, facts, config=args.config)
        text = load_named("hf_pretrain.reports.end_report:format_report")(
            *(output_dir, facts, metrics, samples),
            optimizer=(optimizer_name(args), args.learning_rate),
            commands=commands,
            start=start,
            push_report=trainer.pusher.report if run.pushes else None,
            language=terminal_language(),
        )
        print(text)
        run.directory.record(
            ended=now(),
            steps=trainer.state.global_step,
            metrics=metrics,
            unigram_loss=facts.unigram_loss,
            report=text.strip().splitlines(),
            next_commands=commands,
        )
        write_page(run.directory, trainer.state)
    # Release the lock only now: the record and the report are written under it.
    run.directory.release()


def write_page(directory: RunDirectory, state: TrainerState, *, stopped: str | None = None) -> None:
    """
    Write `report.html` of a run of a recipe. Only the main process calls it. No failure ends the run.

    Args:
        directory ([`RunDirectory`]): the directory of the run.
        state ([`~transformers.TrainerState`]): the state with the log.
        stopped (`str`, *optional*): why the run stops, for its record.
    """
    try:
        if not directory.record_file.is_file():
            return
        if stopped is not None:
            directory.record(stopped=f"after step {state.global_step}: {stopped}")
        load_named("hf_pretrain.reports.page:write_run_page")(directory, state.log_history)
    except Exception as error:
        # The run matters more than its page.
        logger.warning(f"The page of {directory.path} could not be written: {error}. `hf-pretrain compare` writes it.")


def write_model_card(trainer: "RunTrainer") -> None:
    """Write the card of a run to its directory. Only the main process calls it."""
    args, run = trainer.args, trainer.run
    card = load_named("hf_pretrain.hub.model_card:format_run_card")(
        trainer.accelerator.unwrap_model(trainer.model),
        trainer.state,
        run.facts,
        repo_id=trainer.hub_model_id or run.directory.path.name,
        training=describe_training(args, trainer.state, trainer.layout),
        language=args.hub_language,
        license=args.hub_license,
    )
    # Within `_save_checkpoint`, `args.output_dir` is `.saving/`.
    (run.directory.path / REPOCARD_NAME).write_text(card, encoding="utf-8")


def describe_training(args: LMTrainingArguments, state: TrainerState, layout: str) -> list[tuple[str, str]]:
    """
    Return rows `(name, value)` that describe how a run was trained, for a table in its model card. `layout` is the
    layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
    """
    not_sharded = "DDP" if args.world_size > 1 else "one process"
    sharding = {"FSDP": "FSDP2", "one file": not_sharded}.get(layout, f"DeepSpeed {layout}")
    schedule = SchedulerType(args.lr_scheduler_type).value
    schedule_kwargs = args.lr_scheduler_kwargs or {}
    return [
        ("tokens seen", f"{state.num_input_tokens_seen:,}"),
        ("optimizer steps", f"{state.global_step:,}"),
        ("sequences per step", f"{args.rows_per_step}"),
        ("learning rate", f"{args.learning_rate:g}, warmup {args.warmup_steps:g}, {schedule} {schedule_kwargs or ''}"),
        (
            "optimizer",
            f"{optimizer_name(args)}, betas ({args.adam_beta1:g}, {args.adam_beta2:g}), weight decay "
            f"{args.weight_decay:g}, largest norm of the gradients {args.max_grad_norm:g} (0: not clipped)",
        ),
        ("seed", f"{args.seed}"),
        ("launcher", f"{args.launcher}, {sharding}"),
        ("hardware", args.launch_description),
        ("versions", ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hf_pretrain"))),
    ]
