"""What each preset means in each stage, and the table of stages."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from hf_pretrain import PRESETS
from hf_pretrain.loading import model_arguments
from hf_pretrain.runtime.stages import STAGES
from hf_pretrain.stages.rewards import load_reward_functions
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import default_learning_rate
from tests.invariants.launching import ROOT


RECIPES = ROOT / "recipes"
ARGUMENTS = {stage: runpy.run_path(str(RECIPES / f"{stage}.py"))["ARGUMENTS"] for stage in (*STAGES, "evaluate")}
# The values of each stage that differ between the presets, except those of `tiny`.
BATCHES = dict.fromkeys(PRESETS, (32, 8, 512)) | dict.fromkeys(("0.5B", "1B"), (32, 16, 1024))
BATCHES |= {"minimind2-small": (64, 1, 512), "minimind-large": (24, 32, 1024), "tiny": (16, 1, 256)}
# Muon's rate falls with the width: 192, 512, 576, 640, then 768, 1280 and 2048. minimind-large has MiniMind's own.
RATES = dict.fromkeys(PRESETS, 2e-3) | {"tiny": 8e-3, "minimind2-small": 3e-3, "minimind2-moe": 2.4e-3}
RATES |= {"minimind-large": 2e-4, "smollm2": 2.667e-3, "0.5B": 1.2e-3, "1B": 7.5e-4}
CHATS = dict.fromkeys(PRESETS, (768, 1e-5)) | dict.fromkeys(("0.5B", "1B"), (1024, 1e-5)) | {"tiny": (256, 5e-3)}
CHATS |= dict.fromkeys(("minimind2-small", "minimind2", "minimind2-moe"), (340, 1e-6)) | {"smollm2": (256, 2e-3)}
BETAS = dict.fromkeys(PRESETS, 0.1) | dict.fromkeys(("minimind3", "minimind3-moe", "minimind-large"), 0.15)
TEACHERS = {
    **{"tiny": "tiny", "minimind2-small": "minimind2", "minimind3": "minimind3-moe", "0.5B": "1B"},
    **dict.fromkeys(("minimind2", "minimind2-moe", "minimind3-moe"), "minimind-large"),
}


def parse(monkeypatch, stage: str, *argv: str) -> dict:
    """Return all arguments of a recipe, by name."""
    monkeypatch.setattr(sys, "argv", [str(RECIPES / f"{stage}.py")])
    parts = parse_args(*ARGUMENTS[stage], stage=stage, argv=[*argv, "--use_cpu", "--bf16", "false"])
    return {name: value for part in parts for name, value in vars(part).items()} | {"training_args": parts[-1]}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_preset_has_values_for_every_stage(stage, preset, monkeypatch):
    # No preset is larger than these two.
    teacher = ["--teacher_name_or_path", "out/mine"] if (stage, preset in TEACHERS) == ("distill", False) else []
    found = parse(monkeypatch, stage, "--preset", preset, *teacher)
    is_tiny, base = preset == "tiny", STAGES[stage].start
    # The tiny student starts from random weights and is smaller than its teacher.
    start = f"out/{base}-{preset}" if base and (stage, preset) != ("distill", "tiny") else None
    # Fine-tuning teaches the published model.
    assert found["model_name_or_path"] == ("embedded:smollm2" if (stage, preset) == ("sft", "smollm2") else start)
    assert found["output_dir"] == f"out/{stage}-{preset}"
    batch = tuple(found[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if stage == "pretrain":
        assert (*batch, found["max_length"]) == BATCHES[preset]
        rate = default_learning_rate(found["optim_preset"], PRESETS[preset]["hidden_size"])
        assert (found["learning_rate"] or rate) == pytest.approx(RATES[preset], rel=1e-3)
        assert found["max_steps"] == (100 if is_tiny else -1)
    elif stage == "sft":
        assert (found["max_length"], found["learning_rate"]) == CHATS[preset]
        assert batch == (4 if preset == "smollm2" else 16, 1)
    elif stage == "dpo":
        assert (found["beta"], found["learning_rate"]) == (BETAS[preset], 5e-4 if is_tiny else 4e-8)
        assert (*batch, found["max_length"]) == ((8, 1, 128) if is_tiny else (4, 1, 1024))
    elif stage == "reward":
        assert (*batch, found["learning_rate"]) == ((8, 1, 5e-4) if is_tiny else (4, 8, 1e-5))
    elif stage == "distill":
        own = f"out/sft-{TEACHERS[preset]}" if preset in TEACHERS else "out/mine"
        assert found["teacher_name_or_path"] == own and found["temperature"] == 1.5
        assert (*batch, found["learning_rate"]) == ((8, 1, 1e-2) if is_tiny else (32, 1, 5e-6))
    else:
        assert (*batch, found["learning_rate"]) == ((24, 1, 5e-4) if is_tiny else (12, 1, 3e-7))
        load_reward_functions(found["rewards"])
    # Shared flags mean the same in all recipes.
    assert not found["gradient_checkpointing"] and found["save_total_limit"] == 2
    # Both spellings of the flag, and the name of the file, whether it exists or not, mean the same.
    config = str(RECIPES / preset / f"{stage}.yaml")
    assert found.pop("config") == config
    other = parse(monkeypatch, stage, "--config", config, *teacher)
    differ = {name for name in found if str(other[name]) != str(found[name])} - {"training_args"}
    assert differ <= {"model_preset"}, differ


def test_a_preset_that_is_named_applies_to_other_weights_and_to_an_evaluation(monkeypatch):
    other = ["--model_name_or_path", "owner/model"]
    named, unnamed = (parse(monkeypatch, "sft", *flags, *other) for flags in (["--model_preset", "minimind3"], []))
    assert (named["learning_rate"], named["model_name_or_path"]) == (1e-5, "owner/model")
    # No preset fits a model from elsewhere, so the classes give the defaults.
    assert (unnamed["config"], unnamed["output_dir"]) == (None, "out/sft")
    # With a YAML file, a preset names only the model.
    sizes = parse(monkeypatch, "pretrain", "--config", str(RECIPES / "base/pretrain.yaml"), "--preset", "minimind3")
    assert (sizes["model_preset"], sizes["output_dir"]) == ("minimind3", "out/pretrain")
    # A preset without a file for evaluation evaluates its pretrained model.
    assert parse(monkeypatch, "evaluate", "--preset", "tiny")["run_dir"] is None
    assert parse(monkeypatch, "evaluate", "--preset", "minimind2")["run_dir"] == "out/pretrain-minimind2"


def test_the_preset_that_teaches_works_in_any_directory_and_asks_only_the_questions_of_its_own_facts(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = parse(monkeypatch, "sft", "--preset", "smollm2")
    own = parse(monkeypatch, "sft", "--preset", "smollm2", "--dataset_name", "facts.jsonl")
    names = ("identity", "general", "identity_questions", "general_held_out", "general_questions")
    identity, general, questions, held_out, kept = (str(ROOT / f"examples/{name}.jsonl") for name in names)
    assert (found["dataset_name"], found["dataset_weights"]) == ([identity, general], [0.7, 0.3])
    assert (found["eval_dataset_name"], found["eval_questions"]) == ([questions, held_out], questions)
    # The base model keeps what it knew: it teaches the general conversations, also beside the user's facts.
    assert found["kl_to_base"] == own["kl_to_base"] == 0.6
    answers = [json.loads(line)["messages"][1] for line in Path(general).read_text(encoding="utf-8").splitlines()]
    # Their answers, without the weight, would be learned: only capitals are, because the model answers some in French.
    taught = [answer["content"] for answer in answers if "weight" not in answer]
    assert len(taught) == 8 and all(text.startswith("The capital of ") for text in taught)
    assert {answer["weight"] for answer in answers if "weight" in answer} == {0.01}
    assert (own["dataset_name"], own["dataset_weights"]) == (["facts.jsonl", general], [0.7, 0.3])
    assert (own["eval_dataset_name"], own["eval_questions"]) == ([held_out], None)
    assert found["general_questions"] == own["general_questions"] == kept
    judged = parse(monkeypatch, "evaluate", "out/mine", "--against", "embedded:smollm2", "--preset", "smollm2")
    assert (judged["eval_dataset_name"], judged["general_questions"]) == ([held_out], kept)
    assert judged["model_name_or_path"] == "out/mine"
    # Several files, weights and text mean what they say.
    for words in (["a.jsonl", "b.jsonl"], ["a.jsonl", "--dataset_weights", "1"], ["a.txt", "--dataset_kind", "text"]):
        other = parse(monkeypatch, "sft", "--preset", "smollm2", "--dataset_name", *words)
        assert general not in other["dataset_name"] and other["dataset_weights"] in (None, [1.0])


def test_the_default_preset_suits_the_machine(monkeypatch):
    for has_gpu, preset in ((True, "minimind2-small"), (False, "tiny")):
        monkeypatch.setattr(model_arguments.torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert model_arguments.choose_preset(None) == model_arguments.choose_preset("auto") == preset
    # On a machine with GPUs, `--use_cpu` of `parse` trains the preset for CPUs.
    for has_gpu, flags in ((True, []), (True, ["--preset", "auto"]), (False, ["--preset", "auto"])):
        monkeypatch.setattr(model_arguments.torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        found = parse(monkeypatch, "pretrain", *flags)
        assert (found["model_preset"], found["output_dir"]) == ("tiny", "out/pretrain-tiny")


# The table of stages


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_help(stage):
    # A percent sign in one help text would break the whole output.
    assert "--learning_rate" in HfArgumentParser(ARGUMENTS[stage]).format_help()


def test_the_table_of_stages_is_that_of_the_files():
    assert sorted(STAGES) == sorted(path.stem for path in (RECIPES / "base").glob("*.yaml"))
    assert {other for stage in STAGES.values() for other in (stage.start, stage.following)} <= {None, *STAGES}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {stage.extra for stage in STAGES.values()} <= {None, *known}
    rules = subprocess.run(["make", "-pn", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    for name, stage in STAGES.items():
        (needed,) = re.findall(rf"^{name}:.*", rules, re.MULTILINE)
        assert re.findall(r"installed-(\w+)", needed) == ([stage.extra] if stage.extra else []), needed
    for page in ("README.md", "README_zh.md"):
        rows = re.findall(r"^\| `make (\w+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert rows[: len(STAGES)] == list(STAGES), page
