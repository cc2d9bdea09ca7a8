"""
Load documents: embedded corpora, files and Hub datasets, mixed and split into a training and a validation set.

`datasets` holds the rows, and parses them in several processes. The lines of files are read by `data/formats.py`,
because the builders of `datasets` fail a whole load on one corrupt line and accept numbers in place of text. A bad
line is rejected with file, line and reason. Too many bad lines stop the run before it starts.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import public_name
from .caching import cache_key, count_processes
from .columns import parse_columns
from .conversations import first_question
from .corpora import EMBEDDED_CORPORA
from .formats import BadRecord, drop_padding
from .hub_datasets import load_hub_dataset
from .records import Record, check_record
from .rejected import RATIO_INTERVAL, RejectedLines
from .sources import EMBEDDED_SOURCES, find_sources, read_source


_TEXT, _NUMBER = Value("string"), Value("int64")
# A line of a source: a record as JSON text, or its fault.
LINE_FEATURES = Features({"source": _TEXT, "line": _NUMBER, "content": _TEXT, "fault": _TEXT})
DOCUMENT_FEATURES = Features({"text": _TEXT, "origin": _TEXT})
# A good record has `text`, and `origin` if the split hashes something other than the text. A bad one has an empty
# text, its position and a reason.
RECORD_FEATURES = Features({**DOCUMENT_FEATURES, "source": _TEXT, "line": _NUMBER, "reason": _TEXT})
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
    columns: list[str] | None = None,
    **files: Any,
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
        columns (`list[str]`, *optional*): as in [`~data.columns.parse_columns`].
        files: `encoding` and `whole_files`, as in [`~data.formats.read_file`].

    Returns:
        `tuple`: training set and validation set, each with the single column `text`.

    Raises:
        `UserError`: if a name leads to no data or only to bad data, a file cannot be read, too many lines are bad, or
            the weights do not fit the names.
        `ImportError`: if a package that holds data or decompresses them is not installed.
    """
    if weights is not None and len(weights) != len(dataset_names):
        raise UserError(f"dataset_weights={weights} must be {len(dataset_names)} numbers above 0, one for each name.")
    rejected = RejectedLines(max_rejected_ratio, rejected_path)
    # Conversations and preferences need all columns of a file, texts only one.
    renamed = parse_columns(columns)
    text_column = renamed.pop("text", text_column)
    how = {"schema": schema, "text_column": text_column if schema == "text" else None, "columns": renamed}
    records = [_load_records(name, how, files, streaming, num_proc) for name in dataset_names]
    parts = [_keep_documents(part, rejected) for part in records]
    # Without a validation set, read the head of each stream anyway: it shows bad lines before the run starts.
    heads = _read_heads(dataset_names, parts, VALIDATION_SCAN if validation_fraction else RATIO_INTERVAL, rejected)
    if validation_fraction and not streaming:
        validation_fraction = _reach_documents(heads, validation_fraction, schema)
    validation = concatenate_datasets([split_documents(head, 0.0, validation_fraction, num_proc) for head in heads])
    if is_evaluation:
        return validation.select([]), validation
    # The training set gets the hashes above the hashes of the validation set. By default, `stop` must be exactly 1.0:
    # a rounded sum below 1.0 could drop a document.
    stop = validation_fraction + (1 - validation_fraction) * train_fraction if train_fraction < 1 else 1.0
    parts = [split_documents(part, validation_fraction, stop, num_proc) for part in parts]
    train, passes = _mix(dataset_names, parts, weights, seed)
    # Every dataset derived from a stream inherits this text. A resumed run compares it with the one in its checkpoint.
    described = str(([part.info.description for part in records], weights, validation_fraction, train_fraction))
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


def _reach_documents(heads: list[Dataset], fraction: float, schema: str) -> float:
    """
    Return the share of the documents for validation, or a larger one where no document has such a hash by chance.

    Of ten texts or more, at least one is for validation. Of conversations, which may be facts to learn, it is the
    share that the user asks for.
    """
    number = sum(map(len, heads))
    wanted = max(int(number * fraction), int(schema == "text" and number >= 10))
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


def _load_records(
    name: str, how: dict[str, Any], files: dict[str, Any], streaming: bool, num_proc: int | None
) -> Dataset | IterableDataset:
    """Load the checked records of one name, with the columns of `RECORD_FEATURES`. They are cached unless streamed."""
    sources = find_sources(name)
    states = [(source, _file_state(source)) for source in sources or []]
    if states:
        lines = _load_lines(name, states, how | files, streaming)
    else:
        lines = load_hub_dataset(name, streaming=streaming, num_proc=num_proc)
    # Some streams learn their columns only from the first record.
    columns = lines.column_names or list(next(iter(lines), ()))
    if not columns:
        raise UserError(f"{name} holds no record. Check the name, its configuration and its split.")
    text_column = how["text_column"]
    if not states and text_column is not None and text_column not in columns:
        raise UserError(f"{name} has no column {text_column!r} but {', '.join(columns)}; pass --text_column.")
    # A resumed run compares this text of a stream. A digest of the files would need to read them.
    names_and_sizes = [(Path(source).name, size) for source, (size, _) in states] or name
    lines.info.description = str([how, files, names_and_sizes]) if streaming else ""
    hub_name = None if states else name
    checking: dict[str, Any] = {"fn_kwargs": {"hub_name": hub_name, "types": lines.features, **how}}
    checking |= {"features": RECORD_FEATURES, "remove_columns": columns}
    if isinstance(lines, Dataset):
        checking["num_proc"] = count_processes(len(lines), num_proc)
        checking["new_fingerprint"] = cache_key(lines._fingerprint, how, hub_name)
    return lines.map(_check_lines, batched=True, with_indices=True, **checking)


def _load_lines(
    name: str, states: list[tuple[str, tuple[int, int | str]]], how: dict[str, Any], streaming: bool
) -> Dataset | IterableDataset:
    """Load the lines of files and embedded parts, with the columns of `LINE_FEATURES`."""
    reading: dict[str, Any] = {"features": LINE_FEATURES, "gen_kwargs": {"states": states, **how}}
    if streaming:
        return IterableDataset.from_generator(_read_lines, **reading)
    announce(f"reading {name}")
    # A file may change and keep its size and its time.
    contents = [(source, state if source in EMBEDDED_SOURCES else _digest_file(source)) for source, state in states]
    try:
        return Dataset.from_generator(_read_lines, **reading, fingerprint=cache_key(how, contents))
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


def _read_lines(states: list[tuple[str, tuple[int, int | str]]], **how: Any) -> Iterator[dict[str, Any]]:
    """
    Yield the lines of embedded parts and files.

    Raises:
        `UserError`: if a file has changed since the run began.
    """
    for source, state in states:
        line = 0
        for line, content in read_source(source, **how):
            fault = content.reason if isinstance(content, BadRecord) else None
            yield {"source": source, "line": line, "content": content if fault is None else None, "fault": fault}
        if line == 0:
            raise UserError(f"{source} holds no record. Remove it or write it again.")
        # Its records would be a mixture of two versions, and other ranks or later epochs would read others.
        if _file_state(source) != state:
            raise UserError(f"{source} changed while this run was reading it. Start again, or read a copy.")


def _check_lines(
    batch: dict[str, list], indices: list[int], hub_name: str | None, types: Features | None, **how: Any
) -> dict[str, list]:
    """Check a batch of lines; or of rows of a Hub dataset, whose columns have the given types."""
    rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    records: list[tuple] = []
    for index, row in zip(indices, rows, strict=True):
        if hub_name is not None:
            record = check_record(hub_name, index + 1, drop_padding(row, types), **how)
        else:
            content = row["content"] if row["fault"] is None else BadRecord(row["fault"])
            record = check_record(row["source"], row["line"], content, **how)
        if record.reason:
            records.append(("", None, record.source, record.line, record.reason))
        else:
            records.append((record.text, _find_origin(record), None, None, None))
    return dict(zip(RECORD_FEATURES, map(list, zip(*records, strict=True)), strict=True))


def _find_origin(record: Record) -> str | None:
    """Return the text that the split hashes in place of the document; `None` for a text that is not embedded."""
    if record.schema != "text":
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
    # Multiplying a bound by a power of two is exact, so neighbouring ranges neither overlap nor leave a gap.
    return [start * 2**64 <= value < stop * 2**64 for value in hash_documents(texts, origins)]


def hash_documents(texts: list[str], origins: list[str | None]) -> list[int]:
    """Return the hash of each document's origin, or of its text without one, as a number below 2^64."""
    keys = (text if origin is None else origin for text, origin in zip(texts, origins, strict=True))
    # NOTE: Python's `hash` differs between processes, so each rank would get a different split.
    return [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) for key in keys]
