"""
Sphinx extension: tables of the flags of every recipe, from the recipe's own parser.

Each recipe is started without arguments, up to the moment at which it parses its command line. So the tables hold
exactly the flags that the recipe accepts, and nothing here has to name a dataclass.
"""

import argparse
import dataclasses
import os

from docutils import nodes
from recipe_parsers import RECIPES, recipe_parser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from transformers import TrainingArguments


# A heading in the order in which a project needs them.
ORDER = ("pretrain", "sft", "dpo", "distill", "grpo", "evaluate", "tokenizer", "chat", "serve", "convert", "doctor")


def _inherited_defaults(recipe: str) -> dict[str, object]:
    """Defaults of the flags that a recipe takes over from transformers, and from TRL where it uses it."""
    bases: list[type] = [TrainingArguments]
    if recipe == "dpo":
        from trl import DPOConfig

        bases.append(DPOConfig)
    elif recipe == "grpo":
        from trl import GRPOConfig

        bases.append(GRPOConfig)
    defaults = {}
    for base in bases:
        for field in dataclasses.fields(base):
            is_factory = field.default_factory is not dataclasses.MISSING
            defaults[field.name] = field.default_factory() if is_factory else field.default
    return defaults


def _show(value: object) -> str:
    if value is None or value is argparse.SUPPRESS or value == "":
        return ""
    words = value if isinstance(value, (list, tuple)) else [value]
    text = " ".join(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
    return f"`{text}`"


def flag_table(recipe: str) -> str:
    """Return a Markdown table of the flags of a recipe, without those that transformers or TRL define as they are."""
    inherited = (
        _inherited_defaults(recipe) if recipe in ("pretrain", "sft", "dpo", "distill", "grpo", "evaluate") else {}
    )
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for action in recipe_parser(recipe)._actions:
        before = inherited.get(action.dest, action)
        # An empty list and an empty text both mean that nothing is set.
        unchanged = before == action.default or (before in ("", []) and action.default in ("", []))
        if unchanged or isinstance(action, argparse._HelpAction):
            continue
        # Flags come in two spellings, --max_length and --max-length; one is enough to read.
        names = [name for name in action.option_strings if "-" not in name[2:]]
        if not names or names[0].startswith("--no_"):
            continue
        help_text = (action.help or "").replace("%%", "%").replace("|", r"\|").replace("<", r"\<").replace("\n", " ")
        choices = [choice for choice in action.choices or () if isinstance(choice, str)]
        if choices and not any(choice in help_text for choice in choices):
            help_text = f"{help_text} One of {', '.join(choices)}.".strip()
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {_show(action.default)} | {help_text} |")
    return "\n".join(lines)


class RecipeFlags(SphinxDirective):
    """One section per recipe, with its table."""

    def run(self) -> list[nodes.Node]:
        found = sorted(path.stem for path in RECIPES.glob("*.py"))
        parts = []
        for recipe in [*(name for name in ORDER if name in found), *(name for name in found if name not in ORDER)]:
            self.env.note_dependency(str(RECIPES / f"{recipe}.py"))
            parts.append(f"## {recipe}\n\n`recipes/{recipe}.py`\n\n{flag_table(recipe)}\n")
        return self.parse_text_to_nodes("\n".join(parts), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    # What depends on the device of the builder must not end up in the tables.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    app.add_directive("recipe-flags", RecipeFlags)
    return {"parallel_read_safe": True}
