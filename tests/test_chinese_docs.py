"""The Chinese pages name the same commands, flags, messages and files as the English ones."""

import re
from pathlib import Path

import pytest


DOCS = Path(__file__).parents[1] / "docs"


def code_of(path: Path) -> set[str]:
    """Return the lines of code blocks, without comments, and the code within sentences."""
    blocks, code = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE), re.compile(r"`([^`\n]+)`")
    text = path.read_text(encoding="utf-8")
    lines = [re.sub(r"\s+# .*|^# .*", "", line) for block in blocks.findall(text) for line in block.splitlines()]
    return set([*filter(None, lines), *code.findall(re.sub(r"(?<=\w)\n", " ", blocks.sub("", text)))])


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "zh").glob("*.md")))
def test_both_languages_name_the_same_code(page):
    english, chinese = code_of(DOCS / page), code_of(DOCS / "zh" / page)
    assert len(english) > 20
    # A sentence may name a word once more or less.
    assert (english - chinese, chinese - english) == (set(), set())
