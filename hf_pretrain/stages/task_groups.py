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


def compare_with_published(results: dict[str, Any]) -> str:
    """
    Return a table of accuracies in percent, beside published ones. Return "" if no task belongs to `minimind`.

    Args:
        results (`dict`): the result of [`~stages.harness.evaluate_tasks`].
    """
    tasks = [(number, task) for number, task in enumerate(GROUPS["minimind"]) if task in results]
    if not tasks:
        return ""
    rows = [["accuracy in %", *(task for _, task in tasks)]]
    own = [results[task]["metrics"].get("acc", {}).get("value") for _, task in tasks]
    rows.append(["this model", *("-" if value is None else f"{100 * value:.2f}" for value in own)])
    for name, figures in (("random guess", CHANCE), *PUBLISHED.items()):
        rows.append([name, *(f"{figures[number]:.2f}" for number, _ in tasks)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "The published figures are from MiniMind's README, which measured them with lm-eval."])


__all__ = ["CHANCE", "GROUPS", "PUBLISHED", "compare_with_published", "expand_tasks"]
