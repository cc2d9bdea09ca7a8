"""The table of docs/getting-started.md has the figures of the recorded runs."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.expected import EXPECTED_NAME


ROOT = Path(__file__).parents[2]
EXPECTED = json.loads((ROOT / "recipes/tiny" / EXPECTED_NAME).read_text(encoding="utf-8"))
SHORT = {
    path.parent.name: json.loads(path.read_text(encoding="utf-8"))["pretrain"]
    for path in sorted((ROOT / "recipes").glob(f"*/{EXPECTED_NAME}"))
    if path.parent.name != "tiny"
}
END = {"loss": "eval_loss", "KL": "eval_kl", "reward": "eval_reward"}


@pytest.mark.parametrize("stage", EXPECTED)
def test_the_table_of_expected_losses_has_the_recorded_figures(stage):
    text = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Is my loss normal?")
    (row,) = [line for line in section.splitlines() if line.startswith(f"| `make {stage}` |")]
    _, steps, seconds, losses, end = [cell.strip() for cell in row.strip("|").split("|")]
    recorded = EXPECTED[stage]
    assert (int(steps), int(seconds)) == (recorded["steps"], recorded["seconds"])
    # Every log covers the same number of steps.
    curve = recorded["curves"]["reward" if "reward" in losses else "loss"]
    per_log = recorded["steps"] // len(curve)
    figures = re.findall(r"(\d+): ([\d.]+)", losses)
    assert len(figures) >= 4 and int(figures[-1][0]) == recorded["steps"]
    for step, value in figures:
        assert f"{curve[int(step) // per_log - 1][1]:.2f}" == value, step
    for name, value in re.findall(r"(\w+) ([\d.]+)", end):
        assert f"{recorded['metrics'][END[name]]:.2f}" == value, name


def section() -> str:
    return (ROOT / "docs/getting-started.md").read_text(encoding="utf-8").partition("## Is my loss normal?")[2]


@pytest.mark.parametrize("preset", SHORT)
def test_the_table_of_short_runs_has_the_recorded_figures(preset):
    table = section().partition("| validation loss |")[2].partition("\n\n")[0]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| `{preset}` |")]
    _, rows, seconds, losses, end = [cell.strip() for cell in row.strip("|").split("|")]
    recorded = SHORT[preset]
    assert rows == f"{recorded['rows_per_step']} x {recorded['arguments']['max_length']}"
    assert int(seconds) == round(recorded["seconds"])
    curve = recorded["curves"]["loss"]
    per_log = recorded["steps"] // len(curve)
    figures = re.findall(r"(\d+): ([\d.]+)", losses)
    assert len(figures) >= 4 and int(figures[-1][0]) == recorded["steps"]
    assert [value for _, value in figures] == [f"{curve[int(step) // per_log - 1][1]:.2f}" for step, _ in figures]
    assert end == f"{recorded['metrics']['eval_loss']:.2f}"
