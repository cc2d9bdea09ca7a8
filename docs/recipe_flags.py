"""
Sphinx extension: lists of the flags of every recipe, from the recipe's own parser.
"""

import argparse
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hf_pretrain.runtime.parser import own_fields, recipe_parser
from hf_pretrain.runtime.stages import STAGES


RECIPES = Path(__file__).parents[1] / "recipes"
# A heading in the order in which a project needs them.
ORDER = ("from_scratch", *STAGES, "evaluate", "tokenizer", "chat", "generate", "serve", "board", "convert", "doctor")


def _show(value: object) -> str:
    if value is None or value is argparse.SUPPRESS or value == "":
        return ""
    words = value if isinstance(value, (list, tuple)) else [value]
    text = " ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
    return f"Default: `{text}`."


def _sentences(action: argparse.Action) -> str:
    """Return the help of a flag in Markdown, with its choices and its default."""
    # Flags become code, so that no line breaks after their hyphens.
    help_text = re.sub(r"(?<![\w`-])--\w+", r"`\g<0>`", (action.help or "").replace("%%", "%").replace("<", r"\<"))
    parts = [" ".join(help_text.split())]
    choices = [choice for choice in action.choices or () if isinstance(choice, str)]
    if not all(choice in parts[0] for choice in choices):
        parts.append(f"One of {', '.join(choices)}.")
    parts.append(_show(action.default))
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


def recipe_flags(recipe: str) -> dict[str, str]:
    """Return the names and the help of a recipe's flags, without those that transformers or TRL define as they are."""
    parser = recipe_parser(RECIPES / f"{recipe}.py")
    ours = set().union(*map(own_fields, parser.dataclass_types))
    flags = {}
    for action in parser._actions:
        # Flags come in two spellings, --max_length and --max-length; the first one is enough to read.
        name = min(action.option_strings, key=len) if action.option_strings else action.dest
        if action.dest in ours and action.help is not argparse.SUPPRESS and not name.startswith("--no_"):
            flags[f"`{name}`"] = _sentences(action)
    return flags


class RecipeFlags(SphinxDirective):
    """A section with the flags that all training recipes share, and one section per recipe with all others."""

    def run(self) -> list[nodes.Node]:
        found = sorted(path.stem for path in RECIPES.glob("*.py"))
        for recipe in found:
            self.env.note_dependency(str(RECIPES / f"{recipe}.py"))
        flags = {recipe: recipe_flags(recipe) for recipe in found}
        first, *others = (flags[recipe] for recipe in STAGES)
        shared = {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}
        names = ", ".join(f"`{recipe}`" for recipe in STAGES)
        parts = [f"## All training recipes\n\n{names} share these flags.", *_definitions(shared)]
        for recipe in [*(name for name in ORDER if name in found), *(name for name in found if name not in ORDER)]:
            parts.append(f"## {recipe}\n\n`recipes/{recipe}.py`")
            if recipe == "evaluate":
                absent = ", ".join(name for name in shared if name not in flags[recipe])
                parts.append(f"This recipe also takes the flags of all training recipes, except {absent}.")
            is_training = recipe in (*STAGES, "evaluate")
            own = {name: text for name, text in flags[recipe].items() if not is_training or shared.get(name) != text}
            parts.extend(_definitions(own))
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def _definitions(flags: dict[str, str]) -> list[str]:
    return [f"{name}\n: {text}" for name, text in flags.items()]


def setup(app: Sphinx) -> dict[str, bool]:
    # What depends on the device of the builder must not end up in the lists.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    app.add_directive("recipe-flags", RecipeFlags)
    return {"parallel_read_safe": True}
