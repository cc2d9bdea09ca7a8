"""What every training recipe does before and after its own part."""

from pathlib import Path

from transformers import set_seed

from .arguments import LMTrainingArguments
from .checkpointing import checkpoint_to_resume
from .hub import HubPushMixin, pull_checkpoint, remove_staging
from .model_card import CURVE_NAME
from .reporting import format_report, plot_loss_curve


def begin_run(training_args: LMTrainingArguments) -> str | None:
    """
    The checkpoint that a run goes on from, if any, fetched from the Hub where that is asked for. Seeds everything and
    says on what the run trains.

    Raises:
        `ValueError`: as [`~hub.pull_checkpoint`] and [`~checkpointing.checkpoint_to_resume`] do.
    """
    pull_checkpoint(training_args)
    checkpoint = checkpoint_to_resume(training_args)
    set_seed(training_args.seed)
    if training_args.process_index == 0:
        remove_staging(training_args.output_dir)
        print(training_args.launch_description)
    return checkpoint


def train_and_evaluate(trainer: HubPushMixin, *, checkpoint: str | None) -> dict[str, float]:
    """Trains, saves, evaluates where there are held-out rows, and writes the log. Returns the held-out metrics."""
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    trainer.save_state()
    return metrics


def end_run(trainer: HubPushMixin, metrics: dict[str, float], *, samples: list[tuple[str, str]] | None = None) -> None:
    """Plots the loss curve, pushes where that is asked for, and prints the report."""
    training_args, unigram = trainer.args, trainer.run_facts.unigram_loss
    is_main = training_args.process_index == 0
    if is_main:
        plot_loss_curve(trainer.state.log_history, Path(training_args.output_dir, CURVE_NAME), unigram=unigram)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    if is_main:
        print(
            format_report(
                training_args,
                metrics=metrics,
                unigram=unigram,
                samples=samples or [],
                push_report=trainer.push_report,
            )
        )


__all__ = ["begin_run", "end_run", "train_and_evaluate"]
