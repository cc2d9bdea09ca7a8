"""
`report.html`: the page of one run, or one page that compares several runs.

The page is one file that needs no network: text, tables and SVG charts. Unless a language is named, it holds the texts
in both languages, and its only script shows those of the browser's language. Without scripts, it is in English.
"""

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

from ..run_directory.directory import RunDirectory
from ..run_directory.history import RunHistory
from ..run_directory.metrics import METRICS, Metric, named_figures
from ..runtime.flags import library_flag
from ..runtime.texts import LANGUAGES, Translation, translation
from ..runtime.writing import written_whole


# Each run has the same colour on all charts.
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
# Width and height of a chart in inches.
SIZE = (6, 3.2)
# A line: its label, its x and y values, and arguments of `Axes.plot`.
Line = tuple[str, Sequence[float], Sequence[float], dict[str, Any]]
# Charts with one figure each: title, name in the log, title of the y axis.
_CHARTS = (
    ("Reward accuracy", "rewards/accuracies", "share of the pairs"),
    ("Level of the tasks", "task_level", "level"),
    ("Completion length", "completions/mean_length", "tokens"),
    ("KL divergence from the reference model", "kl", "nats"),
    ("Groups with equal rewards", "frac_reward_zero_std", "share of the prompts"),
    ("Entropy", "entropy", "nats per token"),
    ("Clipped tokens", "clip_ratio/region_mean", "share of the tokens"),
    ("Truncated answers", "completions/clipped_ratio", "share of the answers"),
    ("Learning rate", "learning_rate", "learning rate"),
    ("Gradient norm", "grad_norm", "norm"),
    ("Speed", "tokens_per_second", "tokens/s"),
    ("Share of the peak speed", "mfu", "MFU"),
    ("Memory", "peak_memory_gib", "GiB per process"),
)
# A sentence below the title of a chart.
_EXPLANATIONS = {
    "Reward over tokens": "The mean reward of the answers that the model samples. It should rise.",
    "Completion length": "Answers that become longer without more reward are padded.",
    "KL divergence from the reference model": "How far the model has moved from its first weights.",
    "Groups with equal rewards": "Prompts whose answers all got the same reward. They teach nothing.",
    "Entropy": "How open the next token is. Near 0, all answers to a prompt are the same.",
    "Clipped tokens": "Tokens whose probability has changed too much since they were sampled to count further.",
    "Truncated answers": "Answers that reached the largest number of tokens before their end.",
}
_FROM_ZERO = ("learning_rate", "tokens_per_second", "mfu", "peak_memory_gib")
_X_LABELS = {"tokens": "tokens (millions)", "minutes": "minutes of training"}

environment = Environment(loader=PackageLoader("hf_pretrain", ""), autoescape=True, trim_blocks=True)


def write_page(
    runs: list[RunHistory],
    path: Path,
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    language: str | None = None,
) -> None:
    """
    Write the page of runs.

    Args:
        runs (`list` of [`RunHistory`]): one run, or several to compare.
        path (`Path`): the file to write.
        title (`str`, *optional*): its heading; by default the names of the runs.
        notes (`Sequence[str]`): sentences below the heading.
        language (`str`, *optional*): `en` or `zh`; by default the browser's.
    """
    t = translation(language) if language else _in_both
    names, headlines = [run.name for run in runs], [dict(_headlines(run, t)) for run in runs]
    text = environment.get_template("reports/page.html.jinja").render(
        title=title or ", ".join(names),
        is_comparison=title is None and len(runs) > 1,
        language=language,
        t=t,
        notes=notes,
        runs=runs,
        colours=dict(zip(names, COLOURS * len(runs), strict=False)),
        differences=find_differences(runs),
        headlines=headlines,
        explanations=_EXPLANATIONS,
        labels=list(dict.fromkeys(itertools.chain.from_iterable(headlines))),
        charts=list(draw_charts(runs, t=t if language else partial(_in_both, tag="tspan"))),
    )
    # A browser must not read half a page.
    with written_whole(path.parent) as scratch:
        # A sample may hold half of a surrogate pair, which UTF-8 cannot write.
        (scratch / path.name).write_text(text, encoding="utf-8", errors="replace")


def write_run_page(directory: RunDirectory, log: list[dict[str, Any]]) -> None:
    """Write `report.html` of a run that ends, whose files may lack figures of its log."""
    write_page([RunHistory(directory.path.resolve().name, directory.launches, log)], directory.report_file)


def _in_both(text: str, *, tag: str = "span", **fields: object) -> Markup:
    """Return a text in both languages, as HTML. The style of the page shows one of them."""
    texts = {language: translation(language)(text, **fields) for language in LANGUAGES}
    parts = [Markup(f'<{tag} lang="{language}">{escape(each)}</{tag}>') for language, each in texts.items()]
    return Markup().join(parts) if len({*texts.values()}) > 1 else escape(texts["en"])


def find_differences(runs: list[RunHistory]) -> dict[str, list[Any]]:
    """Return the arguments, launches and versions that differ between runs, with the value of each run."""
    settings = []
    for run in runs:
        # The launch names the number of processes, the device and the precision.
        launch = {name: run.last_launch[name] for name in ("launcher", "launch") if name in run.last_launch}
        settings.append(run.arguments | launch | run.last_launch.get("versions", {}))
    names = dict.fromkeys(name for values in settings for name in values if "incidental" not in library_flag(name))
    found = {name: [values.get(name) for values in settings] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _headlines(run: RunHistory, t: Translation) -> list[tuple[str, str]]:
    """Return the final figures of a run as pairs of label and text."""
    figures = []
    named = named_figures(itertools.chain.from_iterable(run.log))
    for metric in (*METRICS, *(Metric(*each) for each in named.items())):
        if (value := run.last(metric.key)) is not None:
            first = next(entry for entry in run.log if metric.key in entry)
            before = first[metric.key] if first["step"] == 0 and run.log[-1]["step"] > 0 else None
            known = {"before": before, "unigram_loss": run.unigram_loss}
            figures.append((metric.label, metric.describe(value, run.loss_unit, **known, t=t)))
    if run.log:
        figures.append(("steps", f"{run.log[-1]['step']:,}"))
    if tokens := run.last("num_input_tokens_seen"):
        figures.append(("tokens seen", f"{tokens:,}"))
    if seconds := sum(entry.get("training_seconds", 0.0) for entry in run.log):
        figures.append(("time of training", t("{minutes} min", minutes=f"{seconds / 60:,.1f}")))
    return figures


def draw_charts(
    runs: list[RunHistory], *, expected: Sequence[Line] = (), size: tuple[float, float] = SIZE, t: Translation = str
) -> Iterator[tuple[str, str]]:
    """
    Yield title and SVG of each chart for which a run has figures.

    Args:
        runs (`list` of [`RunHistory`]): the runs.
        expected (`Sequence`): more lines for the loss over tokens.
        size (`tuple`): width and height of a chart in inches, which decide how large its text is.
        t (`Callable`): translates the labels, into HTML.
    """
    units = {run.loss_unit for run in runs}
    y_labels = {"reward": "mean reward", "loss": f"loss ({units.pop()})" if len(units) == 1 else "loss"}
    for measure, over in itertools.product(y_labels, _X_LABELS):
        lines = _lines(runs, measure, over=over, label="training", style={"alpha": 0.45})
        dots = {"marker": "o", "markersize": 3}
        lines += _lines(runs, f"eval_{measure}", over=over, label="validation", style=dots)
        places = [x for _, xs, _, _ in lines for x in xs]
        for number, run in enumerate(runs if measure == "loss" and places else ()):
            if run.unigram_loss is not None:
                name = f"{run.name} unigram model" if len(runs) > 1 else "unigram model"
                style = {"color": COLOURS[number % len(COLOURS)], "linestyle": ":"}
                lines.append((name, [min(places), max(places)], [run.unigram_loss] * 2, style))
        # A run that was too short to log the time of its steps has all its points at one.
        if len(places) == 1 or len({*places}) > 1:
            lines += expected if (measure, over) == ("loss", "tokens") else []
            chart = draw_chart(lines, x_label=_X_LABELS[over], y_label=y_labels[measure], size=size, t=t)
            yield f"{measure.capitalize()} over {over}", chart
    for title, key, y_label in _CHARTS:
        if lines := _lines(runs, key):
            labels = {"x_label": _X_LABELS["tokens"], "y_label": y_label}
            yield title, draw_chart(lines, **labels, from_zero=key in _FROM_ZERO, size=size, t=t)


def _lines(
    runs: list[RunHistory], key: str, *, over: str = "tokens", label: str = "", style: dict[str, Any] | None = None
) -> list[Line]:
    """Return a line for each run that has logged a figure."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        x, y = run.series(key, over=over)
        if x:
            name = f"{run.name} {label}".strip() if len(runs) > 1 else label or run.name
            lines.append((name, x, y, {"color": COLOURS[number % len(COLOURS)]} | (style or {})))
    return lines


def _thin(y: Sequence[float]) -> list[int]:
    """Return the places of at most 802 points of a curve: the ends, and the extremes of each of its 400 parts."""
    if len(y) <= 802:
        return list(range(len(y)))
    edges = np.linspace(0, len(y), 401).astype(int)
    parts = [(first, np.asarray(y[first:last])) for first, last in itertools.pairwise(edges)]
    return sorted(
        {0, len(y) - 1, *(int(first + find(part)) for first, part in parts for find in (np.argmin, np.argmax))}
    )


def draw_chart(
    lines: list[Line],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    size: tuple[float, float] = SIZE,
    t: Translation = str,
) -> str:
    """
    Return a chart of lines as an SVG element. The style of the page sets its size.

    Args:
        lines (`list`): label, x values, y values and arguments of `Axes.plot` of each line.
        x_label, y_label (`str`): titles of the axes, with the unit.
        from_zero (`bool`): let the y axis begin at 0, for figures whose ratios matter.
        size (`tuple`), t (`Callable`): as for [`draw_charts`].
    """
    # Without pyplot there is no global state and no search for a display.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for label, x, y, style in lines:
        # A single point has no line: show it as a dot.
        default: dict[str, Any] = {"linewidth": 1.4, "marker": "o" if len(x) == 1 else None}
        kept = _thin(y)
        axes.plot([x[each] for each in kept], [y[each] for each in kept], label=label, **default | style)
    axes.set(xlabel=x_label, ylabel=y_label)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False)
    text = io.StringIO()
    # Keep text as text, in the font of the page. The salt makes the ids depend on the figure alone.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_pretrain", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    # Leave out the XML declaration. matplotlib has no font for Chinese text, and the browser has.
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    return re.sub("(?<=>)[^<>]+(?=</text>)", lambda label: t(label[0]), svg)
