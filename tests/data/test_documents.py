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
from datasets import IterableDataset

from hf_pretrain.data import documents, rejected, sources
from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows import caching
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
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
    for texts in ((["日本 text"], [None]), (["another"], ["日本 text"])):
        for edge, is_below in ((share + 1e-9, True), (share - 1e-9, False)):
            assert documents.hashes_are_between(*texts, 0.0, edge) == [is_below]
            assert documents.hashes_are_between(*texts, edge, 1.0) == [not is_below]


def texts_of(*parts):
    return [record["text"] for part in parts for record in part]


TEXTS = [f"document {index}" for index in range(300)]
BAD_LINES = {
    3: (b'{"text": "cut', "broken JSON"),
    7: (b"[1, 2]", "not an object but an array"),
    11: (b'{"content": "a"}', "no column 'text' (there is: content)"),
    13: (b'{"text": "\xff"}', "not UTF-8; pass the right --encoding"),
    17: (b'{"text": "  "}', "is empty"),
    19: (b'{"text": "\\ud83d"}', "half a surrogate pair"),
    23: (b'{"text": "a\\u0000"}', "NUL character"),
    24: (b'{"text": "\0"}', "broken JSON: Invalid control character"),
    31: (b'{"text": null}', "holds null"),
    37: (b'{"text": 5}', "holds an integer"),
    41: (b'{"\\ud83d": 1}', "no column 'text'"),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_lines_are_rejected_and_good_ones_are_kept(tmp_path, warnings, streaming):
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    good = [text for number, text in enumerate(TEXTS, start=1) if number not in BAD_LINES]
    for number, (line, _) in BAD_LINES.items():
        lines[number - 1] = line
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    name, rejected = str(tmp_path / "bad.jsonl"), tmp_path / "run" / "rejected.jsonl"
    arguments = {"streaming": streaming, "validation_fraction": 0.1, "max_rejected_ratio": 0.05}
    for _ in range(2):  # the second time, from the cache
        warnings.clear()
        train, validation = load_documents([name], Reading(**arguments), rejected_path=rejected)
        assert sorted(texts_of(train, validation)) == sorted(good)
        listed = [json.loads(line) for line in rejected.read_text(encoding="utf-8").splitlines()]
        assert [(entry["source"], entry["line"]) for entry in listed] == [(name, number) for number in BAD_LINES]
        assert all(words in entry["reason"] for entry, (_, words) in zip(listed, BAD_LINES.values(), strict=True))
        (warning,) = warnings
        assert warning.startswith(f"{name}:3: broken JSON") and str(rejected) in warning
        assert streaming or train.info.description == f"{len(BAD_LINES)} bad lines skipped"
    with pytest.raises(UserError):
        load_documents([name], Reading(**arguments | {"max_rejected_ratio": 0.02}), rejected_path=rejected)


def test_a_directory_and_its_globs_give_each_file_once(tmp_path, warnings):
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
    (data / "sub" / "latest.jsonl").symlink_to("a.jsonl")
    expected = [str(data / name) for name in ("a.jsonl", "linked/a.jsonl", "sub/a.jsonl")]
    for name in (data / "*", data / "**", data / "**/*.jsonl", tmp_path / "data*"):
        assert sources.find_sources(str(name)) == expected, name
    # A glob of a directory that links to itself is slow.
    (data / "sub" / "loop").symlink_to(data)
    assert sources.find_sources(str(data)) == expected
    assert f"{data}: 3 data files. 1 others are left out, such as {data / 'notes.md'}." in warnings
    # Without other data, they are the data.
    (tmp_path / "notes").mkdir()
    (data / "notes.md").rename(tmp_path / "notes/a.md")
    assert sources.find_sources(str(tmp_path / "notes")) == [str(tmp_path / "notes/a.md")]


def test_streams_and_processes_read_all_formats_alike(tmp_path, monkeypatch):
    names = ("jsonl", "gz", "zst", "json", "parquet", "txt")
    texts = {name: [f"{name} {index}" for index in range(10)] for name in names}
    jsonl = {name: "".join(json.dumps({"text": text}) + "\n" for text in texts[name]).encode() for name in names}
    (tmp_path / "a.jsonl").write_bytes(jsonl["jsonl"])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl["gz"]))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(jsonl["zst"], codec="zstd", asbytes=True))
    (tmp_path / "d.json").write_text(json.dumps([{"text": text} for text in texts["json"]]))
    pq.write_table(pa.table({"text": texts["parquet"]}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_text("\n\n".join(texts["txt"]))
    lines = [json.dumps({"text": f"line {number} " * (number % 7)}).encode() for number in range(300)]
    lines[5::80] = [b"", b"{", b'{"text": 5}', b"[1, 2]"]
    (tmp_path / "z.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))

    def load(**arguments) -> tuple[list[str], list[str], str]:
        reading = Reading(validation_fraction=0.2, max_rejected_ratio=1, **arguments)
        rejected = tmp_path / "out" / "rejected"
        train, validation = load_documents([str(tmp_path / "*.*")], reading, rejected_path=rejected)
        assert train.column_names == validation.column_names == ["text"]
        return texts_of(train), texts_of(validation), (tmp_path / "out" / "rejected").read_text()

    whole = load()
    assert set(sum(texts.values(), [])) < set(whole[0] + whole[1]) and len(whole[2].splitlines()) > 3
    assert load(streaming=True) == whole
    monkeypatch.setattr(caching, "GROUP_SIZE", 30)
    monkeypatch.setattr(caching, "CODE", "another cache entry")
    assert caching.count_processes(300, 2) == 2 and load(num_proc=2) == whole == load()


def share_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


@pytest.mark.parametrize(
    ("number", "schema", "fraction", "expected"),
    [
        (40, "text", 0.01, 1),
        (360, "text", 0.01, 3),
        (9, "text", 0.01, 0),
        # Each fact to learn counts, unless the user's share holds one.
        (40, "conversation", 0.01, 0),
        (360, "conversation", 0.01, 3),
        (40, "text", 0.0, 0),
    ],
)
def test_small_data_have_documents_for_validation(tmp_path, capsys, number, schema, fraction, expected):
    """Texts of which none has a hash of the validation set by chance: the ones with the smallest hashes are taken."""
    texts = [f"note {index}" for index in range(2 * number) if share_of(f"note {index}") >= 0.01]
    texts = sorted(texts, key=share_of)[:number]
    conversations = [{"prompt": text, "completion": "a"} for text in texts]
    name = write_jsonl(tmp_path / "a.jsonl", texts if schema == "text" else conversations)
    train, validation = load_documents([name], Reading(kind=schema, validation_fraction=fraction))
    assert (len(train), len(validation)) == (number - expected, expected)
    if schema == "text":
        assert set(validation["text"]) == {*texts[:expected]}
    said = f"taking {expected} of {number} documents for validation"
    assert (said in capsys.readouterr().err) == (expected > 0)
    # A second name with one document keeps it.
    one = write_jsonl(tmp_path / "b.jsonl", [texts[0]] if schema == "text" else conversations[:1])
    _, validation = load_documents([name, one], Reading(kind=schema, validation_fraction=fraction))
    assert len(validation) in (0, expected)


def test_split_is_fixed_by_the_text_alone(tmp_path):
    texts = [f"text number {index}" for index in range(1000)]
    one = write_jsonl(tmp_path / "one.jsonl", texts + texts[:200])
    two = write_jsonl(tmp_path / "two.jsonl", texts[::-2])
    three = write_jsonl(tmp_path / "three.jsonl", texts[::2])
    train, validation = load_documents([one], Reading(validation_fraction=0.05))
    validation_texts = set(texts_of(validation))
    assert not validation_texts & set(texts_of(train)) and 30 <= len(validation_texts) <= 70
    assert sorted(texts_of(train, validation)) == sorted(texts + texts[:200])
    for arguments in ({}, {"streaming": True}, {"seed": 7}, {"dataset_weights": [1, 2]}):
        other_train, other_validation = load_documents([two, three], Reading(validation_fraction=0.05, **arguments))
        assert set(texts_of(other_validation)) == validation_texts
        assert set(texts_of(other_train)) == set(texts) - validation_texts
    wider = set(texts_of(load_documents([one], Reading(validation_fraction=0.1))[1]))
    assert validation_texts < wider


@pytest.mark.parametrize("streaming", [False, True])
def test_train_fraction_does_not_change_the_validation_set(tmp_path, streaming):
    name = write_jsonl(tmp_path / "a.jsonl", [f"text number {index}" for index in range(1000)])
    how = {"validation_fraction": 0.1, "streaming": streaming}
    sets = [load_documents([name], Reading(train_fraction=fraction, **how)) for fraction in (0.25, 0.5, 1.0)]
    quarter, half, whole = (texts_of(train) for train, _ in sets)
    assert texts_of(sets[0][1]) == texts_of(sets[2][1])
    assert {*quarter} < {*half} < {*whole} and 0.21 < len(quarter) / len(whole) < 0.29
    assert quarter[:50] != whole[:50], "drawn from all of it, not its beginning"


def test_a_stream_never_trains_on_validation_hashes_after_its_scan(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "VALIDATION_SCAN", 100)
    name = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    train, validation = load_documents([name], Reading(validation_fraction=0.2))
    streamed, streamed_validation = load_documents([name], Reading(validation_fraction=0.2, streaming=True))
    assert isinstance(streamed, IterableDataset)
    assert texts_of(streamed) == texts_of(train)
    assert texts_of(streamed) == texts_of(streamed), "a second epoch"
    assert texts_of(streamed_validation) == [text for text in texts_of(validation) if text in TEXTS[:100]]


def test_a_stream_stops_at_later_bad_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "VALIDATION_SCAN", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{index}"}}\n' for index in range(2000)) + "{\n" * 2000)
    train, _ = load_documents([str(path)], Reading(streaming=True))
    train = pickle.loads(pickle.dumps(train))  # as in a worker of a DataLoader
    with pytest.raises(UserError):
        list(train)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_mix_sources(tmp_path, streaming):
    sizes = {"a": 100, "b": 500}
    names = [write_jsonl(tmp_path / f"{kind}.jsonl", [f"{kind}{i}" for i in range(n)]) for kind, n in sizes.items()]
    arguments = {"streaming": streaming, "validation_fraction": 0}
    train, _ = load_documents(names, Reading(dataset_weights=[3, 1], **arguments))
    texts = texts_of(train)
    counted = Counter(text[0] for text in texts)
    assert 0.70 < counted["a"] / len(texts) < 0.80 and len(set(texts)) == 600, "each source is read in full"
    if not streaming:
        found = [float(number) for number in re.findall(r"jsonl (\d+\.\d) times", train.info.description)]
        # The draws are random, so the counts scatter around the expectation.
        assert found == pytest.approx([counted[kind] / sizes[kind] for kind in "ab"], rel=0.2)
    assert texts == texts_of(load_documents(names, Reading(dataset_weights=[0.75, 0.25], **arguments))[0])
    assert texts != texts_of(load_documents(names, Reading(dataset_weights=[3, 1], seed=1, **arguments))[0])
