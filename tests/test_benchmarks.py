"""The arithmetic behind the published figures, and a short run of each program of the benchmarks."""

import json
import math
import sys
import threading

import datasets
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch.nn.modules.module import register_module_forward_hook

from benchmarks import (
    bench,
    contestants,
    from_scratch_splits,
    gpu_check,
    preparation,
    profile_step,
    programs,
    race,
    race_settings,
    scaling,
)
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model import packed_attention
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.toys import EXPERTS


def make_setting(tmp_path, *, bf16: bool = False, **fields) -> programs.Setting:
    documents = Dataset.from_dict({"text": [f"{number} is a number, {number + 1} the next." for number in range(100)]})
    config = MiniMindConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **fields)
    tokenizer = train_tokenizer(documents["text"][:], vocab_size=300)
    return programs.Setting(documents, tokenizer, config, max_length=32, batch_size=2, output_dir=tmp_path, bf16=bf16)


def make_race_setting(tmp_path, **fields) -> contestants.RaceSetting:
    setting = make_setting(tmp_path)
    recipe = tmp_path / "pretrain.yaml"
    recipe.write_text(
        "config_overrides: hidden_size=32, num_hidden_layers=1, num_attention_heads=4\nvocab_size: 300\n"
        "max_length: 32\nlearning_rate: 1e-2\nper_device_train_batch_size: 2\n"
    )
    validation = encode_documents(setting.documents[:20]["text"], setting.tokenizer)
    own = {"recipe": recipe, "flags": {}, "seconds": 0.3, "validation": validation, "learning_rate": 1e-2}
    return contestants.RaceSetting(**vars(setting) | own | fields)


def test_all_programs_compute_in_the_same_precision(tmp_path):
    setting, found = make_setting(tmp_path, bf16=True), set()

    def note(module, inputs, output):
        # The logits may be float32.
        if isinstance(module, torch.nn.Linear) and module.out_features == setting.config.hidden_size:
            found.add(output.dtype)

    hook = register_module_forward_hook(note)
    try:
        for build in (programs.ours, programs.bare_loop, programs.upstream_style, programs.stock_trainer):
            build(setting)(1)
    finally:
        hook.remove()
    assert found == {torch.bfloat16}


def test_no_program_is_faster_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure_gemm_rate", lambda device, dtype: 1.0)
    # A model with experts has three programs.
    found = bench.compare(make_setting(tmp_path, **EXPERTS), rounds=1, steps=1)
    assert list(found["programs"]) == ["ours", "ours, Muon", "bare loop"]
    assert max(row["share_of_limit"] for row in found["programs"].values()) == pytest.approx(1.0)


def test_tokens_are_counted_where_other_processes_collate(tmp_path):
    setting = make_setting(tmp_path)
    found = [programs.ours(setting, dataloader_num_workers=number)(3) for number in (0, 1)]
    alone, with_worker = ([tokens for _, tokens in steps] for steps in found)
    assert with_worker == alone and len(alone) == 3 and min(alone) > 32


def test_the_profile_divides_a_step_into_its_parts(tmp_path):
    shares = profile_step.profile_step(make_setting(tmp_path, bf16=True), steps=1)
    assert sum(shares.values()) == pytest.approx(1)
    named = {"head and loss", "norms", "rotations", "attention", "optimizer", "data", "gradient clipping", "other"}
    assert shares.keys() >= named | {profile_step.MATRIX_PRODUCTS, profile_step.CASTS}


def test_ratios_of_hand_made_curves():
    # Ours falls by 1 nat in 10 s, then by 1 nat in 20 s. It reaches 5.5 after 5 s, 4.5 after 20 s, and never 3.
    mine = {"num_steps": 3, "curve": [(0.0, 6.0), (10.0, 5.0), (30.0, 4.0)]}
    slow = {"num_steps": 2, "curve": [(0.0, 6.0), (40.0, 5.5)]}
    good = {"num_steps": 2, "curve": [(0.0, 6.0), (25.0, 4.5)]}
    best = {"num_steps": 2, "curve": [(0.0, 6.0), (25.0, 3.0)]}
    found = {"ours": mine, "slow": slow, "good": good}
    assert race.ratios_of_all([found, found | {"good": best}]) == {"slow": [0.125, 0.125], "good": [0.8, None]}
    # A shorter schedule of ours reaches 4.5 sooner, and is no other contestant.
    short = found | {"ours, 1/2": {"num_steps": 1, "curve": [(0.0, 6.0), (10.0, 4.5)]}}
    assert race.ratios_of_all([short]) == {"slow": [0.083], "good": [0.4]}
    report = race.report([found])
    assert "best other contestant (good) in 0.80" in report and "slowest contestant (slow) in 0.12" in report


def test_a_search_ends_where_no_half_and_no_double_is_better():
    # A long valley: small batches want small rates and short rows, and the best place lies off the axes of the start.
    def loss_of(settings: dict[str, float]) -> float:
        rate, batch_size, length = (settings[name] for name in race.SEARCHED)
        valley = math.log2(rate / 5e-4 / batch_size) ** 2 + math.log2(length / 64 / batch_size) ** 2
        return 0.04 * valley + 0.1 * math.log2(batch_size)

    first = dict(zip(race.SEARCHED, (4e-3, 8, 256), strict=True))
    assert race_settings.search(first, loss_of) == dict(zip(race.SEARCHED, (5e-4, 1, 64), strict=True))
    assert list(race.best_settings("tiny")) == list(contestants.OTHERS)


def test_the_validation_loss_is_the_mean_over_documents_that_stand_alone(tmp_path):
    setting = make_race_setting(tmp_path)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(setting.config).eval()
    documents = [torch.tensor(ids) for ids in setting.validation]
    with torch.no_grad():
        losses = [F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none") for ids in documents]
    how = {"device": torch.device("cpu"), "bf16": False, "batch_size": 3}
    found = contestants.validation_loss(lambda ids: model(ids).logits, setting.validation, **how)
    # Documents of different lengths, so that padding and the order of the batches matter.
    assert len(set(map(len, documents))) > 1
    assert found == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["ours", contestants.LOOP, "stock Trainer", "TRL SFTTrainer"])
def test_each_contestant_learns(tmp_path, name):
    found = race.compete(name, make_race_setting(tmp_path, num_steps=30), threading.Barrier(1))
    seconds, losses = zip(*found["curve"], strict=True)
    assert len(losses) == race.NUM_VALIDATIONS + 1
    assert seconds[0] == 0 and list(seconds) == sorted(seconds)
    # Random weights know nothing: the loss starts at that of the uniform distribution.
    assert losses[0] == pytest.approx(math.log(300), abs=0.3) and losses[-1] < losses[0] - 0.5


# A checkout of MiniMind of 2026, as far as the race reads it.
CHECKOUT = {
    "model/model_minimind.py": """
from types import SimpleNamespace as MiniMindConfig
from torch import nn
class MiniMindForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    def forward(self, input_ids):
        return self.embedding(input_ids) @ self.embedding.weight.T
""",
    "dataset/lm_dataset.py": """
import json, torch
def PretrainDataset(path, tokenizer, max_length):
    texts = [tokenizer.bos_token + json.loads(line)["text"] + tokenizer.eos_token for line in open(path)]
    how = {"add_special_tokens": False, "padding": "max_length", "truncation": True, "return_tensors": "pt"}
    ids = tokenizer(texts, max_length=max_length, **how).input_ids
    return [(row, row.clone()) for row in ids]
""",
}


def test_a_checkout_of_minimind_trains(tmp_path, monkeypatch):
    for name, text in CHECKOUT.items():
        (tmp_path / "minimind" / name).parent.mkdir(parents=True)
        (tmp_path / "minimind" / name).write_text(text)
    monkeypatch.setattr(sys, "path", sys.path[:])
    setting = make_race_setting(tmp_path, upstream=tmp_path / "minimind", num_steps=20, batch_size=4)
    run = contestants.Run(setting, threading.Barrier(1), num_steps=20, num_validations=2)
    contestants.CONTESTANTS["MiniMind"](setting, run)
    losses = [loss for _, loss in run.curve]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.slow
def test_a_contestant_competes_in_its_own_process_within_its_time(tmp_path):
    found = race.run_together({"loop": (contestants.LOOP, make_race_setting(tmp_path))})
    assert found["loop"]["num_steps"] > 0
    race.plot([found], tmp_path / "race.png", title="toy")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_programs_prepare_the_same_text(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"{number} is a number, {number + 1} the next." for number in range(2000)]
    path = tmp_path / "documents.jsonl"
    num_documents = preparation.write_documents(texts, path, 150_000)
    tokenizer = train_tokenizer(texts, vocab_size=300)
    # The texts repeat up to the size of the file.
    assert num_documents > 2000 and 150_000 <= path.stat().st_size < 150_100
    num_tokens = sum(len(ids) for ids in encode_documents((texts * 2)[:num_documents], tokenizer))
    runs = {name: prepare(str(path), tokenizer, 1) for name, prepare in preparation.PROGRAMS.items()}
    found = {name: sum(map(len, rows["input_ids"])) for name, rows in runs.items()}
    # TRL adds only eos, run_clm.py adds neither bos nor eos and drops the rest of each batch.
    assert found["ours"] == num_tokens
    assert found["TRL SFTTrainer"] == num_tokens - num_documents
    num_batches = math.ceil(num_documents / 1000)
    assert 0 <= num_tokens - 2 * num_documents - found["run_clm.py"] < num_batches * preparation.MAX_LENGTH


@pytest.mark.documents
def test_the_table_of_several_machines_is_what_the_script_prints(monkeypatch, capsys):
    # Worked out by hand: 2e8 / 2^4.7619, and the terms of Daly's interval for a minute per save and a failure per day.
    assert scaling.critical_batch_tokens(2.0) == pytest.approx(7.3715e6, rel=1e-4)
    assert scaling.checkpoint_interval(60, 86_400) == pytest.approx(3_180.1, rel=1e-4)
    assert scaling.all_reduce_bytes(1e9, 8) == pytest.approx(2 * 7 / 8 * 4e9)
    # Figure 1 of the ZeRO paper: 7.5e9 parameters with 16 bytes each on 64 GPUs.
    assert scaling.state_bytes(7.5e9, 64)["ZeRO-3, FSDP2"] == pytest.approx(1.875e9)
    monkeypatch.setattr(sys, "argv", ["scaling"])
    scaling.main(scaling.parse_arguments())
    printed = capsys.readouterr().out
    page = (ROOT / "docs/several-machines.md").read_text(encoding="utf-8")
    assert "1,024" in printed and [line for line in printed.splitlines() if line not in page] == []


def test_the_gpu_check_finds_a_wrong_kernel_and_goes_on_after_errors(tmp_path, monkeypatch):
    checks = gpu_check.CHECKS | {"broken": lambda bench: 1 / 0}
    names = ("packed attention", "experts, grouped_mm, float32", "generation with a cache", "fp16", "broken")

    def run():
        return [gpu_check.run_check(name, checks[name], gpu_check.Bench("cpu", tmp_path)) for name in names]

    rows = run()
    assert [row.passed for row in rows] == [True, True, True, None, False]
    table = gpu_check.format_table(rows, bench.environment())
    assert "| fp16 | skipped | skipped: fp16 needs a GPU |" in table
    assert "| broken | **failed** | ZeroDivisionError: division by zero |" in table

    attend = packed_attention._attend_in_blocks
    monkeypatch.setattr(packed_attention, "_attend_in_blocks", lambda *states: attend(*states) * 1.2)
    assert [row.passed for row in run()] == [False, True, True, None, False]


def test_the_gpu_check_compares_every_loss():
    for found, passes in (([2.0, 1.0001], True), ([2.0, 1.1], False), ([2.0, math.nan], False)):
        assert gpu_check.compare(found, [2.0, 1.0], 1e-3)[0] is passes
    with pytest.raises(ValueError):
        gpu_check.compare([2.0], [2.0, 1.0], 1e-3)


def test_splits_train_the_same_number_of_steps(tmp_path, monkeypatch, capsys):
    trained = []

    def train(stage, directory, max_steps, words):
        trained.append((stage, max_steps, "--model_name_or_path" in words))
        return dict.fromkeys(from_scratch_splits.FIGURES, 0.5)

    monkeypatch.setattr(from_scratch_splits, "train", train)
    monkeypatch.setattr(from_scratch_splits, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["splits", "--steps", "100", "--shares", "0.5", "0.85"])
    from_scratch_splits.main()
    assert trained == [("pretrain", 50, False), ("sft", 50, True), ("pretrain", 85, False), ("sft", 15, True)]
    assert "| 85% | 85 + 15 | 42 | 0.500 |" in capsys.readouterr().out
    assert [row["share"] for row in json.loads((tmp_path / "results.json").read_text())] == [0.5, 0.85]
