"""The report and the loss curve at the end of a run."""

import math
import sys

import pytest
from datasets import Dataset

from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.reporting import continue_command, format_report, plot_loss_curve, unigram_loss


def test_unigram_loss_is_the_formula():
    train = Dataset.from_dict({"input_ids": [[1, 5, 5, 2, 1, 6, 2]], "seq_lengths": [[4, 3]]})
    held_out = Dataset.from_dict({"input_ids": [[1, 5, 2], [1, 7, 2]], "seq_lengths": [[3], [3]]})
    # Training predicts 5 5 2 6 2. Add-one smoothing counts each of the 8 entries once more.
    probability = {2: 3 / 13, 5: 3 / 13, 6: 2 / 13, 7: 1 / 13}
    expected = -sum(math.log(probability[token]) for token in (5, 2, 7, 2)) / 4
    assert unigram_loss(train, held_out, vocab_size=8) == pytest.approx(expected)


def test_report_names_everything(monkeypatch):
    monkeypatch.setattr("sys.argv", ["recipes/pretrain.py", "--max_steps", "3", "--output_dir", "out/a"])
    args = LMTrainingArguments(output_dir="out/a")
    metrics = {"eval_loss": 4.0, "eval_bits_per_byte": 1.5}
    report = format_report(args, metrics=metrics, unigram=7.0, samples=[("a", "b")])
    for part in (
        f"muon, learning rate {args.learning_rate:g}",
        "out/a",
        "4.0000",
        "7.0000",
        "1.5000",
        "'a' -> 'b'",
        continue_command(args),
    ):
        assert part in report


def test_continue_command_replaces_directories(monkeypatch, tmp_path):
    words = ["recipes/pretrain.py", "--output_dir=out/a", "--model_name_or_path", "out/0", "--max_steps", "3"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.chdir(tmp_path)
    # The run read its preset's YAML by default. The printed command must name it, because it starts from a checkpoint.
    args = LMTrainingArguments(output_dir="out/a/", config="recipes/tiny/pretrain.yaml")
    assert continue_command(args) == (
        f"{sys.executable} recipes/pretrain.py --max_steps 3 --config recipes/tiny/pretrain.yaml "
        "--model_name_or_path out/a/ --output_dir out/a-continued"
    )
    monkeypatch.setattr(LMTrainingArguments, "world_size", property(lambda self: 2))
    assert "torchrun --standalone --nproc_per_node 2 recipes/pretrain.py" in continue_command(args)


def test_loss_curve_is_a_picture(tmp_path):
    history = [
        {"loss": 6.0, "num_input_tokens_seen": 10},
        {"eval_loss": 5.5, "num_input_tokens_seen": 10},
        {"train_runtime": 1.0},
    ]
    plot_loss_curve(history, tmp_path / "curve.png", unigram=7.0)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
