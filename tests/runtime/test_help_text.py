"""`--help` shows this package's flags in groups and the often used flags of Trainer, and no others."""

import argparse
import re
import subprocess
import sys

import pytest

from hf_pretrain.runtime.help_text import FlagFormatter
from hf_pretrain.runtime.recipe_parsers import recipe_parser
from tests.invariants.launching import ROOT


def flags(text: str) -> list[str]:
    return re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)


@pytest.fixture(scope="module")
def parser():
    return recipe_parser(ROOT / "recipes/pretrain.py")


def test_each_flag_stands_once_under_the_title_of_its_group(parser, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help"])
    text = parser.format_help()
    assert len(flags(text)) == len(set(flags(text))) < 90
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert [title.split()[0] for title in titles] == ["Model", "Adapter", "Text", "Data", "Training,", "Flags"]
    groups = re.split(r"^\S.*:$", text, flags=re.MULTILINE)[1:]
    for group, name in zip(
        groups, ("model_preset", "lora_r", "max_length", "dataset_name", "learning_rate", "max_steps"), strict=True
    ):
        assert f"--{name}" in flags(group)
    # The default stands beside a flag, unless the text names it.
    assert re.search(r"--save_total_limit N\s+Number of checkpoints to keep. \(default:\s+2\)", text)
    assert "(default: None)" not in text


def test_a_recipe_shows_flags_of_its_own_and_those_of_its_stage_apart(monkeypatch):
    # recipes/doctor.py defines its dataclass itself.
    words = [sys.executable, str(ROOT / "recipes/doctor.py"), "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert {"--memory_gib", "--strategy"} <= set(flags(text))
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    text = recipe_parser(ROOT / "recipes/evaluate.py").format_help()
    own = text.split("Evaluation, and tasks of lm-eval:")[1].split("Training, saving and sharding:")[0]
    assert "--tasks" in flags(own) and "--save_steps" not in flags(own)


def test_help_all_adds_the_other_flags(parser, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help"])
    short = flags(parser.format_help())
    (number,) = re.findall(r"--help-all shows (\d+) more flags", parser.format_help())
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help-all"])
    whole = flags(parser.format_help())
    assert set(short) < set(whole) and len(set(whole)) == len(whole) == len(short) + int(number)
    assert "--adafactor" not in short and "--torch_empty_cache_steps" in whole


def test_the_nearest_choice_is_named():
    with pytest.raises(ValueError, match="--dtype q8 is unknown; the nearest one is q8_0. All: float32"):
        recipe_parser(ROOT / "recipes/convert.py").parse_args(["--from", "a", "--to", "b", "--dtype", "q8"])


def test_tools_show_choices_and_defaults():
    text = " ".join(recipe_parser(ROOT / "recipes/serve.py").format_help().split())
    assert "--port N TCP port (default: 8000)" in text
    assert "(one of debug, info, warning, error; default: warning)" in text
    assert "--end_with_stdin" not in text
    text = " ".join(recipe_parser(ROOT / "recipes/chat.py").format_help().split())
    assert "--think VALUE" in text and "(one of on, off)" in text and "seed of the sampling (default: 0)" in text


def test_choices_within_other_words_of_the_text_do_not_count():
    parser = argparse.ArgumentParser(formatter_class=FlagFormatter)
    parser.add_argument("--think", choices=("on", "off"), help="Think in the conversation, or off.")
    parser.add_argument("--save", choices=("on", "off"), help="Either on or off.")
    text = parser.format_help()
    assert "or off. (one of on, off)" in " ".join(text.split()) and text.count("one of") == 1


def test_resuming_has_a_text_of_ours(parser):
    text = " ".join(parser.format_help().split())
    assert (
        "--resume_from_checkpoint VALUE Resume the run from this checkpoint directory; auto takes the newest" in text
    )


def test_hf_pretrain_names_itself_and_its_flags(monkeypatch):
    monkeypatch.setenv("HF_PRETRAIN_PROGRAM", "hf-pretrain pretrain")
    parser = recipe_parser(ROOT / "recipes/pretrain.py")
    text = parser.format_help()
    assert "usage: hf-pretrain pretrain [--flag value ...]" in text and "--max_steps" in flags(text)
    assert {"--nproc", "--launcher", "--preset", "--ds", "--accelerate", "--master_port"} <= set(flags(text))
    monkeypatch.setenv("HF_PRETRAIN_PROGRAM", "hf-pretrain chat")
    text = recipe_parser(ROOT / "recipes/chat.py").format_help()
    assert "usage: hf-pretrain chat [-h]" in text and "--nproc" not in flags(text)
