"""The Chinese pages name the same commands, flags and messages as the English ones, and all links lead somewhere."""

import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.documents

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def code_of(path: Path) -> set[str]:
    """Return the lines of code blocks, without comments, and the code within sentences."""
    code, text = re.compile(r"`([^`\n]+)`"), path.read_text(encoding="utf-8")
    lines = [re.sub(r"\s+# .*|^# .*", "", line) for block in BLOCKS.findall(text) for line in block.splitlines()]
    return set([*filter(None, lines), *code.findall(re.sub(r"(?<=\w)\n", " ", BLOCKS.sub("", text)))])


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)", BLOCKS.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "zh").glob("*.md")))
def test_both_languages_name_the_same_code(page):
    english, chinese = code_of(DOCS / page), code_of(DOCS / "zh" / page)
    assert len(english) > 20
    # A sentence may name a word once more or less.
    assert (english - chinese, chinese - english) == (set(), set())


@pytest.mark.parametrize("page", [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")], ids=str)
def test_the_links_of_all_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!\w+://)([^)#\s]*)#?([^)\s]*)\)", BLOCKS.sub("", page.read_text(encoding="utf-8")))
    for name, anchor in links:
        target = page.parent / name if name else page
        assert target.is_file(), name
        assert not anchor or anchor in anchors_of(target), f"{name}#{anchor}"
