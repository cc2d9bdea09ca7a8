"""
A cache on disk of the teacher's log-probabilities for every row, computed once.

For each token, the cache holds the teacher's `top_k` largest log-probabilities of the next token at the run's
temperature, the ids of these tokens, and the log-probability of all other tokens together:

    <directory>/log_probs.npy   float32 (num_tokens, top_k + 1)
    <directory>/indices.npy     uint16 or int32 (num_tokens, top_k)
    <directory>/meta.json       the inputs of the cache; written last, so a cache without it is computed again

The KL is computed over these `top_k + 1` classes. It never exceeds the KL over the whole vocabulary, because merging
classes can only bring two distributions closer. It ignores how the student distributes probability within the rest. If
`top_k` equals the vocabulary, there is no rest, and the KL is exact.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments
from transformers.utils import logging

from ..runtime.activity import activity
from ..runtime.errors import UserError
from ..runtime.processes import on_main_process


logger = logging.get_logger(__name__)

ROW_COLUMN = "teacher_row"


def keep_top(log_probs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """
    Return the log-probabilities of the chosen classes, and of all other classes together as one more class.

    Args:
        log_probs (`torch.FloatTensor` of shape `(..., vocab_size)`)
        indices (`torch.LongTensor` of shape `(..., top_k)`): the classes to keep.

    Returns:
        `torch.FloatTensor` of shape `(..., top_k + 1)`, or `(..., top_k)` if `indices` holds all classes.
    """
    top = log_probs.gather(-1, indices)
    # With all classes kept, the rest would be log(0), and its term of the KL would be NaN.
    if indices.shape[-1] == log_probs.shape[-1]:
        return top
    rest = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top, rest], dim=-1)


@dataclass
class TeacherCache:
    """
    An open cache.

    Args:
        log_probs (`np.memmap` of shape `(num_tokens, top_k + 1)`): the file, mapped into memory but not read.
        indices (`np.memmap` of shape `(num_tokens, top_k)`): the file of token ids, mapped likewise.
        starts (`np.ndarray` of shape `(num_rows + 1,)`): the first token of each row.
    """

    log_probs: np.memmap
    indices: np.memmap
    starts: np.ndarray

    def collate(self, rows: list[int], seq_len: int) -> dict[str, torch.Tensor]:
        """
        Return `teacher_log_probs` and `teacher_indices` of some rows, `(num_rows, seq_len, ...)`, with zeros in the
        padding.
        """
        log_probs = np.zeros((len(rows), seq_len, self.log_probs.shape[1]), dtype=np.float32)
        # `gather` does not accept uint16.
        indices = np.zeros((len(rows), seq_len, self.indices.shape[1]), dtype=np.int64)
        for number, row in enumerate(rows):
            start, end = self.starts[row], self.starts[row + 1]
            log_probs[number, : end - start] = self.log_probs[start:end]
            indices[number, : end - start] = self.indices[start:end]
        return {"teacher_log_probs": torch.from_numpy(log_probs), "teacher_indices": torch.from_numpy(indices)}


class TeacherCollator:
    """Collate with another collator, and add the cached log-probabilities of rows that [`open_cache`] numbered."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], cache: TeacherCache):
        self.collator = collator
        self.cache = cache

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if ROW_COLUMN not in features[0]:
            raise UserError(
                "These rows are not in the teacher's cache, which holds the rows of the trainer's datasets. Leave out "
                "--cache_teacher_logits to evaluate on others."
            )
        rows = [feature[ROW_COLUMN] for feature in features]
        batch = self.collator([{k: v for k, v in f.items() if k != ROW_COLUMN} for f in features])
        return batch | self.cache.collate(rows, batch["input_ids"].shape[1])


def open_cache(
    directory: Path,
    row_sets: list[datasets.Dataset],
    ask: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    *,
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
    top_k: int,
    vocab_size: int,
    described_by: dict[str, Any],
    args: TrainingArguments,
) -> tuple[TeacherCache, list[datasets.Dataset]]:
    """
    Open the cache in `directory`. Compute it first if it is missing, or belongs to other rows or another teacher.

    All ranks must call this function. Each rank computes its share of the rows, on a file system that all ranks share.

    Args:
        directory (`Path`): directory of the cache.
        row_sets (`list[datasets.Dataset]`): the packed rows, such as training and validation set.
        ask (`Callable`): returns the teacher's log-probabilities for a batch, `(batch_size, seq_len, vocab_size)`.
        collator (`Callable`): makes a batch from rows.
        top_k (`int`): log-probabilities to keep per token.
        vocab_size (`int`): the size of the shared vocabulary.
        described_by (`dict`): all other inputs of the log-probabilities, for `meta.json`.
        args ([`~transformers.TrainingArguments`]): gives the ranks and the batch size.

    Returns:
        `tuple`: the cache, and the row sets with a column that holds the number of each row in the cache.

    Raises:
        `ValueError`: in the cases of [`check_cacheable`].
    """
    check_cacheable(row_sets, top_k, vocab_size)
    rows = datasets.concatenate_datasets(row_sets)
    # The cache stores tokens without padding, one row after the other.
    lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    meta = {"rows": _digest(row_sets), "top_k": top_k, "vocab_size": vocab_size, **described_by}
    is_main = args.process_index == 0
    # The main process decides for all ranks: another rank may have a stale view of the file system.
    is_made = broadcast_object_list([_read_meta(directory) == meta])[0]
    if not is_made:
        on_main_process(args, lambda: _allocate(directory, int(starts[-1]), top_k=top_k, vocab_size=vocab_size))
        # Shares may differ in size: each rank holds the whole teacher, so no rank waits for another.
        share = np.array_split(np.arange(len(rows)), args.world_size)[args.process_index]
        _fill(
            _open(directory, starts, mode="r+"), rows, share, ask, collator, batch_size=args.per_device_eval_batch_size
        )
        # Every rank must have written its rows before `meta.json` declares the cache complete.
        args.distributed_state.wait_for_everyone()
        if is_main:
            (directory / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    numbered, first = [], 0
    for row_set in row_sets:
        numbered.append(row_set.add_column(ROW_COLUMN, np.arange(first, first + len(row_set))))
        first += len(row_set)
    return _open(directory, starts, mode="r"), numbered


def check_cacheable(row_sets: list[datasets.Dataset], top_k: int, vocab_size: int) -> None:
    """Raise `ValueError` for streamed rows, or a `top_k` that exceeds the vocabulary."""
    if not all(isinstance(rows, datasets.Dataset) for rows in row_sets):
        raise UserError(
            "--cache_teacher_logits needs rows with numbers, and a stream has none: leave it or --streaming out."
        )
    if not 1 <= top_k <= vocab_size:
        raise UserError(f"--cache_teacher_logits {top_k} must lie between 1 and the vocabulary of {vocab_size}.")


def _digest(row_sets: list[datasets.Dataset]) -> str:
    """Return a hash of all tokens and document boundaries."""
    digest = hashlib.blake2b(digest_size=16)
    for rows in row_sets:
        table = rows.with_format("arrow")[:]
        for name in ("input_ids", "seq_lengths"):
            column = table[name].combine_chunks()
            digest.update(column.value_lengths().to_numpy().tobytes() + column.flatten().to_numpy().tobytes())
    return digest.hexdigest()


def _read_meta(directory: Path) -> dict[str, Any] | None:
    """Return the description of the cache in `meta.json`; `None` if the cache is incomplete."""
    try:
        return json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    # A full disk or a killed run may have left half a file.
    except (OSError, ValueError):
        return None


def _allocate(directory: Path, num_tokens: int, *, top_k: int, vocab_size: int):
    """Create the files at their full size, so that every rank can write its part."""
    directory.mkdir(parents=True, exist_ok=True)
    # Without meta.json the cache counts as incomplete until every rank has written its part.
    (directory / "meta.json").unlink(missing_ok=True)
    size = cache_bytes(num_tokens, top_k=top_k, vocab_size=vocab_size)
    logger.warning(f"Running the teacher once on {num_tokens:,} tokens: {size / 1e6:,.0f} MB in {directory}.")
    for name, dtype, width in _files(top_k, vocab_size):
        path = directory / f"{name}.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_tokens, width))
        if sys.platform == "linux":
            _reserve(path)


def _files(top_k: int, vocab_size: int) -> tuple[tuple[str, type, int], ...]:
    """Return the name, dtype and values per token of each file."""
    classes = top_k + (top_k < vocab_size)
    # uint16 halves the file for the usual small vocabularies.
    index_type = np.uint16 if vocab_size <= 2**16 else np.int32
    return ("log_probs", np.float32, classes), ("indices", index_type, top_k)


def cache_bytes(num_tokens: int, *, top_k: int, vocab_size: int) -> int:
    """Return the bytes that a cache of `num_tokens` tokens takes on the disk."""
    return sum(num_tokens * width * np.dtype(dtype).itemsize for _, dtype, width in _files(top_k, vocab_size))


def _reserve(path: Path) -> None:
    """
    Allocate the blocks of a sparse file on the disk, or remove the file and raise `OSError`.

    If the disk were full, a write to the mapped memory would end the process with SIGBUS, without a message.
    """
    try:
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink()
        raise


def _open(directory: Path, starts: np.ndarray, *, mode: Literal["r", "r+"]) -> TeacherCache:
    """Map the files into memory."""
    log_probs, indices = (
        np.lib.format.open_memmap(directory / f"{name}.npy", mode=mode) for name in ("log_probs", "indices")
    )
    return TeacherCache(log_probs, indices, starts)


def _fill(cache: TeacherCache, rows, share: np.ndarray, ask, collator, *, batch_size: int):
    """Compute the log-probabilities of the rows in `share`, and write them into the cache."""
    top_k = cache.indices.shape[1]
    phase = activity.begin("asking the teacher", len(share))
    for first in range(0, len(share), batch_size):
        numbers = share[first : first + batch_size].tolist()
        phase.done = first
        log_probs = ask(collator([rows[number] for number in numbers]))
        indices = log_probs.topk(top_k, dim=-1).indices
        # (batch_size, seq_len, vocab_size) -> (batch_size, seq_len, top_k + 1)
        kept = keep_top(log_probs, indices).cpu().numpy()
        for place, number in enumerate(numbers):
            start, end = cache.starts[number], cache.starts[number + 1]
            # `end - start` tokens: leave out the padding of the batch.
            cache.log_probs[start:end] = kept[place, : end - start]
            cache.indices[start:end] = indices[place, : end - start].cpu().numpy()
    # Write the mapped memory to the file now: a crash must not lose it after `meta.json` declares the cache complete.
    cache.log_probs.flush()
    cache.indices.flush()


__all__ = ["ROW_COLUMN", "TeacherCache", "TeacherCollator", "cache_bytes", "check_cacheable", "keep_top", "open_cache"]
