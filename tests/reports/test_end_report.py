"""The report and the loss curve at the end of a run."""

import json
import shlex
import sys

import pytest
from transformers import TrainerState

import hf_pretrain_cli
from hf_pretrain.reports.end_report import next_commands
from hf_pretrain.run_directory.directory import RunDirectory
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.training.reporting import write_page
from tests.invariants.launching import ROOT


@pytest.mark.parametrize(
    ("recipe", "data_kind", "words"),
    [
        ("pretrain", "text", "sft --preset tiny"),
        ("sft", "conversations", "dpo --preset tiny"),
        ("dpo", "preferences", "grpo --preset tiny"),
        # A fine-tuning or a distillation on text gives a base model, and comes before the one on conversations.
        ("sft", "text", "sft --preset tiny"),
        ("distill", "text", "sft --preset tiny"),
        ("distill", "conversations", "dpo --preset tiny"),
        ("grpo", "tasks", None),
    ],
)
def test_the_next_commands_lead_to_the_next_stage(recipe, data_kind, words, monkeypatch):
    # As after `source .venv/bin/activate`.
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    config = str(ROOT / f"recipes/tiny/{recipe}.yaml")
    facts = RunFacts(recipe=recipe, data_kind=data_kind)
    chat, *stages = next_commands("out/a b/", facts, config=config)
    assert chat == ("Talk to it", "hf-pretrain chat --model_name_or_path 'out/a b'")
    if words is None:
        assert not stages
        return
    ((label, command),) = stages
    stage = words.split()[0]
    assert label == "Next stage"
    assert command == f"hf-pretrain {words} --model_name_or_path 'out/a b' --output_dir 'out/a b-{stage}'"
    # The command is one that `hf-pretrain` understands.
    _, started = hf_pretrain_cli.make_command(stage, shlex.split(command)[2:])
    assert shlex.join(started).endswith(shlex.join(shlex.split(command)[2:]))
    # The stages of `make` stand beside each other: out/sft-tiny follows out/pretrain-tiny.
    following = next_commands(f"out/{recipe}-tiny", facts, config=config)[1][1]
    assert following.endswith(f"--output_dir out/{stage}-tiny" if stage != recipe else "out/sft-tiny-sft")
    # A file of the user's own has no name as a preset.
    assert "--preset" not in next_commands("out/a", facts, config="elsewhere/pretrain.yaml")[1][1]


@pytest.mark.parametrize(
    ("preset", "base"), [("smollm2", "embedded:smollm2"), ("smollm2", "out/earlier"), (None, "Qwen/Qwen3-0.6B")]
)
def test_a_published_model_that_has_learnt_facts_is_judged_and_exported(preset, base, monkeypatch):
    """DPO needs preferences and TRL."""
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    config = preset and str(ROOT / f"recipes/{preset}/sft.yaml")
    facts = RunFacts(recipe="sft", data_kind="conversations", base_model=base)
    chat, *judge, export = next_commands("out/facts", facts, config=config)
    assert chat == ("Talk to it", "hf-pretrain chat --model_name_or_path out/facts")
    # Without a preset, nobody knows on which data to compare them.
    words = f"--preset smollm2 --model_name_or_path out/facts --against {base}"
    assert judge == ([("Judge it", f"hf-pretrain evaluate {words}")] if preset else [])
    gguf = "--from out/facts --to out/facts-gguf --format gguf --dtype q8_0"
    assert export == ("Export it", f"hf-pretrain convert {gguf}")


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    directory = RunDirectory(tmp_path)
    # A run that no recipe has begun has no page.
    write_page(directory, TrainerState())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text("[{}]")
    (tmp_path / "report.html").mkdir()
    write_page(directory, TrainerState(), stopped="SIGTERM")
    assert f"The page of {tmp_path} could not be written: " in caplog.text
    assert json.loads((tmp_path / "run.json").read_text()) == [{"stopped": "after step 0: SIGTERM"}]
