"""Rename columns of users' data to the names that records are recognised by (`--columns`)."""

from functools import cache
from typing import Any

from ..rows.reading import Reading
from ..runtime.errors import UserError
from ..runtime.names import check_word
from .conversations import ANSWERS, GENERATED, QUESTIONS
from .formats import BadRecord


# Columns that decide what a record teaches.
_DECIDING = ("messages", "conversations", "chosen", "rejected", *QUESTIONS, *ANSWERS, GENERATED)
COLUMN_NAMES = (*_DECIDING, "text", "history", "system", "tools", "chat_template_kwargs", "solution", "gt")


def columns_of(reading: Reading) -> tuple[str, dict[str, str]]:
    """Return the user's names of the column of the text, and of each other column by ours."""
    columns = dict(parse_columns(tuple(reading.columns or ())))
    return columns.pop("text", reading.text_column), columns


@cache
def parse_columns(pairs: tuple[str, ...]) -> dict[str, str]:
    """
    Return the user's name of each column, by ours.

    Args:
        pairs (`tuple[str, ...]`): `OUR=THEIRS`, such as `prompt=question`.

    Raises:
        `UserError`: for an unknown name, a pair without two names, or a name that stands in two pairs.
    """
    columns: dict[str, str] = {}
    for pair in pairs:
        ours, _, theirs = pair.partition("=")
        check_word("--columns", ours, COLUMN_NAMES)
        if not theirs or ours in columns:
            raise UserError(f"--columns {pair} is no pair of its own. Write OUR=THEIRS once, e.g. prompt=question.")
        columns[ours] = theirs
    return columns


def rename_columns(record: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """
    Return a record with our names in place of the user's; raise `BadRecord` if it lacks one of the columns.

    If `columns` names one of the columns that decide what a record teaches, the record loses the others of these.
    """
    for theirs in columns.values():
        if theirs not in record:
            raise BadRecord(f"no column {theirs!r} (there is: {', '.join(map(str, record))}); correct --columns")
    others = {*columns, *columns.values()}.union(_DECIDING if columns.keys() & {*_DECIDING} else ())
    rest = {name: value for name, value in record.items() if name not in others}
    return rest | {ours: record[theirs] for ours, theirs in columns.items()}
