"""
Load documents: embedded corpora, files and Hub datasets, mixed and split into a training and a validation set.

`datasets` holds the rows, and parses them in several processes. The lines of files are read by `data/formats.py`,
because the builders of `datasets` fail a whole load on one corrupt line and accept numbers in place of text. A bad
line is rejected with file, line and reason. Too many bad lines stop the run before it starts.
"""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, IterableDataset, Value

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from .caching import cache_key, count_processes
from .conversations import SCHEMAS, first_question
from .corpora import EMBEDDED_CORPORA
from .formats import BadRecord, drop_padding, parse_json, read_text
from .hub_datasets import load_hub_dataset
from .rejected import RATIO_INTERVAL, RejectedLines
from .sources import EMBEDDED_SOURCES, find_sources, read_source


# A record of a source, as JSON text, or its fault.
RECORD_FEATURES = Features(
    {"source": Value("string"), "line": Value("int64"), "content": Value("string"), "fault": Value("string")}
)
# A good row has `text`, and `origin` if the split hashes something other than the text. A bad row has an empty text,
# its position and a reason.
ROW_FEATURES = Features(
    {
        "text": Value("string"),
        "origin": Value("string"),
        "source": Value("string"),
        "line": Value("int64"),
        "reason": Value("string"),
    }
)
DOCUMENT_FEATURES = Features({"text": Value("string"), "origin": Value("string")})
# The validation set of a stream comes from this many documents at its start.
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
    is_evaluation: bool = False,
) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Load the training set and the validation set.

    A hash decides to which set a document belongs. It is the hash of the first question for conversations, preferences
    and all embedded text, and the hash of the text for other documents. The split therefore does not depend on the
    order of files, world size, seed or streaming, and equal documents are in the same set. In the embedded corpora, no
    stage trains on a document that another stage uses for validation. This function drops exact copies in the embedded
    corpora. The description of the training set (`train.info.description`) has the number of bad lines, and how often
    one pass over a mixture reads each dataset.

    Args:
        dataset_names (`list[str]`): names of sources, as docs/data.md lists them.
        schema (`str`, defaults to `"text"`): kind of the records: `text`, or a key of `SCHEMAS`. A document's text is
            then the JSON of the record in the internal form.
        text_column (`str`, defaults to `"text"`): key or column of the text, for the schema `text`.
        weights (`list[float]`, *optional*): sampling weight of each name in the training set; they need not sum to 1.
            Sampling ends when every name has been read in full, so small datasets repeat and no document is left out.
            Without weights, the datasets are concatenated. The validation set never repeats documents.
        streaming (`bool`, defaults to `False`): read the data while training. The validation set then comes from the
            first 50,000 documents of each name. The run does not train on later documents with such a hash either.
        validation_fraction (`float`, defaults to 0.01): share of the documents in the validation set; 0 for none.
        train_fraction (`float`, defaults to 1.0): share of the remaining documents in the training set, chosen by the
            same hash. The validation set stays the same.
        seed (`int`, defaults to 42): seed of the mixture.
        num_proc (`int`, *optional*): number of processes that parse and split data of more than 10,000 records; by
            default one per core, up to 8.
        max_rejected_ratio (`float`, defaults to 0.01): tolerated share of bad lines over all names. Streams are
            checked before the first step, and then every 1,000 lines.
        rejected_path (`str` or `Path`, *optional*): JSONL file that lists bad lines: source, line (counted from 1) and
            reason.
        is_evaluation (`bool`, defaults to `False`): return an empty training set.

    Returns:
        `tuple`: training set and validation set, each with the single column `text`.

    Raises:
        `ValueError`: if a name leads to no data or only to bad data, a file cannot be read, too many lines are bad, or
            an argument is out of range.
        `ImportError`: if a package that holds data or decompresses them is not installed.
    """
    _check_arguments(dataset_names, weights, validation_fraction, train_fraction)
    rejected = RejectedLines(max_rejected_ratio, rejected_path)
    # Conversations and preferences need all columns of a file, texts only one.
    column = text_column if schema == "text" else None
    rows = [_load_rows(name, schema, column, streaming, num_proc) for name in dataset_names]
    parts = [_keep_documents(part, rejected) for part in rows]
    # Without a validation set, read the head of each stream anyway: it shows bad lines before the run starts.
    heads = _read_heads(dataset_names, parts, VALIDATION_SCAN if validation_fraction else RATIO_INTERVAL, rejected)
    validation = datasets.concatenate_datasets(
        [split_documents(head, 0.0, validation_fraction, num_proc) for head in heads]
    )
    if is_evaluation:
        return validation.select([]), validation
    # The training set gets the hashes above the hashes of the validation set. By default, `stop` must be exactly 1.0:
    # a rounded sum below 1.0 could drop a document.
    stop = validation_fraction + (1 - validation_fraction) * train_fraction if train_fraction < 1 else 1.0
    parts = [split_documents(part, validation_fraction, stop, num_proc) for part in parts]
    train, passes = _mix(list(zip(dataset_names, parts, strict=True)), weights, seed)
    # Every dataset derived from a stream inherits this text. A resumed run compares it with the one in its checkpoint.
    described = str(([part.info.description for part in rows], weights, validation_fraction, train_fraction))
    if not streaming:
        share = f"{train_fraction:.0%} of the training documents (--train_fraction)" if train_fraction < 1 else ""
        skipped = f"{rejected.num_rejected:,} bad lines skipped" if rejected.num_rejected else ""
        described = "; ".join(filter(None, (share, skipped, passes)))
    train.info.description = described
    return train, validation


def _read_heads(
    names: list[str], parts: list[Dataset | IterableDataset], scan: int, rejected: RejectedLines
) -> list[Dataset]:
    """
    Return the documents that the validation set comes from: all of a dataset, and the first `scan` of a stream.

    Raises:
        `ValueError`: if a name leads to no document, or if too many lines are bad.
    """
    # The run reads these documents again: training filters the whole stream by the same hash.
    heads = []
    for name, part in zip(names, parts, strict=True):
        head = list(part.take(scan)) if isinstance(part, IterableDataset) else part
        if len(head) == 0:
            raise UserError(f"{name} holds no document to train on.{rejected.describe()}")
        heads.append(Dataset.from_list(head, DOCUMENT_FEATURES) if isinstance(head, list) else head)
    rejected.check_ratio()
    return heads


def _check_arguments(
    dataset_names: list[str],
    weights: list[float] | None,
    validation_fraction: float,
    train_fraction: float,
) -> None:
    """Raise `ValueError` for arguments of [`load_documents`] that are out of range."""
    if weights is not None and not (
        len(weights) == len(dataset_names) and all(0 < weight < float("inf") for weight in weights)
    ):
        raise UserError(
            f"dataset_weights={weights} must be {len(dataset_names)} numbers above 0, one for each dataset name."
        )
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"validation_fraction={validation_fraction} must be at least 0 and below 1. To evaluate on all data, pass "
            "--eval_dataset_name."
        )
    if not 0 < train_fraction <= 1:
        raise UserError(f"train_fraction={train_fraction} must be above 0 and at most 1.")


def _mix(
    parts: list[tuple[str, Dataset | IterableDataset]], weights: list[float] | None, seed: int
) -> tuple[Dataset | IterableDataset, str]:
    """Concatenate named datasets, or mix them by weight; also return how often a pass reads each part of a mixture."""
    documents = [part for _, part in parts]
    for name, part in parts:
        if isinstance(part, Dataset) and len(part) == 0:
            raise UserError(
                f"validation_fraction and train_fraction leave no document of {name} to train on. Lower the first, "
                "raise the second, or add data."
            )
    if weights is None or len(parts) == 1:
        return datasets.concatenate_datasets(documents), ""
    shares = [weight / sum(weights) for weight in weights]
    # `all_exhausted` samples until every dataset has been read in full.
    train = datasets.interleave_datasets(documents, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")
    if isinstance(train, IterableDataset):
        return train, ""
    often = [len(train) * share / len(part) for part, share in zip(documents, shares, strict=True)]
    times = [f"{name} {number:.1f} times" for (name, _), number in zip(parts, often, strict=True)]
    return train, f"a pass reads {', '.join(times)}"


def _load_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Load the rows of one name, with the columns of `ROW_FEATURES`. Rows are cached unless streamed."""
    sources = find_sources(name)
    if sources is None:
        return _load_hub_rows(name, schema, text_column, streaming, num_proc)
    how = {"schema": schema, "text_column": text_column}
    states = [(source, _file_state(source)) for source in sources]
    reading: dict[str, Any] = {"features": RECORD_FEATURES, "gen_kwargs": {"states": states, **how}}
    parsing: dict[str, Any] = {"batched": True, "fn_kwargs": how, "features": ROW_FEATURES}
    parsing["remove_columns"] = list(RECORD_FEATURES)
    if streaming:
        stream = IterableDataset.from_generator(_read_records, **reading).map(_parse_records, **parsing)
        # A resumed run compares this text, too. Names and sizes identify the files; a digest would need to read them.
        stream.info.description = str([how, *((Path(source).name, size) for source, (size, _) in states)])
        return stream
    announce(f"reading {name}")
    try:
        records = Dataset.from_generator(_read_records, **reading, fingerprint=cache_key(how, states))
    except datasets.exceptions.DatasetGenerationError as error:
        # `datasets` wraps every error of the generator. Users should see only the message inside.
        raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None
    return records.map(
        _parse_records,
        **parsing,
        num_proc=count_processes(len(records), num_proc),
        new_fingerprint=cache_key(records._fingerprint, how),
    )


def _file_state(source: str) -> tuple[int, int | str]:
    """Return size and modification time of a file, or the version of an embedded part."""
    if source in EMBEDDED_SOURCES:
        return 0, EMBEDDED_CORPORA[EMBEDDED_SOURCES[source]].version()
    status = Path(source).stat()
    return status.st_size, status.st_mtime_ns


def _read_records(
    states: list[tuple[str, tuple[int, int | str]]], schema: str, text_column: str | None
) -> Iterator[dict[str, Any]]:
    """
    Yield the records of embedded parts and files.

    Raises:
        `ValueError`: if a file has changed since the run began.
    """
    for source, state in states:
        line = 0
        for line, content in read_source(source, schema=schema, text_column=text_column):
            if isinstance(content, BadRecord):
                yield {"source": source, "line": line, "content": None, "fault": content.reason}
            else:
                yield {"source": source, "line": line, "content": content, "fault": None}
        if line == 0:
            raise UserError(f"{source} holds no record. Remove it or write it again.")
        # Its rows would be a mixture of two versions, and other ranks or later epochs would read others.
        if _file_state(source) != state:
            raise UserError(
                f"{source} changed while this run was reading it. Start again. If a program still writes to the file, "
                "use a copy."
            )


def _parse_records(batch: dict[str, list], schema: str, text_column: str | None) -> dict[str, list]:
    """Make rows from a batch of records."""
    rows = []
    for source, line, content, fault in zip(*(batch[name] for name in RECORD_FEATURES), strict=True):
        # The text of an embedded document is in `text`, whatever column the text of other documents is in.
        column = text_column if source not in EMBEDDED_SOURCES else "text"
        rows.append(_make_row(source, line, content if fault is None else BadRecord(fault), schema, column))
    return {column: [row[column] for row in rows] for column in ROW_FEATURES}


def _load_hub_rows(
    name: str, schema: str, text_column: str | None, streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Load the rows of a Hub dataset `name:config[split]@revision`."""
    records = load_hub_dataset(name, streaming=streaming, num_proc=num_proc)
    # Some streams learn their columns only from the first record.
    columns = records.column_names or list(next(iter(records), ()))
    if not columns:
        raise UserError(f"{name} holds no record. Check the name, its configuration and its split.")
    if text_column is not None and text_column not in columns:
        raise UserError(f"{name} has no column {text_column!r} but {', '.join(columns)}; pass --text_column.")
    how = (name, schema, text_column)
    parsing: dict[str, Any] = {}
    if not streaming:
        parsing["num_proc"] = count_processes(len(records), num_proc)
        parsing["new_fingerprint"] = cache_key(records._fingerprint, *how)
    rows = records.map(
        _check_records,
        batched=True,
        with_indices=True,
        fn_kwargs={"name": name, "schema": schema, "text_column": text_column, "types": records.features},
        features=ROW_FEATURES,
        remove_columns=columns,
        **parsing,
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
        rows.append(_make_row(name, index + 1, record, schema, text_column))
    return {column: [row[column] for row in rows] for column in ROW_FEATURES}


def _make_row(
    source: str, line: int, content: str | dict | BadRecord, schema: str, text_column: str | None
) -> dict[str, Any]:
    """Make one row: the text of a good record, parsed or as JSON, or the position of a bad one with the reason."""
    try:
        record = content if isinstance(content, dict) else parse_json(content)
        if schema == "text":
            text = read_text(record, text_column=text_column)
            # The split hashes the text of documents that are not embedded.
            origin = record["origin"] if source in EMBEDDED_SOURCES else None
        else:
            text = SCHEMAS[schema](record)
            origin = first_question(text)
        return {"text": text, "origin": origin, "source": None, "line": None, "reason": None}
    except BadRecord as error:
        return {"text": "", "origin": None, "source": source, "line": line, "reason": error.reason}


def _keep_documents(rows: Dataset | IterableDataset, rejected: RejectedLines) -> Dataset | IterableDataset:
    """Return the documents among rows, and record the others as rejected."""
    if isinstance(rows, IterableDataset):
        # `keep` counts bad lines while the run reads the stream, so too many of them can also stop a run late.
        return rows.filter(rejected.keep).select_columns(list(DOCUMENT_FEATURES))
    # Read the column from Arrow: a Python loop over all rows would take minutes for large data.
    # A row is bad if its reason is not null. An empty dataset has no chunks.
    is_bad = np.concatenate([chunk.is_valid() for chunk in rows.data.column("reason").chunks] or [[]]).astype(bool)
    rejected.num_lines += len(rows)
    # `[:]` reads all bad rows at once, which is faster than iterating over them.
    bad = rows.select(np.flatnonzero(is_bad))[:]
    for source, line, reason in zip(bad["source"], bad["line"], bad["reason"], strict=True):
        rejected.add(source, line, reason)
    documents = rows.select_columns(list(DOCUMENT_FEATURES))
    # A selection reads through a table of indices, which is slower. Data without bad lines do not need one.
    return documents.select(np.flatnonzero(~is_bad)) if is_bad.any() else documents


def split_documents(
    documents: Dataset | IterableDataset, start: float, stop: float, num_proc: int | None
) -> Dataset | IterableDataset:
    """
    Return the documents whose hash lies in [`start`, `stop`), with only the column `text`.

    Args:
        documents ([`Dataset`] or [`IterableDataset`]): with the columns of `DOCUMENT_FEATURES`.
        start, stop (`float`): range within [0, 1].
        num_proc (`int`, *optional*): number of processes; by default one per core, up to 8.
    """
    is_wanted = partial(hashes_are_between, start=start, stop=stop)
    how: dict[str, Any] = {}
    if isinstance(documents, Dataset):
        how["new_fingerprint"] = cache_key(documents._fingerprint, start, stop)
        # A hash takes microseconds, and a process a tenth of a second to start.
        how["num_proc"] = count_processes(len(documents) // 10, num_proc)
    documents = documents.filter(is_wanted, batched=True, input_columns=list(DOCUMENT_FEATURES), **how)
    return documents.select_columns(["text"])


def hashes_are_between(texts: list[str], origins: list[str | None], start: float, stop: float) -> list[bool]:
    """
    Return, for each document, whether its hash as a number in [0, 1) lies in [`start`, `stop`).

    The function hashes the document's origin, such as the first question of a conversation, so that all documents with
    the same origin land in the same set. It hashes the text of a document without an origin.
    """
    keys = (text if origin is None else origin for text, origin in zip(texts, origins, strict=True))
    hashes = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
    # NOTE: Python's `hash` differs between processes, so each rank would get a different split. Multiplying a bound by
    # a power of two is exact, so neighbouring ranges neither overlap nor leave a gap.
    return [start * 2**64 <= int.from_bytes(value) < stop * 2**64 for value in hashes]
