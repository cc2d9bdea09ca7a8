"""What the messages say about mistakes of users. The other tests assert types of exceptions, not words."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
TABLE = [
    pytest.param(mistake, id=f"{path.parent.name}: {mistake.says}")
    for path in sorted(TESTS.glob("*/mistakes.py"))
    for mistake in import_module(f"tests.{path.parent.name}.mistakes").MISTAKES
]


@pytest.mark.parametrize("mistake", TABLE)
def test_a_message_says_what_where_and_what_to_do(mistake, request):
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(mistake.make).parameters}
    with pytest.raises(mistake.error) as raised:
        mistake.make(**fixtures)
    message = str(raised.value)
    assert re.search(mistake.says, message, re.DOTALL), message
    # An object without a text of its own, a value that was never filled in, or words that ran together.
    assert not re.search(r"<\S+ object at 0x|\{\w*\}|\bNone None\b|\.[A-Z]\w+ [a-z]", message), message


def test_words_stand_in_the_table_alone():
    """A pattern of a message elsewhere would state its words twice."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises"
        if any(keyword.arg == "match" for keyword in node.keywords)
    ]
    assert found == []
