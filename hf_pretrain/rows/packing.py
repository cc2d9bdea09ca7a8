"""
Pack documents into rows of token ids without padding.

Each row is one packed sequence of at most `max_length` tokens. The strategy `bfd` is best-fit decreasing bin packing,
as in "Fewer Truncations Improve Language Modeling" (https://arxiv.org/abs/2404.10830), but it splits documents longer
than a row instead of truncating them. A row records the lengths of its documents, so that no document attends to
another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerFast

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..tokenizer.control_tokens import encode_documents
from .caching import GROUP_SIZE, cache_key, count_processes, encoding_key


PACKING_STRATEGIES = ("bfd", "wrapped", "none")
# In shorter rows, bos and eos alone would be a large share of the tokens.
MIN_LENGTH = 8

ROW_FEATURES = {"input_ids": List(Value("int32")), "seq_lengths": List(Value("int32"))}
# Features of the tokens of documents, and of rows.
_UNWEIGHTED = ({"input_ids": List(Value("int32"))}, ROW_FEATURES)
_WEIGHTS = {"loss_mask": List(Value("float32"))}
_WEIGHTED = ({**_UNWEIGHTED[0], **_WEIGHTS, "num_tokens_cut": Value("int32")}, {**ROW_FEATURES, **_WEIGHTS})


class PackingReport:
    """
    Counts of one packing.

    Args:
        documents ([`Dataset`]): the documents. Their description, such as the number of bad lines, is a part of the
            report.
        tokens ([`Dataset`]): their tokens, one row each.
        rows ([`Dataset`]): the packed sequences.
        max_length (`int`): maximum number of tokens in a row.

    Attributes:
        num_tokens (`int`): number of tokens in the rows, bos and eos of each document included.
        fill_ratio (`float`): share of positions that hold a token, `num_tokens / (num_rows * max_length)`.
        num_tokens_lost (`int`): number of tokens that are in no row, because documents are cut off at `max_length`.
        num_tokens_trained (`int`, *optional*): number of tokens with a weight other than 0; `None` without weights.
        num_dropped (`int`): number of conversations without a trained token within `max_length`.
    """

    def __init__(self, documents: Dataset, tokens: Dataset, rows: Dataset, max_length: int):
        lengths = pc.list_value_length(tokens.data.column("input_ids"))
        self.num_documents, self.num_rows = len(documents), len(rows)
        self.max_length, self.note = max_length, documents.info.description
        self.num_dropped = _total(pc.equal(lengths, 0))
        self.num_tokens = _total(pc.list_value_length(rows.data.column("input_ids")))
        self.fill_ratio = self.num_tokens / max(len(rows) * max_length, 1)
        self.num_tokens_lost, self.num_tokens_trained = _total(lengths) - self.num_tokens, None
        if "loss_mask" in rows.column_names:
            # The encoder has already cut conversations off, so their lost tokens are not in `tokens`.
            self.num_tokens_lost += _total(tokens.data.column("num_tokens_cut"))
            self.num_tokens_trained = _total(pc.not_equal(pc.list_flatten(rows.data.column("loss_mask")), 0))

    def __str__(self) -> str:
        lost = self.num_tokens_lost / max(1, self.num_tokens_lost + self.num_tokens)
        share = f" ({lost:.0%})" if lost > 0.01 else ""
        text = (
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {self.num_rows:,} sequences, "
            f"{self.fill_ratio:.2%} filled, {self.num_tokens_lost:,} tokens{share} cut at "
            f"--max_length {self.max_length}"
        )
        if self.num_tokens_trained is not None:
            text += f"; {self.num_tokens_trained:,} tokens count in the loss"
            text += f", {self.num_dropped:,} conversations without any were dropped"
        return f"{text}; {self.note}" if self.note else text


def _total(values: pa.ChunkedArray) -> int:
    return pc.sum(values, min_count=0).as_py()


def prepare_rows(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    packing_strategy: str = "bfd",
    num_proc: int | None = None,
    encoder: Callable | None = None,
) -> tuple[Dataset | IterableDataset, PackingReport | None]:
    """
    Tokenize documents and pack them into rows. Both steps are cached by content.

    Args:
        documents ([`Dataset`] or [`IterableDataset`]): with the single column `text`.
        tokenizer ([`PreTrainedTokenizerFast`]): with bos and eos, which enclose each document.
        max_length (`int`): maximum number of tokens in a row.
        packing_strategy (`str`, defaults to `"bfd"`): `bfd` fills the rest of each row with the longest document that
            fits, and splits documents longer than a row. `wrapped` cuts the concatenated documents into rows; the rest
            of a document that is cut becomes a separate document. `none` gives each document a row and truncates it at
            `max_length`. Documents are packed in groups of 10,000.
        num_proc (`int`, *optional*): number of processes that tokenize; by default one per core, up to 8. It does not
            change the rows.
        encoder ([`~rows.encoding.ConversationEncoder`], *optional*): for documents that are conversations.
            Conversations are never split. They are truncated at `max_length`, and dropped if no trained token is left.

    Returns:
        `tuple`: rows and a [`PackingReport`], which is `None` for a stream. Rows are in the order of their first
        document. They have `input_ids` (at most `max_length`, `int32`) and `seq_lengths` (lengths of the documents in
        the row, `int32`, whose sum is the length of the row); with an encoder also `loss_mask` (one weight per token,
        `float32`).

    Raises:
        `UserError`: if `packing_strategy` is `wrapped` with an encoder, or `max_length` is below 8.
    """
    assert packing_strategy in PACKING_STRATEGIES
    if max_length < MIN_LENGTH:
        raise UserError(f"max_length={max_length} is too short to learn from. Use at least {MIN_LENGTH}.")
    if encoder is not None and packing_strategy == "wrapped":
        raise UserError("--packing wrapped would cut conversations apart. Use bfd or none.")
    # Text needs no weights: every token has the weight 1.
    token_features, row_features = _UNWEIGHTED if encoder is None else _WEIGHTED
    options: dict[str, Any] = {"max_length": max_length, "packing_strategy": packing_strategy}
    packing: dict[str, Any] = {"batched": True, "batch_size": GROUP_SIZE, "features": Features(row_features)}
    if encoder is None:
        # Text is not cut before it is packed, so its tokens do not depend on `max_length`.
        encode, key = partial(_encode_texts, tokenizer=tokenizer), encoding_key(tokenizer)
    else:
        encode = partial(encoder, tokenizer=tokenizer, max_length=max_length)
        key = encoding_key(tokenizer, encoder, tokenizer.chat_template, max_length)
    if isinstance(documents, IterableDataset):
        options["encode"] = encode
        rows = documents.map(_encode_and_pack_batch, fn_kwargs=options, remove_columns=["text"], **packing)
        # A resumed run compares this text with the one in its checkpoint.
        rows.info.description = str((documents.info.description, key, max_length, packing_strategy))
        return rows, None
    announce("tokenizing and packing")
    tokens_key = cache_key(documents._fingerprint, key)
    tokenizing = {"features": Features(token_features), "num_proc": count_processes(len(documents), num_proc)}
    tokenizing |= {"new_fingerprint": tokens_key, "remove_columns": ["text"], "desc": "tokenizing"}
    tokens = documents.map(encode, batched=True, input_columns="text", **tokenizing)
    # The Arrow format passes whole tables to `_pack_batch`, without a Python object per token.
    packing |= {"new_fingerprint": cache_key(tokens_key, options, GROUP_SIZE), "desc": "packing"}
    rows = tokens.with_format("arrow").map(_pack_batch, fn_kwargs=options, **packing).with_format(None)
    return rows, PackingReport(documents, tokens, rows, max_length)


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> dict[str, list]:
    """Tokenize texts."""
    return {"input_ids": encode_documents(texts, tokenizer)}


def _encode_and_pack_batch(
    batch: dict[str, list[str]],
    encode: Callable[[list[str]], dict[str, list]],
    max_length: int,
    packing_strategy: str,
) -> dict[str, list]:
    """
    Tokenize and pack a batch of a stream.

    One `map` does both, because with streams `datasets` passes Arrow tables slowly from one `map` to the next.
    """
    encoded = encode(batch["text"])
    schema = Features({name: _WEIGHTED[0][name] for name in encoded}).arrow_schema
    return _pack_batch(pa.table(encoded, schema), max_length, packing_strategy).to_pydict()


def _pack_batch(batch: pa.Table, max_length: int, packing_strategy: str) -> pa.Table:
    """Pack one group of documents into rows."""
    lists = {name: batch.column(name).combine_chunks() for name in batch.schema.names if name in _WEIGHTED[1]}
    # `flatten` respects the offset of a slice. `values` would return the whole buffer, with documents of other slices.
    values = {name: column.flatten().to_numpy() for name, column in lists.items()}
    offsets = lists["input_ids"].offsets.to_numpy().astype(np.int64)
    # The first offset of a slice is not 0.
    offsets -= offsets[0]
    starts, lengths = offsets[:-1], np.diff(offsets)
    # The encoder has dropped these conversations.
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    # From here on, `starts` and `lengths` describe pieces, in order of tokens. A piece is a part of a document, or a
    # whole document, that stays in one row.
    if packing_strategy == "none":
        lengths = np.minimum(lengths, max_length)
        row_of = np.arange(len(starts))
    elif packing_strategy == "wrapped":
        # A piece ends with its document or its row, whichever comes first. `union1d` sorts, and keeps a start once.
        starts = np.union1d(starts, np.arange(0, offsets[-1], max_length))
        lengths = np.diff(starts, append=offsets[-1])
        row_of = starts // max_length
    else:
        starts, lengths = split_long(starts, lengths, max_length)
        row_of = _best_fit_decreasing(lengths, max_length)
    return _lay_out(values, starts, lengths, row_of)


def split_long(starts: np.ndarray, lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Split documents longer than a row into full rows and a rest.

    A rest of one token would be useless for training, because no token comes before it. So such a rest takes one token
    from the piece before it.

    Args:
        starts, lengths (`np.ndarray` of shape `(num_documents,)`): first token and number of tokens of each document.
        max_length (`int`): number of tokens in a full row.

    Returns:
        `tuple`: starts and lengths of the pieces, each of shape `(num_pieces,)`.
    """
    # Integer division of the negated numbers rounds up.
    num_pieces = -(-lengths // max_length)
    # (num_pieces,): index of the first piece of the same document, then the place of the piece in it
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    place = np.arange(num_pieces.sum()) - first
    piece_starts = np.repeat(starts, num_pieces) + place * max_length
    ends = np.repeat(starts + lengths, num_pieces)
    # Move the start of such a rest back by one. The piece before it then ends one token earlier, because `piece_ends`
    # is computed from the next start.
    is_lone = (ends - piece_starts == 1) & (place > 0)
    piece_starts[is_lone] -= 1
    is_last = place == np.repeat(num_pieces, num_pieces) - 1
    piece_ends = np.where(is_last, ends, np.append(piece_starts[1:], 0))
    return piece_starts, piece_ends - piece_starts


def _best_fit_decreasing(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """
    Assign each piece to a row, the longest piece first: to the fullest row that still has space for it, or to a new
    row.

    Bit `s` of one integer is set if some row has `s` tokens of space left. A shift and the lowest set bit find the
    best row in a time that does not depend on the number of rows.

    Args:
        lengths (`np.ndarray` of shape `(num_pieces,)`): number of tokens of each piece, at most `max_length`.
        max_length (`int`): number of tokens in a full row.

    Returns:
        `np.ndarray` of shape `(num_pieces,)`: index of each piece's row, from 0 without gaps.
    """
    rows_with: list[list[int]] = [[] for _ in range(max_length + 1)]  # indexed by the space left
    spaces = 0
    num_rows = 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    # Stable, so that documents of equal length keep their order on every platform.
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        # Bit i of `fitting` is set if some row has length + i tokens of space left.
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            # Rows with equal space are interchangeable, and the last one costs no search.
            row = rows_with[space].pop()
            if not rows_with[space]:
                spaces &= ~(1 << space)
        else:
            space, row = max_length, num_rows
            num_rows += 1
        row_of[piece] = row
        if space > length:
            rows_with[space - length].append(row)
            spaces |= 1 << (space - length)
    return row_of


def _lay_out(values: dict[str, np.ndarray], starts: np.ndarray, lengths: np.ndarray, row_of: np.ndarray) -> pa.Table:
    """
    Build the table of rows.

    Args:
        values (`dict[str, np.ndarray]`, each of shape `(num_tokens,)`): ids of all documents in sequence, and their
            weights if there are any.
        starts, lengths, row_of (`np.ndarray` of shape `(num_pieces,)`): first token, number of tokens and row of each
            piece. Pieces keep their order within a row, and rows are ordered by their first piece.
    """
    # `return_index` gives the first piece of each row, which becomes the row's rank in the output.
    _, first_piece, row_of = np.unique(row_of, return_index=True, return_inverse=True)
    # `lexsort` sorts by its last key first: rows by their first piece, then pieces in their own order.
    order = np.lexsort((np.arange(len(starts)), first_piece[row_of]))
    starts, lengths, row_of = starts[order], lengths[order], first_piece[row_of][order]
    ends = np.cumsum(lengths)
    # Output position i takes the input token at i - (start of its piece in the output) + (start in the input).
    taken = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
    row_begins = np.flatnonzero(np.diff(row_of, prepend=-1))
    # Arrow's list offsets are int32. A group of 10,000 documents stays far below 2**31 tokens.
    piece_offsets = np.append(row_begins, len(starts)).astype(np.int32)
    token_offsets = np.append(0, ends)[piece_offsets].astype(np.int32)
    # Arrow stores lists as offsets into one flat array, so no Python list is built per row.
    columns = {name: pa.ListArray.from_arrays(token_offsets, column[taken]) for name, column in values.items()}
    columns["seq_lengths"] = pa.ListArray.from_arrays(piece_offsets, lengths.astype(np.int32))
    # `datasets` expects the columns in the order of the features.
    return pa.table({name: columns[name] for name in _WEIGHTED[1] if name in columns})
