"""Read the records of data sources with their line numbers, to inspect and clean data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .conversations import SCHEMAS
from .corpora import load_embedded
from .formats import BadRecord, read_file, read_text
from .sources import EMBEDDED_SOURCES, find_sources


@dataclass(frozen=True)
class Record:
    """
    A record, or a bad line.

    Args:
        source (`str`): the file, or the name of the embedded part.
        line (`int`): the line number, counted from 1; 0 if the reason concerns the whole file.
        content: the parsed record; `None` for a bad line.
        text (`str`): the document: the text, or the conversation or preference in the internal form.
        reason (`str`): why a line is bad; empty for a good one.
    """

    source: str
    line: int
    content: Any
    text: str
    reason: str = ""


def read_records(names: list[str], *, schema: str | None = None, text_column: str = "text") -> Iterator[Record]:
    """
    Yield all records of files and embedded parts, with the bad lines.

    Args:
        names (`list[str]`): names in the form of `--dataset_name`, but no whole datasets of the Hub.
        schema (`str`, *optional*): `text`, or a key of `SCHEMAS`; by default the one that fits the first record.
        text_column (`str`): key of the text, for the schema `text`.

    Raises:
        `ValueError`: if a name leads to no data.
    """
    for name in names:
        sources = find_sources(name)
        if sources is None:
            raise ValueError(
                f"{name} is no file here. To read a dataset on the Hub, name one of its files: owner/name:file.jsonl."
            )
        for source in sources:
            yield from _read_source(source, schema or find_schema(source, text_column), text_column)


def find_schema(source: str, text_column: str = "text") -> str:
    """Return the schema that fits the first record of a source: `text` if it has a text, else one of `SCHEMAS`."""
    if source in EMBEDDED_SOURCES:
        return "text"
    for _, _, content in read_file(Path(source), text_column=text_column):
        if isinstance(content, dict) and text_column not in content:
            # Try `preference` first: a preference may also pass as a conversation.
            return next((name for name in ("preference", "conversation") if _fits(name, content)), "text")
        return "text"
    return "text"


def _fits(schema: str, content: Any) -> bool:
    try:
        SCHEMAS[schema](content)
    except BadRecord:
        return False
    return True


def _read_source(source: str, schema: str, text_column: str) -> Iterator[Record]:
    if source in EMBEDDED_SOURCES:
        for number, document in enumerate(load_embedded(EMBEDDED_SOURCES[source], schema=schema), start=1):
            yield Record(source, number, document, read_text(document, text_column="text"))
        return
    for line, _, content in read_file(Path(source), text_column=text_column if schema == "text" else None):
        try:
            if isinstance(content, BadRecord):
                raise content
            text = read_text(content, text_column=text_column) if schema == "text" else SCHEMAS[schema](content)
        except BadRecord as error:
            yield Record(source, line, None, "", error.reason)
        else:
            yield Record(source, line, content, text)


__all__ = ["Record", "find_schema", "read_records"]
