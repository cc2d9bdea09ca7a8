"""
Load documents: embedded corpora, files and Hub datasets, mixed and split into a training and a validation set.

This package reads files line by line itself, because `datasets` fails a whole load on one corrupt line and accepts
numbers in place of text. It rejects a bad line with file, line and reason. Too many bad lines stop the run before it
starts.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from transformers.utils import logging

from ..runtime.errors import UserError
from .conversations import SCHEMAS, first_question
from .corpora import load_embedded
from .formats import BadRecord, drop_padding, read_file, read_json_lines, read_text
from .hub_datasets import SPLIT, load_hub_dataset
from .parts import cache_key, map_parts
from .rejected import RATIO_INTERVAL, RejectedLines
from .sources import EMBEDDED_SOURCES, Piece, check_unchanged, cut_sources, file_state, find_sources
from .splitting import DOCUMENT_FEATURES, split_documents


logger = logging.get_logger(__name__)

# Columns of every source. A good row has `text`, and `origin` if the split hashes something other than the text. A bad
# row has an empty text, its position and a reason.
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
# The validation set of a stream comes from this many documents at its start.
VALIDATION_SCAN = 50_000
# Text that a run reads up to about this many times is nearly as good as new text
# (https://huggingface.co/papers/2305.16264).
MAX_REPEATS = 4


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
    repeats: dict[str, float] | None = None,
    is_evaluation: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Load the training set and the validation set.

    A hash decides to which set a document belongs. It is the hash of the first question for conversations, preferences
    and all embedded text, and the hash of the text for other documents. The split therefore does not depend on the
    order of files, world size, seed or streaming, and equal documents are in the same set. In the embedded corpora, no
    stage trains on a document that another stage uses for validation. This function drops exact copies in the embedded
    corpora. The description of the training set (`train.info.description`) has the numbers of copies and bad lines.

    Args:
        dataset_names (`list[str]`): each name is `embedded`, `embedded:<part>`, a path, a glob, a directory, a Hub id
            `name[:config][@revision]` (its split `train`), a file on the Hub, `owner/name:file.jsonl[@revision]` or
            `hf://datasets/owner/name[@revision]/file.jsonl`, or files on ModelScope,
            `modelscope://owner/name[:file.jsonl][@revision]`. Files are `.jsonl` or `.json` (one object per line, or
            an array of objects), `.parquet`, `.csv`, `.tsv` and `.txt` (blank lines separate documents);
            all but parquet also with `.gz` or `.zst`. Blank lines in JSONL are skipped.
        schema (`str`, defaults to `"text"`): kind of the records: `text`, or a key of `SCHEMAS`. A document's text is
            then the JSON of the record in the internal form.
        text_column (`str`, defaults to `"text"`): key or column of the text, for the schema `text`.
        weights (`list[float]`, *optional*): sampling weight of each name in the training set; they need not sum to 1.
            Sampling ends when every name has been read in full, so small datasets repeat and no document is left out.
            Without weights, the datasets are concatenated. The validation set never repeats documents.
        streaming (`bool`, defaults to `False`): read the data while training. The validation set then comes from the
            first 50,000 documents of each name. The run does not train on later documents with such a hash either.
        validation_fraction (`float`, defaults to 0.01): share of the documents in the validation set; 0 for none, and
            1 for all in an evaluation.
        train_fraction (`float`, defaults to 1.0): share of the remaining documents in the training set, chosen by the
            same hash. The validation set stays the same.
        seed (`int`, defaults to 42): seed of the mixture.
        num_proc (`int`, *optional*): number of processes that read data of more than 64 MiB or 100,000 documents; by
            default one per core, up to 8.
        max_rejected_ratio (`float`, defaults to 0.01): tolerated share of bad lines over all names. Streams are
            checked before the first step, and then every 1,000 lines.
        rejected_path (`str` or `Path`, *optional*): JSONL file that lists bad lines: source, line (counted from 1),
            offset (the byte in the decompressed file where the line starts, if there are lines) and reason.
        repeats (`dict[str, float]`, *optional*): this function adds how often one pass over a mixture reads each name,
            for [`~data.preparation.describe_repeats`]. It is unknown for streams.
        is_evaluation (`bool`, defaults to `False`): return an empty training set.

    Returns:
        `tuple`: training set and validation set, each with the single column `text`.

    Raises:
        `ValueError`: if a name leads to no data or only to bad data, a file cannot be read, too many lines are bad, or
            an argument is out of range.
        `ImportError`: if a package that holds data or decompresses them is not installed.
    """
    _check_arguments(dataset_names, weights, train_fraction, max_rejected_ratio)
    if not (0 <= validation_fraction < 1 or (is_evaluation and validation_fraction == 1)):
        limit = "at most" if is_evaluation else "below"
        raise UserError(f"validation_fraction={validation_fraction} must be at least 0 and {limit} 1.")
    rejected = RejectedLines(max_rejected_ratio, rejected_path)
    # Conversations and preferences need all columns of a file, texts only one.
    column = text_column if schema == "text" else None
    rows = [_load_rows(name, schema, column, streaming, num_proc) for name in dataset_names]
    if streaming:
        # `keep` counts bad lines while the run reads the stream, so too many of them can also stop a run late.
        parts = [part.filter(rejected.keep).select_columns(list(DOCUMENT_FEATURES)) for part in rows]
        # Without a validation set, read the head of each stream anyway: it shows bad lines before the run starts.
        scan = VALIDATION_SCAN if validation_fraction else RATIO_INTERVAL
        # The run reads these documents again: training filters the whole stream by the same hash.
        heads = [_in_memory(part.take(scan)) for part in parts]
    else:
        parts = heads = [_keep_documents(part, rejected) for part in rows]
    for name, head in zip(dataset_names, heads, strict=True):
        if len(head) == 0:
            raise UserError(f"{name} holds no document to train on.{rejected.describe()}")
    rejected.check_ratio()

    validation = datasets.concatenate_datasets(
        [split_documents(head, 0.0, validation_fraction, num_proc) for head in heads]
    )
    if is_evaluation:
        return validation.select([]), validation
    # The training set gets the hashes above the hashes of the validation set. By default, `stop` must be exactly 1.0:
    # a rounded sum below 1.0 could drop a document.
    stop = validation_fraction + (1 - validation_fraction) * train_fraction if train_fraction < 1 else 1.0
    parts = [split_documents(part, validation_fraction, stop, num_proc) for part in parts]
    for name, part in zip(dataset_names, parts, strict=True):
        if not streaming and len(part) == 0:
            raise UserError(
                f"validation_fraction={validation_fraction} and train_fraction={train_fraction} leave no document of "
                f"{name} to train on. Lower the first, raise the second, or add data."
            )
    if weights is None or len(parts) == 1:
        train = datasets.concatenate_datasets(parts)
    else:
        # `all_exhausted` samples until every dataset has been read in full.
        probabilities = [weight / sum(weights) for weight in weights]
        train = datasets.interleave_datasets(
            parts, probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted"
        )
        if repeats is not None and not streaming:
            for name, part, probability in zip(dataset_names, parts, probabilities, strict=True):
                repeats[name] = len(train) * probability / len(part)
    if streaming:
        # Every dataset derived from the stream inherits this text. A resumed run compares it with the text in its
        # checkpoint.
        described = [part.info.description for part in rows]
        train.info.description = str((described, weights, validation_fraction, train_fraction))
    else:
        share = f"{train_fraction:.0%} of the training documents (--train_fraction)" if train_fraction < 1 else ""
        train.info.description = "; ".join(filter(None, (share, rejected.describe_counts())))
    return train, validation


def _check_arguments(
    dataset_names: list[str],
    weights: list[float] | None,
    train_fraction: float,
    max_rejected_ratio: float,
) -> None:
    """Raise `ValueError` for arguments of [`load_documents`] that are out of range."""
    if not dataset_names:
        raise UserError("No data: pass --dataset_name, for instance embedded.")
    if weights is not None and len(weights) != len(dataset_names):
        raise UserError(
            f"{len(weights)} dataset_weights for {len(dataset_names)} dataset names; pass one weight per name."
        )
    if weights is not None and not all(0 < weight < float("inf") for weight in weights):
        raise UserError(
            f"dataset_weights={weights} must be finite and above 0; leave a dataset out instead of weighting it 0."
        )
    if not 0 < train_fraction <= 1:
        raise UserError(f"train_fraction={train_fraction} must be above 0 and at most 1.")
    if not 0 <= max_rejected_ratio <= 1:
        raise UserError(f"max_rejected_ratio={max_rejected_ratio} must lie between 0 and 1.")


# Rows: documents, with bad lines among them.


def _load_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Load the rows of one name, with the columns of `ROW_FEATURES`. Rows are cached by content unless streamed."""
    sources = find_sources(name)
    if sources is None:
        return _load_hub_rows(name, schema, text_column, streaming, num_proc)
    how = {"schema": schema, "text_column": text_column}
    if streaming:
        pieces = [Piece(source, file_state(source)) for source in sources]
        stream = IterableDataset.from_generator(
            _read_rows, features=ROW_FEATURES, gen_kwargs={"pieces": pieces, **how}
        )
        # A resumed run compares this text, too. Names and sizes identify the files; a digest would need to read them.
        stream.info.description = str([how, *((Path(piece.source).name, piece.state[0]) for piece in pieces)])
        return stream
    shards = cut_sources(sources)
    parts = map_parts(shards, partial(_load_shard, how=how), num_proc=num_proc, desc=f"reading {name}")
    return datasets.concatenate_datasets(parts)


def _load_shard(pieces: list[Piece], how: dict[str, str | None]) -> Dataset:
    """Load the rows of some pieces from the cache, or read them."""
    # Use a digest of the content instead of the file's time: a file that was touched but not changed finds its entry.
    contents = [(piece.source, piece.start, piece.line, piece.digest) for piece in pieces]
    key = cache_key(how, contents)
    try:
        # NOTE: without `fingerprint`, `datasets` would hash the pickled generator and miss changes in its code.
        return Dataset.from_generator(
            _read_rows, features=ROW_FEATURES, gen_kwargs={"pieces": pieces, **how}, fingerprint=key
        )
    except datasets.exceptions.DatasetGenerationError as error:
        # `datasets` wraps every error of the generator. Users should see only the message inside.
        for kind in (ValueError, ImportError):
            if isinstance(error.__cause__, kind):
                raise kind(str(error.__cause__)) from None
        raise


def _load_hub_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Load the rows of a Hub dataset `name[:config][@revision]`."""
    records = load_hub_dataset(name, streaming=streaming, num_proc=num_proc)
    # Some streams learn their columns only from the first record.
    columns = records.column_names or list(next(iter(records), ()))
    if not columns:
        raise UserError(f"{name} holds no record. Check the name, its configuration and its split `{SPLIT}`.")
    if text_column is not None and text_column not in columns:
        raise UserError(f"{name} has no column {text_column!r} but {', '.join(columns)}; pass --text_column.")
    how = (name, schema, text_column)
    # Our own key: `datasets` pickles `_check_records` by name and would miss changes in the functions that it calls.
    rows = records.map(
        _check_records,
        batched=True,
        with_indices=True,
        fn_kwargs={"name": name, "schema": schema, "text_column": text_column, "types": records.features},
        features=ROW_FEATURES,
        remove_columns=columns,
        **({} if streaming else {"num_proc": num_proc, "new_fingerprint": cache_key(records._fingerprint, *how)}),
    )
    rows.info.description = str(how)
    return rows


def _check_records(
    batch: dict[str, list], indices: list[int], name: str, schema: str, text_column: str | None, types: Features | None
) -> dict[str, list]:
    """Make rows from a batch of Hub records, whose columns have the given types."""
    rows = []
    for place, index in enumerate(indices):
        record = drop_padding({column: values[place] for column, values in batch.items()}, types)
        rows.append(_make_row(name, index + 1, None, record, schema, text_column))
    return {column: [row[column] for row in rows] for column in ROW_FEATURES}


def _read_rows(pieces: list[Piece], schema: str, text_column: str | None) -> Iterator[dict[str, Any]]:
    """
    Yield the rows of embedded parts and files.

    Raises:
        `ValueError`: if a file has changed since the run began.
    """
    for piece in pieces:
        source = piece.source
        # Check before and after: a file that changes in between would leave rows of both versions in the cache.
        check_unchanged(source, piece.state)
        column = text_column if source not in EMBEDDED_SOURCES else "text"
        if piece.stop is None:
            records = _read_source(source, schema, text_column)
        else:
            records = read_json_lines(Path(source), start=piece.start, stop=piece.stop, line=piece.line)
        # Only a whole file can have no records; a piece of a file has at least one line.
        is_empty = piece.stop is None
        for line, offset, record in records:
            is_empty = False
            yield _make_row(source, line, offset, record, schema, column)
        if is_empty:
            reason = BadRecord("holds no record; remove the file or write it again")
            yield _make_row(source, 0, None, reason, schema, column)
        check_unchanged(source, piece.state)


def _read_source(source: str, schema: str, text_column: str | None) -> Iterator[tuple[int, int | None, Any]]:
    """Yield the records of a whole file or embedded part, in the form of [`~data.formats.read_file`]."""
    if source in EMBEDDED_SOURCES:
        documents = load_embedded(EMBEDDED_SOURCES[source], schema=schema)
        yield from ((number, None, document) for number, document in enumerate(documents, start=1))
    else:
        yield from read_file(Path(source), text_column=text_column)


def _make_row(
    source: str, line: int, offset: int | None, record: Any, schema: str, text_column: str | None
) -> dict[str, Any]:
    """Make one row: the text of a good record, or the position of a bad one with the reason."""
    try:
        if isinstance(record, BadRecord):
            raise record
        if schema == "text":
            text = read_text(record, text_column=text_column)
            # The split hashes the text of documents that are not embedded.
            origin = record["origin"] if source in EMBEDDED_SOURCES else None
        else:
            text = SCHEMAS[schema](record)
            origin = first_question(text)
        return {"text": text, "origin": origin, "source": None, "line": None, "offset": None, "reason": None}
    except BadRecord as error:
        where = {"source": source, "line": line, "offset": offset}
        return {"text": "", "origin": None, **where, "reason": error.reason}


def find_line(dataset_names: list[str], schema: str, text: str) -> str:
    """
    Return the position of the first record that gives the document `text`, as `file:line`.

    Loaded documents do not have a position any more, so this function reads the data again. It serves error messages.

    Args:
        dataset_names (`list[str]`): as in [`load_documents`].
        schema (`str`): a key of `SCHEMAS`.
        text (`str`): a conversation or preference in the internal form.
    """
    for name in dataset_names:
        sources = find_sources(name)
        if sources is None:
            rows: Iterator[dict[str, Any]] = iter(_load_hub_rows(name, schema, None, True, None))
            numbered = ((name, number, row) for number, row in enumerate(rows, start=1))
        else:
            numbered = (
                (source, line, _make_row(source, line, offset, record, schema, None))
                for source in sources
                for line, offset, record in _read_source(source, schema, None)
            )
        for source, line, row in numbered:
            if row["text"] == text:
                return f"{source}:{line}"
    return ", ".join(dataset_names)


# Documents: the good rows.


def _keep_documents(rows: Dataset, rejected: RejectedLines) -> Dataset:
    """Return the documents among rows, and record the others as rejected."""
    # Read the column from Arrow: a Python loop over all rows would take minutes for large data.
    # A row is bad if its reason is not null. An empty dataset has no chunks.
    is_bad = np.concatenate([chunk.is_valid() for chunk in rows.data.column("reason").chunks] or [[]]).astype(bool)
    rejected.num_lines += len(rows)
    # `[:]` reads all bad rows at once, which is faster than iterating over them.
    bad = rows.select(np.flatnonzero(is_bad))[:]
    for source, line, offset, reason in zip(
        *(bad[name] for name in ("source", "line", "offset", "reason")), strict=True
    ):
        rejected.add(source, line, offset, reason)
    documents = rows.select_columns(list(DOCUMENT_FEATURES))
    # A selection reads through a table of indices, which is slower. Data without bad lines do not need one.
    return documents.select(np.flatnonzero(~is_bad)) if is_bad.any() else documents


def _in_memory(documents: IterableDataset) -> Dataset:
    """Read a stream of documents into memory."""
    taken = list(documents)
    columns = {name: [document[name] for document in taken] for name in DOCUMENT_FEATURES}
    return Dataset.from_dict(columns, features=DOCUMENT_FEATURES)
