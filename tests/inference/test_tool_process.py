"""Functions of a user's file as tools, in a process of their own."""

import json
import time
from pathlib import Path

import psutil
import pytest

from hf_pretrain.inference import tool_process
from hf_pretrain.inference.tools import call_tool, offer_tools


EXAMPLE = Path(__file__).parents[2] / "examples/tools.py"
TOOLS = '''
import os, sys, time
import neighbour

def double(value: float) -> dict:
    """Doubles a number.

    Args:
        value: The number.
    """
    print("not a result")
    return {"value": neighbour.TWO * value}

def reward(completions, **columns):
    return [1.0 for _ in completions]


def fail(text: str) -> str:
    """Fails.

    Args:
        text: Why.
    """
    raise ValueError(text)

def end(code: int) -> str:
    """Ends the process.

    Args:
        code: The status.
    """
    os._exit(code)

def leave() -> str:
    """Leaves."""
    sys.exit("left")

def count() -> str:
    """Counts without an end, in C."""
    return str(9**9**9)

def write(length: int) -> str:
    """Writes much.

    Args:
        length: Characters.
    """
    return "x" * length

def process() -> int:
    """Names its process."""
    return os.getpid()

def _hidden() -> str:
    return ""
'''


@pytest.fixture
def tools(tmp_path):
    # A module of the package has the name of the neighbour's file in `import tools`: it must not be found.
    (tmp_path / "neighbour.py").write_text("TWO = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(TOOLS)
    return offer_tools(str(path))


def call(functions, name, **arguments):
    return call_tool(functions, {"function": {"name": name, "arguments": json.dumps(arguments)}})


def test_the_functions_of_a_file_except_rewards_are_tools_in_one_process(tools):
    schemas, functions = tools
    names = ["double", "fail", "end", "leave", "count", "write", "process"]
    assert [each["function"]["name"] for each in schemas] == names
    assert schemas[0]["function"]["parameters"]["properties"] == {
        "value": {"type": "number", "description": "The number."}
    }
    assert call(functions, "double", value=1.5) == '{"value": 3.0}'
    assert functions["double"](2) == '{"value": 4}'
    child = int(call(functions, "process"))
    assert child == int(call(functions, "process"))
    assert psutil.Process(child).ppid() == psutil.Process().pid


def test_a_tool_that_fails_gives_an_error_and_the_next_call_works(tools, monkeypatch):
    _, functions = tools
    monkeypatch.setattr(tool_process, "MAX_SECONDS", 1.0)
    for name, arguments, message in (
        ("fail", {"text": "there is none"}, "ValueError: there is none"),
        ("fail", {"other": 1}, "missing a required argument: 'text'"),
        ("leave", {}, "SystemExit: left"),
        ("end", {"code": 0}, "end ended its process."),
        ("count", {}, "count took longer than 1 seconds."),
    ):
        begin = time.monotonic()
        assert message in json.loads(call(functions, name, **arguments))["error"]
        assert time.monotonic() - begin < 10
        assert call(functions, "double", value=2) == '{"value": 4}'


def test_a_long_result_is_cut(tools):
    text = call(tools[1], "write", length=5000)
    assert text == "x" * 4000 + " ... (1,000 more characters)"


def test_the_tools_of_the_example():
    _, functions = offer_tools(str(EXAMPLE))
    for name, arguments, result in (
        ("calculate", {"expression": "12 * (3 + 4) / -2"}, "-42"),
        ("convert_units", {"value": 5, "source": "mile", "target": "km"}, "8.04672"),
        ("convert_units", {"value": 2, "source": "pound", "target": "g"}, "907.185"),
        ("calendar", {"date": "2026-02-27", "days": 3}, "Monday, 2026-03-02"),
        ("calendar", {"date": "2026-11-30", "days": 0}, "Monday, 2026-11-30"),
        ("stock", {"item": "pears"}, "40"),
    ):
        assert call(functions, name, **arguments) == result
    for name, arguments, message in (
        ("calculate", {"expression": "__import__('os')"}, "Write numbers"),
        ("convert_units", {"value": 1, "source": "kg", "target": "km"}, "no way from kg to km."),
        ("stock", {"item": "cars"}, "no goods of the name cars"),
    ):
        assert message in json.loads(call(functions, name, **arguments))["error"]
