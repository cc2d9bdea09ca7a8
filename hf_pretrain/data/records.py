"""Read the records of data sources with their line numbers, to inspect and clean data."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conversations import SCHEMAS
from .corpora import load_embedded
from .formats import BadRecord, drop_padding, file_format, read_file, read_text
from .hub_datasets import SPLIT, load_hub_dataset
from .sources import EMBEDDED_SOURCES, find_sources, is_hub_dataset


@dataclass(frozen=True)
class Record:
    """
    A record, a bad line, or a copy in an embedded part.

    Args:
        source (`str`): the file, or the name of the embedded part or Hub dataset.
        line (`int`): the number of the line or row, counted from 1; 0 if the reason concerns the whole file.
        content: the parsed record; `None` for a bad line or a copy.
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

    @property
    def document(self) -> Any:
        """The text, or the conversation or preference as a `dict`."""
        return self.text if self.schema == "text" else json.loads(self.text)


def list_sources(names: list[str]) -> list[str]:
    """
    Return all files, embedded parts and Hub datasets that names stand for. Download those on the Hub.

    Args:
        names (`list[str]`): names in the form of `--dataset_name`.

    Raises:
        `ValueError`: if a name leads to no data.
    """
    sources = []
    for name in names:
        found = find_sources(name)
        if found is None:
            # Download now, so that a wrong name fails before the work starts.
            load_hub_dataset(name)
        sources += [name] if found is None else found
    return sources


def describe_splits(sources: list[str]) -> str:
    """Return a sentence that names the split read from each Hub dataset; "" if there are none."""
    names = [source for source in sources if is_hub_dataset(source)]
    return f"Read from the Hub, as in training: the split `{SPLIT}` of {', '.join(names)}." if names else ""


def read_records(sources: list[str], *, schema: str | None = None, text_column: str = "text") -> Iterator[Record]:
    """
    Yield all records of files, embedded parts and Hub datasets. Bad lines and the copies in embedded parts have a
    reason.

    Args:
        sources (`list[str]`): the result of [`list_sources`].
        schema (`str`, *optional*): `text`, or a key of `SCHEMAS`; by default the one that [`find_schema`] finds.
        text_column (`str`): key of the text, for the schema `text`.
    """
    for source in sources:
        yield from _read_source(source, schema or find_schema(source, text_column) or "text", text_column)


def find_schema(source: str, text_column: str = "text") -> str | None:
    """Return the schema of the first record of a source that has one; `None` if none does."""
    if source in EMBEDDED_SOURCES:
        return "text"
    # Read all columns of a parquet file: it may not have the text column.
    column = None if file_format(Path(source)) == ".parquet" else text_column
    for _, content in _read_contents(source, column):
        # Try `preference` first: a preference may also pass as a conversation.
        for schema in ("text", "preference", "conversation"):
            try:
                _read_content(content, schema, text_column)
            except BadRecord:
                continue
            return schema
    return None


def plain_text(record: Record, *, chosen_only: bool = False) -> str:
    """
    Return the text of a record as people read it. For a conversation, it is all messages, thoughts and calls.

    Args:
        record ([`Record`]): a good record.
        chosen_only (`bool`, defaults to `False`): leave out the rejected answer of a preference.
    """
    if record.schema == "text":
        return record.text
    parts = record.document
    names = ("messages", "prompt", "chosen") if chosen_only else ("messages", "prompt", "chosen", "rejected")
    texts: list[str] = []
    for message in (message for name in names for message in parts.get(name, [])):
        calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", [])]
        texts += [message.get("reasoning_content", ""), message["content"], *calls]
    return "\n".join(filter(None, texts))


def _read_source(source: str, schema: str, text_column: str) -> Iterator[Record]:
    numbered: Iterator[tuple[int, Any]]
    if source in EMBEDDED_SOURCES:
        text_column = "text"
        numbered = enumerate(load_embedded(EMBEDDED_SOURCES[source], schema=schema), start=1)
    else:
        # Read all columns of a parquet file: a cleaning copies them.
        is_parquet = file_format(Path(source)) == ".parquet"
        numbered = _read_contents(source, text_column if schema == "text" and not is_parquet else None)
    for line, content in numbered:
        try:
            yield Record(source, line, content, _read_content(content, schema, text_column), schema=schema)
        except BadRecord as error:
            yield Record(source, line, None, "", error.reason)


def _read_contents(source: str, text_column: str | None) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each record of a file or Hub dataset."""
    if is_hub_dataset(source):
        # The rows come one by one from a table that is mapped into memory.
        rows = load_hub_dataset(source)
        yield from ((line, drop_padding(row, rows.features)) for line, row in enumerate(rows, start=1))
    else:
        yield from ((line, content) for line, _, content in read_file(Path(source), text_column=text_column))


def _read_content(content: Any, schema: str, text_column: str) -> str:
    """Return the text of a record; raise `BadRecord` if the schema does not fit."""
    if isinstance(content, BadRecord):
        raise content
    return read_text(content, text_column=text_column) if schema == "text" else SCHEMAS[schema](content)


__all__ = ["Record", "describe_splits", "find_schema", "list_sources", "plain_text", "read_records"]
