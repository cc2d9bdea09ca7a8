"""The figures of the READMEs and of docs/performance.md are those of the committed records."""

import json
import re
import statistics

import pytest

from tests.invariants.launching import ROOT


PAGES = ("README.md", "README_zh.md")
STOCK, TRL, UPSTREAM = "stock Trainer", "TRL SFTTrainer", "MiniMind"


def record(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def final_loss(race: dict, name: str) -> float:
    return statistics.median(seed[name]["curve"][-1][1] for seed in race["seeds"])


@pytest.mark.parametrize("page", PAGES)
def test_the_headlines_are_those_of_the_race(page):
    # In both languages, the first percentage of the row is our share of MiniMind's time, followed by the difference.
    row = next(line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "Muon" in line)
    race = record("race-upstream-long-tiny")
    difference = final_loss(race, UPSTREAM) - final_loss(race, "ours")
    expected = f"{100 * statistics.median(race['ratios'][UPSTREAM]):.0f}", f"{difference:.2f}"
    assert (re.search(r"(\d+)%", row)[1], re.search(r"\d\.\d\d", row)[0]) == expected
    # The other percentages are our shares of the time of stock Trainer and of TRL.
    ratios = record("race-tiny")["ratios"]
    shares = [f"{100 * statistics.median(ratios[name]):.0f}" for name in (STOCK, TRL)]
    assert re.findall(r"(\d+)%", row)[1:] == shares


@pytest.mark.parametrize("page", PAGES)
def test_the_speeds_are_those_of_the_benchmark(page):
    row = next(line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "26M" in line)
    programs = next(iter(record("2-cores-of-amd-epyc")["sizes"].values()))["programs"]
    faster = {name: programs[name]["ours_is_times_as_fast"] for name in (STOCK, TRL, "upstream style")}
    figures = [f"{programs['ours']['tokens_per_second']:,.0f}", f"{faster[STOCK]:.2f}", f"{faster[TRL]:.2f}"]
    figures.append(f"{faster['upstream style']:.1f}")
    found = iter(re.findall(r"\d[\d,.]*\d", row))
    # In this order, with other numbers between them.
    assert all(figure in found for figure in figures), (figures, row)


@pytest.mark.parametrize("race", ["race-tiny", "race-minimind2-small", "race-upstream-long-tiny"])
def test_the_tables_are_those_of_the_races(race):
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for name, found in record(race)["ratios"].items():
        loss, range_ = final_loss(record(race), name), f"{min(found):.2f} to {max(found):.2f}"
        assert f"| {loss:.2f} | {statistics.median(found):.2f} ({range_}) |" in text, name


def performance() -> str:
    return (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def table(header: str) -> dict[str, list[str]]:
    """Return the rows of the table in docs/performance.md whose header begins so: the other cells by the first one."""
    lines = performance().split(f"| {header}")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {first: cells for first, *cells in rows}


def test_the_table_of_speeds_is_that_of_the_benchmark():
    programs = next(iter(record("2-cores-of-amd-epyc")["sizes"].values()))["programs"]
    # Each program by a part of its name in the table.
    parts = {
        "ours": "`MaskedLossTrainer`",
        "ours, compiled": "`MaskedLossTrainer` with `torch_compile`",
        "ours, Muon": "`MaskedLossTrainer` with Muon",
        "bare loop": "the same model in a bare loop",
        "stock Trainer": "stock `Trainer` with a Llama of the same shape, concatenated sequences",
        "stock Trainer, compiled": "stock `Trainer` as above, with `torch_compile`",
        "TRL SFTTrainer": "TRL's `SFTTrainer` with packing",
        "upstream style": "a loop like MiniMind's: sequences padded to 512",
    }
    expected = {
        parts[name]: [
            f"{found['tokens_per_second']:,.0f}",
            f"{found['share_of_limit']:.0%}",
            f"{found['ours_is_times_as_fast']:.2f}x",
        ]
        for name, found in programs.items()
    }
    assert table("program | useful tokens/s") == expected


def test_the_table_of_parts_that_were_left_out_is_that_of_the_race():
    race = record("race-left-out-tiny")
    loss = final_loss(race, "ours")
    parts = {
        "without our first weights": "our initial weights",
        "without our attention": "our attention: `sdpa` instead",
        "without packing": "packing",
        "without decay": "the decay of the learning rate",
        "without Muon": "Muon: AdamW instead",
    }
    rows = table("`ours` without")
    assert rows.keys() == {"nothing", *parts.values()} and rows["nothing"] == [f"{loss:.3f}", "", ""]
    for name, row in parts.items():
        other = final_loss(race, name)
        # The table subtracts the losses that it shows.
        difference = round(other, 3) - round(loss, 3)
        assert rows[row][:2] == [f"{other:.3f}", f"{difference:+.3f}"]
        # The record has three decimal places, so its last one may round either way.
        assert float(rows[row][2]) == pytest.approx(statistics.median(race["ratios"][name]), abs=0.00501)


def test_the_table_of_preparation_is_that_of_its_record():
    names = {
        "ours": "this package",
        "TRL SFTTrainer": "TRL's `SFTTrainer` with `bfd_split` packing",
        "run_clm.py": "transformers' `run_clm.py`: concatenated sequences",
    }
    found, expected = record("preparation"), {}
    for name, program in found["programs"].items():
        expected[names[name]] = [
            f"{program['megabytes_per_cpu_second']:.2f}",
            f"{program['ours_is_times_as_fast']:.2f}x",
            f"{program['seconds']:.1f}",
            f"{program['peak_rss_bytes'] / 1e6:.0f} MB",
        ]
    assert table("program | MB of text") == expected
    small, large = found["growth"]["runs"]
    text = " ".join(performance().split())
    assert f"0.1 GB took {small['seconds']:.0f} seconds and 1 GB took {large['seconds']:.0f} seconds" in text


def test_the_launches_are_those_of_the_record():
    runs = {run["run"]: run for run in record("cuda-calls")["runs"]}
    rows = re.findall(r"^\| `(minimind[^`]*)` \| \d+ x \d+ \|(.*)\|$", performance(), re.M)
    for preset, cells in rows:
        for gib, cell in zip((80, 40, 24), cells.split("|"), strict=True):
            expected = " not counted "
            if run := runs.get(f"pretrain, {preset}, {gib} GiB"):
                expected = f": {run['launches'] + run['matrix_products']:,.0f}, {run['peak_gib']:.1f} GiB "
            assert cell.endswith(expected), (preset, gib)
    assert len(rows) == 6
