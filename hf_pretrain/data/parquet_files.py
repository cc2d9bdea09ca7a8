"""Read parquet files."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from ..rows.reading import Reading
from ..runtime.errors import UserError
from .columns import columns_of
from .formats import BadRecord, as_json, drop_padding


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
