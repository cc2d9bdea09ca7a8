"""Groups of lm-eval tasks, and published accuracies to compare with."""

from typing import Any


# Names that `--tasks` accepts in addition to lm-eval's.
GROUPS = {
    # The table of MiniMind's README.
    "minimind": ("ceval-valid", "cmmlu", "arc_easy", "piqa", "openbookqa", "hellaswag", "social_iqa"),
    # Pairs of a grammatical and an ungrammatical sentence. Models with a few million parameters beat chance here.
    "small": ("blimp", "zhoblimp"),
}
# Accuracies in percent from https://github.com/jingyaogong/minimind (README.md, in the order of the group `minimind`).
# The README does not name the metric. Its figures of known models are acc_norm wherever lm-eval computes that:
# TinyLlama's acc on hellaswag lies near 46. Chat models were asked through their chat templates.
PUBLISHED = {
    "minimind-3 (64M)": (24.89, 25.38, 28.49, 50.65, 23.60, 28.28, 34.19),
    "minimind-3-moe (198M)": (25.48, 24.32, 27.74, 50.71, 26.20, 27.43, 34.03),
    "gpt2-medium (360M)": (23.18, 25.00, 43.60, 66.38, 30.20, 39.38, 39.10),
    "SmolLM2-135M": (24.44, 24.71, 58.50, 68.17, 32.80, 43.15, 39.46),
    "TinyLlama-1.1B": (25.71, 25.03, 54.80, 74.43, 35.60, 60.38, 43.09),
}
# Accuracies of random guesses in percent, in the same order.
CHANCE = (25.0, 25.0, 25.0, 50.0, 25.0, 25.0, 33.3)


def expand_tasks(names: str) -> list[str]:
    """Return the tasks of a comma-separated list, with each group replaced by its tasks."""
    return [task for name in names.split(",") for task in GROUPS.get(name.strip(), (name.strip(),))]


def compare_with_published(results: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """
    Return the accuracies of this model and the published ones, in percent, by model and task. Return an empty dict if
    no task belongs to `minimind`.

    Args:
        results (`dict`): the result of [`~stages.harness.evaluate_tasks`].
    """
    tasks = [(number, task) for number, task in enumerate(GROUPS["minimind"]) if task in results]
    if not tasks:
        return {}
    own: dict[str, float | None] = {}
    for _, task in tasks:
        metrics = results[task]["metrics"]
        entry = metrics.get("acc_norm") or metrics.get("acc")
        own[task] = round(100 * entry["value"], 2) if entry else None
    published = {"a guess": CHANCE, **PUBLISHED}
    return {"this model": own} | {
        name: {task: figures[number] for number, task in tasks} for name, figures in published.items()
    }


def format_comparison(results: dict[str, Any]) -> str:
    """
    Return the comparison of `evaluation.json` as a Markdown table, with what makes the figures differ; "" if there is
    none.
    """
    comparison = results.get("comparison")
    if not comparison:
        return ""
    rows = [["accuracy in %", *comparison["this model"]]]
    for name, figures in comparison.items():
        rows.append([name, *("-" if value is None else f"{value:.2f}" for value in figures.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    cells.insert(1, ["-" * width for width in widths])
    notes = [
        "Published figures: MiniMind's README, measured with lm-eval; acc_norm, or acc where there is no acc_norm.",
        "Chat models, also the published ones, were asked through their chat templates, all others in plain text.",
    ]
    if results["apply_chat_template"] is False:
        notes[1] += " This model was asked in plain text."
    if results["limit"] is not None:
        notes.append(f"With --limit {results['limit']:g}, this model answered only a part of the questions.")
    return "\n".join([*(f"| {' | '.join(row)} |" for row in cells), "", *notes])


__all__ = ["CHANCE", "GROUPS", "PUBLISHED", "compare_with_published", "expand_tasks", "format_comparison"]
