"""Read the records of data sources with their line numbers, to inspect and clean data."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .columns import parse_columns, rename_columns
from .conversations import CONVERSATION_KEYS, SCHEMAS
from .formats import BadRecord, file_format, parse_json, read_text
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
        schema (`str`): `text`, or the key of `SCHEMAS` that gave `text`.
    """

    source: str
    line: int
    content: Any
    text: str
    reason: str = ""
    schema: str = "text"


def read_records(names: Iterable[str], *, text_column: str = "text", **how: Any) -> Iterator[Record]:
    """
    Yield all records of files, embedded parts and Hub datasets. Bad lines have a reason.

    Args:
        names (`Iterable[str]`): names in the form of `--dataset_name`.
        text_column (`str`): key of the text, for the schema `text`.
        how: `columns`, as in [`~data.columns.parse_columns`]; the others as in [`~data.formats.read_file`].

    Raises:
        `UserError`: if a name leads to no data.
    """
    renamed = parse_columns(how.pop("columns", None))
    text_column = renamed.pop("text", text_column)
    for source in [source for name in names for source in find_sources(name) or [name]]:
        # Read all columns of a parquet file: it may not have the text column, and a cleaning copies them.
        column = None if file_format(Path(source)) == ".parquet" else text_column
        for line, content in read_source(source, text_column=column, **how):
            yield check_record(source, line, content, text_column=text_column, columns=renamed)


def check_record(
    source: str,
    line: int,
    content: Any,
    *,
    schema: str | None = None,
    text_column: str | None,
    columns: dict[str, str],
) -> Record:
    """
    Check the record of a line: a parsed one, its JSON text, or its fault.

    Args:
        source (`str`), line (`int`): where the record is.
        content (`str`, `dict` or `BadRecord`): the record.
        schema (`str`, *optional*): `text`, or a key of `SCHEMAS`. By default, the fields of the record decide.
        text_column (`str`, *optional*): key of the text, for the schema `text`.
        columns (`dict[str, str]`): the user's name of each column, by ours. Embedded records have our names.
    """
    # The text of an embedded document is in `text`, whatever column the text of other documents is in.
    column = "text" if source in EMBEDDED_SOURCES else str(text_column)
    try:
        content = content if isinstance(content, dict) else parse_json(content)
        if columns and isinstance(content, dict) and source not in EMBEDDED_SOURCES:
            content = rename_columns(content, columns)
        schema = schema or _find_schema(content, column)
        text = read_text(content, text_column=column) if schema == "text" else SCHEMAS[schema](content)
        return Record(source, line, content, text, schema=schema)
    except BadRecord as error:
        return Record(source, line, None, "", error.reason)


def _find_schema(content: Any, text_column: str) -> str:
    """Return the schema that the fields of a record stand for; `text` without any known field."""
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
    if record.schema == "text":
        return record.text
    parts = json.loads(record.text)
    names = ("messages", "prompt", "chosen") if chosen_only else ("messages", "prompt", "chosen", "rejected")
    texts: list[str] = []
    for message in (message for name in names for message in parts.get(name, [])):
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", [])]
        texts += [message.get("reasoning_content", ""), message["content"], *calls]
    return "\n".join(filter(None, texts))
