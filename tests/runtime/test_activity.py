"""A run shows what it does: in one progress bar on a terminal, elsewhere in a line after each long silence."""

import os
import re
import runpy
import sys
import time
from pathlib import Path

import pytest

from hf_pretrain.runtime.activity import SILENT_SECONDS, Activity
from tests.faults.conftest import workspace  # noqa: F401
from tests.faults.driving import command
from tests.invariants.launching import ROOT
from tests.toys import write_jsonl
from tests.weights.test_conversion import GOLDEN


@pytest.fixture
def activity():
    activity = Activity()
    yield activity
    activity.stop()


def test_a_line_appears_after_each_silence(activity):
    lines = []
    activity.start(lines.append, None, seconds=0.2)
    phase = activity.begin("evaluating", 10)
    # As long as something is printed, there is no line.
    for _ in range(10):
        time.sleep(0.05)
        with activity.above("x\n"):
            pass
    assert lines == []
    time.sleep(0.5)
    phase.done = 5
    time.sleep(0.5)
    activity.stop()
    assert 3 <= len(lines) <= 5 and lines[0] == "evaluating 0/10, 00:00"
    assert re.fullmatch(r"evaluating 5/10, 00:01, 00:01 left", lines[-1])
    number = len(lines)
    time.sleep(0.5)
    assert len(lines) == number


def test_a_phase_inside_another_one_ends(activity):
    training = activity.begin("training", 30, 10)
    with pytest.raises(OSError), activity.during("saving"):
        assert activity.phase.text == "saving"
        raise OSError
    assert activity.phase is training
    # The time left follows from the steps of this launch, and not from the steps before the resume.
    training.done, training.since = 20, time.monotonic() - 60
    assert training.format() == "training 20/30, 01:00, 01:00 left"
    bar = training.format(60)
    assert re.fullmatch(r"training 20/30 \|█+\S? +\| 01:00, 01:00 left", bar) and len(bar) == 60


class Screen:
    """What a terminal of one line shows, and the lines above it."""

    def __init__(self):
        self.lines, self.line = [], ""

    def write(self, text: str) -> None:
        for piece in re.split(r"(\r|\n)", text):
            if piece == "\n":
                self.lines.append(self.line.rstrip())
                self.line = ""
            elif piece == "\r":
                self.column = 0
            else:
                column = getattr(self, "column", 0)
                self.line = self.line[:column] + piece + self.line[column + len(piece) :]
                self.column = column + len(piece)
            if piece == "\n":
                self.column = 0


def test_lines_appear_above_the_bar(activity):
    screen = Screen()
    activity.start(print, screen.write)
    activity.begin("evaluating", 10)
    for text in ("one\n", "two", " and three\n"):
        with activity.above(text):
            screen.write(text)
        assert screen.line.startswith("evaluating 0/10 |") == text.endswith("\n")
    activity.stop()
    assert screen.lines == ["one", "two and three"] and not screen.line.strip()


def test_bars_of_libraries_are_taken_out(activity):
    screen = Screen()
    activity.start(print, screen.write)
    activity.begin("reading")

    def pieces(*texts: str) -> str:
        return "".join(activity.absorb(text) for text in texts)

    # A bar that is drawn twice, a second one below it, and their ends.
    assert pieces("\r 0/2", "\r 1/2", "\n", "\r 0/7", "\x1b[A") == ""
    with activity.above("x\n"):
        pass
    assert screen.line.rstrip() == "0/7"
    assert pieces("\r 2/2", "\n", "done\r\n", "\n") == "done\r\n\n"
    assert pieces("\r      \rabove\n", "a", "\n") == "above\na\n"
    # Text that a program prints over is no bar of a library.
    assert pieces("step 5\r", "a\rb\n") == "step 5\na\nb\n"
    with activity.above("x\n"):
        pass
    assert screen.line.startswith("reading, 00:00")


@pytest.mark.parametrize(
    ("recipe", "words", "phases", "result"),
    [
        ("convert", ["--from", str(GOLDEN / "C_dense")], ["reading the weights", "writing the model"], "out: "),
        (
            "tokenizer",
            ["--dataset_name", "a.jsonl"],
            ["reading a.jsonl", "training a tokenizer"],
            "The tokenizer has ",
        ),
    ],
)
def test_a_tool_names_its_phases_on_standard_error(recipe, words, phases, result, tmp_path, monkeypatch, capfd):
    # The phases take less than nine seconds here.
    assert SILENT_SECONDS == 9 and Activity.start.__kwdefaults__["seconds"] == SILENT_SECONDS
    monkeypatch.setitem(Activity.start.__kwdefaults__, "seconds", 0.002)
    monkeypatch.chdir(tmp_path)
    # The path makes the text new, so the tokenizer of an earlier test does not fit.
    write_jsonl(tmp_path / "a.jsonl", [f"{tmp_path} {number:x} {number**5}" for number in range(20_000)])
    target = {"convert": "--to", "tokenizer": "--output_dir"}[recipe]
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"recipes/{recipe}.py"), *words, target, "out"])
    runpy.run_path(sys.argv[0], run_name="__main__")
    printed = capfd.readouterr()
    lines = printed.err.splitlines()
    for phase in phases:
        assert any(re.fullmatch(rf"{phase}, \d\d:\d\d", line) for line in lines), (phase, lines[:20])
    assert printed.out.startswith(result) and not any(phase in printed.out for phase in phases)


def watch(words: list[str], directory: Path) -> tuple[int, str]:
    """Run a command in a terminal of 100 columns, and return its exit status and what it writes."""
    import fcntl
    import pty
    import struct
    import termios

    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        os.execv(words[0], words)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    output = b""
    while True:
        try:
            output += os.read(terminal, 65536)
        except OSError:
            # Linux reports the end of the terminal in this way.
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), output.decode()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_shows_one_bar_for_all_phases(workspace, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    status, output = watch(command(workspace, tmp_path / "run", "--max_steps", "8"), tmp_path)
    screen = Screen()
    screen.write(output.replace("\r\n", "\n"))
    assert status == 0, output
    # The bars are gone at the end, and every line above them is a line of `train.log`.
    assert not screen.line.strip() and "\x1b" not in output and not [line for line in screen.lines if "|" in line]
    assert (tmp_path / "run/train.log").read_text().splitlines()[1:] == screen.lines
    assert sum(line.startswith("step ") for line in screen.lines) >= 8
    for phase in ("starting, ", r"reading \S+train.jsonl, ", r"saving checkpoint-8, ", "saving the model, "):
        assert re.search(rf"\r{phase}\d\d:\d\d", output), phase
    assert re.search(r"training \d/8 \|[^|]+\| \d\d:\d\d, \d\d:\d\d left", output)
