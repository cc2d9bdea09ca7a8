"""
The manifest of prepared rows: a JSON file beside their Arrow files in the cache of `datasets`, with their kind, their
counts, a digest of all rows and a digest of the tokenizer.

The process that prepares the rows writes it. A run that starts or resumes later compares the digest and reads no row.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash
from datasets import Dataset

from ..runtime.writing import moved_when_whole


# Columns that TRL computes with the reference model. On a GPU, their last bits may change; its weights do not.
_REFERENCE_COLUMNS = {"ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"}


def describe_data(dataset: Any) -> dict[str, Any]:
    """
    Return the number of rows of a dataset and a digest of all rows, from its manifest if it has one. For a stream,
    return a digest of its description; for any other kind of dataset, return an empty `dict`.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return {"digest": xxhash.xxh3_128(dataset.info.description.encode()).hexdigest()}
    if not isinstance(dataset, Dataset):
        return {}
    return _read_manifest(dataset) or {"rows": len(dataset), "digest": _digest_rows(dataset)}


def _digest_rows(rows: Dataset) -> str:
    digest = xxhash.xxh3_128()
    names = [name for name in rows.column_names if name not in _REFERENCE_COLUMNS]
    for table in rows.select_columns(names).with_format("arrow").iter(batch_size=1000):
        # NOTE: a slice would be serialized with some bytes of the rows after it. `take` copies the rows of a batch.
        for batch in table.take(np.arange(len(table))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def write_rows_manifest(rows: Dataset, **facts: str) -> None:
    """
    Write the manifest of rows that have just been prepared, or found in the cache, unless it is there and intact.

    Args:
        rows ([`~datasets.Dataset`]): the rows, as the trainer gets them.
        facts (`str`): what else the manifest says to its readers.
    """
    if (path := _manifest_path(rows)) is None or _read_manifest(rows):
        return
    content = {**facts, "rows": len(rows), "digest": _digest_rows(rows), "files": _file_states(rows)}
    # Without a manifest, for example on a full disk, the run hashes the rows where it needs the digest.
    with suppress(OSError), moved_when_whole(path.parent) as scratch:
        (scratch / path.name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _read_manifest(rows: Dataset) -> dict[str, Any]:
    """Return `rows` and `digest` of a manifest; an empty `dict` if it is missing, damaged, or of other files."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if (path := _manifest_path(rows)) is not None:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["files"] == _file_states(rows) and content["rows"] == len(rows):
                return {"rows": len(rows), "digest": str(content["digest"])}
    return {}


def _manifest_path(rows: Dataset) -> Path | None:
    """Return the path of the manifest; `None` for rows in memory. Every change of a dataset gives another name."""
    files = rows.cache_files
    return Path(files[0]["filename"]).with_name(f"manifest-{rows._fingerprint}.json") if files else None


def _file_states(rows: Dataset) -> dict[str, list[int]]:
    """Return size and modification time of each Arrow file."""
    states = {Path(file["filename"]): Path(file["filename"]).stat() for file in rows.cache_files}
    return {path.name: [state.st_size, state.st_mtime_ns] for path, state in states.items()}
