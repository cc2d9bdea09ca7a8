"""The figures of the READMEs and of docs/performance.md are those of the committed records."""

import json
import re
import statistics

import pytest

from tests.invariants.launching import ROOT


pytestmark = pytest.mark.documents

PAGES = ("README.md", "README_zh.md")
LOOP, STOCK, TRL = "loop like MiniMind's", "stock Trainer", "TRL SFTTrainer"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def record(name: str) -> dict:
    return json.loads(read(f"benchmarks/results/{name}.json"))


STAGES = json.loads(read("recipes/tiny/expected.json"))
PERFORMANCE = read("docs/performance.md")
# Sentences that state the minutes of a stage.
MINUTES = {
    ("README.md", "pretrain"): r"trains for (\d+) minutes on two cores",
    ("README_zh.md", "pretrain"): r"训练 (\d+) 分钟",
    ("docs/getting-started.md", "pretrain"): r"in (\d+) minutes on two CPU cores",
    ("docs/getting-started.md", "sft"): r"on conversations, in (\d+) minutes",
    ("docs/zh/getting-started.md", "pretrain"): r"CPU 核上需要 (\d+) 分钟",
    ("docs/zh/getting-started.md", "sft"): r"用时 (\d+) 分钟",
} | {(f"recipes/tiny/{stage}.yaml", stage): r"in about (\d+) minutes? on two CPU cores" for stage in STAGES}


def test_the_minutes_of_the_stages_are_those_of_the_record():
    minutes = {stage: f"{max(1, round(run['seconds'] / 60))}" for stage, run in STAGES.items()}
    for (page, stage), sentence in MINUTES.items():
        assert re.findall(sentence, read(page)) == [minutes[stage]], (page, stage)
    for page in ("docs/stages.md", "docs/zh/stages.md", "recipes/tiny/reward.yaml", "recipes/tiny/evaluate.yaml"):
        assert not re.search(r"(takes|in|needs) (about )?[\w ]+ minutes?|需要[^。]*分钟", read(page)), page


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_stages_is_that_of_the_record(page):
    rows = re.findall(r"^\| `make (\w+)` \|.*\| (.*) \| *(\d+) \|$", read(page), re.M)
    assert {stage for stage, *_ in rows} == STAGES.keys()
    for stage, figures, minutes in rows:
        run = STAGES[stage]
        assert int(minutes) == max(1, round(run["seconds"] / 60)), stage
        metric = "eval_kl" if stage == "distill" else "eval_reward" if stage == "grpo" else "eval_loss"
        expected = [f"{run['metrics'][metric]:.2f}"]
        if stage in ("sft", "dpo", "grpo"):
            expected.insert(0, f"{run['curves'][metric][0][1]:.2f}")
        found = iter(re.findall(r"\d\.\d+", figures))
        assert all(figure in found for figure in expected), (stage, figures)


def final_loss(race: dict, name: str) -> float:
    return statistics.median(seed[name]["curve"][-1][1] for seed in race["seeds"])


@pytest.mark.parametrize("page", PAGES)
def test_the_headlines_are_those_of_the_race(page):
    # In both languages: our shares of the time of the loop, stock Trainer and TRL, and how much lower our loss is.
    row = next(line for line in read(page).splitlines() if "Muon" in line)
    race = record("race-tiny")
    difference = final_loss(race, LOOP) - final_loss(race, "ours")
    assert re.search(r"\d\.\d\d", row)[0] == f"{difference:.2f}"
    shares = [f"{100 * statistics.median(race['ratios'][name]):.0f}" for name in (LOOP, STOCK, TRL)]
    assert re.findall(r"(\d+)%", row) == shares


def speeds() -> dict:
    return next(iter(record("2-cores-of-amd-epyc")["sizes"].values()))["programs"]


@pytest.mark.parametrize("page", PAGES)
def test_the_speeds_are_those_of_the_benchmark(page):
    row = next(line for line in read(page).splitlines() if "26M" in line)
    programs = speeds()
    faster = {name: programs[name]["ours_is_times_as_fast"] for name in (STOCK, TRL, "upstream style")}
    figures = [f"{programs['ours']['tokens_per_second']:,.0f}", f"{faster[STOCK]:.2f}", f"{faster[TRL]:.2f}"]
    figures.append(f"{faster['upstream style']:.1f}")
    found = iter(re.findall(r"\d[\d,.]*\d", row))
    # In this order, with other numbers between them.
    assert all(figure in found for figure in figures), (figures, row)


@pytest.mark.parametrize("race", ["race-tiny", "race-minimind2-small", "race-upstream-long-tiny"])
def test_the_tables_are_those_of_the_races(race):
    for name, found in record(race)["ratios"].items():
        loss, range_ = final_loss(record(race), name), f"{min(found):.2f} to {max(found):.2f}"
        assert f"| {loss:.2f} | {statistics.median(found):.2f} ({range_}) |" in PERFORMANCE, name


def table(header: str) -> dict[str, list[str]]:
    """Return the rows of the table in docs/performance.md whose header begins so: the other cells by the first one."""
    lines = PERFORMANCE.split(f"| {header}")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {first: cells for first, *cells in rows}


def test_the_table_of_speeds_is_that_of_the_benchmark():
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
    form = "{tokens_per_second:,.0f}|{share_of_limit:.0%}|{ours_is_times_as_fast:.2f}x"
    expected = {parts[name]: form.format(**found).split("|") for name, found in speeds().items()}
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
    found, form = record("preparation"), "{megabytes_per_cpu_second:.2f}|{ours_is_times_as_fast:.2f}x|{seconds:.1f}|"
    rows = {names[name]: form.format(**program).split("|") for name, program in found["programs"].items()}
    for row, program in zip(rows.values(), found["programs"].values(), strict=True):
        row[-1] = f"{program['peak_rss_bytes'] / 1e6:.0f} MB"
    assert table("program | MB of text") == rows
    small, large = (f"{run['seconds']:.0f} seconds" for run in found["growth"]["runs"])
    assert f"0.1 GB took {small} and 1 GB took {large}" in " ".join(PERFORMANCE.split())


def test_the_launches_are_those_of_the_record():
    runs = {run["run"]: run for run in record("cuda-calls")["runs"]}
    rows = re.findall(r"^\| `(minimind[^`]*)` \| \d+ x \d+ \| \d+ x \d+: (.*?) \|", PERFORMANCE, re.M)
    for preset, cell in rows:
        run = runs[f"pretrain, {preset}, 80 GiB"]
        assert cell == f"{run['launches'] + run['matrix_products']:,.0f}, {run['peak_gib']:.1f} GiB", preset
    assert len(rows) == 6
