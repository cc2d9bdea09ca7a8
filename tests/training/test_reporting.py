"""The report and the loss curve at the end of a run."""

import math
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets import Dataset
from transformers import TrainerState

import hf_pretrain_cli
from hf_pretrain.hub.model_card import CARD_NAME, RunFacts
from hf_pretrain.runtime.installation import install_command
from hf_pretrain.training import reporting
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.reporting import (
    format_report,
    next_commands,
    plot_loss_curve,
    unigram_loss,
    write_run_card,
    write_run_page,
)
from tests.invariants.launching import ROOT, free_port
from tests.toys import toy_model


KINDS = ("text", "conversations")


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
    commands = next_commands(args, RunFacts())
    report = format_report(args, metrics=metrics, unigram=7.0, samples=[("a", "b")], commands=commands)
    for part in (
        f"muon, learning rate {args.learning_rate:g}",
        "out/a",
        "4.0000",
        "7.0000",
        "1.5000",
        "'a' -> 'b'",
        "hf-pretrain chat --model_name_or_path out/a",
    ):
        assert part in report


@pytest.mark.parametrize(
    ("margin", "beside"),
    [(0.0, "before, all pairs tied"), (-0.2, "0.4000 before")],
)
def test_an_accuracy_before_training_is_no_failure_if_all_pairs_tie(margin, beside):
    """Rewards are differences to the reference, and a tie counts as no success."""
    start = {"eval_rewards/accuracies": 0.4 if margin else 0.0, "eval_rewards/margins": margin}
    args = LMTrainingArguments(output_dir="out/a")
    metrics = {"eval_rewards/accuracies": 0.9}
    report = format_report(args, metrics=metrics, unigram=None, samples=[], start=start)
    assert f"\nReward accuracy    0.9000 ({beside})" in report


def test_the_card_multiplies_the_rows_of_a_step_by_the_processes_that_have_rows_of_their_own(tmp_path):
    class FourProcesses(LMTrainingArguments):
        world_size = 4

    args = FourProcesses(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=3, gradient_accumulation_steps=5
    )
    for size, rows, product in (
        (1, 60, "3 x 5 accumulated x 4 processes"),
        (2, 30, "3 x 5 accumulated x 2 groups of 2 tensor-parallel processes"),
    ):
        args.tp_size = size
        write_run_card(args, toy_model(), TrainerState(), RunFacts(), "me/mine", "one file")
        card = (tmp_path / CARD_NAME).read_text(encoding="utf-8")
        assert f"| sequences per step | {rows} ({product}) |" in card


@pytest.mark.parametrize(
    ("recipe", "output_dir", "words"),
    [
        ("pretrain", "out/pretrain-tiny", "sft --preset tiny"),
        ("sft", "out/sft-tiny/", "dpo --preset tiny"),
        # The preset's reinforcement learning starts from the fine-tuned model, and its directory is for that.
        ("dpo", "out/dpo-tiny", "grpo --preset tiny --model_name_or_path out/dpo-tiny --output_dir out/dpo-tiny-grpo"),
        # A fine-tuning on text gives a base model, and comes before the fine-tuning on conversations.
        (
            "sft on text",
            "out/sft-tiny",
            "sft --preset tiny --model_name_or_path out/sft-tiny --output_dir out/sft-tiny-sft",
        ),
        ("sft", "out/other", "dpo --preset tiny --model_name_or_path out/other --output_dir out/other-dpo"),
    ],
)
def test_a_preset_names_the_directories_of_the_next_stage(monkeypatch, recipe, output_dir, words):
    recipe, _, data = recipe.partition(" on ")
    config = str(ROOT / f"recipes/tiny/{recipe}.yaml")
    args = LMTrainingArguments(output_dir=output_dir, config=config, use_cpu=True)
    monkeypatch.setattr("sys.argv", [str(ROOT / f"recipes/{recipe}.py")])
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    facts = RunFacts(recipe=recipe, data_kind="text" if recipe == "pretrain" or data else "conversations")
    label, command = next_commands(args, facts)[-1]
    assert label == "Next stage" and command == f"hf-pretrain {words}"
    if "--model_name_or_path" not in words:
        _, started = hf_pretrain_cli.make_command(words.split()[0], words.split()[1:])
        config = started[started.index("--config") + 1]
        assert hf_pretrain_cli.config_value(config, "model_name_or_path") == output_dir.rstrip("/")


def test_the_next_commands_lead_to_the_next_stage(monkeypatch):
    args = LMTrainingArguments(output_dir="out/a/", config=str(ROOT / "recipes/tiny/pretrain.yaml"), use_cpu=True)
    monkeypatch.setattr("sys.argv", [str(ROOT / "recipes/pretrain.py"), "--use_cpu"])
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    chat, sft = next_commands(args, RunFacts())
    assert chat == ("Talk to it", "hf-pretrain chat --model_name_or_path out/a/")
    names = "--model_name_or_path out/a/ --output_dir out/a-sft"
    assert sft == ("Next stage", f"hf-pretrain sft --preset tiny {names} --use_cpu")
    # The command is one that `hf-pretrain` understands.
    _, command = hf_pretrain_cli.make_command("sft", shlex.split(sft[1])[2:])
    assert str(ROOT / "recipes/tiny/sft.yaml") in [str(Path(word).absolute()) for word in command]
    # A file of the user's own has no name as a preset.
    monkeypatch.setattr("sys.argv", ["elsewhere/pretrain.py"])
    assert next_commands(args, RunFacts())[1][1] == f"hf-pretrain sft --config {ROOT}/recipes/tiny/sft.yaml {names}"
    monkeypatch.setattr(LMTrainingArguments, "world_size", property(lambda self: 2))
    # The deepspeed launcher sets these, and accelerate adds the wrong LOCAL_WORLD_SIZE.
    for name, value in (("CROSS_SIZE", "1"), ("LOCAL_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    after_sft = RunFacts(recipe="sft", data_kind="conversations")
    dpo = next_commands(args, after_sft)[1][1]
    assert "--nproc 2" in dpo and "hf-pretrain dpo" in dpo
    with monkeypatch.context() as patch:
        patch.setattr(reporting, "find_spec", lambda name: None)
        install = ("Next, install TRL", install_command("trl"))
        assert next_commands(args, after_sft)[1:] == [install, ("Next stage", dpo)]
    # Outside of its environment, the shell does not find the command by name.
    monkeypatch.setenv("VIRTUAL_ENV", "elsewhere")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    program = Path(shlex.split(next_commands(args, after_sft)[0][1])[0])
    assert sys.prefix == sys.base_prefix or program.absolute() == Path(sys.executable).with_name("hf-pretrain")
    # After the last stage, there is only the chat.
    assert [label for label, _ in next_commands(args, RunFacts(recipe="grpo", data_kind="tasks"))] == ["Talk to it"]
    # A distillation on text gives a base model, which comes before the fine-tuning.
    distilled = {kind: next_commands(args, RunFacts(recipe="distill", data_kind=kind))[1][1] for kind in KINDS}
    assert " sft " in distilled["text"] and " dpo " in distilled["conversations"]


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc", "2", "--launcher", "deepspeed", "--ds", "zero3"],
        ["--nproc", "2", "--launcher", "deepspeed", "--deepspeed", "mine/zero2.json"],
        ["--nproc", "2", "--launcher", "accelerate", "--accelerate", "fsdp2"],
        ["--nproc", "2"],
    ],
    ids=["deepspeed", "own DeepSpeed config", "accelerate", "torchrun"],
)
def test_the_next_stage_is_launched_like_this_one(words, monkeypatch):
    # torchrun finds a free port by itself, and refuses the flag.
    port = ["--master_port", str(free_port())] if "--launcher" in words else []
    _, command = hf_pretrain_cli.make_command("pretrain", [*words, "--use_cpu", *port])
    monkeypatch.setenv("HF_PRETRAIN_COMMAND", shlex.join(command))
    monkeypatch.setattr("sys.argv", ["recipes/pretrain.py", "--use_cpu"])
    args = LMTrainingArguments(output_dir="out/a", use_cpu=True)
    # As the parser would set it. The constructor would start DeepSpeed.
    args.deepspeed = command[command.index("--deepspeed") + 1] if "--deepspeed" in command else None
    args.launcher = {"accelerate": "accelerate launch"}.get(Path(command[0]).name, Path(command[0]).name)
    monkeypatch.setattr(LMTrainingArguments, "world_size", property(lambda self: 2))
    monkeypatch.setattr(reporting, "num_local_processes", lambda: 2)
    next_stage = shlex.split(next_commands(args, RunFacts())[1][1])
    assert next_stage[-len(words) - 1 :] == [*words, "--use_cpu"]
    # The command is one that `hf-pretrain` understands.
    hf_pretrain_cli.make_command("sft", [*next_stage[2:], *port])


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, caplog, monkeypatch):
    # On a disk with errors, the check for the record fails.
    with monkeypatch.context() as context:
        context.setattr(Path, "is_file", Mock(side_effect=OSError("I/O error")))
        write_run_page(tmp_path)
    assert "could not be written: I/O error" in caplog.text
    # A run that no recipe has begun has no page.
    write_run_page(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / "report.html").mkdir()
    write_run_page(tmp_path)
    assert f"The page of {tmp_path} could not be written: " in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "report.html"}


def test_loss_curve_is_a_picture(tmp_path):
    history = [
        {"loss": 6.0, "num_input_tokens_seen": 10},
        {"eval_loss": 5.5, "num_input_tokens_seen": 10},
        {"train_runtime": 1.0},
    ]
    plot_loss_curve(history, tmp_path / "curve.png", unigram=7.0)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
