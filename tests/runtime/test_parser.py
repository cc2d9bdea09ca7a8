"""`--help` shows this package's flags in groups and the often used flags of Trainer, and no others."""

import re
import sys

from hf_pretrain.runtime.parser import recipe_parser
from tests.invariants.launching import ROOT


def flags(text: str) -> list[str]:
    return re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)


def test_each_flag_stands_once_in_the_group_of_its_dataclass(monkeypatch):
    parser = recipe_parser(ROOT / "recipes/pretrain.py")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help"])
    text = parser.format_help()
    short = flags(text)
    assert len(short) == len(set(short)) <= 94
    groups = re.split(r"^\S.*:$", text, flags=re.MULTILINE)[1:]
    names = ("preset", "lora_r", "max_length", "eval_tasks", "learning_rate")
    for group, name in zip(groups, names, strict=True):
        assert f"--{name}" in flags(group)
    # The default stands beside a flag, if there is one.
    assert re.search(r"--save_total_limit VALUE\s+Number of checkpoints to keep. \(default:\s+2\)", text)
    assert "(default: None)" not in text and "--adafactor" not in short
    assert re.search(r"--resume_from_checkpoint VALUE\s+Checkpoint to resume from; auto takes", text)
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help-all"])
    whole = flags(parser.format_help())
    assert set(short) < set(whole) and "--torch_empty_cache_steps" in whole


def test_tools_show_choices_and_defaults():
    text = " ".join(recipe_parser(ROOT / "recipes/serve.py").format_help().split())
    assert "--port VALUE TCP port. (default: 8000)" in text
    assert "--think on|off Reason before answering" in text
    assert "--end_with_stdin" not in text
