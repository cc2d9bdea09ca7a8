"""Read tables: CSV and parquet files, and what other readers make of their files."""

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from ..rows.reading import Reading
from ..runtime.errors import UserError
from .columns import columns_of
from .formats import BadRecord, as_json, drop_padding, file_format, open_text, write_json


# Python's default limit is 128 KiB, and a document may be longer. Without a limit, a quote that is never closed could
# fill the memory.
MAX_FIELD_CHARACTERS = 64_000_000


def _read_rows(path: Path, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, each with the number of its first line."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    with open_text(path, encoding, "") as file:
        header = file.readline()
        # Excel writes semicolons where the comma is the decimal point. Only the names show it: texts hold all marks.
        found = [mark for mark in ",;\t" if mark in re.sub('"[^"]*"', "", header)]
        separator = "\t" if file_format(path) == ".tsv" else "".join(found) or ","
        if len(separator) > 1:
            raise UserError(f"{path}: the first row holds several separators, {separator!r}. Quote its names.")
        rows = csv.reader(chain([header], file), delimiter=separator, strict=True)
        number = 1
        for row in rows:
            # Blank lines are no rows.
            if row:
                yield number, row
            number = rows.line_num + 1


def read_table(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the rows of a table as the JSON of objects of strings. The first row names the keys."""
    _, names = next(rows, (0, []))
    if len(set(names)) < len(names):
        raise UserError(f"{path}: the first row does not name each column once. Correct it.")
    fault = BadRecord(f"a row without {len(names)} fields like the first row; quote its fields")
    for number, row in rows:
        yield number, write_json(dict(zip(names, row, strict=True))) if len(row) == len(names) else fault


def read_csv(path: Path, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the rows of a CSV file as objects."""
    return read_table(path, _read_rows(path, reading.encoding))


def read_parquet(path: Path, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the rows of a parquet file, with the column of the text or, for other records, with all columns."""
    file = pq.ParquetFile(path)
    names, text_column = file.schema_arrow.names, columns_of(reading)[0]
    if reading.kind == "text" and text_column not in names:
        raise UserError(f"{path} has no column {text_column!r} but {', '.join(names)}. Pass --text_column.")
    # Read in batches, so that a large file need not fit into memory.
    batches = file.iter_batches(batch_size=1000, columns=[text_column] if reading.kind == "text" else None)
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from ((number, as_json(drop_padding(row))) for number, row in enumerate(rows, start=1))
