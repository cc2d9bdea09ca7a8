import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from hf_pretrain.data import caching, packing
from hf_pretrain.data.packing import PACKING_STRATEGIES, PackingReport, prepare_rows
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.training import train_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat"], vocab_size=300)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    lengths = [*rng.geometric(0.05, size=300), 14, 15, 16, 29, 30, 31, 500]
    return ["".join(rng.choice(list("abcdefghij"), size=length)) for length in lengths]


def on_disk(texts, path):
    Dataset.from_dict({"text": texts}).save_to_disk(path)
    return datasets.load_from_disk(path)


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
    rows, report = prepare_rows(Dataset.from_dict({"text": texts}), tokenizer, max_length=max_length)
    documents = encode_documents(texts, tokenizer)
    pieces = [piece for row in pieces_of(rows) for piece in row]
    assert max(len(row["input_ids"]) for row in rows) <= max_length
    assert min(map(len, pieces)) >= 2
    # A document that fits stays whole. A longer one fills a row with every piece but the last two.
    rejoin(documents, pieces)
    whole = [tuple(document) for document in documents if len(document) <= max_length]
    assert not set(whole) - {tuple(piece) for piece in pieces}
    num_tokens = sum(map(len, documents))
    assert report == PackingReport(
        *(len(texts), num_tokens, len(rows), num_tokens / (len(rows) * max_length)),
        **{"num_tokens_lost": 0, "max_length": max_length},
    )
    assert report.fill_ratio > 0.95


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


def test_wrapped_is_the_stream_cut_into_rows(tokenizer, texts):
    rows, report = prepare_rows(
        Dataset.from_dict({"text": texts}), tokenizer, max_length=16, packing_strategy="wrapped"
    )
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
    rows, report = prepare_rows(Dataset.from_dict({"text": texts}), tokenizer, max_length=16, packing_strategy="none")
    documents = encode_documents(texts, tokenizer)
    assert [row["input_ids"] for row in rows] == [document[:16] for document in documents]
    assert all(row["seq_lengths"] == [len(row["input_ids"])] for row in rows)
    lost = sum(len(document) - 16 for document in documents if len(document) > 16)
    assert (report.num_rows, report.num_tokens_lost) == (len(texts), lost)
    share = lost / (lost + sum(len(row["input_ids"]) for row in rows))
    assert f"{lost:,} tokens ({share:.0%}) cut at --max_length 16" in str(report) and "\n" not in str(report)


@pytest.mark.parametrize("kind", PACKING_STRATEGIES)
def test_rows_are_the_same_for_streams_and_processes(tokenizer, texts, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(packing, "GROUP_SIZE", 100)
    documents = on_disk(texts, tmp_path / "documents")
    one, one_report = prepare_rows(documents, tokenizer, max_length=32, packing_strategy=kind)
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in texts), features=documents.features)
    streamed, report = prepare_rows(stream, tokenizer, max_length=32, packing_strategy=kind)
    assert report is None
    assert list(streamed) == list(one)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "other"))
    again = on_disk(texts, tmp_path / "again")
    monkeypatch.setattr(caching, "GROUP_SIZE", 100)
    two, two_report = prepare_rows(again, tokenizer, max_length=32, packing_strategy=kind, num_proc=2)
    assert list(two) == list(one) and two_report == one_report
    assert two.features == one.features == packing.ROW_FEATURES


def test_a_second_run_uses_the_cache(tokenizer, texts, tmp_path, monkeypatch):
    documents = on_disk(texts, tmp_path / "documents")
    first, report = prepare_rows(documents, tokenizer, max_length=32)
    tokenizer("used in between")
    with monkeypatch.context() as patch:
        patch.setattr(packing, "encode_documents", None)
        patch.setattr(packing, "_lay_out", None)
        second, second_report = prepare_rows(documents, tokenizer, max_length=32)
    assert list(second) == list(first) and second_report == report
    # Everything that changes the rows changes the key.
    other = train_tokenizer(["abcdefghij"], vocab_size=300)
    assert prepare_rows(documents, other, max_length=32)[1].num_tokens != report.num_tokens
    assert prepare_rows(documents, tokenizer, max_length=33)[1].num_rows != report.num_rows
    other = train_tokenizer(["the cat sat on the mat"], vocab_size=300)
    other.eos_token = other.pad_token
    assert prepare_rows(documents, other, max_length=32)[0][0]["input_ids"][-1] == 0
    monkeypatch.setattr(caching, "CODE", "other")
    monkeypatch.setattr(packing, "encode_documents", lambda texts, tokenizer: [[7, 8]] * len(texts))
    assert prepare_rows(documents, tokenizer, max_length=32)[1].num_tokens == 2 * len(texts)


def test_mistakes_are_named(tokenizer):
    documents = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ValueError, match="max_length=4 is too short"):
        prepare_rows(documents, tokenizer, max_length=4)
