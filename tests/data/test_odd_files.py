"""Unusual files: damaged, huge, very many, or no regular files."""

import gzip
import json
import os
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hf_pretrain.data.loading import load_documents


LINES = b"".join(json.dumps({"text": f"document {number} {number**7}"}).encode() + b"\n" for number in range(2000))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def damage(data: bytes, place: int) -> bytes:
    return data[:place] + bytes(255 - byte for byte in data[place : place + 64]) + data[place + 64 :]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_package_is_named(tmp_path, monkeypatch, streaming):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"pip install .*\[zstd\]"):
        load_documents([str(tmp_path / "a.jsonl.zst")], streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", [0, 0.5, 0.999])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_damage_in_a_compressed_file_is_named(tmp_path, ending, place, streaming):
    compress = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}[ending]
    data = compress(LINES)
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(damage(data, int(place * len(data))))
    with pytest.raises(ValueError, match=f"a.jsonl.{ending}: the compressed file (is damaged|ends early)"):
        documents, _ = load_documents([str(path)], streaming=streaming, max_rejected_ratio=1.0)
        list(documents)


def test_nulls_at_every_depth_of_a_table(tmp_path):
    message = {"role": "user", "content": "a question"}
    answer = {"role": "assistant", "content": "an answer"}
    conversations = [
        [message, answer],
        None,
        [],
        [None, None],
        [message, None],
        [message, {"role": "assistant", "content": None}],
        [{"role": None, "content": "a"}, answer],
        [{"role": "user", "content": None}, answer],
    ]
    schema = pa.schema({"messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))})
    table = pa.table({"messages": conversations}, schema=schema)
    pq.write_table(table, tmp_path / "chats.parquet")
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"])}), tmp_path / "texts.parquet")
    pq.write_table(pa.table({"text": pa.nulls(3)}), tmp_path / "nulls.parquet")
    rejected = tmp_path / "rejected.jsonl"
    how = {"validation_fraction": 0, "max_rejected_ratio": 1.0, "rejected_path": rejected}
    documents, _ = load_documents([str(tmp_path / "chats.parquet")], schema="conversation", **how)
    reasons = {line["line"]: line["reason"] for line in map(json.loads, rejected.read_text().splitlines())}
    expected = {
        2: "no conversation",
        3: "'messages' is no list of messages but empty",
        4: "'messages' holds null in place of a message",
        5: "'messages' holds null in place of a message",
        6: "a message of the assistant has no content",
        7: "a message has the role null",
        8: "a message of the user has no content",
    }
    assert reasons.keys() == expected.keys() and len(documents) == 1
    assert all(reasons[line].startswith(words) for line, words in expected.items()), reasons
    documents, _ = load_documents([str(tmp_path / "texts.parquet")], **how)
    assert documents["text"][:] == ["a", "b"]
    sharegpt = [[{"from": "human", "value": "a"}, {"from": "gpt", "value": value}] for value in ("b", None)]
    pq.write_table(pa.table({"conversations": sharegpt}), tmp_path / "sharegpt.parquet")
    documents, _ = load_documents([str(tmp_path / "sharegpt.parquet")], schema="conversation", **how)
    assert len(documents) == 1 and "a message of the assistant has no content" in rejected.read_text()
    with pytest.raises(ValueError, match="(?s)nulls.parquet holds no document.*3 x column 'text' holds null"):
        load_documents([str(tmp_path / "nulls.parquet")], **how)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match="pipe.jsonl is neither a file nor a directory"):
        load_documents([str(tmp_path / "pipe.jsonl")])
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert len(load_documents([str(tmp_path)], validation_fraction=0)[0]) == 2000


def test_ten_thousand_files(tmp_path):
    lines = LINES.splitlines(keepends=True)
    for number in range(10_000):
        (tmp_path / f"{number:05}.jsonl").write_bytes(lines[number % 2000])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    train, validation = load_documents([str(tmp_path)], num_proc=1)
    assert len(train) + len(validation) == 10_000
    assert before is None or len(os.listdir("/proc/self/fd")) < before + 50


HUGE = """
import datasets, resource, sys
datasets.config.HF_DATASETS_CACHE = sys.argv[2]
from hf_pretrain.data.loading import load_documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train, _ = load_documents([sys.argv[1]], validation_fraction=0)
print([len(text) for text in train["text"]], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in KiB")
def test_a_line_of_200_mb(tmp_path):
    size = 200_000_000
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(size // 1_000_000):
            file.write(b"many words " * 90_909 + b"!")
        file.write(b'"}\n{"text": "after"}\n')
    words = [sys.executable, "-c", HUGE, str(tmp_path / "a.jsonl"), str(tmp_path / "cache")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    lengths, _, gib = result.stdout.strip().rpartition(" ")
    assert lengths == f"[6, {size}, 5]"
    assert float(gib) < 4
