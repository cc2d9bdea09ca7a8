"""Texts in English and Chinese: none is missing, and the environment chooses the language of a terminal."""

import json
import re

import pytest

import hf_pretrain_cli
from hf_pretrain.board.launching import read_flags
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.run_directory.metrics import METRICS
from hf_pretrain.runtime.texts import TEXTS, terminal_language, translation
from tests.invariants.launching import ROOT


def test_every_text_that_the_package_shows_is_translated():
    package = ROOT / "hf_pretrain"
    files = [*package.rglob("*.py"), *package.rglob("*.jinja"), ROOT / "hf_pretrain_cli.py"]
    used = {text for path in files for text in re.findall(r"\bt\(\s*[\"']([^\"']+)[\"']", path.read_text("utf-8"))}
    assert len(used) > 90 and used <= {*TEXTS}
    assert {metric.label for metric in METRICS} <= {*TEXTS}
    forms = {each["form"] for flags in read_flags().values() for each in flags.values()}
    assert {text for form in forms for text in form.split(": ")} <= {*TEXTS}
    # A translation has the same fields.
    for text in TEXTS:
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", translation("zh")(text))), text


def test_every_recipe_preset_and_flag_of_the_board_has_a_chinese_description():
    described = json.loads((ROOT / "recipes/chinese.json").read_text("utf-8"))
    flags = set().union(*read_flags().values())
    assert described.keys() == {*hf_pretrain_cli.STAGES, *hf_pretrain_cli.TOOLS, *PRESETS} | flags


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LANGUAGE": "zh", "LC_ALL": "C"}, "zh"),
        ({"LANGUAGE": "", "LC_ALL": "zh_TW"}, "zh"),
    ],
)
def test_the_environment_chooses_the_language_of_a_terminal(monkeypatch, variables, language):
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal_language() == language
