"""The report and the loss curve at the end of a run."""

import json
import math
import shlex
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainerState

import hf_pretrain_cli
from hf_pretrain.hub.model_card import RunFacts
from hf_pretrain.training.end_report import (
    next_commands,
    unigram_loss,
    write_run_page,
)
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import ROOT


def test_unigram_loss_is_the_formula():
    train = Dataset.from_dict({"input_ids": [[1, 5, 5, 2, 1, 6, 2]], "seq_lengths": [[4, 3]]})
    held_out = Dataset.from_dict({"input_ids": [[1, 5, 2], [1, 7, 2]], "seq_lengths": [[3], [3]]})
    # Training predicts 5 5 2 6 2. Add-one smoothing counts each of the 8 entries once more.
    probability = {2: 3 / 13, 5: 3 / 13, 6: 2 / 13, 7: 1 / 13}
    expected = -sum(math.log(probability[token]) for token in (5, 2, 7, 2)) / 4
    assert unigram_loss(train, held_out, vocab_size=8) == pytest.approx(expected)


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
def test_the_next_commands_lead_to_the_next_stage(recipe, data_kind, words):
    config = str(ROOT / f"recipes/tiny/{recipe}.yaml")
    args = LMTrainingArguments(output_dir="out/a b/", config=config, use_cpu=True)
    chat, *stages = next_commands(args, RunFacts(recipe=recipe, data_kind=data_kind))
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
    assert str(ROOT / f"recipes/tiny/{stage}.yaml") in [str(Path(word).absolute()) for word in started]
    # A file of the user's own has no name as a preset.
    args.config = "elsewhere/pretrain.yaml"
    assert "--preset" not in next_commands(args, RunFacts(recipe=recipe, data_kind=data_kind))[1][1]


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    # A run that no recipe has begun has no page.
    write_run_page(args, TrainerState())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text("[{}]")
    (tmp_path / "report.html").mkdir()
    write_run_page(args, TrainerState(), stopped="SIGTERM")
    assert f"The page of {tmp_path} could not be written: " in caplog.text
    assert json.loads((tmp_path / "run.json").read_text()) == [{"stopped": "after step 0: SIGTERM"}]
