"""
Read files as records, and records as documents `{"text": str}`.

A record that cannot become a document is a [`BadRecord`]. Its reason says what is wrong and what to do. The words do
not depend on the line, so that equal faults can be counted together.
"""

import codecs
import csv
import datetime
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Json

from ..runtime.errors import MissingExtraError
from ..runtime.installation import install_command


EXTENSIONS = (".jsonl", ".json", ".txt", ".parquet", ".csv", ".tsv")
COMPRESSIONS = (".gz", ".zst")
CHUNK_BYTES = 1 << 20
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
        raise BadRecord(f"no column {text_column!r} (there is: {', '.join(map(str, record))}); pass --text_column")
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


def check_values(value: Any, column: str) -> None:
    """
    Check a parsed JSON value and all values inside it.

    Raises:
        `BadRecord`: for arrays and objects that nest deeper than `MAX_DEPTH`, a repeated key, or text that
            [`check_characters`] refuses.
    """
    # Use a stack: a hostile file could exceed Python's recursion limit.
    remaining = [(value, 1)]
    while remaining:
        value, depth = remaining.pop()
        if isinstance(value, BadRecord):
            raise value
        if isinstance(value, str):
            check_characters(value, column)
        elif isinstance(value, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise BadRecord(f"column {column!r} nests deeper than {MAX_DEPTH} levels; fix or drop the line")
            # Check keys as well: they are text, too.
            items = [*value, *value.values()] if isinstance(value, dict) else value
            remaining += [(item, depth + 1) for item in items]


def write_json(value: Any, column: str) -> str:
    """Return a value as JSON, dates as text in ISO 8601; raise `BadRecord` for other types that JSON lacks."""

    def as_text(part: Any) -> str:
        if isinstance(part, datetime.date | datetime.time):
            return part.isoformat()
        raise BadRecord(f"column {column!r} holds {json_type(part)}, which JSON does not have; write it as text")

    return json.dumps(value, ensure_ascii=False, default=as_text)


def json_type(value: Any) -> str:
    """Return the name of a value's type in JSON, with its article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    # `_unique_object` puts a `BadRecord` in place of an object with a repeated key.
    return names.get(type(value), "an object" if isinstance(value, (dict, BadRecord)) else f"a {type(value).__name__}")


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
    # Parquet compresses itself. A parquet file that is compressed as a whole cannot be read in parts.
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    extension = "".join(suffixes[-2:-1] if is_compressed else suffixes[-1:])
    return extension if extension in EXTENSIONS and not (is_compressed and extension == ".parquet") else None


def read_file(path: Path, *, text_column: str | None) -> Iterator[tuple[int, int | None, Any]]:
    """
    Yield the records of a file, each with its position.

    Args:
        path (`Path`): a file with a [`file_format`]. `.json` and `.jsonl` files hold one object per line, or an array.
        text_column (`str`, *optional*): column to read from a parquet file, and key for the text of a `.txt` file.
            Without it, records have all columns, and a `.txt` file is refused.

    Yields:
        `tuple[int, int | None, Any]`: number, offset and content.

        - The number is the first line of the record in a JSONL, `.txt`, `.csv` or `.tsv` file and the index in a JSON
          array or parquet file, counted from 1. Number 0 marks a `BadRecord` about the whole file, or about the rest
          of it after earlier records.
        - The offset is the byte in the decompressed file where the line starts; `None` in arrays and tables.
        - The content is the parsed record or a [`BadRecord`].
    """
    extension = file_format(path)
    try:
        if extension == ".parquet":
            yield from _read_parquet(path, text_column)
        elif extension == ".txt" and text_column is None:
            yield 0, None, BadRecord("plain text, and records are wanted; write them as JSONL")
        elif extension == ".txt":
            yield from _read_paragraphs(_lines(_decompressed(path)), text_column)
        elif extension in (".csv", ".tsv"):
            yield from _read_table(_lines(_decompressed(path)), is_csv=extension == ".csv")
        elif holds_array(path):
            yield from _read_array(b"".join(_decompressed(path)))
        else:
            yield from _read_json_lines(_lines(_decompressed(path)))
    except BadRecord as error:
        yield 0, None, error
    except EOFError:
        yield 0, None, BadRecord("the compressed file ends early and its rest is lost; write it again")
    except (gzip.BadGzipFile, zlib.error) as error:
        yield 0, None, BadRecord(f"the compressed file is damaged ({error}); write it again")


def read_json_lines(path: Path, *, start: int, stop: int, line: int) -> Iterator[tuple[int, int, Any]]:
    """
    Yield the records of a piece of an uncompressed JSONL file, in the form of [`read_file`].

    Args:
        path (`Path`): the file.
        start (`int`): byte where the piece starts, which must be the start of a line.
        stop (`int`): byte where it ends, which must be the end of a line.
        line (`int`): number of the first line.
    """

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            # Do not read beyond `stop`, where the next piece starts.
            while chunk := file.read(min(CHUNK_BYTES, stop - file.tell())):
                yield chunk

    try:
        yield from _read_json_lines(_lines(chunks(), line - 1, start))
    except BadRecord as error:
        yield 0, start, error


def _decompressed(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in chunks; raise `EOFError` or the decompressor's error if it is truncated or damaged."""
    if path.suffix.lower() == ".zst":
        yield from _zstd_chunks(path)
        return
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file of one or more zstd frames."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(f"Reading {path} needs zstandard: {install_command('zstd')}") from error
    # NOTE: zstandard's `stream_reader` does not notice a truncated file. `decompressobj` reports the end of a frame.
    decompressor = zstandard.ZstdDecompressor()
    frame, is_whole = decompressor.decompressobj(), True
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                while chunk:
                    yield frame.decompress(chunk)
                    chunk, is_whole = frame.unused_data, frame.eof
                    # A file may hold several frames. The rest of the chunk is the beginning of the next one.
                    if is_whole:
                        frame = decompressor.decompressobj()
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from error
    if not is_whole:
        raise EOFError


def _lines(chunks: Iterable[bytes], number: int = 0, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from `number` + 1), offset and content of each line, without line end and byte order mark."""
    # A line may span many chunks. Join its pieces once: joining at each chunk would take quadratic time.
    pieces: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for other in others:
            number, line = number + 1, b"".join(pieces)
            yield number, offset, _strip_line(number, line)
            # The offset includes the line break and a carriage return, which `line` still holds.
            offset, pieces = offset + len(line) + 1, [other]
    # The last line may end without a line break.
    if any(pieces):
        yield number + 1, offset, _strip_line(number + 1, b"".join(pieces))


def _strip_line(number: int, line: bytes) -> bytes:
    """
    Remove the carriage return of a line, and the byte order mark of the first one.

    Raises:
        `BadRecord`: if the first line is UTF-16.
    """
    if number == 1 and _is_utf16(line):
        raise BadRecord("UTF-16 text; convert the file to UTF-8, for example by `iconv -f UTF-16 -t UTF-8`")
    return (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).removesuffix(b"\r")


def _is_utf16(data: bytes) -> bool:
    """Return whether data begin with a byte order mark of UTF-16, or with four ASCII characters in UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    # Every second byte of ASCII characters is zero. If all bytes are zero, a crash has left them behind.
    return sorted(half == bytes(4) for half in (data[0:8:2], data[1:8:2])) == [False, True]


def _read_json_lines(lines: Iterable[tuple[int, int, bytes]]) -> Iterator[tuple[int, int, Any]]:
    """Yield the parsed lines that are not blank."""
    for number, offset, line in lines:
        if line.strip():
            yield number, offset, _parse_json(line)


def _read_paragraphs(lines: Iterable[tuple[int, int, bytes]], text_column: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the paragraphs between blank lines, each with the position of its first line."""
    # Number and offset of the first line of the paragraph.
    start = (0, 0)
    paragraph: list[bytes] = []

    def finish() -> tuple[int, int, Any]:
        try:
            return *start, {text_column: b"\n".join(paragraph).decode("utf-8")}
        except UnicodeDecodeError:
            return *start, BadRecord("not UTF-8; convert the file")

    for number, offset, line in lines:
        if line.strip():
            start = start if paragraph else (number, offset)
            paragraph.append(line)
        elif paragraph:
            yield finish()
            paragraph = []
    if paragraph:
        yield finish()


def _read_table(lines: Iterable[tuple[int, int, bytes]], *, is_csv: bool) -> Iterator[tuple[int, None, Any]]:
    """
    Yield the rows of a CSV or TSV file as objects of strings, each with its first line. The first row names the keys.
    """
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    # TSV has no quotes: https://www.iana.org/assignments/media-types/text/tab-separated-values
    dialect: dict[str, Any] = {} if is_csv else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    advice = "quote its fields" if is_csv else "remove tabs and line breaks from its fields"
    # A quoted field may hold line breaks. `surrogateescape` turns invalid bytes into lone surrogates, which valid
    # UTF-8 never contains.
    texts = (line.decode("utf-8", "surrogateescape") + "\n" for _, _, line in lines)
    rows = csv.reader(texts, strict=True, **dialect)
    header: list[str] = []
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "unexpected end" in str(error):
                yield 0, None, BadRecord(f"a quote of the row in line {number} is never closed; close it")
                return
            yield number, None, BadRecord(_explain(error))
            continue
        if row is None:
            return
        is_utf8 = not SURROGATE.search("".join(row))
        # A blank line gives an empty row.
        if not row:
            continue
        if not header:
            header = row
            if not is_utf8 or len(set(header)) < len(header):
                yield 0, None, BadRecord("the first row does not name each column once, in UTF-8; correct it")
                return
        elif not is_utf8:
            yield number, None, BadRecord("not UTF-8; convert the file")
        elif len(row) != len(header):
            yield number, None, BadRecord(f"a row without {len(header)} fields like the first row; {advice}")
        else:
            yield number, None, dict(zip(header, row, strict=True))


def _explain(error: csv.Error) -> str:
    """Return what is wrong with a row, and what to do."""
    if "new-line character" in str(error):
        return "a carriage return within a line; remove it, or end lines with line feeds"
    if "field limit" in str(error):
        return f"a field of more than {MAX_FIELD_CHARACTERS:,} characters; close its quote, or split the text"
    return f"a broken row ({error}); double the quotes inside a quoted field"


def holds_array(path: Path) -> bool:
    """Return whether a `.json` or `.jsonl` file holds one JSON array instead of one object per line."""
    lines = (line.strip() for _, _, line in _lines(_decompressed(path)) if line.strip())
    try:
        first = next(lines, b"")
        if file_format(path) == ".json":
            return first.startswith(b"[")
        # JSONL may have lines that are arrays, and each of them is a bad line.
        if not re.match(rb"\[\s*(\{|$)", first):
            return False
        last = first
        for line in lines:
            last = line
    except BadRecord:
        # UTF-16: the reader of lines says so.
        return False
    return last.endswith(b"]") and (last is first or isinstance(_parse_json(first), BadRecord))


def _read_array(data: bytes) -> Iterator[tuple[int, None, Any]]:
    """Yield the elements of a JSON array, or one `BadRecord` if it cannot be parsed."""
    records = _parse_json(data.removeprefix(b"\xef\xbb\xbf"))
    if isinstance(records, BadRecord):
        yield 0, None, records
    else:
        yield from ((number, None, record) for number, record in enumerate(records, start=1))


def _read_parquet(path: Path, text_column: str | None) -> Iterator[tuple[int, None, Any]]:
    """Yield the rows of a parquet file, with one column or all."""
    number = 0
    try:
        file = pq.ParquetFile(path)
        if text_column is not None and text_column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            yield 0, None, BadRecord(f"no column {text_column!r} (there is: {names}); pass --text_column")
            return
        columns = [name for name in file.schema_arrow.names if text_column in (None, name)]
        if len(set(columns)) < len(columns):
            twice = next(name for name in columns if columns.count(name) > 1)
            yield 0, None, BadRecord(f"the column {twice!r} occurs twice; rename one")
            return
        # Read in batches, so that a large file need not fit into memory.
        for batch in file.iter_batches(batch_size=1000, columns=None if text_column is None else [text_column]):
            for record in batch.to_struct_array():
                number += 1
                try:
                    # Arrow does not validate UTF-8 when it reads; the conversion to `str` does.
                    yield number, None, drop_padding(record.as_py())
                except UnicodeDecodeError:
                    yield number, None, BadRecord("not UTF-8; convert the file")
                except ValueError as error:
                    yield number, None, BadRecord(f"a row that cannot be read ({error}); fix or drop it")
    except (pa.ArrowException, OSError) as error:
        yield 0, None, BadRecord(f"no readable parquet file ({error}); write it again")


def _parse_json(data: bytes) -> Any:
    """Parse JSON, or return a `BadRecord`. An object with a repeated key becomes a `BadRecord` at any depth."""
    # Look for NUL bytes first: the JSON parser's own message would not mention them.
    if b"\0" in data:
        return BadRecord("a NUL byte, as a crash or a full disk leaves behind; drop the line")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_object)
    except UnicodeDecodeError:
        return BadRecord("not UTF-8; convert the file")
    except json.JSONDecodeError as error:
        where = f" at line {error.lineno}" if b"\n" in data else ""
        return BadRecord(f"broken JSON: {error.msg}{where}; fix or drop it")
    # Python refuses integers of more than 4,300 digits with a plain ValueError.
    except (ValueError, RecursionError) as error:
        return BadRecord(f"JSON that cannot be read: {error}; fix or drop it")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """Build an object from its pairs. Python's own parser would silently keep only the last of equal keys."""
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    keys = [key for key, _ in pairs]
    twice = next(key for key in keys if keys.count(key) > 1)
    return BadRecord(f"the key {twice!r} occurs twice; keep one")
