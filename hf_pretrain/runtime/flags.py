"""
Flags: fields of dataclasses that state what the parser, a resume and the board's form have to know.

    max_length: int = flag(512, "Number of tokens per packed sequence.", bounds="at least 8")

`library_flags.yaml` states the same for the fields of transformers and TRL. All readers loop over [`flags_of`].
"""

import dataclasses
import operator
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError
from .names import check_word


_TESTS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
_TABLE = yaml.safe_load(Path(__file__).with_name("library_flags.yaml").read_text(encoding="utf-8"))
_LIBRARIES = [(name, fact, value) for fact, part in _TABLE.items() for value, names in part.items() for name in names]
_FACTS = ("bounds", "resume", "names", "form", "spelled")
# What each field states. transformers' parser would pass it to argparse if it stood in the metadata of the field.
_STATED: dict[dataclasses.Field[Any], dict[str, str]] = {}


def flag(default: Any = dataclasses.MISSING, help: str | None = None, **stated: Any) -> Any:
    """
    Return a field of a dataclass that is a flag. A field that a subclass declares anew keeps what it does not state.

    Args:
        default: the value without the flag. Each instance gets its own list. Without a default, the flag is required.
        help (`str`): the text of `--help`.
        bounds (`str`): bounds of its numbers, such as `above 0 and at most 1`; by default `at least 0`.
        resume (`str`): what a resume does with it (`training/resume_check.py`). `compared`, the default: it must be
            equal. `ignored`: it changes no update, or is compared as something else. `content`: it acts only through
            a content that is compared. `state`: the state of the optimizer holds it. `schedule`: so does the state of
            a schedule that adapts. `evaluation`: it matters only to a schedule that follows the evaluations.
            `duration`: it matters only to a schedule that depends on the number of steps.
        names (`str`): `model` or `dataset` if it names one, `code` if it names code of the user.
        form (`str`): its group in the form of the board, and its label there: `Duration: Most steps`.
        spelled (`str`): its only spelling, if it is not the field's name. Without dashes, it takes words by position.
        stated: the facts from `bounds` on, and options of argparse, such as `choices` and `aliases`.
    """
    given = {"default_factory": partial(list, default)} if isinstance(default, list) else {"default": default}
    metadata = {} if help is None else {"help": help}
    metadata |= {name: value for name, value in stated.items() if name not in _FACTS}
    # A required field may stand behind others.
    field = dataclasses.field(**given, metadata=metadata, kw_only=default is dataclasses.MISSING)
    _STATED[field] = {name: value for name, value in stated.items() if name in _FACTS}
    return field


ignored_flag, content_flag = partial(flag, resume="ignored"), partial(flag, resume="content")


def same_flag(cls: type, name: str, help: str | None = None) -> Any:
    """Return a field like that of another dataclass, with another text of `--help` if one is given."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return flag(default, **field.metadata | _STATED[field] | ({"help": help} if help else {}))


@cache
def library_flag(name: str) -> dict[str, Any]:
    """Return what the table states about a field of transformers or TRL."""
    return {fact: value for pattern, fact, value in _LIBRARIES if fnmatchcase(name, pattern)}


def flags_of(cls: type) -> dict[str, dict[str, Any]]:
    """Return what is known about each flag of a dataclass."""
    known: dict[str, dict[str, Any]] = {}
    for base in reversed(cls.__mro__):
        for name, field in vars(base).get("__dataclass_fields__", {}).items():
            known[name] = (known.get(name) or library_flag(name)) | field.metadata | _STATED.get(field, {})
    return known


def check_number(name: str, number: Any, bounds: str = "at least 0") -> None:
    """Raise `UserError` for a number that is not finite or out of its bounds."""
    limits = re.findall(rf"({'|'.join(_TESTS)}) (\S+)", bounds)
    # Comparisons with NaN are false.
    if isinstance(number, int | float) and not (
        -(2**63) < number < 2**63 and all(_TESTS[test](number, float(limit)) for test, limit in limits)
    ):
        raise UserError(f"{name} {number} must be {bounds}. Give another value, or leave the flag out.")


def check_bounds(flags: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a value, or one in a list, that is out of the bounds of its flag."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            check_number(f"--{name}", number, flags.get(name, {}).get("bounds", "at least 0"))


def check_flags(arguments: Any) -> None:
    """Raise `UserError` if a field of a dataclass has a value that is out of its bounds or not one of its choices."""
    for field in dataclasses.fields(arguments):
        value = vars(arguments).get(field.name)
        if "choices" in field.metadata and value is not None:
            for word in value if isinstance(value, list) else [value]:
                check_word(f"--{field.name}", word, field.metadata["choices"])
    check_bounds(flags_of(type(arguments)), vars(arguments))
