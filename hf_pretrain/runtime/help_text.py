"""
The text of `--help`: this package's flags in groups, then the flags of Trainer that are often used. `--help-all` also
shows all other flags of transformers and TRL.
"""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator


# Flags of transformers' `TrainingArguments` that are often used.
_COMMON = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_steps", "seed"),
    *("use_cpu", "fp16", "deepspeed", "activation_checkpointing", "dataloader_num_workers", "eval_on_start"),
    *("load_best_model_at_end", "metric_for_best_model", "resume_from_checkpoint", "report_to", "run_name"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "log_level"),
)
# Help texts that replace those of transformers.
HELP_TEXTS = {
    "resume_from_checkpoint": "Resume the run from this checkpoint directory; auto takes the newest intact one in "
    "--output_dir, and starts a new run if there is none."
}
_PACKAGE = __package__.partition(".")[0]


class FlagFormatter(argparse.RawDescriptionHelpFormatter):
    """Show one spelling of each flag, and its default unless the help text already names it."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        # HfArgumentParser also accepts dashes for underscores, and the names of earlier versions.
        name = next(word for word in action.option_strings if word.startswith("--"))
        # A switch needs no value.
        if action.nargs in (0, "?"):
            return name
        value = action.metavar or ("N" if action.type is int else "X" if action.type is float else "VALUE")
        return f"{name} {value}{' ...' if action.nargs in ('+', '*') else ''}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        choices = [str(choice) for choice in action.choices or ()]
        is_listed = all(re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", text) for choice in choices)
        notes = [] if is_listed else [f"one of {', '.join(choices)}"]
        # Switches are off by default. 0 is a default to show, although it equals False.
        is_known = action.default is False or action.default in (None, "", argparse.SUPPRESS) or "default" in text
        notes += [] if is_known or not action.option_strings else ["default: %(default)s"]
        return f"{text} ({'; '.join(notes)})" if notes else text


def format_groups(
    parser: argparse.ArgumentParser,
    dataclass_types: Iterable[type],
    launcher_flags: Iterable[argparse.Action] = (),
    *,
    shows_all: bool,
) -> str:
    """
    Return the text of `--help` for a parser of dataclasses.

    Args:
        parser (`ArgumentParser`): the parser.
        dataclass_types (`Iterable[type]`): the dataclasses whose fields are its flags.
        launcher_flags (`Iterable[Action]`): flags that `hf-pretrain` reads before the recipe.
        shows_all (`bool`): also show the flags of libraries that are rarely used.
    """
    formatter = parser._get_formatter()
    formatter.add_text(parser.description)
    formatter.add_text(f"usage: {parser.prog} [--flag value ...]. `--flag false` turns a switch off.")
    if launcher_flags:
        formatter.start_section("Processes and launcher, read by hf-pretrain")
        formatter.add_arguments(launcher_flags)
        formatter.end_section()
    # `--no_x` is another spelling of `--x false`.
    actions = {
        action.dest: action
        for action in parser._actions
        if not action.option_strings[0].startswith("--no_") and action.dest not in ("help", "help_all")
    }
    shown: set[str] = set()
    for title, names in _groups(list(dataclass_types), shows_all=shows_all):
        found = [actions[name] for name in names if name in actions and name not in shown]
        shown.update(names)
        if found:
            formatter.start_section(title)
            formatter.add_arguments(found)
            formatter.end_section()
    formatter.add_text(parser.epilog)
    if not shows_all:
        formatter.add_text(f"--help-all shows {len(actions.keys() - shown)} more flags of the libraries.")
    return formatter.format_help()


def _groups(dataclass_types: list[type], *, shows_all: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield title and names of each group: for each dataclass of this package its own fields, then the others."""
    theirs: list[str] = []
    for cls in dataclass_types:
        mine: set[str] = set()
        for base in cls.__mro__:
            # A recipe runs as `__main__`, and may define a dataclass of its own.
            if base.__module__.startswith((_PACKAGE, "__main__")) and (names := _own(base)):
                sentence = (inspect.getdoc(base) or base.__name__).split("\n\n")[0].replace("\n", " ").rstrip(".")
                yield base.__dict__.get("help_title", sentence), names
                mine.update(names)
        theirs += [field.name for field in dataclasses.fields(cls) if field.init and field.name not in mine]
    yield "Flags of transformers' Trainer that are often used", [name for name in _COMMON if name in theirs]
    if shows_all:
        yield "All other flags of transformers and TRL", theirs


def _own(cls: type) -> list[str]:
    """Return the fields that a dataclass defines itself, in the order of its source."""
    fields = getattr(cls, "__dataclass_fields__", {})
    return [name for name in cls.__dict__.get("__annotations__", {}) if name in fields and fields[name].init]


__all__ = ["HELP_TEXTS", "FlagFormatter", "format_groups"]
