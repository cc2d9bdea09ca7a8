"""
Load documents: embedded corpora, files and Hub datasets, mixed and split into a training and a validation set.

`datasets` holds the rows, and parses them in several processes. The lines of files are read by `data/formats.py`,
because the builders of `datasets` fail a whole load on one corrupt line and accept numbers in place of text. A bad
line is rejected with file, line and reason. Too many bad lines stop the run before it starts.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets

from ..rows.caching import cache_key, count_processes
from ..rows.reading import Reading
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import public_name
from .columns import columns_of
from .conversations import first_question
from .corpora import EMBEDDED_CORPORA
from .formats import BadRecord, drop_padding
from .hub_datasets import load_hub_dataset
from .records import Record, check_record
from .rejected import RATIO_INTERVAL, RejectedLines
from .sources import EMBEDDED_SOURCES, find_sources, name_eval_sets, read_source


_TEXT, _NUMBER = Value("string"), Value("int64")
# A line of a source: a record as JSON text, or its fault.
LINE_FEATURES = Features({"source": _TEXT, "line": _NUMBER, "content": _TEXT, "fault": _TEXT})
DOCUMENT_FEATURES = Features({"text": _TEXT, "origin": _TEXT})
# A good record has `text`, and `origin` if the split hashes something other than the text. A bad one has an empty
# text, its position and a reason.
RECORD_FEATURES = Features({**DOCUMENT_FEATURES, "source": _TEXT, "line": _NUMBER, "reason": _TEXT})
# The validation set of a stream comes from this many documents at its start.
VALIDATION_SCAN = 50_000


def load_sets(
    names: list[str],
    eval_names: list[str] | None,
    reading: Reading,
    *,
    directory: Path | None = None,
    is_evaluation: bool = False,
) -> tuple[Dataset | IterableDataset, dict[str, Dataset]]:
    """
    Load the training set, shuffled if it is a stream, and the validation sets by name, by [`load_documents`]. A single
    validation set has the name "".

    Args:
        names, eval_names (`list[str]`): names of the data and, if the user gives some, of the validation data.
        reading ([`~rows.reading.Reading`]): how the user wants them to be read.
        directory (`Path`, *optional*): directory of `rejected.jsonl`, which lists bad lines.
        is_evaluation (`bool`, defaults to `False`): return an empty training set.
    """
    validation: dict[str, Any] = {}
    # Without a fraction for validation, the training set is the whole set.
    whole = replace(reading, validation_fraction=0.0, train_fraction=1.0, dataset_weights=None, streaming=False)
    # An evaluation may take the training data, too.
    for label, name in name_eval_sets(eval_names, [] if is_evaluation else names).items():
        path = directory and directory / f"rejected-eval{label and '-'}{label}.jsonl"
        validation[label], _ = load_documents([name], whole, rejected_path=path)
    if validation and is_evaluation:
        return next(iter(validation.values())).select([]), validation
    reading = replace(reading, validation_fraction=0.0) if validation else reading
    path = directory and directory / "rejected.jsonl"
    train, split = load_documents(names, reading, rejected_path=path, is_evaluation=is_evaluation)
    # Streams are shuffled within a buffer of 10,000 documents; a `Dataset` is shuffled by the Trainer's sampler. An
    # evaluation gets an empty training set, which is no stream.
    if isinstance(train, IterableDataset):
        train = train.shuffle(seed=reading.seed, buffer_size=10_000)
    return train, validation or {"": split}


def load_documents(
    dataset_names: list[str],
    reading: Reading = Reading(),
    *,
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
        reading ([`~rows.reading.Reading`]): how the user wants them to be read, mixed and divided.
        rejected_path (`str` or `Path`, *optional*): JSONL file that lists bad lines: source, line (counted from 1) and
            reason.
        is_evaluation (`bool`, defaults to `False`): return an empty training set.

    Returns:
        `tuple`: training set and validation set, each with the single column `text`.

    Raises:
        `UserError`: if a name leads to no data or only to bad data, a file cannot be read, too many lines are bad, or
            the weights do not fit the names.
        `ImportError`: if a package that holds data or decompresses them is not installed.
    """
    fraction, weights, num_proc = reading.validation_fraction, reading.dataset_weights, reading.num_proc
    if weights is not None and len(weights) != len(dataset_names):
        raise UserError(f"dataset_weights={weights} must be {len(dataset_names)} numbers above 0, one for each name.")
    rejected = RejectedLines(reading.max_rejected_ratio, rejected_path)
    records = [_load_records(name, reading) for name in dataset_names]
    parts = [_keep_documents(part, rejected) for part in records]
    # Without a validation set, read the head of each stream anyway: it shows bad lines before the run starts.
    heads = _read_heads(dataset_names, parts, VALIDATION_SCAN if fraction else RATIO_INTERVAL, rejected)
    if fraction and not reading.streaming:
        fraction = _reach_documents(heads, fraction, reading.kind)
    validation = concatenate_datasets([split_documents(head, 0.0, fraction, num_proc) for head in heads])
    if is_evaluation:
        return validation.select([]), validation
    # The training set gets the hashes above the hashes of the validation set. By default, `stop` must be exactly 1.0:
    # a rounded sum below 1.0 could drop a document.
    stop = fraction + (1 - fraction) * reading.train_fraction if reading.train_fraction < 1 else 1.0
    parts = [split_documents(part, fraction, stop, num_proc) for part in parts]
    train, passes = _mix(dataset_names, parts, weights, reading.seed)
    if reading.streaming:
        # Every dataset derived from a stream inherits this text. A resumed run compares it with the one in its
        # checkpoint.
        described = str(([part.info.description for part in records], weights, fraction, reading.train_fraction))
    else:
        share = f"{reading.train_fraction:.0%} of the training documents (--train_fraction)"
        share = share if reading.train_fraction < 1 else ""
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
        `UserError`: if a name leads to no document, or if too many lines are bad.
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


def _reach_documents(heads: list[Dataset], fraction: float, kind: str | None) -> float:
    """
    Return the share of the documents for validation, or a larger one where no document has such a hash by chance.

    Of ten texts or more, at least one is for validation. Of conversations, which may be facts to learn, it is the
    share that the user asks for.
    """
    number = sum(map(len, heads))
    wanted = max(int(number * fraction), int(kind == "text" and number >= 10))
    # Larger data have documents with such hashes.
    if not wanted or number > 10_000:
        return fraction
    parts = [sorted(hash_documents(*head[:].values())) for head in heads]
    hashes = sorted(sum(parts, []))
    reached = math.nextafter(hashes[wanted - 1] / 2**64, 1.0)
    # No name may lose all of its documents.
    if hashes[0] < fraction * 2**64 or any(part[-1] < reached * 2**64 for part in parts):
        return fraction
    announce(f"taking {wanted} of {number:,} documents for validation")
    return reached


def _mix(
    names: list[str], parts: list[Dataset | IterableDataset], weights: list[float] | None, seed: int
) -> tuple[Dataset | IterableDataset, str]:
    """Concatenate named datasets, or mix them by weight; also return how often a pass reads each part of a mixture."""
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, Dataset) and len(part) == 0:
            raise UserError(f"validation_fraction and train_fraction leave no document of {name}. Lower the first.")
    if weights is None or len(parts) == 1:
        return concatenate_datasets(parts), ""
    shares = [weight / sum(weights) for weight in weights]
    # `all_exhausted` samples until every dataset has been read in full.
    train = datasets.interleave_datasets(parts, probabilities=shares, seed=seed, stopping_strategy="all_exhausted")
    if isinstance(train, IterableDataset):
        return train, ""
    often = [len(train) * share / len(part) for part, share in zip(parts, shares, strict=True)]
    times = [f"{public_name(name)} {number:.1f} times" for name, number in zip(names, often, strict=True)]
    return train, f"a pass reads {', '.join(times)}"


def _load_records(name: str, reading: Reading) -> Dataset | IterableDataset:
    """Load the checked records of one name, with the columns of `RECORD_FEATURES`. They are cached unless streamed."""
    text_column, renamed = columns_of(reading)
    is_text = reading.kind == "text"
    # What decides the content of a record. Checkpoints hold digests of this text.
    choices: list[Any] = [
        {"schema": reading.kind, "text_column": text_column if is_text else None, "columns": renamed},
        {"encoding": reading.encoding, "whole_files": reading.whole_files},
    ]
    sources = find_sources(name)
    states = [(source, _file_state(source)) for source in sources or []]
    if states:
        lines = _load_lines(name, states, reading, choices)
    else:
        lines = load_hub_dataset(name, streaming=reading.streaming, num_proc=reading.num_proc)
    # Some streams learn their columns only from the first record.
    columns = lines.column_names or list(next(iter(lines), ()))
    if not columns:
        raise UserError(f"{name} holds no record. Check the name, its configuration and its split.")
    if not states and is_text and text_column not in columns:
        raise UserError(f"{name} has no column {text_column!r} but {', '.join(columns)}; pass --text_column.")
    # A resumed run compares this text of a stream. A digest of the files would need to read them.
    names_and_sizes = [(Path(source).name, size) for source, (size, _) in states] or name
    lines.info.description = str([*choices, names_and_sizes]) if reading.streaming else ""
    hub_name = None if states else name
    checking: dict[str, Any] = {"fn_kwargs": {"hub_name": hub_name, "types": lines.features, "reading": reading}}
    checking |= {"features": RECORD_FEATURES, "remove_columns": columns}
    if isinstance(lines, Dataset):
        checking["num_proc"] = count_processes(len(lines), reading.num_proc)
        checking["new_fingerprint"] = cache_key(lines._fingerprint, choices, hub_name)
    return lines.map(_check_lines, batched=True, with_indices=True, **checking)


def _load_lines(
    name: str, states: list[tuple[str, tuple[int, int | str]]], reading: Reading, choices: list[Any]
) -> Dataset | IterableDataset:
    """Load the lines of files and embedded parts, with the columns of `LINE_FEATURES`."""
    arguments: dict[str, Any] = {"features": LINE_FEATURES, "gen_kwargs": {"states": states, "reading": reading}}
    if reading.streaming:
        return IterableDataset.from_generator(_read_lines, **arguments)
    announce(f"reading {name}")
    # A file may change and keep its size and its time.
    contents = [(source, state if source in EMBEDDED_SOURCES else _digest_file(source)) for source, state in states]
    try:
        return Dataset.from_generator(_read_lines, **arguments, fingerprint=cache_key(choices, contents))
    except datasets.exceptions.DatasetGenerationError as error:
        # `datasets` wraps every error of the generator. Users should see only the message inside.
        raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None


def _file_state(source: str) -> tuple[int, int | str]:
    """Return size and modification time of a file, or the version of an embedded part."""
    if source in EMBEDDED_SOURCES:
        return 0, EMBEDDED_CORPORA[EMBEDDED_SOURCES[source]].version()
    status = Path(source).stat()
    return status.st_size, status.st_mtime_ns


def _digest_file(source: str) -> str:
    """Return a digest of the bytes of a file."""
    with open(source, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _read_lines(states: list[tuple[str, tuple[int, int | str]]], reading: Reading) -> Iterator[dict[str, Any]]:
    """
    Yield the lines of embedded parts and files.

    Raises:
        `UserError`: if a file has changed since the run began.
    """
    for source, state in states:
        line = 0
        for line, content in read_source(source, reading):
            fault = content.reason if isinstance(content, BadRecord) else None
            yield {"source": source, "line": line, "content": content if fault is None else None, "fault": fault}
        if line == 0:
            raise UserError(f"{source} holds no record. Remove it or write it again.")
        # Its records would be a mixture of two versions, and other ranks or later epochs would read others.
        if _file_state(source) != state:
            raise UserError(f"{source} changed while this run was reading it. Start again, or read a copy.")


def _check_lines(
    batch: dict[str, list], indices: list[int], hub_name: str | None, types: Features | None, reading: Reading
) -> dict[str, list]:
    """Check a batch of lines; or of rows of a Hub dataset, whose columns have the given types."""
    rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    records: list[tuple] = []
    for index, row in zip(indices, rows, strict=True):
        if hub_name is not None:
            record = check_record(hub_name, index + 1, drop_padding(row, types), reading)
        else:
            content = row["content"] if row["fault"] is None else BadRecord(row["fault"])
            record = check_record(row["source"], row["line"], content, reading)
        if record.reason:
            records.append(("", None, record.source, record.line, record.reason))
        else:
            records.append((record.text, _find_origin(record), None, None, None))
    return dict(zip(RECORD_FEATURES, map(list, zip(*records, strict=True)), strict=True))


def _find_origin(record: Record) -> str | None:
    """Return the text that the split hashes in place of the document; `None` for a text that is not embedded."""
    if record.kind != "text":
        return first_question(record.text)
    return record.content["origin"] if record.source in EMBEDDED_SOURCES else None


def _keep_documents(records: Dataset | IterableDataset, rejected: RejectedLines) -> Dataset | IterableDataset:
    """Return the documents among checked records, and record the others as rejected."""
    if isinstance(records, IterableDataset):
        # `keep` counts bad lines while the run reads the stream, so too many of them can also stop a run late.
        return records.filter(rejected.keep).select_columns(list(DOCUMENT_FEATURES))
    # Read the column from Arrow: a Python loop over all records would take minutes for large data.
    is_bad = pc.is_valid(records.data.column("reason")).to_numpy()
    rejected.num_lines += len(records)
    for line in records.select(np.flatnonzero(is_bad)).to_list():
        rejected.add(line["source"], line["line"], line["reason"])
    documents = records.select_columns(list(DOCUMENT_FEATURES))
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
    caching: dict[str, Any] = {}
    if isinstance(documents, Dataset):
        caching["new_fingerprint"] = cache_key(documents._fingerprint, start, stop)
        # A hash takes microseconds, and a process a tenth of a second to start.
        caching["num_proc"] = count_processes(len(documents) // 10, num_proc)
    documents = documents.filter(is_wanted, batched=True, input_columns=list(DOCUMENT_FEATURES), **caching)
    return documents.select_columns(["text"])


def hashes_are_between(texts: list[str], origins: list[str | None], start: float, stop: float) -> list[bool]:
    """
    Return, for each document, whether its hash as a number in [0, 1) lies in [`start`, `stop`).

    The function hashes the document's origin, such as the first question of a conversation, so that all documents with
    the same origin land in the same set. It hashes the text of a document without an origin.
    """
    # Multiplying a bound by a power of two is exact, so neighbouring ranges neither overlap nor leave a gap.
    return [start * 2**64 <= value < stop * 2**64 for value in hash_documents(texts, origins)]


def hash_documents(texts: list[str], origins: list[str | None]) -> list[int]:
    """Return the hash of each document's origin, or of its text without one, as a number below 2^64."""
    keys = (text if origin is None else origin for text, origin in zip(texts, origins, strict=True))
    # NOTE: Python's `hash` differs between processes, so each rank would get a different split.
    return [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) for key in keys]
