"""The parser of a recipe's command line, the text of its `--help`, and the reader of `--config` files."""

import argparse
import dataclasses
import inspect
import os
import re
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from .errors import UserError, as_user_errors
from .flags import check_bounds, flags_of
from .named import load_named
from .names import hint
from .secret_words import hide_secrets


# Keys of a YAML file whose paths may be relative to the file.
_DATA_KEYS = ("dataset_name", "eval_dataset_name", "eval_questions", "general_questions", "mixed_in")


class FlagFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Show one spelling of each flag, and its default if there is one."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        # HfArgumentParser also accepts dashes for underscores. A switch needs no value.
        value = "|".join(map(str, action.choices)) if action.choices else "VALUE"
        return min(action.option_strings, key=len) + ("" if action.nargs in (0, "?") else f" {value}")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # `is`, because 0 is a default to show, although it equals False.
        is_off = action.default is False or action.default in (None, "")
        return action.help if is_off else super()._get_help_string(action)


class RecipeParser(HfArgumentParser):
    """
    Parser of dataclasses of [`~runtime.flags.flag`]. It raises [`UserError`] instead of exiting as argparse does.

    Args:
        dataclass_types (`tuple[type, ...]`): the dataclasses whose fields are the flags.
    """

    def __init__(self, dataclass_types: tuple[type, ...] = (), **kwargs: Any):
        self.flags = {name: about for cls in dataclass_types for name, about in flags_of(cls).items()}
        super().__init__(dataclass_types, formatter_class=FlagFormatter, allow_abbrev=False, **kwargs)
        self.hides_flags = not self.flags.keys() <= set().union(*map(own_fields, dataclass_types))
        if self.hides_flags:
            self.add_argument("--help-all", action="help", help="Show all flags, and exit.")

    def add_argument(self, *spellings: Any, **options: Any) -> argparse.Action:
        """Add a flag, with the options that HfArgumentParser derives from the type of a field."""
        name = spellings[0].lstrip("-")
        about = self.flags.get(name, {})
        options |= {"help": about["help"]} if "help" in about else {}
        if options.get("action") is argparse.BooleanOptionalAction:
            options = {key: value for key, value in options.items() if key not in ("type", "nargs", "const")}
        spelled = about.get("spelled")
        if spelled is None:
            return super().add_argument(*spellings, **options)
        if spelled.startswith("-"):
            return super().add_argument(spelled, dest=name, **options)
        del options["required"]
        return super().add_argument(spelled, **options)

    def format_help(self) -> str:
        """Return the flags in one group per dataclass; without `--help-all`, only those that are often used."""
        if not self.dataclass_types:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        # `--no_x`, another spelling of `--x false`, comes later.
        actions = {action.dest: action for action in reversed(self._actions)}
        for cls in self.dataclass_types:
            formatter.start_section((inspect.getdoc(cls) or "").partition("\n\n")[0].rstrip("."))
            names, own = [field.name for field in dataclasses.fields(cls) if field.init], own_fields(cls)
            is_whole = "--help-all" in sys.argv
            formatter.add_arguments(
                actions[name] for name in names if is_whole or name in own or "shown" in self.flags[name]
            )
            formatter.end_section()
        more = " --help-all shows all flags of the libraries." if self.hides_flags else ""
        formatter.add_text(f"`--flag false` turns a switch off.{more}")
        return formatter.format_help()

    def translate(self, argv: list[str], stage: str) -> list[str]:
        """Return a command line whose flags of MiniMind's script for a stage are ours, if it has unknown flags."""
        if not stage or not self.parse_known_args(argv)[1]:
            return argv
        return load_named("hf_pretrain.runtime.minimind_flags:translate_minimind")(argv, stage)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """
        Parse all arguments. Raise `UserError` for unknown ones, which names similar ones, and for values that are
        empty or out of bounds.
        """
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word for word in unknown if word.startswith("--")] or unknown[:1]
            known = [flag.lstrip("-") for action in self._actions for flag in action.option_strings]
            texts = ", ".join(
                f"{word!r}{self.hint(word.lstrip('-').split('=')[0], known)}" for word in hide_secrets(words)
            )
            raise UserError(f"Unknown argument {texts}. `--help` lists the flags.")
        for name, value in vars(namespace).items():
            # A variable of the shell may be unset. `Path("")` would be the working directory.
            if value == "" and self.get_default(name) != "":
                raise UserError(f"--{name} is empty. Give it a value, or leave the flag out.")
            if self.flags[name].get("names") in ("model", "dataset"):
                setattr(namespace, name, _download(value, self.flags[name]["names"]))
        check_bounds(self.flags, vars(namespace))
        return namespace

    def parse(self, argv: list[str] | None = None) -> tuple[Any, ...]:
        """Parse a command line, by default that of the process, into an instance of each dataclass."""
        values = vars(self.parse_args(argv))
        # transformers and TRL refuse values here, too.
        with as_user_errors():
            return self.parse_dict(values)

    def hint(self, word: str, known: Collection[str]) -> str:
        """Return the end of a message that names the known flag that other toolkits call so, or the most similar."""
        own = next((name for name, about in self.flags.items() if word in about.get("also", "").split()), None)
        return f"; here it is {own}" if own in known else hint(word, known)

    def error(self, message: str) -> NoReturn:
        # argparse names all spellings of a flag. The last one that has no dashes is the usual one.
        message = re.sub(r"^argument [^:]*?(--\w+)(/--\w+-[\w-]+)?:", r"\1:", message)
        raise UserError(f"{message}. `--help` lists the flags.")


def _download(value: Any, repo_type: str) -> Any:
    """Return the value of an argument with paths in place of names of ModelScope."""
    if isinstance(value, list):
        return [_download(each, repo_type) for each in value]
    if not isinstance(value, str) or not value.startswith("modelscope:"):
        return value
    return load_named("hf_pretrain.runtime.modelscope:download")(value, repo_type=repo_type)


def own_fields(cls: type) -> set[str]:
    """Return the fields of a dataclass that this package defines."""
    bases = (base for base in cls.__mro__ if not base.__module__.startswith(("transformers", "trl")))
    return {name for base in bases for name in inspect.get_annotations(base)}


def recipe_parser(path: str | Path) -> RecipeParser:
    """
    Return the parser of a recipe, without running the recipe. A recipe names its dataclasses in `ARGUMENTS`.

    Raises:
        `SystemExit`: if the recipe needs an extra that is not installed.
    """
    return RecipeParser(runpy.run_path(str(path))["ARGUMENTS"])


def parse_flags(*dataclass_types: type, stage: str = "") -> tuple[Any, ...]:
    """
    Parse the command line of a tool into instances of dataclasses. The docstring of the program describes it. `stage`
    is as for [`RecipeParser.translate`].
    """
    parser = RecipeParser(dataclass_types, description=sys.modules["__main__"].__doc__)
    return parser.parse(parser.translate(sys.argv[1:], stage))


class ConfigLoader(yaml.SafeLoader):
    """YAML loader that refuses a key that stands twice. PyYAML silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_config(path: str | Path) -> dict[str, Any]:
    """
    Return the keys and values of a YAML file. Its key `extends` may name another file, relative to this one, whose
    values are the defaults. Names of data, also those below `example`, that are paths relative to this file become
    paths relative to the working directory.

    Raises:
        `UserError`: if a file cannot be read, is not YAML, or holds no mapping.
    """
    path = Path(path)
    try:
        # PyYAML recognises UTF-16 in bytes.
        content = yaml.load(path.read_bytes(), Loader=ConfigLoader)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {error}. Name a YAML file.") from None
    except RecursionError:
        raise UserError(f"--config {path} extends itself, or is nested too deeply. Correct `extends`.") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold `key: value` lines, such as `learning_rate: 1e-3`.")
    parent, example = content.pop("extends", None), content.pop("example", {})
    kinds = [type(each) for each in content.get("mixed_in") or ["", 0.5]]
    if not isinstance(example, dict) or kinds != [str, float]:
        raise UserError(f"--config {path}: `example` must hold `key: value` lines, and `mixed_in` be [FILE, 0.3].")
    for part in (content, example):
        part.update({key: _find_beside(path.parent, part[key]) for key in _DATA_KEYS if key in part})
    base = {} if parent is None else read_config(path.parent / parent)
    # The parent's example is for its data alone, and the file's own keys win over it.
    above = {} if "dataset_name" in content else base.get("example", {})
    example = {name: value for name, value in above.items() if name not in content} | example
    base.pop("example", None)
    return base | content | ({"example": example} if example else {})


def _find_beside(directory: Path, value: Any) -> Any:
    """Return the path of a file in a directory, or of several, or the name itself where there is none."""
    if isinstance(value, list):
        return [_find_beside(directory, each) for each in value]
    path = os.path.normpath(directory / str(value))
    return path if value and os.path.exists(path) else value
