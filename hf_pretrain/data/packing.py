"""
From documents to rows of ids without padding.

`bfd` is best-fit decreasing bin packing, as in "Fewer Truncations Improve Language Modeling"
(https://arxiv.org/abs/2404.10830), except that longer documents are split rather than cut. A row says how long its
documents are, so that none of them sees another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerFast

from ..tokenizer.encoding import encode_documents
from .encoding import ConversationEncoder
from .parts import GROUP_SIZE, cache_key, cut, digest, work_on


PACKING_STRATEGIES = ("bfd", "wrapped", "none")
MIN_LENGTH = 8

TOKEN_FEATURES = {"input_ids": List(Value("int32"))}
WEIGHTED_TOKEN_FEATURES = {**TOKEN_FEATURES, "loss_mask": List(Value("float32")), "num_tokens_cut": Value("int32")}
ROW_FEATURES = {"input_ids": List(Value("int32")), "seq_lengths": List(Value("int32"))}
WEIGHTED_ROW_FEATURES = {**ROW_FEATURES, "loss_mask": List(Value("float32"))}


@dataclass
class PackingReport:
    """
    What packing made of a dataset.

    Args:
        num_documents (`int`): documents that went in.
        num_tokens (`int`): tokens in the rows, each document's bos and eos included.
        num_rows (`int`): rows that came out.
        fill_ratio (`float`): tokens over positions, `num_tokens / (num_rows * max_length)`.
        num_tokens_lost (`int`): tokens of the documents that are in no row, since they are cut at `max_length`.
        num_tokens_trained (`int`, *optional*): of tokens with weights, those whose weight is not 0.
        num_dropped (`int`): conversations that hold nothing to train on within a row.
        max_length (`int`): the most tokens a row takes.
        note (`str`): what is said of the documents besides, such as the copies that were left out.
    """

    num_documents: int
    num_tokens: int
    num_rows: int
    fill_ratio: float
    num_tokens_lost: int
    num_tokens_trained: int | None = None
    num_dropped: int = 0
    max_length: int = field(default=0, compare=False)
    note: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {self.num_rows:,} rows, "
            f"{self.fill_ratio:.2%} filled, {self.num_tokens_lost:,} tokens cut at --max_length {self.max_length}"
        )
        if self.num_tokens_trained is not None:
            text += f"; {self.num_tokens_trained:,} tokens are trained on"
            text += f", {self.num_dropped:,} conversations without any were dropped"
        return f"{text}; {self.note}" if self.note else text


def prepare_rows(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    packing_strategy: str = "bfd",
    num_proc: int | None = None,
    encoder: ConversationEncoder | None = None,
) -> tuple[Dataset | IterableDataset, PackingReport | None]:
    """
    Tokenizes documents and lays them into rows. Both steps are cached by content.

    Args:
        documents ([`Dataset`] or [`IterableDataset`]): with the single column `text`.
        tokenizer ([`PreTrainedTokenizerFast`]): with bos and eos, which enclose each document.
        max_length (`int`): most tokens a row.
        packing_strategy (`str`, defaults to `"bfd"`): `bfd` fills each row's rest with the longest document that fits and
            splits documents longer than a row; `wrapped` cuts the stream of documents into rows, where a document
            that is cut goes on as another one; `none` gives each document a row and drops what is over `max_length`.
            Documents are packed 10,000 at a time.
        num_proc (`int`, *optional*): processes that work on parts of 10,000 to 100,000 documents; by default one a
            core, up to 8. It does not change the rows.
        encoder ([`~data.encoding.ConversationEncoder`], *optional*): for documents that are conversations. They
            are never split: what is over `max_length` is cut off, and one without anything to train on before is
            dropped.

    Returns:
        `tuple`: rows in the order of their first document, with `input_ids` (at most `max_length` of `int32`) and
        `seq_lengths` (`int32` lengths of the documents in the row, which sum to its own), with an encoder also
        `loss_mask` (`float32`, a weight for each token); and the report, `None` for a stream.

    Raises:
        `ValueError`: if `packing_strategy` is unknown, or `wrapped` with an encoder, `max_length` is below 8, or no conversation
            has anything to train on.
    """
    if packing_strategy not in PACKING_STRATEGIES:
        raise ValueError(f"packing_strategy={packing_strategy!r} is unknown. Use {', '.join(PACKING_STRATEGIES)}.")
    if max_length < MIN_LENGTH:
        raise ValueError(f"max_length={max_length} is too short to learn from; take at least {MIN_LENGTH}.")
    if encoder is not None and packing_strategy == "wrapped":
        raise ValueError("packing_strategy='wrapped' would cut conversations apart; use bfd or none.")
    is_weighted = encoder is not None
    features = Features(WEIGHTED_ROW_FEATURES if is_weighted else ROW_FEATURES)
    how: dict[str, Any] = {"max_length": max_length, "packing_strategy": packing_strategy}
    encode = partial(_encode_batch, tokenizer=tokenizer, encoder=encoder, max_length=max_length)
    # NOTE: datasets would hash the tokenizer by pickling it, which changes with what it was used for before.
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    key = digest(tokenizer.backend_tokenizer.to_str(), ends)
    if is_weighted:
        key = digest(key, encoder, tokenizer.chat_template, max_length)
    if isinstance(documents, IterableDataset):
        rows = documents.map(
            _encode_and_pack_batch,
            fn_kwargs={**how, "encode": encode},
            remove_columns=["text"],
            **{"batched": True, "batch_size": GROUP_SIZE, "features": features},
        )
        # A resumed run compares this text with the one in its checkpoint, so the key keeps the flag's older name.
        described = {"max_length": max_length, "packing": packing_strategy}
        rows.info.description = str((documents.info.description, key, described))
        return rows, None
    if len(documents) == 0:
        no_rows = Dataset.from_dict({name: [] for name in features}, features=features)
        return no_rows, PackingReport(0, 0, 0, fill_ratio=0.0, num_tokens_lost=0)

    prepare = partial(_prepare_part, key=key, encode=encode, features=features, how=how)
    prepared = work_on(cut(documents), prepare, num_proc=num_proc, desc="Tokenizing and packing")
    rows = concatenate_datasets([part for part, _ in prepared])
    report = _add_reports([report for _, report in prepared], max_length)
    report = replace(report, max_length=max_length, note=documents.info.description)
    if report.num_rows == 0:
        raise ValueError(
            f"None of {len(documents)} conversations has anything to train on within max_length={max_length} tokens. "
            "Raise --max_length, or look at the rows with --preview."
        )
    return rows, report


def _prepare_part(
    documents: Dataset, key: str, encode: Callable[[dict[str, list]], dict[str, list]], features: Features, how: dict
) -> tuple[Dataset, PackingReport]:
    """Rows of one part, and what was counted; `key` stands for the tokenizer and the encoder."""
    key = cache_key(documents._fingerprint, key)
    tokens = documents.map(
        encode,
        batched=True,
        remove_columns=["text"],
        features=Features(WEIGHTED_TOKEN_FEATURES if "loss_mask" in features else TOKEN_FEATURES),
        new_fingerprint=key,
        desc="Tokenizing",
    )
    if len(tokens) == 0:
        no_rows = Dataset.from_dict({name: [] for name in features}, features=features)
        return no_rows, PackingReport(len(documents), 0, 0, 0.0, 0, num_dropped=len(documents))
    key = cache_key(key, how, GROUP_SIZE)
    rows = tokens.with_format("arrow").map(
        _pack_batch,
        fn_kwargs=how,
        new_fingerprint=key,
        desc="Packing",
        **{"batched": True, "batch_size": GROUP_SIZE, "features": features},
    )
    return rows.with_format(None), _report(documents, tokens, rows, how["max_length"])


def _report(documents: Dataset, tokens: Dataset, rows: Dataset, max_length: int) -> PackingReport:
    """Counts what went in and what came out."""
    num_tokens_in, num_tokens = [
        sum(pc.sum(pc.list_value_length(chunk)).as_py() for chunk in data.data.column("input_ids").chunks)
        for data in (tokens, rows)
    ]
    trained = None
    if "loss_mask" in rows.column_names:
        num_tokens_in += pc.sum(tokens.data.column("num_tokens_cut")).as_py()
        chunks = rows.data.column("loss_mask").chunks
        trained = sum(pc.sum(pc.not_equal(pc.list_flatten(chunk), 0)).as_py() for chunk in chunks)
    return PackingReport(
        num_documents=len(documents),
        num_tokens=num_tokens,
        num_rows=len(rows),
        fill_ratio=num_tokens / (len(rows) * max_length),
        num_tokens_lost=num_tokens_in - num_tokens,
        num_tokens_trained=trained,
        num_dropped=len(documents) - len(tokens),
    )


def _add_reports(reports: list[PackingReport], max_length: int) -> PackingReport:
    """The report of all parts."""
    names = ("num_documents", "num_tokens", "num_rows", "num_tokens_lost", "num_dropped")
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    trained = [report.num_tokens_trained for report in reports if report.num_tokens_trained is not None]
    fill_ratio = sums["num_tokens"] / max(sums["num_rows"] * max_length, 1)
    return PackingReport(**sums, fill_ratio=fill_ratio, num_tokens_trained=sum(trained) if trained else None)


def _encode_batch(
    batch: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerFast,
    encoder: ConversationEncoder | None,
    max_length: int,
) -> dict[str, list]:
    if encoder is None:
        return {"input_ids": encode_documents(batch["text"], tokenizer)}
    return encoder(batch["text"], tokenizer, max_length=max_length)


def _encode_and_pack_batch(
    batch: dict[str, list[str]],
    encode: Callable[[dict[str, list[str]]], dict[str, list]],
    max_length: int,
    packing_strategy: str,
) -> dict[str, list]:
    """Both steps at once, for streams: `datasets` is slow at handing Arrow tables on from one to the other there."""
    types = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.float32())}
    encoded = encode(batch)
    if not encoded["input_ids"]:
        return {name: [] for name in (WEIGHTED_ROW_FEATURES if "loss_mask" in encoded else ROW_FEATURES)}
    arrays = {name: pa.chunked_array([pa.array(encoded[name], types[name])]) for name in types if name in encoded}
    return _pack_batch(pa.table(arrays), max_length, packing_strategy).to_pydict()


def _pack_batch(batch: pa.Table, max_length: int, packing_strategy: str) -> pa.Table:
    """Rows of one group of documents."""
    lists = {
        name: batch.column(name).combine_chunks() for name in ("input_ids", "loss_mask") if name in batch.schema.names
    }
    # Flattened, since each column may begin at another place of its buffer.
    values = {name: column.flatten().to_numpy() for name, column in lists.items()}
    offsets = lists["input_ids"].offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    starts, lengths = offsets[:-1], np.diff(offsets)
    # Pieces of documents that stay together, in the order of the tokens, and the row of each piece.
    if packing_strategy == "none":
        lengths = np.minimum(lengths, max_length)
        row_of = np.arange(len(starts))
    elif packing_strategy == "wrapped":
        cuts = np.arange(0, offsets[-1], max_length)
        starts = np.union1d(starts, cuts)
        lengths = np.diff(starts, append=offsets[-1])
        row_of = starts // max_length
    else:
        starts, lengths = _split_long(starts, lengths, max_length)
        row_of = _best_fit_decreasing(lengths, max_length)
    return _lay_out(values, starts, lengths, row_of)


def _split_long(starts: np.ndarray, lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Splits documents longer than a row into full rows and a rest.

    A rest of one token could not be learnt from, as no token comes before it: it takes one from the piece before.
    """
    num_pieces = -(-lengths // max_length)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    place = np.arange(num_pieces.sum()) - first
    piece_starts = np.repeat(starts, num_pieces) + place * max_length
    ends = np.repeat(starts + lengths, num_pieces)
    is_lone = (ends - piece_starts == 1) & (place > 0)
    piece_starts[is_lone] -= 1
    is_last = place == np.repeat(num_pieces, num_pieces) - 1
    piece_ends = np.where(is_last, ends, np.append(piece_starts[1:], 0))
    return piece_starts, piece_ends - piece_starts


def _best_fit_decreasing(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """
    Row of each piece: longest first, into the row with the least space that still takes it, or into a new one.

    The spaces that some row has are the bits of one integer, so that finding the best row is a shift and a lowest bit,
    whatever the number of rows.

    Args:
        lengths (`np.ndarray` of shape `(num_pieces,)`): tokens of each piece, at most `max_length`.
        max_length (`int`): tokens a row takes.

    Returns:
        `np.ndarray` of shape `(num_pieces,)`: rows, numbered from 0 without gaps.
    """
    rows_with: list[list[int]] = [[] for _ in range(max_length + 1)]  # by space left
    spaces = 0
    num_rows = 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
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
    The table of rows.

    Args:
        values (`dict[str, np.ndarray]`, each of shape `(num_tokens,)`): ids of all documents, one after the other, and
            their weights, if any.
        starts, lengths, row_of (`np.ndarray` of shape `(num_pieces,)`): where in them each piece begins, its
            tokens, and its row. Pieces keep their order within a row, and rows are ordered by their first piece.
    """
    _, first_piece, row_of = np.unique(row_of, return_index=True, return_inverse=True)
    order = np.lexsort((np.arange(len(starts)), first_piece[row_of]))
    starts, lengths, row_of = starts[order], lengths[order], first_piece[row_of][order]
    ends = np.cumsum(lengths)
    # Position i of the output takes the token at i minus where its piece begins here plus where it begins there.
    taken = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    row_begins = np.flatnonzero(np.diff(row_of, prepend=-1))
    piece_offsets = np.append(row_begins, len(starts)).astype(np.int32)
    token_offsets = np.append(0, ends)[piece_offsets].astype(np.int32)
    columns = {name: pa.ListArray.from_arrays(token_offsets, column[taken]) for name, column in values.items()}
    columns["seq_lengths"] = pa.ListArray.from_arrays(piece_offsets, lengths.astype(np.int32))
    # In the order of the features.
    return pa.table({name: columns[name] for name in WEIGHTED_ROW_FEATURES if name in columns})
