import numpy as np
import pytest
from datasets import Dataset, Features, IterableDataset, Value

from hf_pretrain.rows import caching, packing
from hf_pretrain.rows.packing import PACKING_STRATEGIES, prepare_rows
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.training import train_tokenizer


TEXT = Features({"text": Value("string")})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat"], vocab_size=300)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    lengths = [*rng.geometric(0.05, size=300), 14, 15, 16, 29, 30, 31, 500]
    return ["".join(rng.choice(list("abcdefghij"), size=length)) for length in lengths]


def pack(texts, tokenizer, max_length=16, **how):
    return prepare_rows(Dataset.from_dict({"text": texts}), tokenizer, max_length=max_length, **how)


def pieces_of(rows):
    """Return each row as the list of its documents."""
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        yield np.split(np.array(row["input_ids"]), np.cumsum(row["seq_lengths"])[:-1])


def rejoin(documents, pieces):
    """Take each document's tokens out of the pieces, from beginning to end; fail if a token is missing."""
    left = [tuple(piece) for piece in pieces]
    for document in sorted(map(tuple, documents), key=len):
        rest = document
        while rest:
            fitting = [piece for piece in set(left) if rest[: len(piece)] == piece]
            assert fitting, "a piece of a document is in no row"
            piece = max(fitting, key=len)
            left.remove(piece)
            rest = rest[len(piece) :]
    assert not left, "a row holds something that is in no document"


@pytest.mark.parametrize("max_length", [16, 31])
def test_bfd_keeps_every_token_once(tokenizer, texts, max_length):
    rows, report = pack(texts, tokenizer, max_length)
    documents = encode_documents(texts, tokenizer)
    pieces = [piece for row in pieces_of(rows) for piece in row]
    assert max(len(row["input_ids"]) for row in rows) <= max_length
    assert min(map(len, pieces)) >= 2
    # A document that fits stays whole. A longer one fills a row with every piece but the last two.
    rejoin(documents, pieces)
    whole = [tuple(document) for document in documents if len(document) <= max_length]
    assert not set(whole) - {tuple(piece) for piece in pieces}
    num_tokens = sum(map(len, documents))
    assert report.num_tokens == num_tokens and report.num_tokens_trained is None
    assert report.fill_ratio == num_tokens / (len(rows) * max_length) > 0.95
    assert str(report).startswith(f"{len(texts):,} documents, {num_tokens:,} tokens in {len(rows):,} sequences, ")
    assert str(report).endswith(f" filled, 0 tokens cut at --max_length {max_length}")


def naive_best_fit_decreasing(lengths, max_length):
    """Return the number of rows and their free space, from a search of all rows for every piece."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, space in enumerate(spaces) if space >= length]
        if fitting:
            row = min(fitting, key=lambda row: spaces[row])
            spaces[row] -= length
        else:
            spaces.append(max_length - length)
    return sorted(spaces)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_equals_a_naive_search(seed):
    lengths = np.random.default_rng(seed).integers(2, 65, size=200)
    row_of = packing._best_fit_decreasing(lengths, 64)
    spaces = 64 - np.bincount(row_of, weights=lengths)
    assert sorted(spaces) == naive_best_fit_decreasing(lengths.tolist(), 64)


def test_best_fit_keeps_the_order_of_equal_lengths():
    """Otherwise, the rows of two platforms would differ."""
    row_of = packing._best_fit_decreasing(np.array([40, 64] * 50), 64)
    assert row_of.reshape(50, 2).tolist() == [[50 + pair, pair] for pair in range(50)]


def test_wrapped_is_the_stream_cut_into_rows(tokenizer, texts):
    rows, report = pack(texts, tokenizer, packing_strategy="wrapped")
    documents = encode_documents(texts, tokenizer)
    stream = [token for document in documents for token in document]
    assert [row["input_ids"] for row in rows] == [stream[i : i + 16] for i in range(0, len(stream), 16)]
    # A document begins at each bos and at the beginning of each row.
    for row in pieces_of(rows):
        for index, piece in enumerate(row):
            assert index == 0 or piece[0] == tokenizer.bos_token_id
            assert tokenizer.bos_token_id not in piece[1:]
    assert report.num_tokens == len(stream) and report.num_tokens_lost == 0


def test_none_is_one_document_per_row(tokenizer, texts):
    rows, report = pack(texts, tokenizer, packing_strategy="none")
    documents = encode_documents(texts, tokenizer)
    assert [row["input_ids"] for row in rows] == [document[:16] for document in documents]
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in rows)
    lost = sum(len(document) - 16 for document in documents if len(document) > 16)
    assert (report.num_rows, report.num_tokens_lost) == (len(texts), lost)
    share = lost / (lost + sum(len(row["input_ids"]) for row in rows))
    assert f"{lost:,} tokens ({share:.0%}) cut at --max_length 16" in str(report) and "\n" not in str(report)


@pytest.mark.parametrize("kind", PACKING_STRATEGIES)
def test_rows_are_the_same_for_streams_and_processes(tokenizer, texts, monkeypatch, kind):
    monkeypatch.setattr(packing, "GROUP_SIZE", 100)
    how = {"max_length": 32, "packing_strategy": kind}
    one, one_report = pack(texts, tokenizer, **how)
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in texts), features=TEXT)
    streamed, report = prepare_rows(stream, tokenizer, **how)
    assert report is None and list(streamed) == list(one)
    monkeypatch.setattr(caching, "GROUP_SIZE", 100)
    two, two_report = pack(texts, tokenizer, num_proc=2, **how)
    assert list(two) == list(one) and vars(two_report) == vars(one_report)
    assert two.features == one.features == packing.ROW_FEATURES
