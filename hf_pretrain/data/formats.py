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
import string
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Json

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from .exports import read_export
from .office_files import read_office_file


DOCUMENTS = (".docx", ".pdf")
# Files without records.
TEXT_EXTENSIONS = (".txt", ".md", *DOCUMENTS)
EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".xlsx", *TEXT_EXTENSIONS)
COMPRESSIONS = (".gz", ".zst")
KNOWN = f"{', '.join(EXTENSIONS)}, also with {' or '.join(COMPRESSIONS)}"
# Code pages of Windows for Chinese, western languages, Russian and Japanese.
ENCODINGS = ("gb18030", "cp1252", "cp1251", "cp932")
# Beginnings of questions, which the group matches, and of answers.
PAIR_MARKS = re.compile(r"(?im)^[>#* \t]*(?:(Q|Question|问题?|提问)|A|Answer|答案?|回答)[ \t]*\d*[ \t]*\**[:：]\**")
# JSON can hold half of a surrogate pair, and Python's parser accepts it. But UTF-8 cannot encode it.
SURROGATE = re.compile("[\ud800-\udfff]")
# Python's default limit is 128 KiB, and a document may be longer. Without a limit, a quote that is never closed could
# fill the memory.
MAX_FIELD_CHARACTERS = 64_000_000
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


def read_file(
    path: Path, *, text_column: str | None, encoding: str = "utf-8", whole_files: bool = False
) -> Iterator[tuple[int, str | BadRecord]]:
    """
    Yield the records of a file as JSON text, each with its number.

    Args:
        path (`Path`): a file with a [`file_format`].
        text_column (`str`, *optional*): column to read from a parquet file, and key for the text of a file of plain
            text. Without it, records have all columns, and plain text must be pairs of question and answer.
        encoding (`str`, defaults to `"utf-8"`): encoding of a file without a byte order mark.
        whole_files (`bool`, defaults to `False`): make one record of a .txt file, as of a .md file, not one per
            paragraph.

    Yields:
        `tuple[int, str | BadRecord]`: the number of the record's first line, or of its row in a JSON array or parquet
        file, counted from 1; and the JSON text, which a line of a JSONL file may hold in broken form.

    Raises:
        `UserError`: if the file is damaged or has no records of this kind.
    """
    extension = file_format(path)
    try:
        records: Iterator[tuple[int, str | BadRecord]]
        if extension in TEXT_EXTENSIONS and text_column is None:
            records = _read_pairs(path, encoding)
        elif extension == ".parquet":
            records = enumerate(map(as_json, _read_parquet(path, text_column)), start=1)
        elif extension in (".xlsx", *DOCUMENTS):
            tables = read_office_file(path, extension, text_column)
            records = chain.from_iterable(_read_table(path, iter(rows)) for rows in tables)
        elif extension in (".csv", ".tsv"):
            records = _read_table(path, _read_csv(path, encoding, extension))
        elif extension in TEXT_EXTENSIONS:
            # A heading alone, or half a block of code, is no document.
            texts = _read_paragraphs(path, encoding, whole_files or extension == ".md")
            records = ((number, write_json({text_column: text})) for number, text in texts)
        else:
            records = _read_json_lines(path, encoding, may_be_array=extension == ".json")
        fault = None
        for number, content in records:
            # Only a byte that the encoding lacks has become a surrogate: JSON escapes others.
            if isinstance(content, str) and SURROGATE.search(content):
                # The lines of a file have one reason, so that they are counted together.
                content = fault = fault or _wrong_encoding(encoding, content)
            yield number, content
    except BadRecord as error:
        raise UserError(f"{path}: {error.reason}.") from None
    except UnicodeError as error:
        raise UserError(f"{path} is not {encoding.upper()}. Pass the right --encoding.") from error
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


def _wrong_encoding(encoding: str, text: str) -> BadRecord:
    """Return the reason for bytes that the encoding does not have, with what other encodings make of the text."""
    found = []
    for name in ENCODINGS:
        with suppress(UnicodeError):
            read = text.encode(encoding, "surrogateescape").decode(name)
            start = max(0, next(place for place, character in enumerate(read) if not character.isascii()) - 20)
            found.append(f"{name} reads {read[start : start + 40]!r}")
    return BadRecord(f"not {encoding.upper()}; pass the right --encoding: {', '.join(found) or 'e.g. big5'}")


def _open(path: Path, encoding: str, newline: str | None) -> io.TextIOWrapper:
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


def _read_json_lines(path: Path, encoding: str, *, may_be_array: bool) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the lines that are not blank, or the elements of an array."""
    with _open(path, encoding, "\n") as file:
        numbered = enumerate(file, start=1)
        lines = ((number, line.rstrip("\r\n")) for number, line in numbered if line.strip(string.whitespace))
        start, first = next(lines, (0, ""))
        if may_be_array and first.lstrip().startswith("["):
            text = first + file.read()
            records = parse_json(_wrong_encoding(encoding, text) if SURROGATE.search(text) else text)
            records = read_export(records) or records
            yield from ((number, as_json(record)) for number, record in enumerate(records, start=1))
            return
        second = next(lines, None)
        # Programs that print JSON for people begin so.
        if second and (first.strip() == "[" or (first.strip() == "{" and second[1].lstrip().startswith('"'))):
            rest = "\n".join(line for _, line in lines)
            exported = read_export(f"{first}\n{second[1]}\n{rest}") if may_be_array else None
            if not exported:
                shapes = "one object per line (`jq -c`), or in a .json file one array of objects"
                chats = "Of Telegram's exports, only personal chats in which both write are read."
                raise UserError(f"{path} holds JSON over several lines. Write {shapes}. {chats}")
            yield from ((number, as_json(record)) for number, record in enumerate(exported, start=1))
            return
        yield from chain([(start, first)] if first else [], [second] if second else [], lines)


def _read_paragraphs(path: Path, encoding: str, whole_files: bool) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs between blank lines, each with the number of its first line, or the whole text."""
    with _open(path, encoding, None) as file:
        if whole_files:
            yield 1, file.read()
            return
        for is_blank, group in groupby(enumerate(file, start=1), lambda numbered: not numbered[1].strip()):
            if not is_blank:
                numbers, lines = zip(*group, strict=True)
                yield numbers[0], "".join(lines).removesuffix("\n")


def _read_pairs(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """
    Yield questions and answers as JSON, each pair with its number, from a text in which a mark begins each of them.

    Raises:
        `UserError`: if the text is of another form.
    """
    content = "" if file_format(path) in DOCUMENTS else next(_read_paragraphs(path, encoding, True))[1]
    before, *parts = PAIR_MARKS.split(content)
    texts = [text.strip() for text in parts[1::2]]
    is_question = [mark is not None for mark in parts[::2]]
    if not texts or before.strip() or not all(texts) or is_question != [True, False] * (len(texts) // 2):
        form = "JSONL, or as .txt with `Q:` before each question and `A:` before each answer"
        raise UserError(f"{path} holds plain text, and records are wanted. Write them as {form}.")
    announce(f"reading {path} as {len(texts) // 2} pairs of question and answer")
    pairs = zip(texts[::2], texts[1::2], strict=True)
    yield from ((i, write_json({"prompt": q, "completion": a})) for i, (q, a) in enumerate(pairs, start=1))


def _read_csv(path: Path, encoding: str, extension: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of its first line."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    with _open(path, encoding, "") as file:
        header = file.readline()
        # Excel writes semicolons where the comma is the decimal point. Only the names show it: texts hold all marks.
        found = [mark for mark in ",;\t" if mark in re.sub('"[^"]*"', "", header)]
        separator = "\t" if extension == ".tsv" else "".join(found) or ","
        if len(separator) > 1:
            raise UserError(f"{path}: the first row holds several separators, {separator!r}. Quote its names.")
        rows = csv.reader(chain([header], file), delimiter=separator, strict=True)
        number = 1
        for row in rows:
            # Blank lines are no rows.
            if row:
                yield number, row
            number = rows.line_num + 1


def _read_table(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the rows of a table as the JSON of objects of strings. The first row names the keys."""
    _, names = next(rows, (0, []))
    if len(set(names)) < len(names):
        raise UserError(f"{path}: the first row does not name each column once. Correct it.")
    fault = BadRecord(f"a row without {len(names)} fields like the first row; quote its fields")
    for number, row in rows:
        yield number, write_json(dict(zip(names, row, strict=True))) if len(row) == len(names) else fault


def _read_parquet(path: Path, text_column: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with one column or all."""
    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    if text_column is not None and text_column not in names:
        raise UserError(f"{path} has no column {text_column!r} but {', '.join(names)}. Pass --text_column.")
    # Read in batches, so that a large file need not fit into memory.
    for batch in file.iter_batches(batch_size=1000, columns=None if text_column is None else [text_column]):
        yield from map(drop_padding, batch.to_pylist())
