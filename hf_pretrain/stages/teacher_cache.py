"""
The teacher's log-probabilities for every row, computed once and kept on disk.

For each token the cache holds the teacher's `top_k` log-probabilities of the next token at the run's temperature, the
tokens that they belong to, and the log-probability of all other tokens together:

    <directory>/log_probs.npy   float32 (num_tokens, top_k + 1)
    <directory>/indices.npy     uint16 or int32 (num_tokens, top_k)
    <directory>/meta.json       what it was made from; written last, so that a cache without it is made anew

The KL is computed over these `top_k + 1` classes. It never exceeds the KL over the whole vocabulary, because joining
classes can only bring two distributions closer, and it does not see how the student distributes probability within the
rest. With `top_k` equal to the vocabulary there is no rest, and the KL is exact.
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

from ..runtime.processes import on_main_process


logger = logging.get_logger(__name__)

ROW_COLUMN = "teacher_row"


def keep_top(log_probs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """
    Return the log-probabilities of some classes, and of all others as one more class.

    Args:
        log_probs (`torch.FloatTensor` of shape `(..., vocab_size)`)
        indices (`torch.LongTensor` of shape `(..., top_k)`): the classes to keep.

    Returns:
        `torch.FloatTensor` of shape `(..., top_k + 1)`, or `(..., top_k)` if `indices` holds all classes.
    """
    top = log_probs.gather(-1, indices)
    # Without this the rest would be log(0), and its term of the KL NaN.
    if indices.shape[-1] == log_probs.shape[-1]:
        return top
    rest = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top, rest], dim=-1)


@dataclass
class TeacherCache:
    """
    An open cache.

    Args:
        log_probs (`np.memmap` of shape `(num_tokens, top_k + 1)`): the file, mapped into memory, not read.
        indices (`np.memmap` of shape `(num_tokens, top_k)`): the same for the tokens.
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
        # int64, because gather takes no uint16.
        indices = np.zeros((len(rows), seq_len, self.indices.shape[1]), dtype=np.int64)
        for number, row in enumerate(rows):
            start, end = self.starts[row], self.starts[row + 1]
            log_probs[number, : end - start] = self.log_probs[start:end]
            indices[number, : end - start] = self.indices[start:end]
        return {"teacher_log_probs": torch.from_numpy(log_probs), "teacher_indices": torch.from_numpy(indices)}


class TeacherCollator:
    """Collate with another collator, and add what the cache holds for rows that [`open_cache`] numbered."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], cache: TeacherCache):
        self.collator = collator
        self.cache = cache

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if ROW_COLUMN not in features[0]:
            raise ValueError(
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

    All ranks must call this. Each computes its share of the rows, on a file system that all of them see.

    Args:
        directory (`Path`): where the cache lies.
        row_sets (`list[datasets.Dataset]`): the packed rows, such as training and validation set.
        ask (`Callable`): from a batch to the teacher's log-probabilities, `(batch_size, seq_len, vocab_size)`.
        collator (`Callable`): from rows to a batch.
        top_k (`int`): log-probabilities to keep per token.
        vocab_size (`int`): the size of the shared vocabulary.
        described_by (`dict`): everything else that the log-probabilities depend on, for `meta.json`.
        args ([`~transformers.TrainingArguments`]): for the ranks and the batch size.

    Returns:
        `tuple`: the cache, and the row sets with a column that finds their rows in it.

    Raises:
        `ValueError`: for streamed rows, or a `top_k` that exceeds the vocabulary.
    """
    if not all(isinstance(rows, datasets.Dataset) for rows in row_sets):
        raise ValueError(
            "--cache_teacher_logits needs rows with numbers, and a stream has none: leave it or --streaming out."
        )
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"--cache_teacher_logits {top_k} must lie between 1 and the vocabulary of {vocab_size}.")
    rows = datasets.concatenate_datasets(row_sets)
    # The cache stores tokens without padding, one row after the other.
    lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    meta = {"rows": _digest(row_sets), "top_k": top_k, "vocab_size": vocab_size, **described_by}
    is_main = args.process_index == 0
    # The main process looks for all ranks: a rank with a stale view of the file system must not decide otherwise.
    is_made = broadcast_object_list([_read_meta(directory) == meta])[0]
    if not is_made:
        on_main_process(args, lambda: _allocate(directory, int(starts[-1]), top_k=top_k, vocab_size=vocab_size))
        # Ranks may get shares of different sizes: the teacher is whole on each of them, so none waits for another.
        share = np.array_split(np.arange(len(rows)), args.world_size)[args.process_index]
        _fill(
            _open(directory, starts, mode="r+"), rows, share, ask, collator, batch_size=args.per_device_eval_batch_size
        )
        args.distributed_state.wait_for_everyone()
        if is_main:
            (directory / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    numbered, first = [], 0
    for row_set in row_sets:
        numbered.append(row_set.add_column(ROW_COLUMN, np.arange(first, first + len(row_set))))
        first += len(row_set)
    return _open(directory, starts, mode="r"), numbered


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
    """Return what the cache was made from; `None` if it is incomplete."""
    try:
        return json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    # A disk that was full or a run that was killed may have left half a file.
    except (OSError, ValueError):
        return None


def _allocate(directory: Path, num_tokens: int, *, top_k: int, vocab_size: int):
    """Create the files at their full size, for every rank to write its part."""
    directory.mkdir(parents=True, exist_ok=True)
    # Without meta.json the cache counts as incomplete until every rank has written its part.
    (directory / "meta.json").unlink(missing_ok=True)
    classes = top_k + (top_k < vocab_size)
    # Half the size for the usual small vocabularies.
    index_type = np.uint16 if vocab_size <= 2**16 else np.int32
    files = (("log_probs", np.float32, classes), ("indices", index_type, top_k))
    size = sum(num_tokens * width * np.dtype(dtype).itemsize for _, dtype, width in files)
    logger.warning(f"Running the teacher once on {num_tokens:,} tokens: {size / 2**20:,.0f} MiB in {directory}.")
    for name, dtype, width in files:
        path = directory / f"{name}.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(num_tokens, width))
        if sys.platform == "linux":
            _reserve(path)


def _reserve(path: Path) -> None:
    """
    Give a sparse file its blocks on the disk, or remove it and raise `OSError`.

    A write through memory to a block that the disk cannot give would end the process with SIGBUS, without a message.
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
    """Compute the log-probabilities of the rows in `share`, and write them to their place."""
    top_k = cache.indices.shape[1]
    for first in range(0, len(share), batch_size):
        numbers = share[first : first + batch_size].tolist()
        log_probs = ask(collator([rows[number] for number in numbers]))
        indices = log_probs.topk(top_k, dim=-1).indices
        # (batch_size, seq_len, vocab_size) -> (batch_size, seq_len, top_k + 1)
        kept = keep_top(log_probs, indices).cpu().numpy()
        for place, number in enumerate(numbers):
            start, end = cache.starts[number], cache.starts[number + 1]
            cache.log_probs[start:end] = kept[place, : end - start]
            cache.indices[start:end] = indices[place, : end - start].cpu().numpy()
    cache.log_probs.flush()
    cache.indices.flush()


__all__ = ["ROW_COLUMN", "TeacherCache", "TeacherCollator", "keep_top", "open_cache"]
