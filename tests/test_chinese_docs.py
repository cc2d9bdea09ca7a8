"""The Chinese pages name the same commands, flags and messages as the English ones, and all links lead somewhere."""

import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.documents

DOCS = Path(__file__).parents[1] / "docs"
# A guide names a file behind the language of its block.
BLOCKS = re.compile(r"^```[^`\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The reference of the Python interface: what it names, without the sentences and the options of the directives.
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data):: (.+)", re.MULTILINE)


def code_of(path: Path) -> set[str]:
    """Return the lines of code blocks, without comments, and the code within sentences."""
    code, text = re.compile(r"`([^`\n]+)`"), path.read_text(encoding="utf-8")
    lines = [re.sub(r"\s+# .*|^# .*", "", line) for block in BLOCKS.findall(text) for line in block.splitlines()]
    return set([*filter(None, lines), *code.findall(re.sub(r"(?<=\w)\n", " ", BLOCKS.sub("", text)))])


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)", BLOCKS.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = sorted(str(path.relative_to(DOCS / "zh")) for path in (DOCS / "zh").rglob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "python.md"])
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


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "guides").glob("*.md")))
def test_the_blocks_of_a_guide_are_equal_in_both_languages(page):
    whole = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    english, chinese = (whole.findall((DOCS / folder / "guides" / page).read_text("utf-8")) for folder in ("", "zh"))
    assert english == chinese


def test_the_chinese_reference_of_the_python_interface_has_every_name():
    english, chinese = (DIRECTIVE.findall((DOCS / page).read_text("utf-8")) for page in ("python.md", "zh/python.md"))
    assert len(english) > 5 and english == chinese
