"""The tables of docs/getting-started.md, in both languages, have the figures of the recorded runs."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.expected import EXPECTED_NAME


pytestmark = pytest.mark.documents

ROOT = Path(__file__).parents[2]
EXPECTED = json.loads((ROOT / "recipes/tiny" / EXPECTED_NAME).read_text(encoding="utf-8"))
SHORT = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))["pretrain"]
    for path in sorted((ROOT / "recipes").glob(f"*/{EXPECTED_NAME}"))
    if path.parent.name != "tiny"
}
END = {"loss": "eval_loss", "KL": "eval_kl", "reward": "eval_reward", "损失": "eval_loss", "奖励": "eval_reward"}
# Each page, the heading of its section, and a part of the header of its second table.
PAGES = (
    ("docs/getting-started.md", "## Is my loss normal?", "| validation loss |"),
    ("docs/zh/getting-started.md", "## 我的损失正常吗？", "| 验证损失 |"),
)


def find_row(page: str, heading: str, name: str, table: str = "") -> list[str]:
    """Return the cells of a row, after its name, in the first table of the section that follows a text."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(heading)[2]
    rows = section.partition(table)[2].partition("\n\n")[0] if table else section
    (row,) = [line for line in rows.splitlines() if line.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def check_curve(losses: str, curve: list, num_steps: int) -> None:
    """Compare figures such as `100: 5.32` with a recorded curve, whose logs cover the same number of steps each."""
    figures = re.findall(r"(\d+): ([\d.]+)", losses)
    per_log = num_steps // len(curve)
    assert len(figures) >= 4 and int(figures[-1][0]) == num_steps
    assert [value for _, value in figures] == [f"{curve[int(step) // per_log - 1][1]:.2f}" for step, _ in figures]


@pytest.mark.parametrize(("page", "heading", "table"), PAGES)
@pytest.mark.parametrize("stage", EXPECTED)
def test_the_table_of_expected_losses_has_the_recorded_figures(stage, page, heading, table):
    steps, seconds, losses, end = find_row(page, heading, f"make {stage}")
    recorded = EXPECTED[stage]
    assert (int(steps), int(seconds)) == (recorded["steps"], recorded["seconds"])
    check_curve(losses, recorded["curves"]["reward" if stage == "grpo" else "loss"], recorded["steps"])
    figures = re.findall(r"(\w+) ([\d.]+)", end)
    assert figures
    for name, value in figures:
        assert f"{recorded['metrics'][END[name]]:.2f}" == value, name


@pytest.mark.parametrize(("page", "heading", "table"), PAGES)
@pytest.mark.parametrize("preset", SHORT)
def test_the_table_of_short_runs_has_the_recorded_figures(preset, page, heading, table):
    rows, seconds, losses, end = find_row(page, heading, preset, table)
    recorded = SHORT[preset]
    assert rows == f"{recorded['rows_per_step']} x {recorded['arguments']['max_length']}"
    assert int(seconds) == round(recorded["seconds"]) and end == f"{recorded['metrics']['eval_loss']:.2f}"
    check_curve(losses, recorded["curves"]["loss"], recorded["steps"])
