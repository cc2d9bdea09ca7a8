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
