"""A command says on standard error what it does, and prints its result to standard output."""

import re
import runpy
import sys
import uuid

import pytest

from hf_pretrain.runtime.command_line import announce, progress
from tests.invariants.launching import ROOT
from tests.toys import write_jsonl
from tests.weights.test_conversion import GOLDEN


@pytest.mark.parametrize(
    ("recipe", "words", "phases", "result"),
    [
        ("convert", ["--from", str(GOLDEN / "C_dense")], ["reading the weights", "writing the model"], "out: "),
        ("tokenizer", ["--dataset_name", "a.jsonl"], ["training a tokenizer"], "The tokenizer has "),
    ],
)
def test_a_tool_names_its_phases_on_standard_error(recipe, words, phases, result, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # New text, so the cached tokenizer of an earlier test does not fit.
    name = uuid.uuid4()
    write_jsonl(tmp_path / "a.jsonl", [f"{name} {number:x} {number**5}" for number in range(2_000)])
    target = {"convert": "--to", "tokenizer": "--output_dir"}[recipe]
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *words, target, "out"])
    runpy.run_path(sys.argv[0], run_name="__main__")
    printed = capfd.readouterr()
    assert set(phases) <= {line.removesuffix(" ...") for line in printed.err.splitlines()}
    assert printed.out.startswith(result) and not any(phase in printed.out for phase in phases)


def test_only_a_terminal_of_the_main_process_shows_bars(monkeypatch, capsys):
    with progress("reading", 2) as bar:
        bar.update()
    assert capsys.readouterr().err == "reading ...\n"
    monkeypatch.setattr("hf_pretrain.runtime.command_line.is_in_notebook", lambda: True)
    with progress("reading", 2) as bar:
        bar.update()
    assert re.search(r"\rreading: +0%\|", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    with progress("reading", 2) as bar:
        bar.update()
    announce("writing")
    assert capsys.readouterr().err == ""
