"""The figures of the READMEs and of docs/performance.md are those of the committed records."""

import json
import re
import statistics

import pytest

from benchmarks import cards
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


@pytest.mark.parametrize(("page", "words"), [("docs/cards.md", {}), ("docs/zh/cards.md", {"measured": "实测"})])
def test_the_table_of_cards_is_calculated_from_the_record(page, words):
    words = words and words | {"calculated": "计算"}
    rows = [line for line in read(page).splitlines() if re.match(r"\| \d+M \|", line)]
    expected = cards.table(dict.fromkeys(cards.CARDS, 1.0))[2:]
    for english, other in words.items():
        expected = [line.replace(f"| {english} |", f"| {other} |") for line in expected]
    assert rows == expected


def test_the_speed_of_a_card_follows_from_products_memory_and_host():
    # What docs/cards.md says, written out: a step of 104M on an H200, whose device time nobody recorded, and one of
    # 64M on an RTX 3090.
    measured = record("step-nvidia-h200")["programs of 104M"]["ours, compiled"]
    large = cards.build("104M")
    assert cards.products_ms(large) + cards.rest_ms(large) == pytest.approx(measured["step_ms"], rel=0.05)
    assert f"{cards.products_ms(large) + cards.rest_ms(large):.1f} " in read("docs/cards.md")
    products, rest = 6 * 63.912192e6 * 32768 / 878.295e12, (22.4e-3 - 6 * 25.829888e6 * 32768 / 878.295e12)
    # Bytes that a token keeps, from width 768 and 512, feed-forward width 2,432 and 1,408, keys of 384 and 128.
    kept = (8 * (6 * 2432 + 18 * 768 + 8 * 384) + 24 * 768) / (8 * (6 * 1408 + 18 * 512 + 8 * 128) + 24 * 512)
    step = products * 989 / 71 + rest * kept * 4800 / 936
    speed, is_measured = cards.tokens_per_second("64M", "RTX 3090")
    assert not is_measured and speed == pytest.approx(815643 * 39.7e-3 / step, rel=1e-4)
    # A card cannot be faster than the host.
    assert cards.step_ms(cards.build("26M"), "H100") == cards.step_ms(cards.build("26M"), "H200") == 39.7


def test_the_reader_gives_one_price_or_one_for_each_card():
    assert cards.read_prices(["0.35"]) == dict.fromkeys(cards.CARDS, 0.35)
    assert cards.read_prices(["T4=0.5", "3090=0.25"]) == {"T4": 0.5, "RTX 3090": 0.25}
    assert cards.read_prices(["1", "T4=0.5"]) == dict.fromkeys(cards.CARDS, 1.0) | {"T4": 0.5}
    # Twice the price, twice the money, at the same hours.
    (*_, once), (*_, twice) = (cards.row("104M", "RTX 3090", price) for price in (1.0, 2.0))
    assert (float(once), float(twice)) == (10, 20)
