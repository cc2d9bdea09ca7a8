"""Table of the metrics of an evaluation. Progress line, report, model card and comparisons read it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..runtime.texts import Translation


NATS = "nats per token"


@dataclass(frozen=True)
class Metric:
    """
    A figure that an evaluation reports.

    Args:
        key (`str`): its name in the trainer's logs, `trainer_state.json` and `evaluation.json`.
        label (`str`): its name for people.
        unit (`str`): its unit; empty if there is none or the label names it.
        lower_is_better (`bool`): whether a smaller value is better.
        is_headline (`bool`): whether the progress line and the report show it; the page of the run and the
            model card show all.
    """

    key: str
    label: str
    unit: str = ""
    lower_is_better: bool = True
    is_headline: bool = True

    @property
    def name(self) -> str:
        """The key without `eval_`, for `--metric_for_best_model` and a card's `metric_type`."""
        return self.key.removeprefix("eval_")

    def unit_in(self, loss_unit: str) -> str:
        """Return the unit in a run whose loss has the unit `loss_unit`; preference losses have other units."""
        return loss_unit if self.key == "eval_loss" else self.unit

    def describe(
        self, value: float, loss_unit: str, *, before: float | None, unigram_loss: float | None, t: Translation
    ) -> str:
        """Return a value with its unit, the value before the training, and the loss of a unigram model."""
        unit = self.unit_in(loss_unit)
        text = f"{value:.4f}" + (" " + t(unit) if unit else "")
        if before is not None:
            text += " " + t("({value} before)", value=f"{before:.4f}")
        if self.key == "eval_loss" and unigram_loss is not None:
            text += " " + t("(a unigram model: {value})", value=f"{unigram_loss:.4f}")
        return text


METRICS = (
    Metric("eval_loss", "validation loss", NATS),
    # No headline: it is the exponential of the loss, and the progress line is short.
    Metric("eval_perplexity", "perplexity", is_headline=False),
    Metric("eval_bits_per_byte", "bits per byte"),
    Metric("eval_kl", "KL divergence from the teacher or base model", NATS),
    Metric("eval_rewards/accuracies", "reward accuracy", lower_is_better=False),
    Metric("eval_accuracy", "pairs ranked correctly", lower_is_better=False),
    Metric("eval_reward", "mean reward", lower_is_better=False),
    Metric("eval_recall", "questions answered right", lower_is_better=False),
    Metric("eval_general_recall", "general questions answered right", lower_is_better=False),
    # Figures of greedy answers (inference/samples.py).
    Metric("eval_distinct_2", "distinct-2 of the answers", lower_is_better=False, is_headline=False),
    Metric("eval_repeated_4grams", "share of repeated 4-grams", is_headline=False),
    Metric("eval_ended_answers", "share of answers that end", lower_is_better=False, is_headline=False),
    Metric("eval_answer_tokens", "mean length of the answers", "tokens", lower_is_better=False, is_headline=False),
)
HEADLINES = tuple(metric for metric in METRICS if metric.is_headline)
# Endings of `--metric_for_best_model` for which lower is better. transformers itself knows only "loss".
LOWER_IS_BETTER = tuple(metric.name for metric in METRICS if metric.lower_is_better)


def evaluated_set(figures: dict[str, Any], sets: Any) -> str | None:
    """Return the name of the validation set that an evaluation measured; `None` without several sets by name."""
    # Trainer logs the time of each evaluation.
    return next((name for name in sets if f"eval_{name}_runtime" in figures), None) if isinstance(sets, dict) else None


def first_figures(figures: dict[str, Any], sets: Any) -> dict[str, Any]:
    """
    Return the figures of the first of several validation sets under their plain names, such as `eval_loss` for
    `eval_news_loss`: they choose the best model. Return an empty `dict` for the other sets.
    """
    name = evaluated_set(figures, sets)
    if name is None or name != next(iter(sets)):
        return {}
    prefix = f"eval_{name}_"
    return {f"eval_{key.removeprefix(prefix)}": value for key, value in figures.items() if key.startswith(prefix)}


def named_figures(figures: Iterable[str]) -> dict[str, str]:
    """Return labels of the losses and rewards on several validation sets, such as `loss on news`, by their keys."""
    # TRL's `RewardTrainer` logs `eval_min_reward` and others.
    matches = (re.fullmatch(r"eval_(.+)(?<!_min)(?<!_mean)(?<!_max)_(loss|reward)", key) for key in figures)
    return {match[0]: f"{match[2]} on {match[1]}" for match in matches if match is not None}


def find_evaluations(log_history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a trainer's log that hold the figures of an evaluation, in their order."""
    keys = {metric.key for metric in METRICS}
    return [entry for entry in log_history if keys & entry.keys()]
