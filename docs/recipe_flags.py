"""
Sphinx extension: lists of the flags of every recipe, from the recipe's own parser.

Each recipe is started without arguments, up to the moment at which it parses its command line. So the lists hold
exactly the flags that the recipe accepts, and nothing here has to name a dataclass.
"""

import argparse
import dataclasses
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from transformers import TrainingArguments

from hf_pretrain.runtime.recipe_parsers import recipe_parser


RECIPES = Path(__file__).parents[1] / "recipes"
TRAINING = ("pretrain", "sft", "dpo", "distill", "grpo")
UNSET: tuple[object, ...] = (None, "", [])
# A heading in the order in which a project needs them.
ORDER = (*TRAINING, "evaluate", "tokenizer", "chat", "serve", "convert", "doctor")


def _inherited(recipe: str) -> dict[str, tuple[object, set[str]]]:
    """Default and help texts of the flags that a recipe takes over from transformers and TRL."""
    bases: list[type] = [TrainingArguments]
    if recipe == "dpo":
        from trl import DPOConfig

        bases.append(DPOConfig)
    elif recipe == "grpo":
        from trl import GRPOConfig

        bases.append(GRPOConfig)
    inherited: dict[str, tuple[object, set[str]]] = {}
    for base in bases:
        for field in dataclasses.fields(base):
            is_factory = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if is_factory else field.default
            _, texts = inherited.get(field.name, (None, set()))
            inherited[field.name] = default, {*texts, field.metadata.get("help", "")}
    return inherited


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
    inherited = _inherited(recipe) if recipe in (*TRAINING, "evaluate") else {}
    flags = {}
    for action in recipe_parser(RECIPES / f"{recipe}.py")._actions:
        before, texts = inherited.get(action.dest, (action, set()))
        # None, an empty list and an empty text all mean that nothing is set.
        is_same_default = before == action.default or (before in UNSET and action.default in UNSET)
        if (is_same_default and (action.help or "") in texts) or isinstance(action, argparse._HelpAction):
            continue
        # Flags come in two spellings, --max_length and --max-length; one is enough to read.
        names = [name for name in action.option_strings if "-" not in name[2:]]
        if names and not names[0].startswith("--no_"):
            flags[", ".join(f"`{name}`" for name in names)] = _sentences(action)
    return flags


class RecipeFlags(SphinxDirective):
    """A section with the flags that all training recipes share, and one section per recipe with all others."""

    def run(self) -> list[nodes.Node]:
        found = sorted(path.stem for path in RECIPES.glob("*.py"))
        for recipe in found:
            self.env.note_dependency(str(RECIPES / f"{recipe}.py"))
        flags = {recipe: recipe_flags(recipe) for recipe in found}
        first, *others = (flags[recipe] for recipe in TRAINING)
        shared = {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}
        names = ", ".join(f"`{recipe}`" for recipe in TRAINING)
        parts = [f"## All training recipes\n\n{names} share these flags.", *_definitions(shared)]
        for recipe in [*(name for name in ORDER if name in found), *(name for name in found if name not in ORDER)]:
            parts.append(f"## {recipe}\n\n`recipes/{recipe}.py`")
            if recipe == "evaluate":
                absent = ", ".join(name for name in shared if name not in flags[recipe])
                parts.append(f"This recipe also takes the flags of all training recipes, except {absent}.")
            own = {name: text for name, text in flags[recipe].items() if shared.get(name) != text}
            parts.extend(_definitions(own))
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def _definitions(flags: dict[str, str]) -> list[str]:
    return [f"{name}\n: {text}" for name, text in flags.items()]


def setup(app: Sphinx) -> dict[str, bool]:
    # What depends on the device of the builder must not end up in the lists.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    app.add_directive("recipe-flags", RecipeFlags)
    return {"parallel_read_safe": True}
