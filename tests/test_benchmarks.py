"""`make bench` runs all programs in one precision. `make race` compares curves of validation loss."""

import json
import math
import re
import subprocess
import sys
import threading
import time

import datasets
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import bench, contestants, preparation, profile_step, programs, race, race_settings
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.tokenizer.encoding import encode_documents
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import EXPERTS


@pytest.mark.parametrize(
    ("features", "expected"), [({"avx512_f": True}, "float32"), ({"avx2": True, "amx_bf16": True}, "bf16")]
)
def test_the_precision_is_the_fastest_of_the_device(monkeypatch, features, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert bench.fastest_precision() == expected


def test_a_slower_precision_has_a_file_of_its_own():
    fastest = bench.fastest_precision()
    other = {"bf16": "float32", "float32": "bf16"}[fastest]
    assert bench.file_name("2 cores of AMD EPYC", fastest) == "2-cores-of-amd-epyc.json"
    assert bench.file_name("2 cores of AMD EPYC", other) == f"2-cores-of-amd-epyc-{other}.json"


def make_setting(tmp_path, *, bf16: bool = False, **fields) -> programs.Setting:
    documents = Dataset.from_dict({"text": [f"{number} is a number, {number + 1} the next." for number in range(100)]})
    config = MiniMindConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **fields)
    tokenizer = train_tokenizer(documents["text"][:], vocab_size=300)
    return programs.Setting(documents, tokenizer, config, max_length=32, batch_size=2, output_dir=tmp_path, bf16=bf16)


@pytest.mark.parametrize("bf16", [False, True])
def test_all_programs_compute_in_the_same_precision(tmp_path, bf16):
    setting = make_setting(tmp_path, bf16=bf16)
    for build in (programs.ours, programs.bare_loop, programs.upstream_style, programs.stock_trainer):
        run, found = build(setting), set()

        def note(module, inputs, output, found=found):
            if isinstance(module, torch.nn.Linear) and module.out_features == setting.config.hidden_size:
                found.add(output.dtype)

        hook = register_module_forward_hook(note)
        try:
            run(1)
        finally:
            hook.remove()
        assert found == {torch.bfloat16 if bf16 else torch.float32}, build.__name__


@pytest.mark.parametrize("quiet", [1.0, 1e15])
def test_the_limit_is_the_best_measurement_and_never_below_the_reached_speed(tmp_path, monkeypatch, quiet):
    rates = iter([1.0, quiet, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(bench, "measure_gemm_rate", lambda device, dtype: next(rates))
    # A model with experts has three programs.
    found = bench.compare(make_setting(tmp_path, **EXPERTS), rounds=2, steps=1)
    share = max(row["share_of_limit"] for row in found["programs"].values())
    assert share == pytest.approx(1.0) if quiet == 1.0 else found["gemm_flops_per_second"] == quiet
    assert list(found["programs"]) == ["ours", "ours, Muon", "bare loop"]


def test_the_table_says_its_precision(capsys):
    row = {"tokens_per_second": 2.0, "step_seconds": 1.0, "share_of_limit": 0.5, "ours_is_times_as_fast": 1.0}
    size = dict.fromkeys(("limit_tokens_per_second", "overhead_over_bare_loop", "loader_share"), 0.0)
    size |= {"programs": {"ours": row}, "growth_with_documents": 0.0}
    settings = {"precision": "float32"}
    profile = {"float32": {"norms": 0.25}}
    results = {"machine": "a CPU", "settings": settings, "sizes": {"26M": size}, "profile": profile}
    bench.print_table(results | {"cost_of_experts": 1.0, "cost_of_muon": {4096: 1.25}})
    printed = capsys.readouterr().out
    assert "Muon over AdamW, 4,096 tokens per step: 1.25x" in printed
    assert "26M in float32 on a CPU" in printed and re.search(r"norms +25.0%", printed)


def test_the_cost_of_muon_falls_with_the_tokens_of_a_step(tmp_path, monkeypatch):
    def interleave(runs, **times):
        # Each program runs, and the seconds are replaced: a pass takes 4 s, an update with AdamW 1 s, with Muon 3 s.
        assert all(len(run(2)) == 2 for run in runs.values())
        return {name: [(seconds, 64)] for name, seconds in (("step", 5.0), ("adamw", 1.0), ("muon", 3.0))}

    monkeypatch.setattr(bench, "interleave", interleave)
    found = bench.cost_of_muon(make_setting(tmp_path), most_tokens=640, rounds=1, steps=2)
    assert found == {64: (4 + 3) / (4 + 1), 640: (40 + 3) / (40 + 1)}
    assert bench.preset_tokens("minimind2-small") == 32768


class _SlowSilu(torch.autograd.Function):
    """An activation that sleeps in both directions."""

    @staticmethod
    def forward(ctx, states):
        time.sleep(0.2)
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.4)
        return gradient


@pytest.mark.parametrize("bf16", [False, True])
def test_the_profile_finds_the_slow_part_of_a_step(tmp_path, bf16, monkeypatch):
    setting = make_setting(tmp_path, bf16=bf16)
    shares = profile_step.profile_step(setting, steps=1)
    assert sum(shares.values()) == pytest.approx(1)
    named = {"head and loss", "norms", "rotations", "attention", "optimizer", "data", "gradient clipping", "other"}
    assert named <= shares.keys() and profile_step.MATRIX_PRODUCTS in shares
    assert (profile_step.CASTS in shares) is bf16
    monkeypatch.setattr("hf_pretrain.model.experts.MiniMindMLP.forward", _slow_mlp)
    shares = profile_step.profile_step(setting, steps=1)
    # Of the 0.6 seconds, 0.4 pass in the backward pass: the profile finds its operators too.
    assert next(iter(shares)) == "elementwise operators of the MLP"
    assert shares["elementwise operators of the MLP"] > 0.5


def _slow_mlp(self, hidden_states):
    return self.down_proj(_SlowSilu.apply(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def test_ratios_of_hand_made_curves():
    # Ours falls by 1 nat in 10 s, then by 1 nat in 20 s. It reaches 5.5 after 5 s, 4.5 after 20 s, and never 3.
    mine = {"num_steps": 3, "curve": [(0.0, 6.0), (10.0, 5.0), (30.0, 4.0)]}
    slow = {"num_steps": 2, "curve": [(0.0, 6.0), (40.0, 5.5)]}
    good = {"num_steps": 2, "curve": [(0.0, 6.0), (25.0, 4.5)]}
    best = {"num_steps": 2, "curve": [(0.0, 6.0), (25.0, 3.0)]}
    found = {"ours": mine, "slow": slow, "good": good}
    assert race.ratios([found], "slow") == [5 / 40]
    assert race.ratios([found, found | {"good": best}], "good") == [20 / 25, math.inf]
    assert race.ratios_of_all([found, found | {"good": best}]) == {"slow": [0.125, 0.125], "good": [0.8, None]}
    # A shorter schedule of ours reaches 4.5 sooner, and is no other contestant.
    short = {"num_steps": 1, "curve": [(0.0, 6.0), (10.0, 4.5)]}
    assert race.ratios([found | {"ours, 1/2": short}], "good") == [10 / 25]
    assert "slowest contestant (slow)" in race.report([found | {"ours, 1/2": short}])
    lines = race.report([found]).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["ours", "good", "slow"]
    assert "best other contestant (good) in 0.80" in lines[4] and "slowest contestant (slow) in 0.12" in lines[5]


@pytest.mark.parametrize(
    ("num_cores", "expected"),
    [
        (1, [[0], [0], [0], [0]]),
        (2, [[0], [1], [0], [1]]),
        # Three cores cannot be shared evenly, so one stays idle.
        (3, [[0], [1], [0], [1]]),
        (9, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_all_contestants_get_equally_many_cores(num_cores, expected):
    assert race.divide_cores(list(range(num_cores)), 4) == expected


TOY = "hidden_size=32, num_hidden_layers=1, num_attention_heads=4"


def make_race_setting(tmp_path, **fields) -> contestants.RaceSetting:
    setting = make_setting(tmp_path)
    recipe = tmp_path / "pretrain.yaml"
    recipe.write_text(
        f"config_overrides: {TOY}\nvocab_size: 300\nmax_length: 32\nlearning_rate: 1e-2\n"
        "per_device_train_batch_size: 2\n"
    )
    validation = encode_documents(setting.documents[:20]["text"], setting.tokenizer)
    own = {"recipe": recipe, "flags": {}, "seconds": 1.0, "validation": validation, "learning_rate": 1e-2}
    return contestants.RaceSetting(**vars(setting) | own | fields)


def test_a_search_ends_where_no_half_and_no_double_is_better():
    # A long valley: small batches want small rates, and the best pair lies off both axes through the start.
    def loss_of(rate: float, batch_size: int) -> float:
        tried.append((rate, batch_size))
        return 0.04 * math.log2(rate / 5e-4 / batch_size) ** 2 + 0.1 * math.log2(batch_size)

    tried: list[tuple[float, int]] = []
    assert race_settings.search(4e-3, loss_of) == (5e-4, 1)
    # A batch size below 1 does not exist.
    assert min(batch_size for _, batch_size in tried) == 1


def test_a_search_continues_from_the_runs_of_its_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    monkeypatch.setattr(race, "ROOT", tmp_path)
    monkeypatch.setattr(race_settings, "make_setting", lambda preset, seconds: make_race_setting(tmp_path))
    tried: list[tuple[float, int]] = []

    def train_alone(name, setting, *, num_rows):
        tried.append((setting.learning_rate, setting.batch_size))
        if len(tried) == 3:
            raise KeyboardInterrupt
        return 1.0, abs(setting.learning_rate - 4e-3) + setting.batch_size

    monkeypatch.setattr(race_settings, "train_alone", train_alone)
    monkeypatch.setattr("sys.argv", ["race_settings", "--others", contestants.LOOP])
    with pytest.raises(KeyboardInterrupt):
        race_settings.main()
    race_settings.main()
    assert len(set(tried)) == len(tried) - 1
    with pytest.raises(KeyError, match="stock Trainer"):
        race.best_settings("tiny")
    best = {run["contestant"]: run for run in json.loads(race.settings_path("tiny").read_text())["runs"]}
    assert best.keys() == {contestants.LOOP}
    # Runs on another number of rows are of no use, and are not overwritten.
    monkeypatch.setattr("sys.argv", ["race_settings", "--others", contestants.LOOP, "--num_rows", "640"])
    with pytest.raises(SystemExit):
        race_settings.main()
    assert "holds runs with another num_rows. Delete it" in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [2, 4])
def test_runs_of_a_search_train_on_equally_many_rows(tmp_path, monkeypatch, batch_size):
    num_steps = []
    train = contestants.CONTESTANTS[contestants.LOOP]
    monkeypatch.setitem(
        contestants.CONTESTANTS,
        contestants.LOOP,
        lambda setting, run: (train(setting, run), num_steps.append(run.num_done)),
    )
    setting = make_race_setting(tmp_path, batch_size=batch_size)
    seconds, loss = race_settings.train_alone(contestants.LOOP, setting, num_rows=100)
    assert num_steps == [100 // batch_size] and loss < math.log(300) - 1
    assert seconds > 0


def test_the_validation_loss_is_the_mean_over_documents_that_stand_alone(tmp_path):
    setting = make_race_setting(tmp_path)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(setting.config).eval()
    losses = []
    for ids in map(torch.tensor, setting.validation):
        with torch.no_grad():
            losses.append(F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    found = contestants.validation_loss(
        lambda ids: model(ids).logits, setting.validation, device=torch.device("cpu"), bf16=False, batch_size=3
    )
    # Documents of different lengths, so that padding and the order of the batches matter.
    assert len({len(ids) for ids in setting.validation}) > 1
    assert found == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_a_contestant_may_have_a_number_of_steps(tmp_path):
    setting = make_race_setting(tmp_path, num_steps=3)
    assert race.compete(contestants.LOOP, setting, threading.Barrier(1))["num_steps"] == 3


@pytest.mark.parametrize("name", ["ours", "loop like MiniMind's", "stock Trainer", "TRL SFTTrainer"])
def test_each_contestant_learns_within_its_time(tmp_path, name):
    setting = make_race_setting(tmp_path)
    found = race.compete(name, setting, threading.Barrier(1))
    seconds, losses = zip(*found["curve"], strict=True)
    assert len(losses) == race.NUM_VALIDATIONS + 1
    assert seconds[0] == 0 and list(seconds) == sorted(seconds)
    # Random weights know nothing: the loss starts at that of the uniform distribution.
    assert losses[0] == pytest.approx(math.log(300), abs=0.3) and losses[-1] < losses[0] - 1
    # The number of steps comes from a measurement of a tenth of a second, and other processes may disturb it.
    assert 0.2 < seconds[-1] < 5


def test_ours_competes_with_the_best_settings_of_others_or_with_itself(tmp_path):
    setting = make_race_setting(tmp_path, flags={"max_steps": 3})
    best = {
        name: {"learning_rate": rate, "batch_size": 4}
        for name, rate in zip(contestants.OTHERS, (1, 2, 3), strict=True)
    }
    entries = race.entries_of(setting, best, upstream=tmp_path)
    assert list(entries) == ["ours", "MiniMind", "stock Trainer", "TRL SFTTrainer"]
    assert [(own.learning_rate, own.batch_size) for _, own in entries.values()] == [(1e-2, 2), (1, 4), (2, 4), (3, 4)]
    entries = race.without_parts(setting)
    assert {name for name, _ in entries.values()} == {"ours"}
    assert entries["without Muon"][1].flags == {"max_steps": 3, "optim_preset": "adamw"}


def test_shorter_runs_count_the_seconds_of_the_race(tmp_path, monkeypatch):
    # 15 of 16 steps are timed, at 2 s a step.
    ours = {"num_steps": 16, "curve": [(0.0, 6.0), (30.0, 4.0)]}

    def fake(entries):
        return {
            name: {"num_steps": own.num_steps, "steps": [0, own.num_steps], "curve": [(0.0, 6.0), (1.0, 5.0)]}
            for name, (_, own) in entries.items()
        }

    monkeypatch.setattr(race, "run_together", fake)
    # A loss of 3 is never reached, so all shares may be of use.
    found = race.run_shorter(
        make_race_setting(tmp_path), {"ours": ours, "other": {"curve": [(0.0, 6.0), (30.0, 3.0)]}}
    )
    assert {name: result["num_steps"] for name, result in found.items()} == dict(
        zip(race.SHORTER, (8, 4, 2, 1), strict=True)
    )
    assert [result["curve"][-1] for result in found.values()] == [(16.0, 5.0), (8.0, 5.0), (4.0, 5.0), (2.0, 5.0)]
    # `ours` reaches a loss of 5.6 after a fifth, and 5.98 after a hundredth of its time.
    for loss, shares in ((5.6, ["ours, 1/4", "ours, 1/8", "ours, 1/16"]), (5.98, ["ours, 1/16"])):
        other = {"curve": [(0.0, 6.0), (30.0, loss)]}
        assert list(race.run_shorter(make_race_setting(tmp_path), {"ours": ours, "other": other})) == shares


@pytest.mark.parametrize("preset", ["tiny"])
def test_the_searched_settings_are_recorded(preset):
    assert list(race.best_settings(preset)) == list(contestants.OTHERS)


def test_a_race_without_searched_settings_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="Run python -m benchmarks.race_settings --model_preset tiny first"):
        race.best_settings("tiny")
    with pytest.raises(ValueError, match="race_settings --model_preset tiny --name long first"):
        race.best_settings("tiny", "long")


def test_a_named_search_chooses_the_contestants(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "ROOT", tmp_path)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    run = {"contestant": contestants.LOOP, "learning_rate": 1e-3, "batch_size": 4, "seconds": 1.0, "final_loss": 5.0}
    race.settings_path("toy", "long").write_text(json.dumps({"runs": [run]}))
    best = race.best_settings("toy", "long")
    assert best == {contestants.LOOP: {"learning_rate": 1e-3, "batch_size": 4}}
    assert list(race.entries_of(make_race_setting(tmp_path), best)) == ["ours", contestants.LOOP]


def test_without_a_part_exactly_that_part_is_missing(tmp_path, monkeypatch):
    trainers = []
    monkeypatch.setattr(contestants, "train", lambda trainer, run: trainers.append(trainer))
    found = {}
    for label, (_, setting) in race.without_parts(make_race_setting(tmp_path)).items():
        setting.flags["max_length"] = 128
        # The recipe of the test has overrides of its own.
        setting.flags["config_overrides"] = ",".join([TOY, *filter(None, [setting.flags.get("config_overrides")])])
        contestants.ours(setting, contestants.Run(setting, threading.Barrier(1), num_steps=2))
        trainer = trainers[-1]
        has = {
            "packing": any(len(lengths) > 1 for lengths in trainer.train_dataset["seq_lengths"]),
            "our attention": trainer.model.config._attn_implementation == "packed",
            "Muon": trainer.args.optim_preset == "muon",
            "decay": trainer.args.lr_scheduler_type == "cosine_with_min_lr",
            "our first weights": not trainer.model.model.layers[0].self_attn.o_proj.weight.any(),
        }
        found[label] = {part for part, is_there in has.items() if not is_there}
    assert found == {"ours": set()} | {f"without {part}": {part} for part in race.PARTS}


@pytest.mark.slow
def test_contestants_compete_in_their_own_processes(tmp_path):
    names = ["ours", "loop like MiniMind's"]
    setting = make_race_setting(tmp_path)
    found = race.run_together({name: (name, setting) for name in names})
    assert list(found) == names
    assert all(result["curve"][-1][1] < result["curve"][0][1] - 1 for result in found.values())
    race.plot([found], tmp_path / "race.png", title="toy")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_contestant_that_fails_ends_the_race(tmp_path):
    with pytest.raises(RuntimeError, match="ours failed"):
        race.run_together({"ours": ("ours", make_race_setting(tmp_path, recipe=tmp_path / "no.yaml"))})


@pytest.mark.slow
def test_all_programs_prepare_the_same_text(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"{number} is a number, {number + 1} the next." for number in range(2000)]
    path = tmp_path / "documents.jsonl"
    num_documents = preparation.write_documents(texts, path, 150_000)
    tokenizer = train_tokenizer(texts, vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    # The texts repeat up to the size of the file.
    assert num_documents > 2000 and 150_000 <= path.stat().st_size < 150_100
    written = (texts * 2)[:num_documents]
    num_tokens = sum(len(ids) for ids in encode_documents(written, tokenizer))
    runs = {name: prepare(str(path), tokenizer, 1) for name, prepare in preparation.PROGRAMS.items()}
    found = {name: sum(map(len, rows["input_ids"])) for name, rows in runs.items()}
    # TRL adds only eos, run_clm.py adds neither bos nor eos and drops the rest of each batch.
    assert found["ours"] == num_tokens
    assert found["TRL SFTTrainer"] == num_tokens - num_documents
    num_batches = math.ceil(num_documents / 1000)
    assert 0 <= num_tokens - 2 * num_documents - found["run_clm.py"] < num_batches * preparation.MAX_LENGTH


def test_memory_is_extrapolated_along_a_line(tmp_path, monkeypatch):
    def measure_apart(name, path, tokenizer_path, *, num_proc):
        megabytes = path.stat().st_size / 1e6
        return {"megabytes": megabytes, "peak_rss_bytes": 1000 + 10 * megabytes, "peak_private_bytes": 500}

    monkeypatch.setattr(preparation, "measure_apart", measure_apart)
    found = preparation.measure_growth(["a text"], tmp_path, tmp_path, [0.0001, 0.0003])
    assert found["extrapolated_rss_bytes_at_10_gigabytes"] == pytest.approx(1000 + 10 * 10_000)
    assert found["extrapolated_private_bytes_at_10_gigabytes"] == pytest.approx(500)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is known on Linux only")
def test_private_memory_counts_workers_but_no_mapped_files(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(80_000_000))
    worker = f"""
import mmap
file = open({str(file)!r}, "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
total = sum(mapped[::4096])
memory = b"1" * 40_000_000
print("ready", flush=True)
input()
"""
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", parent, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "ready\n"
        found = preparation.private_bytes(program.pid)
        program.communicate("\n")
    assert 40_000_000 < found < 80_000_000
