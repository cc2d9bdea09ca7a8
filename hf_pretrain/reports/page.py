"""
`report.html`: the page of one run, or one page that compares several runs.

The page is one file without scripts that needs no network: text, tables and SVG charts.
"""

import itertools
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from ..runtime.metrics import HEADLINES
from ..runtime.writing import written_whole
from .charts import COLOURS, Line, heat_map, line_chart
from .expected import find_expected
from .runs import Run


# Charts with one figure each: title, name in the log, title of the y axis.
_CHARTS = (
    ("Reward accuracy", "rewards/accuracies", "share of the pairs"),
    ("Completion length", "completions/mean_length", "tokens"),
    ("KL divergence from the reference model", "kl", "nats"),
    ("Learning rate", "learning_rate", "learning rate"),
    ("Gradient norm", "grad_norm", "norm"),
    ("Speed", "tokens_per_second", "tokens/s"),
    ("Share of the peak speed", "mfu", "MFU"),
    ("Memory", "peak_memory_gib", "GiB per process"),
)
_FROM_ZERO = ("learning_rate", "tokens_per_second", "mfu", "peak_memory_gib")
# Arguments that differ between any two runs and do not explain their results.
_INCIDENTAL = (
    *("output_dir", "logging_dir", "run_name", "local_rank", "hub_model_id", "resume_from_checkpoint"),
    *("preview", "disable_tqdm", "remove_unused_columns"),
)
_EVENTS = {
    "rejected": "bad lines left out",
    "start": "the run started",
    "resume": "the run resumed",
    "checkpoint": "checkpoint saved",
    "skipped_step": "step skipped",
    "stop": "the run was stopped",
    "end": "the run ended",
}
_MARKED = {"resume": "resumed", "skipped_step": "skipped", "stop": "stopped"}

_environment = Environment(loader=PackageLoader("hf_pretrain.reports", ""), autoescape=True, trim_blocks=True)


def write_page(runs: list[Run], path: Path) -> None:
    """
    Write the page of runs.

    Args:
        runs (`list` of [`Run`]): one run, or several to compare.
        path (`Path`): the file to write.
    """
    text = _environment.get_template("page.html.jinja").render(
        title=runs[0].name if len(runs) == 1 else "Comparison of " + ", ".join(run.name for run in runs),
        runs=runs,
        colours=dict(zip((run.name for run in runs), COLOURS * len(runs), strict=False)),
        differences=find_differences(runs),
        headlines=[_headlines(run) for run in runs],
        charts=list(_draw_charts(runs)),
        heat_maps=[(run.name, *found) for run in runs if (found := _draw_router_load(run))],
        events=_events(runs),
        has_samples=any(run.of_kind("samples") for run in runs),
    )
    # A browser must not read half a page.
    with written_whole(path.parent) as scratch:
        # A sample may hold half of a surrogate pair, which UTF-8 cannot write.
        (scratch / path.name).write_text(text, encoding="utf-8", errors="replace")


def find_differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the arguments, launches and versions that differ between runs, with the value of each run."""
    settings = []
    for run in runs:
        last = run.launches[-1] if run.launches else {}
        # The launch names the number of processes, the device and the precision.
        launch = {name: last[name] for name in ("launcher", "launch") if name in last}
        settings.append(run.arguments | launch | last.get("versions", {}))
    names = dict.fromkeys(name for values in settings for name in values if name not in _INCIDENTAL)
    found = {name: [values.get(name) for values in settings] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _headlines(run: Run) -> list[tuple[str, str]]:
    """Return the final figures of a run as pairs of label and text."""
    rows = []
    for metric in HEADLINES:
        if (value := run.last(metric.key)) is not None:
            rows.append((metric.label, f"{value:.4f} {metric.unit_in(run.loss_unit)}".rstrip()))
    if run.num_steps:
        rows.append(("steps", f"{run.num_steps:,}"))
        # After a resume, entries of later steps remain until the run repeats these steps.
        done = [entry for entry in run.entries if entry["step"] <= run.num_steps]
        if tokens := [entry["num_input_tokens_seen"] for entry in done if "num_input_tokens_seen" in entry]:
            rows.append(("tokens seen", f"{tokens[-1]:,}"))
        if checkpoints := [entry["message"] for entry in done if entry["kind"] == "checkpoint"]:
            rows.append(("newest checkpoint", checkpoints[-1]))
    if seconds := max(run.training_seconds().values()):
        rows.append(("time of training", f"{seconds / 60:,.1f} min"))
    return rows


def _draw_charts(runs: list[Run]):
    """Yield title and SVG of each chart for which a run has figures."""
    of = partial(_lines, runs)
    units = {run.loss_unit for run in runs}
    y_labels = {"reward": "mean reward", "loss": f"loss ({units.pop()})" if len(units) == 1 else "loss"}
    are_timed = all(run.is_timed for run in runs)
    x_labels = {"tokens": "tokens (millions)"}
    x_labels["minutes"] = "minutes of training" if are_timed else "minutes of training and evaluation"
    for (measure, y_label), (over, x_label) in itertools.product(y_labels.items(), x_labels.items()):
        lines = of(measure, over=over, label="training", style={"alpha": 0.45})
        lines += of(f"eval_{measure}", over=over, label="validation", style={"marker": "o", "markersize": 3})
        marks: list[tuple[float, str]] = []
        if len(runs) == 1 and over == "tokens":
            marks = _marks(runs[0])
            if lines:
                lines = _expected_lines(runs[0], measure) + lines
        if lines:
            yield (
                f"{measure.capitalize()} over {over}",
                line_chart(lines, x_label=x_label, y_label=y_label, marks=marks),
            )
    for title, key, y_label in _CHARTS:
        if lines := of(key):
            yield title, line_chart(lines, x_label="tokens (millions)", y_label=y_label, from_zero=key in _FROM_ZERO)


def _lines(
    runs: list[Run], key: str, *, over: str = "tokens", label: str = "", style: dict[str, Any] | None = None
) -> list[Line]:
    """Return the line of a figure for each run that logged it."""
    lines: list[Line] = []
    for number, run in enumerate(runs):
        x, y = run.series(key, over=over)
        if x:
            name = f"{run.name} {label}".strip() if len(runs) > 1 else label or run.name
            lines.append((name, x, y, {"color": COLOURS[number % len(COLOURS)]} | (style or {})))
    return lines


def _expected_lines(run: Run, measure: str) -> list[Line]:
    """Return the loss or the reward of the preset's default run, to draw behind the lines of a run."""
    curves = (find_expected(run) or {"curves": {}})["curves"]
    dashed = {"linestyle": "--", "marker": "s", "markersize": 3}
    lines: list[Line] = []
    for key, name, style in ((measure, "training", {"alpha": 0.3}), (f"eval_{measure}", "validation", dashed)):
        if curves.get(key):
            x, y = zip(*curves[key], strict=True)
            lines.append((f"{name}, default run", [tokens / 1e6 for tokens in x], y, {"color": "#6b7280"} | style))
    return lines


def _marks(run: Run) -> list[tuple[float, str]]:
    """Return the marked events of a run: their position in millions of tokens, and their name."""
    counted = [entry for entry in run.entries if "num_input_tokens_seen" in entry]
    tokens = {entry["step"]: entry["num_input_tokens_seen"] for entry in counted}
    marks = []
    for entry in run.of_kind(*_MARKED):
        # Logs and checkpoints count the tokens. Take the last count before the event.
        before = [step for step in tokens if step <= entry["step"]]
        marks.append((tokens[max(before)] / 1e6 if before else 0.0, _MARKED[entry["kind"]]))
    return marks


def _draw_router_load(run: Run) -> tuple[int, str] | None:
    """Return the step and the heat map of the last router load of a run; `None` for a model without experts."""
    loads = run.of_kind("router_load")
    if not loads:
        return None
    labels = {"x_label": "expert", "y_label": "layer", "colour_label": "share of the tokens"}
    return loads[-1]["step"], heat_map(loads[-1]["load"], **labels)


def _events(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the events of all runs in chronological order."""
    rows = [
        {
            "run": run.name,
            "time": datetime.fromtimestamp(entry["time"]).isoformat(sep=" ", timespec="seconds"),
            "step": entry["step"],
            "text": _EVENTS[entry["kind"]] + (f": {entry['message']}" if entry.get("message") else ""),
        }
        for run in runs
        for entry in run.of_kind(*_EVENTS)
    ]
    return sorted(rows, key=lambda row: row["time"])


__all__ = ["find_differences", "write_page"]
