"""The arithmetic of docs/several-machines.md, compared with figures worked out by hand and published ones."""

import sys
from pathlib import Path

import pytest

from benchmarks import scaling


GB = 1e9


def table(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        # 2e8 / 2^4.7619 = 2e8 / 27.1316
        (scaling.critical_batch_tokens, (2.0,), 7.3715e6),
        # At the critical batch, a run needs twice the data.
        (scaling.data_factor, (5e6, 5e6), 2.0),
        # 2 x 7/8 x 4 bytes x 1e9 parameters
        (scaling.all_reduce_bytes, (1e9, 8), 7 * GB),
        (scaling.all_reduce_bytes, (1e9, 1), 0.0),
        # One minute per save and a failure per day: Young gives sqrt(2 x 60 x 86,400) = 3,219.9 s. Daly's terms add
        # 3,219.9 x (sqrt(60 / 172,800) / 3 + 60 / 172,800 / 9) = 20.1 s, and subtract the minute.
        (scaling.checkpoint_interval, (60, 86_400), 3_180.1),
        # Saving takes longer than the time between failures.
        (scaling.checkpoint_interval, (100, 50), 50),
    ],
)
def test_the_formulas_give_the_figures_worked_out_by_hand(function, arguments, expected):
    assert function(*arguments) == pytest.approx(expected, rel=1e-4)


def test_zero_divides_the_states_as_in_its_paper():
    # Figure 1 of the paper has 7.5e9 parameters on 64 GPUs, in mixed precision: 2 + 2 + 12 bytes per parameter. Here
    # they are 4 + 4 + 8, also 16 in total: 120 GB without sharding and 1.9 GB with all of it, as there.
    found = scaling.state_bytes(7.5e9, 64)
    assert found["DDP"] == pytest.approx(120 * GB) and found["ZeRO-3, FSDP2"] == pytest.approx(1.875 * GB)
    assert found["ZeRO-1"] == pytest.approx((8 + 8 / 64) * 7.5 * GB)
    assert found["ZeRO-2"] == pytest.approx((4 + 12 / 64) * 7.5 * GB)


def test_the_table_of_the_page_is_what_the_script_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling"])
    scaling.main(scaling.parse_arguments())
    printed = capsys.readouterr().out
    rows = table(printed)
    assert rows["GPUs"] == ["8", "64", "1,024"]
    # 32 rows x 8 micro-batches x 512 tokens x 8 GPUs
    assert rows["tokens per step"][0] == "1,048,576"
    # 131,072 tokens x 6 x 104.0e6 FLOPs / (0.4 x 312e12 FLOP/s)
    assert rows["computing per step"] == ["0.656 s"] * 3
    # 1,024 GPUs in 50,680 hours per failure
    assert float(rows["failures per day"][2]) == pytest.approx(1024 * 24 / (16384 * 54 * 24 / 419), abs=5e-4)
    page = Path(__file__).parents[1].joinpath("docs/several-machines.md").read_text(encoding="utf-8")
    assert [line for line in printed.splitlines() if line not in page] == []
