"""The figures of the READMEs and of docs/performance.md are those of the committed records."""

import collections
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


def test_the_table_of_parts_of_a_step_is_that_of_the_benchmark():
    parts = {
        "matrix products of the layers": ["matrix products of the layers"],
        "attention": ["attention"],
        "output head and loss": ["head and loss"],
        "norms": ["norms"],
        "elementwise operators of the MLP": ["elementwise operators of the MLP"],
        "rotations, casts, clipping, optimizer, data": [
            *("rotations", "casts of weights", "gradient clipping", "optimizer", "data", "embedding")
        ],
        "the rest: residual connections, sums of gradients, time outside of operators": ["other"],
    }
    profile = record("2-cores-of-amd-epyc")["profile"]
    expected = {
        row: [f"{sum(profile[kind].get(name, 0) for name in names):.0%}" for kind in ("bf16", "float32")]
        for row, names in parts.items()
    }
    assert table("part | bf16 | float32") == expected
    # No part of the record is left out.
    assert all(set(shares) <= {name for names in parts.values() for name in names} for shares in profile.values())


def test_the_other_figures_of_the_benchmark_are_those_of_its_record():
    text, found = " ".join(performance().split()), record("2-cores-of-amd-epyc")
    size, muon = next(iter(found["sizes"].values())), found["cost_of_muon"]
    for sentence in (
        f"took {-size['overhead_over_bare_loop']:.1%} less time than the median step of the bare loop",
        f"The data loader takes {size['loader_share']:.2%} of a step",
        f"takes {-size['growth_with_documents']:.0%} less time than a step with one document",
        f"takes {found['cost_of_experts']:.2f} times as long as a step of a dense model",
        f"ends {found['seconds_to_first_step']:.1f} seconds after the start",
        f"tokens takes only {muon['32768']:.2f} times as long as with AdamW",
        f"takes {muon['4096'] - 1:.0%} longer than a step with AdamW if it trains on 4,096 tokens, and "
        f"{muon['32768'] - 1:.0%} longer with the 32,768 tokens",
    ):
        assert sentence in text, sentence


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


@pytest.mark.parametrize("model", ["tiny", "minimind2-small"])
def test_the_losses_at_other_learning_rates_are_those_of_the_record(model):
    recorded = collections.defaultdict(set)
    for entry in record(f"learning-{model}"):
        is_plain = not any(entry.get(name) for name in ("left_out", "candidate", "config_overrides", "config"))
        if entry["optim_preset"] == "muon" and is_plain and entry.get("seed", 0) == 0:
            size, steps = str(entry["per_device_train_batch_size"]), str(entry["max_steps"])
            # The record has two losses where the preset's `initializer_range` has changed between the runs.
            recorded[size, steps, f"{entry['learning_rate']:.4f}".rstrip("0")].add(f"{entry['eval_loss']:.3f}")
    lines = [line.strip("|").split("|") for line in performance().splitlines() if line.startswith(f"| `{model}`")]
    rows = [(size.strip(), steps.strip(), losses) for _, size, steps, losses in filter(lambda x: len(x) == 4, lines)]
    assert len(rows) == {"tiny": 5, "minimind2-small": 3}[model]
    for size, steps, losses in rows:
        for rate, loss in re.findall(r"(0\.\d+): (\d\.\d+)", losses):
            assert loss in recorded[size, steps, rate], (size, steps, rate)
