"""
Sources of documents: the embedded corpora, files, the Hub; mixed, split into training and held-out ones.

Files are read by a line reader of our own, because `datasets` fails a whole load on one corrupt line and accepts
numbers for text. A bad line is set aside with file, line and reason; too many of them stop the run before it starts.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from transformers.utils import logging

from ..runtime.names import DatasetName
from .conversations import SCHEMAS, first_question
from .corpora import load_embedded
from .formats import BadRecord, read_file, read_json_lines, read_text
from .parts import cache_key, work_on
from .rejected import RATIO_INTERVAL, RejectedLines
from .sources import EMBEDDED_SOURCES, Piece, check_unchanged, cut_sources, file_state, find_sources
from .splitting import DOCUMENT_FEATURES, split_documents


logger = logging.get_logger(__name__)

# What every source is read into: a document and what its side of the split goes by, unless that is its text; or an
# empty text and the reason why there is none.
ROW_FEATURES = Features(
    {
        "text": Value("string"),
        "origin": Value("string"),
        "source": Value("string"),
        "line": Value("int64"),
        "offset": Value("int64"),
        "reason": Value("string"),
    }
)
# Of a stream, this many documents are looked through for held-out ones, and bad lines are judged every so many rows.
VALIDATION_SCAN = 50_000


def load_documents(
    dataset_names: list[str],
    *,
    schema: str = "text",
    text_column: str = "text",
    weights: list[float] | None = None,
    streaming: bool = False,
    validation_fraction: float = 0.01,
    train_fraction: float = 1.0,
    seed: int = 42,
    num_proc: int | None = None,
    max_rejected_ratio: float = 0.01,
    rejected_path: str | Path | None = None,
) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Documents to train on and documents to hold out.

    A document is held out if a hash of its text says so; of a conversation or a preference, and of all embedded text,
    a hash of the first question. So the split is the same for any order of files, world size, seed and for streaming,
    equal documents land on one side, and no stage trains on what another holds out of the embedded corpora. Exact
    copies in those are left out, and counted in the description of the data (`train.info.description`).

    Args:
        dataset_names (`list[str]`): each one `embedded`, `embedded:<part>`, a path, glob or directory, or a Hub id
            `name[:config][@revision]` (its split `train`). Files are JSONL (`.jsonl`), `.json` (an array of objects,
            or one object a line), `.parquet` and `.txt` (documents are separated by blank lines), all but parquet
            also `.gz` or `.zst`. Blank lines in JSONL are skipped.
        schema (`str`, defaults to `"text"`): what a record is: `text`, or a member of `SCHEMAS`, of which a document's
            text is the JSON.
        text_column (`str`, defaults to `"text"`): the key or column that holds the text, where the schema is that.
        weights (`list[float]`, *optional*): share of each name among the training documents; they need not sum to 1.
            Sources are drawn from until each one has been read in full, so small ones repeat and nothing is left
            out. Without weights, sources follow one another. Held-out documents are never repeated.
        streaming (`bool`, defaults to `False`): read while training. Held-out documents are then those among the
            first 50,000; later ones are left out of training too.
        validation_fraction (`float`, defaults to 0.01): share of documents to hold out; 0 holds out none.
        train_fraction (`float`, defaults to 1.0): share of the other documents to train on, chosen by the same hash.
            The documents held out stay the same.
        seed (`int`, defaults to 42): of the mixture.
        num_proc (`int`, *optional*): processes that read data of more than 64 MiB or 100,000 documents; by default one
            a core, up to 8.
        max_rejected_ratio (`float`, defaults to 0.01): share of bad lines that is tolerated, over all names; while
            streaming, checked every 1,000 lines and at the end of a name.
        rejected_path (`str` or `Path`, *optional*): JSONL file that bad lines are listed in: source, line (counted
            from 1), offset (the byte that the line starts at, in the decompressed file, where there are lines), reason.

    Returns:
        `tuple`: training documents and held-out ones, each with the single column `text`.

    Raises:
        `ValueError`: if a name leads to no data or to none that is good, a file cannot be read, too many lines are
            bad, or an argument makes no sense.
    """
    _check_arguments(dataset_names, weights, validation_fraction, train_fraction, max_rejected_ratio)
    rejected = RejectedLines(max_rejected_ratio, rejected_path)
    column = text_column if schema == "text" else None
    rows = [_load_rows(name, schema, column, streaming, num_proc) for name in dataset_names]
    if streaming:
        parts = [part.filter(rejected.keep).select_columns(list(DOCUMENT_FEATURES)) for part in rows]
        scan = VALIDATION_SCAN if validation_fraction else RATIO_INTERVAL
        heads = [_in_memory(part.take(scan)) for part in parts]
    else:
        parts = heads = [_keep_documents(part, rejected) for part in rows]
    for name, head in zip(dataset_names, heads, strict=True):
        if len(head) == 0:
            raise ValueError(f"{name} holds no document to train on.{rejected.describe()}")
    rejected.check_ratio()

    validation = datasets.concatenate_datasets(
        [split_documents(head, 0.0, validation_fraction, num_proc) for head in heads]
    )
    stop = validation_fraction + (1 - validation_fraction) * train_fraction if train_fraction < 1 else 1.0
    parts = [split_documents(part, validation_fraction, stop, num_proc) for part in parts]
    for name, part in zip(dataset_names, parts, strict=True):
        if not streaming and len(part) == 0:
            raise ValueError(
                f"validation_fraction={validation_fraction} and train_fraction={train_fraction} leave no document of "
                f"{name} to train on. Lower the first, raise the second, or add data."
            )
    if weights is None or len(parts) == 1:
        train = datasets.concatenate_datasets(parts)
    else:
        probabilities = [weight / sum(weights) for weight in weights]
        train = datasets.interleave_datasets(
            parts, probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted"
        )
    if streaming:
        # It stays with all that is made of the stream, and a run that goes on compares it.
        described = [part.info.description for part in rows]
        train.info.description = str((described, weights, validation_fraction, train_fraction))
    else:
        train.info.description = rejected.describe_copies()
    return train, validation


def _check_arguments(
    dataset_names: list[str],
    weights: list[float] | None,
    validation_fraction: float,
    train_fraction: float,
    max_rejected_ratio: float,
) -> None:
    """Refuses arguments of [`load_documents`] that make no sense."""
    if not dataset_names:
        raise ValueError("No data: pass --dataset_name, for instance embedded.")
    if weights is not None and len(weights) != len(dataset_names):
        raise ValueError(
            f"{len(weights)} dataset_weights for {len(dataset_names)} dataset names; pass one weight for each name."
        )
    if weights is not None and not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"dataset_weights are shares above 0, not {weights}; leave out a source instead of 0.")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} is no share in [0, 1).")
    if not 0 < train_fraction <= 1:
        raise ValueError(f"train_fraction={train_fraction} is no share in (0, 1].")
    if not 0 <= max_rejected_ratio <= 1:
        raise ValueError(f"max_rejected_ratio={max_rejected_ratio} is no share in [0, 1].")


# From a name to rows: documents, and bad lines among them


def _load_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Everything under one name, with the columns of `ROW_FEATURES`; cached by content unless streamed."""
    sources = find_sources(name)
    if sources is None:
        return _load_hub_rows(name, schema, text_column, streaming, num_proc)
    how = {"schema": schema, "text_column": text_column}
    if streaming:
        pieces = [Piece(source, file_state(source)) for source in sources]
        stream = IterableDataset.from_generator(
            _read_rows, features=ROW_FEATURES, gen_kwargs={"pieces": pieces, **how}
        )
        # It stays with all that is made of the stream, and a run that goes on compares it.
        stream.info.description = str([how, *((Path(piece.source).name, piece.state[0]) for piece in pieces)])
        return stream
    shards = cut_sources(sources)
    parts = work_on(shards, partial(_load_shard, how=how), num_proc=num_proc, desc=f"Reading {name}")
    return datasets.concatenate_datasets(parts)


def _load_shard(pieces: list[Piece], how: dict[str, str | None]) -> Dataset:
    """The rows of some pieces, read or from the cache."""
    contents = [(piece.source, piece.start, piece.line, piece.digest) for piece in pieces]
    key = cache_key(how, contents)
    try:
        return Dataset.from_generator(
            _read_rows, features=ROW_FEATURES, gen_kwargs={"pieces": pieces, **how}, fingerprint=key
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise ValueError(str(error.__cause__)) from None
        raise


def _load_hub_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Rows of a Hub dataset, `name[:config][@revision]`."""
    dataset = DatasetName.parse(name)
    try:
        records = datasets.load_dataset(
            dataset.repo_id,
            dataset.config,
            revision=dataset.revision,
            split="train",
            streaming=streaming,
            num_proc=None if streaming else num_proc,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{name!r} is no file here, and could not be loaded from the Hub (as name:config@revision): {error}"
        ) from error
    columns = records.column_names or list(next(iter(records)))
    if text_column is not None and text_column not in columns:
        raise ValueError(f"{name} has no column {text_column!r} but {', '.join(columns)}; pass --text_column.")
    how = (name, schema, text_column)
    rows = records.map(
        _check_records,
        batched=True,
        with_indices=True,
        fn_kwargs={"name": name, "schema": schema, "text_column": text_column},
        features=ROW_FEATURES,
        remove_columns=columns,
        **({} if streaming else {"num_proc": num_proc, "new_fingerprint": cache_key(records._fingerprint, *how)}),
    )
    rows.info.description = str(how)
    return rows


def _check_records(
    batch: dict[str, list], indices: list[int], name: str, schema: str, text_column: str | None
) -> dict[str, list]:
    """A batch of Hub records as rows."""
    rows = []
    for place, index in enumerate(indices):
        record = {column: values[place] for column, values in batch.items()}
        rows.append(_make_row(name, index + 1, None, record, schema, text_column))
    return {column: [row[column] for row in rows] for column in ROW_FEATURES}


def _read_rows(pieces: list[Piece], schema: str, text_column: str | None) -> Iterator[dict[str, Any]]:
    """Rows of embedded parts and files; `ValueError` for a file that is not in its state of the beginning any more."""
    for piece in pieces:
        source = piece.source
        check_unchanged(source, piece.state)
        records: Iterator[tuple[int, int | None, Any]]
        column = text_column if source not in EMBEDDED_SOURCES else "text"
        if source in EMBEDDED_SOURCES:
            documents = load_embedded(EMBEDDED_SOURCES[source], schema=schema)
            records = ((number, None, document) for number, document in enumerate(documents, start=1))
        elif piece.stop is None:
            records = read_file(Path(source), text_column=text_column)
        else:
            records = read_json_lines(Path(source), start=piece.start, stop=piece.stop, line=piece.line)
        is_empty = piece.stop is None
        for line, offset, record in records:
            is_empty = False
            yield _make_row(source, line, offset, record, schema, column)
        if is_empty:
            reason = BadRecord("holds no record; remove the file or write it again")
            yield _make_row(source, 0, None, reason, schema, column)
        check_unchanged(source, piece.state)


def _make_row(
    source: str, line: int, offset: int | None, record: Any, schema: str, text_column: str | None
) -> dict[str, Any]:
    """One row: the text of a good record, or where a bad one is and why."""
    try:
        if isinstance(record, BadRecord):
            raise record
        if schema == "text":
            text = read_text(record, text_column=text_column)
            origin = record["origin"] if source in EMBEDDED_SOURCES else None
        else:
            text = SCHEMAS[schema](record)
            origin = first_question(text)
        return {"text": text, "origin": origin, "source": None, "line": None, "offset": None, "reason": None}
    except BadRecord as error:
        where = {"source": source, "line": line, "offset": offset}
        return {"text": "", "origin": None, **where, "reason": error.reason}


# From rows to documents, held out or not


def _keep_documents(rows: Dataset, rejected: RejectedLines) -> Dataset:
    """The documents among rows; the others are noted as rejected."""
    is_bad = np.concatenate([chunk.is_valid() for chunk in rows.data.column("reason").chunks] or [[]]).astype(bool)
    rejected.num_lines += len(rows)
    for row in rows.select(np.flatnonzero(is_bad)):
        rejected.add(row["source"], row["line"], row["offset"], row["reason"])
    documents = rows.select_columns(list(DOCUMENT_FEATURES))
    return documents.select(np.flatnonzero(~is_bad)) if is_bad.any() else documents


def _in_memory(documents: IterableDataset) -> Dataset:
    taken = list(documents)
    columns = {name: [document[name] for document in taken] for name in DOCUMENT_FEATURES}
    return Dataset.from_dict(columns, features=DOCUMENT_FEATURES)
