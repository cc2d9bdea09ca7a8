"""Read the records of data sources with their line numbers, to inspect and clean data."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..rows.reading import Reading
from .columns import columns_of, rename_columns
from .conversations import CONVERSATION_KEYS, RECORDS
from .formats import BadRecord, parse_json, read_text
from .sources import EMBEDDED_SOURCES, find_sources, read_source


@dataclass(frozen=True)
class Record:
    """
    A record, or a bad line.

    Args:
        source (`str`): the file, or the name of the embedded part or Hub dataset.
        line (`int`): the number of the line or row, counted from 1.
        content: the parsed record; `None` for a bad line.
        text (`str`): the document: the text, or the conversation or preference in the internal form.
        reason (`str`): why the record is left out; empty for a good one.
        kind (`str`): `text`, or the key of `RECORDS` that gave `text`.
    """

    source: str
    line: int
    content: Any
    text: str
    reason: str = ""
    kind: str = "text"


def read_records(names: Iterable[str], reading: Reading) -> Iterator[Record]:
    """
    Yield all records of files, embedded parts and Hub datasets. Bad lines have a reason.

    Args:
        names (`Iterable[str]`): names in the form of `--dataset_name`.
        reading ([`~rows.reading.Reading`]): how the user wants them to be read.

    Raises:
        `UserError`: if a name leads to no data.
    """
    for source in [source for name in names for source in find_sources(name) or [name]]:
        for line, content in read_source(source, reading):
            yield check_record(source, line, content, reading)


def check_record(source: str, line: int, content: Any, reading: Reading) -> Record:
    """
    Check the record of a line: a parsed one, its JSON text, or its fault.

    Args:
        source (`str`), line (`int`): where the record is.
        content (`str`, `dict` or `BadRecord`): the record.
        reading ([`~rows.reading.Reading`]): how the user wants it to be read.
    """
    # Embedded records have our names of columns.
    column, columns = ("text", {}) if source in EMBEDDED_SOURCES else columns_of(reading)
    try:
        content = content if isinstance(content, dict) else parse_json(content)
        if columns and isinstance(content, dict):
            content = rename_columns(content, columns)
        kind = reading.kind or _find_kind(content, column)
        text = read_text(content, text_column=column) if kind == "text" else RECORDS[kind](content)
        return Record(source, line, content, text, kind=kind)
    except BadRecord as error:
        return Record(source, line, None, "", error.reason)


def _find_kind(content: Any, text_column: str) -> str:
    """Return the kind that the fields of a record stand for; `text` without any known field."""
    if not isinstance(content, dict) or content.get(text_column) is not None:
        return "text"
    # A preference may also have the fields of a conversation.
    if "chosen" in content:
        return "preference"
    return "conversation" if any(content.keys() >= {*keys} for keys in CONVERSATION_KEYS) else "text"


def plain_text(record: Record, *, chosen_only: bool = False) -> str:
    """
    Return the text of a record as people read it. For a conversation, it is all messages, thoughts and calls.

    Args:
        record ([`Record`]): a good record.
        chosen_only (`bool`, defaults to `False`): leave out the rejected answer of a preference.
    """
    if record.kind == "text":
        return record.text
    parts = json.loads(record.text)
    names = ("messages", "prompt", "chosen") if chosen_only else ("messages", "prompt", "chosen", "rejected")
    texts: list[str] = []
    for message in (message for name in names for message in parts.get(name, [])):
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", [])]
        texts += [message.get("reasoning_content", ""), message["content"], *calls]
    return "\n".join(filter(None, texts))
