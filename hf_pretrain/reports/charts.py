"""Charts of runs: lines over tokens or time, and a heat map."""

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


# Each run has the same colour on all charts.
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
# A line: its label, its x and y values, and arguments of `Axes.plot`.
Line = tuple[str, Sequence[float], Sequence[float], dict[str, Any]]


def line_chart(lines: list[Line], *, x_label: str, y_label: str, from_zero: bool = False) -> Figure:
    """
    Return a chart of lines.

    Args:
        lines (`list`): label, x values, y values and arguments of `Axes.plot` of each line.
        x_label, y_label (`str`): titles of the axes, with the unit.
        from_zero (`bool`): let the y axis begin at 0, for figures whose ratios matter.
    """
    figure, axes = _make_axes(height=3.2)
    for label, x, y, style in lines:
        # A single point has no line: show it as a dot.
        default: dict[str, Any] = {"linewidth": 1.4, "marker": "o" if len(x) == 1 else None}
        axes.plot(x, y, label=label, **default | style)
    axes.set(xlabel=x_label, ylabel=y_label)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False)
    return figure


def heat_map(values: Sequence[Sequence[float]], *, x_label: str, y_label: str, colour_label: str) -> Figure:
    """
    Return a chart of a matrix, the first row at the top.

    Args:
        values (`Sequence` of shape `(num_rows, num_columns)`): the shares to show.
        x_label, y_label, colour_label (`str`): what columns, rows and colours mean.
    """
    figure, axes = _make_axes(height=1.2 + 0.25 * len(values))
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label=colour_label)
    axes.set(xlabel=x_label, ylabel=y_label, xticks=range(len(values[0])), yticks=range(len(values)))
    return figure


def _make_axes(*, height: float) -> tuple[Figure, Axes]:
    # Without pyplot there is no global state and no search for a display.
    figure = Figure(figsize=(6, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def to_svg(figure: Figure) -> str:
    """Return the SVG element of a figure, without width and height, so that the page sets its size."""
    text = io.StringIO()
    # Keep text as text, in the font of the page. The salt makes the ids depend on the figure alone.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_pretrain", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # The view box gives the proportions.
    return re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg))


__all__ = ["COLOURS", "Line", "heat_map", "line_chart", "to_svg"]
