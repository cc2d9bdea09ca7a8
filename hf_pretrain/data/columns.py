"""Rename columns of users' data to the names that records are recognised by (`--columns`)."""

from collections.abc import Collection, Iterator

from datasets import Dataset, IterableDataset

from ..runtime.errors import UserError
from ..runtime.names import check_word
from .conversations import ANSWERS, QUESTIONS
from .formats import BadRecord, as_json, parse_json


# Columns that decide what a record teaches.
_DECIDING = {"messages", "conversations", "chosen", "rejected", *QUESTIONS, *ANSWERS}
COLUMN_NAMES = (
    *("text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history"),
    *("system", "tools", "chat_template_kwargs", "chosen", "rejected", "solution", "gt"),
)


def parse_columns(pairs: list[str] | None) -> dict[str, str]:
    """
    Return the user's name of each column, by ours.

    Args:
        pairs (`list[str]`, *optional*): `OUR=THEIRS`, such as `prompt=question`.

    Raises:
        `UserError`: for an unknown name, a pair without two names, or a name that stands in two pairs.
    """
    columns: dict[str, str] = {}
    for pair in pairs or ():
        ours, _, theirs = pair.partition("=")
        if not theirs:
            raise UserError(f"--columns {pair} is no pair. Write OUR=THEIRS, e.g. prompt=question.")
        check_word("--columns", ours, COLUMN_NAMES)
        if ours in columns or theirs in columns.values():
            raise UserError(f"--columns {pair} repeats a name of another pair. Name each column once.")
        columns[ours] = theirs
    return columns


def rename_fields(
    records: Iterator[tuple[int, str | BadRecord]], columns: dict[str, str], source: str
) -> Iterator[tuple[int, str | BadRecord]]:
    """
    Yield the records of a source, as JSON text with their numbers, with our names in place of the user's.

    Raises:
        `UserError`: after the last record, if none of them has one of the columns.
    """
    seen: dict[str, None] = {}
    left_out = _left_out(columns)
    for number, content in records:
        try:
            record = parse_json(content)
        except BadRecord:
            record = None
        if isinstance(record, dict):
            seen |= dict.fromkeys(record)
            renamed = {ours: record[theirs] for ours, theirs in columns.items() if theirs in record}
            content = as_json({name: record[name] for name in record if name not in left_out} | renamed)
        yield number, content
    if seen:
        _check_present(source, columns, seen)


def rename_table(rows: Dataset | IterableDataset, columns: dict[str, str], name: str) -> Dataset | IterableDataset:
    """Return a Hub dataset with our names in place of the user's; raise `UserError` if it lacks a column."""
    if not columns:
        return rows
    # Some streams learn their columns only from the first record.
    names = rows.column_names or list(next(iter(rows), ()))
    _check_present(name, columns, names)
    unwanted = [column for column in names if column in _left_out(columns) - {*columns.values()}]
    renamed = {theirs: ours for ours, theirs in columns.items() if ours != theirs}
    return rows.remove_columns(unwanted).rename_columns(renamed)


def _left_out(columns: dict[str, str]) -> set[str]:
    """
    Return the names of fields that a renamed record does not keep under these names.

    Without the other deciding columns, the named ones alone decide what the record teaches.
    """
    return {*columns, *columns.values(), *(_DECIDING if _DECIDING & columns.keys() else ())}


def _check_present(source: str, columns: dict[str, str], names: Collection[str]) -> None:
    """Raise `UserError` if a source lacks a column."""
    for theirs in columns.values():
        if theirs not in names:
            raise UserError(f"--columns: {source} has no column {theirs!r} but {', '.join(names)}. Correct the name.")
