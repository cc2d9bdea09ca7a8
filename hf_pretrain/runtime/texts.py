"""
The texts of pages and listings in two languages. The English text is the key of the Chinese one (`chinese.json`).

The command reads this file without importing the package, so it imports only the standard library.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from unicodedata import east_asian_width


LANGUAGES = {"en": "English", "zh": "中文"}
# Returns a text in a language. Keyword arguments fill the names in its braces.
Translation = Callable[..., str]

# By the place where they appear. Descriptions of recipes and flags are in recipes/chinese.json.
_SECTIONS = json.loads(Path(__file__).with_name("chinese.json").read_text(encoding="utf-8"))
_CHINESE = {text: chinese for section in _SECTIONS.values() for text, chinese in section.items()}
TEXTS = tuple(_CHINESE)


def translation(language: str) -> Translation:
    """Return the function that translates texts. It keeps texts without a translation."""
    table = _CHINESE if language == "zh" else {}

    def translate(text: str, **fields: object) -> str:
        found = table.get(text, text)
        return found.format(**fields) if fields else found

    return translate


def format_rows(rows: list[tuple[str, str]], t: Translation, *, width: int) -> str:
    """Return a line per row: a label, which is translated and has at least `width` columns, and a text."""
    labels = [t(label) for label, _ in rows]
    # A Chinese character is two columns wide.
    columns = [sum(1 + (east_asian_width(each) in "WF") for each in label) for label in labels]
    gaps = [" " * (max(width, *columns) + 1 - used) for used in columns]
    parts = zip(labels, gaps, rows, strict=True)
    return "\n".join(label[:1].upper() + label[1:] + gap + text for label, gap, (_, text) in parts)


def terminal_language() -> str:
    """Return the language of this package for a terminal, from the environment."""
    # As gettext does: the first variable that has a value decides.
    names = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    return "zh" if next(filter(None, map(os.environ.get, names)), "").startswith("zh") else "en"


def preferred_language(accepted: str) -> str:
    """Return the language of this package that a browser prefers, by its header `Accept-Language`."""
    found = re.findall(r"\b(en|zh)\b", accepted.lower())
    return found[0] if found else "en"
