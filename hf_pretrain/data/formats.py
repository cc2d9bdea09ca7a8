"""
Read files as records, and check the values of records.

A record that cannot become a document is a [`BadRecord`]. Its reason says what is wrong and what to do. The words do
not depend on the line, so that equal faults can be counted together.
"""

import codecs
import csv
import datetime
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Json

from ..rows.reading import Reading
from ..runtime.errors import UserError
from ..runtime.named import load_named


# The reader of each kind of file, which is imported when such a file is read. A reader takes a path and a `Reading`,
# and yields records as JSON text, or as a `BadRecord`, each with its number.
READERS = {
    ".jsonl": "hf_pretrain.data.json_files:read_lines",
    ".json": "hf_pretrain.data.json_files:read_json",
    ".parquet": "hf_pretrain.data.tables:read_parquet",
    ".csv": "hf_pretrain.data.tables:read_csv",
    ".tsv": "hf_pretrain.data.tables:read_csv",
    ".xlsx": "hf_pretrain.data.office_files:read_office_file",
    ".txt": "hf_pretrain.data.text_files:read_text_file",
    ".md": "hf_pretrain.data.text_files:read_text_file",
    ".docx": "hf_pretrain.data.office_files:read_office_file",
    ".pdf": "hf_pretrain.data.office_files:read_office_file",
}
EXTENSIONS = tuple(READERS)
DOCUMENTS = (".docx", ".pdf")
# Files without records.
TEXT_EXTENSIONS = (".txt", ".md", *DOCUMENTS)
COMPRESSIONS = (".gz", ".zst")
KNOWN = f"{', '.join(EXTENSIONS)}, also with {' or '.join(COMPRESSIONS)}"
# Code pages of Windows for Chinese, western languages, Russian and Japanese.
ENCODINGS = ("gb18030", "cp1252", "cp1251", "cp932")
# JSON can hold half of a surrogate pair, and Python's parser accepts it. But UTF-8 cannot encode it.
SURROGATE = re.compile("[\ud800-\udfff]")
# Maximum number of nested arrays and objects: far above real schemas, far below Python's recursion limit.
MAX_DEPTH = 64


class BadRecord(Exception):
    """
    Exception for a record that is unfit for training.

    Args:
        reason (`str`): what is wrong with the record, and what to do.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        # The reason may quote half a surrogate pair, which cannot be written to a file or a terminal.
        self.reason = reason.encode("utf-8", "backslashreplace").decode()


def read_text(record: Any, *, text_column: str) -> str:
    """
    Return the text of one record.

    Args:
        record (`Any`): a parsed record, which must be a `dict`.
        text_column (`str`): key of the text.

    Raises:
        `BadRecord`: if the record is not an object or lacks the column, or if the value is not text, is empty, or
            contains half a surrogate pair or a NUL character.
    """
    if not isinstance(record, dict):
        raise BadRecord(f"not an object but {json_type(record)}; write it as {{{text_column!r}: ...}}")
    if text_column not in record:
        names = ", ".join(map(str, record))
        raise BadRecord(f"no column {text_column!r} (there is: {names}); pass --text_column or --columns")
    text = record[text_column]
    if not isinstance(text, str):
        raise BadRecord(f"column {text_column!r} holds {json_type(text)}, not text; quote it or drop the line")
    if not text.strip():
        raise BadRecord(f"column {text_column!r} is empty; drop the line")
    check_characters(text, text_column)
    return text


def check_characters(text: str, column: str) -> None:
    """Raise `BadRecord` for text with half a surrogate pair or a NUL character."""
    if SURROGATE.search(text):
        raise BadRecord(f"column {column!r} holds half a surrogate pair, which is no text; encode it again")
    if "\0" in text:
        raise BadRecord(f"column {column!r} holds a NUL character; remove it")


def check_values(value: Any, column: str, *, depth: int = 1) -> None:
    """
    Check a parsed JSON value and all values inside it.

    Raises:
        `BadRecord`: for arrays and objects that nest deeper than `MAX_DEPTH`, or text that [`check_characters`]
            refuses.
    """
    if isinstance(value, str):
        check_characters(value, column)
    elif isinstance(value, (dict, list, tuple)):
        if depth > MAX_DEPTH:
            raise BadRecord(f"column {column!r} nests deeper than {MAX_DEPTH} levels; fix or drop the line")
        # Check keys as well: they are text, too.
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            check_values(item, column, depth=depth + 1)


def write_json(value: Any, *, ascii: bool = False) -> str:
    """Return a value as JSON, dates as text in ISO 8601; raise `BadRecord` for other types that JSON lacks."""

    def as_text(part: Any) -> str:
        if isinstance(part, datetime.date | datetime.time):
            return part.isoformat()
        raise BadRecord(f"a value is {json_type(part)}, which JSON does not have; write it as text")

    return json.dumps(value, ensure_ascii=ascii, default=as_text)


def json_type(value: Any) -> str:
    """Return the name of a value's type in JSON, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def drop_padding(record: dict[str, Any], features: Any = None) -> dict[str, Any]:
    """
    Return a row of a table without the nulls in its nested objects.

    All objects in one column of a table have the same fields, so a table fills fields that an object lacks with null.
    A column that is null stays, and so do nulls in lists.

    Args:
        record (`dict`): the row.
        features (`datasets.Features`, *optional*): types of the columns. Values of type `Json` are not padded.
    """

    def clean(value: Any, feature: Any) -> Any:
        if isinstance(feature, Json):
            return value
        if isinstance(value, dict):
            types = feature if isinstance(feature, dict) else {}
            return {name: clean(inner, types.get(name)) for name, inner in value.items() if inner is not None}
        if isinstance(value, list):
            return [clean(inner, getattr(feature, "feature", None)) for inner in value]
        return value

    return {name: clean(value, (features or {}).get(name)) for name, value in record.items()}


def file_format(path: Path) -> str | None:
    """Return the member of `EXTENSIONS` that a file's name ends in, also before a compression's ending, or `None`."""
    name = Path(path.name.lower())
    # Parquet compresses itself.
    if name.suffix in COMPRESSIONS and name.with_suffix("").suffix != ".parquet":
        name = name.with_suffix("")
    return name.suffix if name.suffix in EXTENSIONS else None


def read_file(path: Path, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """
    Yield the records of a file as JSON text, each with its number.

    Args:
        path (`Path`): a file with a [`file_format`].
        reading ([`~rows.reading.Reading`]): how the user wants it to be read. For records other than text, plain text
            must be pairs of question and answer.

    Yields:
        `tuple[int, str | BadRecord]`: the number of the record's first line, or of its row in a JSON array or parquet
        file, counted from 1; and the JSON text, which a line of a JSONL file may hold in broken form.

    Raises:
        `UserError`: if the file is damaged or has no records of this kind.
    """
    extension = str(file_format(path))
    holds_pairs = extension in TEXT_EXTENSIONS and reading.kind not in ("text", None)
    read = load_named("hf_pretrain.data.text_files:read_pairs" if holds_pairs else READERS[extension])
    fault = None
    try:
        for number, content in read(path, reading):
            # Only a byte that the encoding lacks has become a surrogate: JSON escapes others.
            if isinstance(content, str) and SURROGATE.search(content):
                # The lines of a file have one reason, so that they are counted together.
                content = fault = fault or wrong_encoding(reading.encoding, content)
            yield number, content
    except BadRecord as error:
        raise UserError(f"{path}: {error.reason}.") from None
    except UnicodeError as error:
        raise UserError(f"{path} is not {reading.encoding.upper()}. Pass the right --encoding.") from error
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}. Write it again.") from error


def as_json(record: Any) -> str | BadRecord:
    """Return a record as JSON text, or as a `BadRecord` if it holds a value that JSON lacks."""
    try:
        # ASCII: UTF-8 cannot encode halves of surrogate pairs.
        return write_json(record, ascii=True)
    except BadRecord as error:
        return error


def parse_json(content: str | BadRecord) -> Any:
    """Parse the JSON text of a record. Raise `BadRecord` if it is broken, and in place of a record that is bad."""
    if isinstance(content, BadRecord):
        raise content
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise BadRecord(f"broken JSON: {error.msg}; fix or drop it") from None
    # Python refuses integers of more than 4,300 digits with a plain ValueError.
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"JSON that cannot be read: {error}; fix or drop it") from None


def wrong_encoding(encoding: str, text: str) -> BadRecord:
    """Return the reason for bytes that the encoding does not have, with what other encodings make of the text."""
    found = []
    for name in ENCODINGS:
        with suppress(UnicodeError):
            read = text.encode(encoding, "surrogateescape").decode(name)
            start = max(0, next(place for place, character in enumerate(read) if not character.isascii()) - 20)
            found.append(f"{name} reads {read[start : start + 40]!r}")
    return BadRecord(f"not {encoding.upper()}; pass the right --encoding: {', '.join(found) or 'e.g. big5'}")


def open_text(path: Path, encoding: str, newline: str | None) -> io.TextIOWrapper:
    """
    Open a file as text, decompressed by the ending of its name. A file that ends early gives an `OSError`.

    `surrogateescape` turns invalid bytes into lone surrogates, which valid text never contains.
    """
    file = io.BufferedReader(pa.input_stream(path))
    start = file.peek(4)
    # Also in UTF-8, Excel begins a file with a mark.
    if start.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif re.match(rb"(\0[^\0]){2}|([^\0]\0){2}", start) and not re.match("utf.?(16|32)", encoding.lower()):
        wanted = "utf-16-be" if start[0] == 0 else "utf-16-le"
        raise UserError(f"{path} is no {encoding.upper()}. Pass --encoding {wanted}.")
    try:
        return io.TextIOWrapper(file, encoding=encoding, errors="surrogateescape", newline=newline)
    except LookupError:
        raise UserError(f"--encoding {encoding} is unknown. Use one of Python's, such as gb18030 or utf-16.") from None
