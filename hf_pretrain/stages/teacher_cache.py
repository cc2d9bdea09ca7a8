"""
What a teacher says of every row, asked once and kept on disk, aligned with the rows' tokens.

For each token the cache holds the teacher's `top_k` log-probabilities of the next one, at the run's temperature, which
entries these are, and the logarithm of all the rest together:

    <directory>/log_probs.npy   float32 (num_tokens, top_k + 1)
    <directory>/indices.npy     uint16 or int32 (num_tokens, top_k)
    <directory>/meta.json       what it was made of; written last, so that a cache without it is made anew

The divergence from it is that between `top_k + 1` classes, the rest being one of them: never above the one over the
whole vocabulary, since two distributions can only come closer when classes are joined, and blind to how the student
spreads its probability within the rest. With `top_k` at the size of the vocabulary there is no rest, and it is exact.
"""

import hashlib
import json
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


logger = logging.get_logger(__name__)

ROW_COLUMN = "teacher_row"


def keep_top(log_probs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """
    The log-probabilities of some classes and of the rest as one class more.

    Args:
        log_probs (`torch.FloatTensor` of shape `(..., vocab_size)`)
        indices (`torch.LongTensor` of shape `(..., top_k)`)

    Returns:
        `torch.FloatTensor` of shape `(..., top_k + 1)`, or `(..., top_k)` where nothing is left over.
    """
    top = log_probs.gather(-1, indices)
    if indices.shape[-1] == log_probs.shape[-1]:
        return top
    rest = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top, rest], dim=-1)


@dataclass
class TeacherCache:
    """
    The open cache.

    Args:
        log_probs, indices (`np.memmap`): as the files have them, mapped, not read.
        starts (`np.ndarray` of shape `(num_rows + 1,)`): where in them each row begins.
    """

    log_probs: np.memmap
    indices: np.memmap
    starts: np.ndarray

    def collate(self, rows: list[int], seq_len: int) -> dict[str, torch.Tensor]:
        """`teacher_log_probs` and `teacher_indices` of some rows, `(num_rows, seq_len, ...)`, zero in the padding."""
        log_probs = np.zeros((len(rows), seq_len, self.log_probs.shape[1]), dtype=np.float32)
        indices = np.zeros((len(rows), seq_len, self.indices.shape[1]), dtype=np.int64)
        for number, row in enumerate(rows):
            start, end = self.starts[row], self.starts[row + 1]
            log_probs[number, : end - start] = self.log_probs[start:end]
            indices[number, : end - start] = self.indices[start:end]
        return {"teacher_log_probs": torch.from_numpy(log_probs), "teacher_indices": torch.from_numpy(indices)}


class TeacherCollator:
    """Collates as another collator does, and adds what the cache holds of rows numbered by [`open_cache`]."""

    def __init__(self, collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]], cache: TeacherCache):
        self.collator = collator
        self.cache = cache

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if ROW_COLUMN not in features[0]:
            raise ValueError(
                "These rows are not in the teacher's cache, which holds those that the trainer was made with: leave "
                "--cache_teacher_logits out to evaluate on others."
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
    Opens the cache in `directory`, after making it if it is not there or not of these rows and this teacher. All ranks
    call it; each asks its share of the rows, on a file system that all of them see.

    Args:
        ask (`Callable`): from a batch to the teacher's log-probabilities, `(batch_size, seq_len, vocab_size)`.
        described_by (`dict`): whatever else the answers depend on, for `meta.json`.

    Returns:
        `tuple`: the cache, and the row sets with a column that says where in it their rows are.

    Raises:
        `ValueError`: for rows that are streamed, or a `top_k` outside of the vocabulary.
    """
    if not all(isinstance(rows, datasets.Dataset) for rows in row_sets):
        raise ValueError("--cache_teacher_logits needs rows that are numbered: leave it out, or --streaming.")
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"--cache_teacher_logits {top_k} must lie between 1 and the vocabulary of {vocab_size}.")
    rows = datasets.concatenate_datasets(row_sets)
    lengths = [len(ids) for ids in rows.with_format("numpy")["input_ids"]]
    starts = np.append(0, np.cumsum(lengths, dtype=np.int64))
    meta = {"rows": _digest(row_sets), "top_k": top_k, "vocab_size": vocab_size, **described_by}
    is_main = args.process_index == 0
    # The main process looks for all: they must not come to different ends.
    is_made = broadcast_object_list([_read_meta(directory) == meta])[0]
    if not is_made:
        if is_main:
            _allocate(directory, int(starts[-1]), top_k=top_k, vocab_size=vocab_size)
        args.distributed_state.wait_for_everyone()
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
    digest = hashlib.blake2b(digest_size=16)
    for rows in row_sets:
        table = rows.with_format("arrow")[:]
        for name in ("input_ids", "seq_lengths"):
            column = table[name].combine_chunks()
            digest.update(column.value_lengths().to_numpy().tobytes() + column.flatten().to_numpy().tobytes())
    return digest.hexdigest()


def _read_meta(directory: Path) -> dict[str, Any] | None:
    path = directory / "meta.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _allocate(directory: Path, num_tokens: int, *, top_k: int, vocab_size: int):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "meta.json").unlink(missing_ok=True)
    classes = top_k + (top_k < vocab_size)
    index_type = np.uint16 if vocab_size <= 2**16 else np.int32
    files = (("log_probs", np.float32, classes), ("indices", index_type, top_k))
    size = sum(num_tokens * width * np.dtype(dtype).itemsize for _, dtype, width in files)
    logger.warning(f"Asking the teacher once about {num_tokens:,} tokens: {size / 2**20:,.0f} MiB in {directory}.")
    for name, dtype, width in files:
        np.lib.format.open_memmap(directory / f"{name}.npy", mode="w+", dtype=dtype, shape=(num_tokens, width))


def _open(directory: Path, starts: np.ndarray, *, mode: Literal["r", "r+"]) -> TeacherCache:
    log_probs, indices = (
        np.lib.format.open_memmap(directory / f"{name}.npy", mode=mode) for name in ("log_probs", "indices")
    )
    return TeacherCache(log_probs, indices, starts)


def _fill(cache: TeacherCache, rows, share: np.ndarray, ask, collator, *, batch_size: int):
    """Asks about the rows of `share`, and writes the answers where they belong."""
    top_k = cache.indices.shape[1]
    for first in range(0, len(share), batch_size):
        numbers = share[first : first + batch_size].tolist()
        log_probs = ask(collator([rows[number] for number in numbers]))
        indices = log_probs.topk(top_k, dim=-1).indices
        kept = keep_top(log_probs, indices).cpu().numpy()
        for place, number in enumerate(numbers):
            start, end = cache.starts[number], cache.starts[number + 1]
            cache.log_probs[start:end] = kept[place, : end - start]
            cache.indices[start:end] = indices[place, : end - start].cpu().numpy()
    cache.log_probs.flush()
    cache.indices.flush()


__all__ = ["ROW_COLUMN", "TeacherCache", "TeacherCollator", "keep_top", "open_cache"]
