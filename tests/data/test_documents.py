import gzip
import hashlib
import json
import os
import pickle
import re
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset

from hf_pretrain.data import caching, documents, rejected, sources
from hf_pretrain.data.documents import load_documents
from tests.toys import write_jsonl


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    for module in (rejected, sources):
        monkeypatch.setattr(module.logger, "warning", messages.append)
    return messages


def test_the_rule_of_the_split():
    # Recorded values: a document must never move from one set to the other between versions.
    digest = hashlib.blake2b("日本 text".encode(), digest_size=8).digest()
    share = sum(byte * 256.0 ** -(place + 1) for place, byte in enumerate(digest))
    # The split uses the hash of the text, or of the origin that several documents share.
    for text, origin in (("日本 text", None), ("another", "日本 text")):
        assert documents.hashes_are_between([text], [origin], 0.0, share + 1e-9) == [True]
        assert documents.hashes_are_between([text], [origin], 0.0, share - 1e-9) == [False]
        assert documents.hashes_are_between([text], [origin], share - 1e-9, 1.0) == [True]
        assert documents.hashes_are_between([text], [origin], share + 1e-9, 1.0) == [False]


def texts_of(*parts):
    return [record["text"] for part in parts for record in part]


TEXTS = [f"document {index}" for index in range(300)]
BAD_LINES = {
    3: (b'{"text": "cut', "broken JSON"),
    7: (b"[1, 2]", "not an object but an array"),
    11: (b'{"content": "a"}', "no column 'text' (there is: content)"),
    13: (b'{"text": "\xff"}', "not UTF-8"),
    17: (b'{"text": "  "}', "is empty"),
    19: (b'{"text": "\\ud83d"}', "half a surrogate pair"),
    23: (b'{"text": "a\\u0000"}', "NUL character"),
    24: (b'{"text": "\0"}', "broken JSON: Invalid control character"),
    31: (b'{"text": null}', "holds null"),
    37: (b'{"text": 5}', "holds an integer"),
    41: (b'{"\\ud83d": 1}', "no column 'text'"),
}


def write_bad(path):
    """Write a file of 300 lines, with bad lines where `BAD_LINES` says."""
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    for number, (line, _) in BAD_LINES.items():
        lines[number - 1] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


GOOD_TEXTS = [text for number, text in enumerate(TEXTS, start=1) if number not in BAD_LINES]


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_lines_are_rejected_and_good_ones_are_kept(tmp_path, warnings, streaming):
    name = write_bad(tmp_path / "bad.jsonl")
    rejected = tmp_path / "run" / "rejected.jsonl"
    arguments = {"streaming": streaming, "validation_fraction": 0.1, "max_rejected_ratio": 0.05}
    for _ in range(2):  # the second time, from the cache
        warnings.clear()
        train, validation = load_documents([name], rejected_path=rejected, **arguments)
        assert sorted(texts_of(train, validation)) == sorted(GOOD_TEXTS)
        listed = [json.loads(line) for line in rejected.read_text(encoding="utf-8").splitlines()]
        assert [(entry["source"], entry["line"]) for entry in listed] == [(name, number) for number in BAD_LINES]
        assert all(words in entry["reason"] for entry, (_, words) in zip(listed, BAD_LINES.values(), strict=True))
        (warning,) = warnings
        assert warning.startswith(f"{name}:3: broken JSON") and str(rejected) in warning
        assert streaming or train.info.description == f"{len(BAD_LINES)} bad lines skipped"


@pytest.mark.parametrize("streaming", [False, True])
def test_too_many_bad_lines_stop_the_run(tmp_path, streaming):
    name = write_bad(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError) as error:
        load_documents([name], streaming=streaming, max_rejected_ratio=0.02, rejected_path=tmp_path / "rejected.jsonl")
    message = str(error.value)
    assert "11 of 300 lines (3.67%)" in message and "--max_rejected_ratio 0.02" in message
    assert f"1 x broken JSON: Unterminated string starting at; fix or drop it (first: {name}:3)" in message
    assert message.count(" x ") == 5
    assert str(tmp_path / "rejected.jsonl") in message


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    train, _ = load_documents([name], streaming=True, validation_fraction=0)
    assert len(list(train)) == len(TEXTS) and len(list(train)) == len(TEXTS)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "one more"])
    with pytest.raises(ValueError, match="a.jsonl changed while this run was reading it"):
        list(train)


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_without_data_are_named(tmp_path, streaming):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "table.xlsx").write_text("text\na\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-3])
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "other.parquet")
    (tmp_path / "utf16.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16-be"))
    (tmp_path / "plain.txt").write_text("a")
    for name, words in {
        "empty.jsonl": r"empty.jsonl is empty",
        "bad.jsonl": r"(?s)bad.jsonl holds no document.*1 x column 'text' holds an integer.*bad.jsonl:1",
        "table.xlsx": r"table.xlsx has an unknown ending; known are .jsonl",
        "cut.jsonl.gz": r"cut.jsonl.gz cannot be read: Truncated",
        "other.parquet": r"other.parquet has no column 'text' but content. Pass --text_column",
        "missing.jsonl": r"There is no file or directory .*missing.jsonl",
        "*.nothing": r"No file of .*nothing ends in .jsonl",
        "utf16.jsonl": r"utf16.jsonl holds no document",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_documents([str(tmp_path / name)], streaming=streaming, max_rejected_ratio=1.0)
    with pytest.raises(ValueError, match="plain text, and records are wanted"):
        load_documents([str(tmp_path / "plain.txt")], schema="conversation", streaming=streaming)
    with pytest.raises(ValueError, match="^The name of a dataset is empty. Name a file"):
        load_documents([""], streaming=streaming)
    with pytest.raises(
        ValueError, match="^The dataset embedded:chitcat is unknown; the nearest one is embedded:chitchat."
    ):
        load_documents(["embedded:chitcat"], streaming=streaming)


def write_all_formats(directory):
    """Write the same ten documents in each format, into files named by format."""
    lines = {
        name: [f"{name} {index}" for index in range(10)] for name in ("jsonl", "gz", "zst", "json", "parquet", "txt")
    }
    write_jsonl(directory / "a.jsonl", lines["jsonl"])
    jsonl = {name: "".join(json.dumps({"text": text}) + "\n" for text in lines[name]).encode() for name in lines}
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(jsonl["gz"]))
    (directory / "c.jsonl.zst").write_bytes(pa.compress(jsonl["zst"], codec="zstd", asbytes=True))
    (directory / "d.json").write_text(json.dumps([{"text": text} for text in lines["json"]]))
    pq.write_table(pa.table({"text": lines["parquet"]}), directory / "e.parquet")
    (directory / "f.txt").write_text("\n\n".join(lines["txt"]))
    return [text for texts in lines.values() for text in texts]


@pytest.mark.parametrize("streaming", [False, True])
def test_all_formats_by_file_glob_and_directory(tmp_path, warnings, streaming):
    folder = tmp_path / "data" / "deeper"
    folder.mkdir(parents=True)
    expected = write_all_formats(folder)
    (folder / "README.md").write_text("not data")
    files = [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.json", "e.parquet", "f.txt")]
    for names in (files, [str(tmp_path / "data")], [str(folder / "[a-f].*")], [str(tmp_path / "**" / "[a-f].*")]):
        train, validation = load_documents(names, streaming=streaming, validation_fraction=0)
        assert texts_of(train) == expected
        assert len(validation) == 0
        assert train.column_names == validation.column_names == ["text"]
    assert any("README.md" in message for message in warnings)


def test_a_directory_and_its_globs_give_each_file_once(tmp_path, warnings, monkeypatch):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for place in (".", "sub", ".ipynb_checkpoints", "../elsewhere"):
        (data / place).mkdir(parents=True, exist_ok=True)
        write_jsonl(data / place / "a.jsonl", [{"text": f"text of {place}"}])
    (data / "notes.md").write_text("no data")
    if hasattr(os, "mkfifo"):
        # Nobody writes to it, so to open it would take forever.
        os.mkfifo(data / "pipe.jsonl")
    (data / ".hidden.jsonl").write_text('{"text": "hidden"}\n')
    (data / "linked").symlink_to(elsewhere)
    (data / "sub" / "loop").symlink_to(data)
    (data / "sub" / "latest.jsonl").symlink_to("a.jsonl")
    expected = [str(data / name) for name in ("a.jsonl", "linked/a.jsonl", "sub/a.jsonl")]
    for name in (data, data / "*", data / "**", data / "**/*.jsonl", tmp_path / "data*"):
        assert sources.find_sources(str(name)) == expected, name
    assert f"{data}: 3 data files. 1 others are left out, such as {data / 'notes.md'}." in warnings


def test_processes_read_the_same(tmp_path, monkeypatch):
    expected = write_all_formats(tmp_path)
    lines = [json.dumps({"text": f"line {number} " * (number % 7)}).encode() for number in range(300)]
    lines[5::80] = [b"", b"{", b'{"text": 5}', b"[1, 2]"]
    (tmp_path / "z.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))

    def load(**arguments) -> tuple[list[str], list[str], str]:
        how = {"validation_fraction": 0.2, "max_rejected_ratio": 1, "rejected_path": tmp_path / "out" / "rejected"}
        train, validation = load_documents([str(tmp_path / "*.*")], **how, **arguments)
        return texts_of(train), texts_of(validation), (tmp_path / "out" / "rejected").read_text()

    whole = load()
    assert set(expected) < set(whole[0] + whole[1]) and len(whole[2].splitlines()) > 3
    monkeypatch.setattr(caching, "GROUP_SIZE", 30)
    monkeypatch.setattr(caching, "CODE", "another cache entry")
    assert caching.count_processes(300, 2) == 2 and load(num_proc=2) == whole == load()


def test_split_is_fixed_by_the_text_alone(tmp_path):
    texts = [f"text number {index}" for index in range(2000)]
    one = write_jsonl(tmp_path / "one.jsonl", texts + texts[:500])
    two = write_jsonl(tmp_path / "two.jsonl", texts[::-2])
    three = write_jsonl(tmp_path / "three.jsonl", texts[::2])
    train, validation = load_documents([one], validation_fraction=0.05)
    validation_texts = set(texts_of(validation))
    assert not validation_texts & set(texts_of(train))
    assert sorted(texts_of(train, validation)) == sorted(texts + texts[:500])
    assert 60 <= len(validation_texts) <= 140
    for arguments in ({}, {"streaming": True}, {"seed": 7}, {"weights": [1, 2]}):
        other_train, other_validation = load_documents([two, three], validation_fraction=0.05, **arguments)
        assert set(texts_of(other_validation)) == validation_texts
        assert set(texts_of(other_train)) == set(texts) - validation_texts
    wider = set(texts_of(load_documents([one], validation_fraction=0.1)[1]))
    assert validation_texts < wider


@pytest.mark.parametrize("streaming", [False, True])
def test_train_fraction_does_not_change_the_validation_set(tmp_path, streaming):
    name = write_jsonl(tmp_path / "a.jsonl", [f"text number {index}" for index in range(2000)])
    train, validation = load_documents([name], validation_fraction=0.1, streaming=streaming)
    quarter, same = load_documents([name], validation_fraction=0.1, train_fraction=0.25, streaming=streaming)
    half, _ = load_documents([name], validation_fraction=0.1, train_fraction=0.5, streaming=streaming)
    assert texts_of(same) == texts_of(validation)
    assert set(texts_of(quarter)) < set(texts_of(half)) < set(texts_of(train))
    assert 0.21 < len(texts_of(quarter)) / len(texts_of(train)) < 0.29
    assert texts_of(quarter)[:50] != texts_of(train)[:50], "drawn from all of it, not its beginning"


def test_a_stream_never_trains_on_validation_hashes_after_its_scan(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "VALIDATION_SCAN", 100)
    name = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    train, validation = load_documents([name], validation_fraction=0.2)
    streamed, streamed_validation = load_documents([name], validation_fraction=0.2, streaming=True)
    assert isinstance(streamed, IterableDataset)
    assert texts_of(streamed) == texts_of(train)
    assert texts_of(streamed) == texts_of(streamed), "a second epoch"
    assert texts_of(streamed_validation) == [text for text in texts_of(validation) if text in TEXTS[:100]]


def test_a_stream_stops_at_later_bad_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "VALIDATION_SCAN", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{index}"}}\n' for index in range(2000)) + "{\n" * 2000)
    train, _ = load_documents([str(path)], streaming=True)
    train = pickle.loads(pickle.dumps(train))  # as in a worker of a DataLoader
    with pytest.raises(ValueError, match="--max_rejected_ratio 0.01"):
        list(train)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_mix_sources(tmp_path, streaming):
    sizes = {"a": 100, "b": 500}
    names = [write_jsonl(tmp_path / f"{kind}.jsonl", [f"{kind}{i}" for i in range(n)]) for kind, n in sizes.items()]
    arguments = {"streaming": streaming, "validation_fraction": 0}
    train, _ = load_documents(names, weights=[3, 1], **arguments)
    texts = texts_of(train)
    counted = Counter(text[0] for text in texts)
    assert 0.70 < counted["a"] / len(texts) < 0.80 and len(set(texts)) == 600, "each source is read in full"
    if not streaming:
        found = [float(number) for number in re.findall(r"jsonl (\d+\.\d) times", train.info.description)]
        # The draws are random, so the counts scatter around the expectation.
        assert found == pytest.approx([counted[kind] / sizes[kind] for kind in "ab"], rel=0.2)
    assert texts == texts_of(load_documents(names, weights=[0.75, 0.25], **arguments)[0])
    assert texts != texts_of(load_documents(names, weights=[3, 1], seed=1, **arguments)[0])


@pytest.mark.parametrize(
    "names, arguments, words",
    [
        (["one"], {"validation_fraction": 0.999999}, "leave no document of"),
        (["a", "b"], {"weights": [1.0]}, r"=\[1.0\] must be 2 numbers above 0"),
        (["a"], {"weights": [0.0]}, r"=\[0.0\] must be 1 numbers above 0"),
        (["a"], {"validation_fraction": 1.0}, "validation_fraction=1.0"),
        (["a"], {"train_fraction": 0.0}, "train_fraction=0.0"),
        (["a"], {"train_fraction": 1.5}, "train_fraction=1.5"),
    ],
)
def test_invalid_arguments_are_refused(names, arguments, words, tmp_path):
    write_jsonl(tmp_path / "one.jsonl", ["one"])
    with pytest.raises(ValueError, match=words):
        load_documents([str(tmp_path / f"{name}.jsonl") for name in names], **arguments)


def test_cache_follows_the_content_and_the_code(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    first, _ = load_documents([write_jsonl(path, ["one", "two"])], validation_fraction=0)
    with monkeypatch.context() as patch:
        patch.setattr(documents, "_make_row", None)
        again, _ = load_documents([str(path)], validation_fraction=0)
    assert texts_of(again) == ["one", "two"] and again._fingerprint == first._fingerprint
    make_row = documents._make_row
    with monkeypatch.context() as patch:
        patch.setattr(caching, "CODE", "older")
        patch.setattr(documents, "_make_row", lambda *args: {**make_row(*args), "text": "of an older version"})
        assert texts_of(load_documents([str(path)], validation_fraction=0)[0]) == ["of an older version"] * 2
    assert texts_of(load_documents([str(path)], validation_fraction=0)[0]) == ["one", "two"]
    changed, _ = load_documents([write_jsonl(path, ["one", "2.0"])], validation_fraction=0)
    assert texts_of(changed) == ["one", "2.0"] and changed._fingerprint != first._fingerprint
    path.write_text('{"text": "a", "body": "b"}')
    assert texts_of(load_documents([str(path)], validation_fraction=0)[0]) == ["a"]
    assert texts_of(load_documents([str(path)], validation_fraction=0, text_column="body")[0]) == ["b"]


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_datasets(monkeypatch, streaming):
    """`tests/hub/test_hub_datasets.py` reads them over HTTP, but no streams."""
    table = Dataset.from_dict({"id": [1, 2, 3], "body": ["one", None, "three"]})
    records = table.to_iterable_dataset() if streaming else table
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: records)
    arguments = {"streaming": streaming, "validation_fraction": 0, "max_rejected_ratio": 0.5}
    assert texts_of(load_documents(["org/name"], text_column="body", **arguments)[0]) == ["one", "three"]
    with pytest.raises(ValueError, match="org/name has no column 'text' but id, body; pass --text_column"):
        load_documents(["org/name"], **arguments)


@pytest.mark.parametrize("streaming", [False, True])
def test_embedded_parts(streaming):
    train, validation = load_documents(["embedded:chatterbot"], streaming=streaming)
    texts = texts_of(train, validation)
    assert len(set(texts)) == len(texts) == 7644 - 1201
    assert 40 <= len(validation) <= 120


def test_rows_of_the_hub_are_parsed_in_one_process_per_core(monkeypatch):
    table = Dataset.from_dict({"text": [f"text {number}" for number in range(20)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    monkeypatch.setattr(caching, "GROUP_SIZE", 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    used, original = [], Dataset.map

    def spy(self, *args, **kwargs):
        used.append(kwargs.get("num_proc"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Dataset, "map", spy)
    documents, _ = load_documents(["user/data"], validation_fraction=0)
    assert documents["text"][:] == table["text"][:] and used[0] == 2
