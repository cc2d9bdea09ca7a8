import csv
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hf_pretrain.data import sources
from hf_pretrain.data.formats import BadRecord, file_format, read_file, read_text
from hf_pretrain.data.loading import load_documents
from tests.toys import write_jsonl


def read(path):
    """Return the records of a file, with the reason in place of a `BadRecord`."""
    return [
        (number, f"bad: {record.reason}" if isinstance(record, BadRecord) else record)
        for number, _, record in read_file(path, text_column="text")
    ]


@pytest.mark.parametrize(
    "record, reason",
    [
        ("text", "not an object but a string"),
        ([{"text": "a"}], "not an object but an array"),
        (None, "not an object but null"),
        ({"content": "a", "id": 1}, r"no column 'text' \(there is: content, id\); pass --text_column"),
        ({"text": None}, "holds null, not text"),
        ({"text": 3}, "holds an integer, not text"),
        ({"text": True}, "holds a boolean, not text"),
        ({"text": {"a": "b"}}, "holds an object, not text"),
        ({"text": ""}, "is empty"),
        ({"text": " \n\t\u3000"}, "is empty"),
        ({"text": "a\ud83d"}, "half a surrogate pair"),
        ({"text": "a\0b"}, "NUL character"),
    ],
)
def test_records_that_are_no_documents(record, reason):
    with pytest.raises(BadRecord, match=reason):
        read_text(record, text_column="text")


def test_text_is_returned_unchanged():
    assert read_text({"id": 1, "body": "  a 🙂\n"}, text_column="body") == "  a 🙂\n"


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}\r',
        b"",
        b'{"text": "a", "text": "b"}',
        b'{"text": "cut off',
        b'{"text": "latin \xe9"}',
        b'{"text": "a\0"}',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"text": "no end of line"}',
    ]
    path.write_bytes(b"\n".join(lines))
    records = read(path)
    assert [number for number, _ in records] == [1, 3, 4, 5, 6, 7, 8, 9]
    texts = [record for _, record in records]
    assert (texts[0], texts[-1]) == ({"text": "after a byte order mark"}, {"text": "no end of line"})
    for record, words in zip(
        texts[1:-1],
        ["'text' occurs twice", "broken JSON: Unterminated", "not UTF-8", "NUL byte", "cannot be read", "limit"],
        strict=True,
    ):
        assert record.startswith("bad: ") and words in record


def test_lines_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pretrain.data.formats.CHUNK_BYTES", 5)
    path = tmp_path / "a.jsonl"
    records = [{"text": "x" * length} for length in range(12)]
    write_jsonl(path, records)
    assert read(path) == list(enumerate(records, start=1))


def test_offsets_are_the_starts_of_lines(tmp_path):
    lines = [b'\xef\xbb\xbf{"text": "a"}\r', b"", b'{"text": "\xc3\xa9"}', b'{"text": "no end of line"}']
    content = b"\n".join(lines)
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    starts = [0, content.index(b'{"text": "\xc3'), content.index(b'{"text": "no')]
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert [offset for _, offset, _ in read_file(tmp_path / name, text_column="text")] == starts
    (tmp_path / "a.txt").write_bytes(b"one\n\n\ntwo\nlines\n")
    assert [offset for _, offset, _ in read_file(tmp_path / "a.txt", text_column="text")] == [0, 6]


def test_json_array_and_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('  \n[{"text": "a"},\n {"text": "b", "text": "c"}, 5]')
    records = read(path)
    assert records[0] == (1, {"text": "a"}) and records[2] == (3, 5)
    assert records[1][0] == 2 and "occurs twice" in records[1][1]
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert read(path) == [(1, {"text": "a"}), (2, {"text": "b"})]
    path.write_text('[{"text": "a"},\n {"text": ]')
    ((number, reason),) = read(path)
    assert number == 0 and "at line 2" in reason


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_json_array_in_a_file_of_lines(tmp_path, name, indent):
    path = tmp_path / name
    records = [{"text": "x" * length} for length in range(20)]
    data = json.dumps(records, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(path) == list(enumerate(records, start=1))
    # An array in each line is no array of records.
    line = json.dumps(records).encode()
    path.write_bytes(gzip.compress(line + b"\n" + line) if name.endswith("gz") else line + b"\n" + line)
    assert [number for number, _ in read(path)] == [1, 2]


def test_a_json_array_in_a_large_file_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SHARD_BYTES", 100)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 50)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"text {number}" for number in range(40)]
    (tmp_path / "a.jsonl").write_text(json.dumps([{"text": text} for text in texts], indent=1))
    documents, _ = load_documents([str(tmp_path / "a.jsonl")], validation_fraction=0)
    assert documents["text"][:] == texts


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_utf_16_is_named(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes('{"text": "第二"}\n{"text": "b"}\n'.encode(encoding))
    ((number, reason),) = read(path)
    assert number == 0 and reason.startswith("bad: UTF-16 text; convert the file to UTF-8")
    path.write_bytes(bytes(40) + b"\n")
    assert "UTF-16" not in str(read(path))


def test_paragraphs_of_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\n\nfirst\r\n  document\r\n\r\n\n第二\n \nlatin ".encode() + b"\xe9\n\nlast")
    records = read(path)
    assert records[:2] == [(3, {"text": "first\n  document"}), (7, {"text": "第二"})]
    assert records[2][0] == 9 and "not UTF-8" in records[2][1]
    assert records[3] == (11, {"text": "last"})


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), path)
    assert read(path) == [(1, {"text": "a"}), (2, {"text": None})]
    pq.write_table(pa.table({"id": [1], "content": ["a"]}), path)
    ((number, reason),) = read(path)
    assert number == 0 and "there is: id, content" in reason
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(pa.table({"text": twice}), path)
    ((number, reason),) = read(path)
    assert number == 1 and "duplicate field names" in reason
    path.write_bytes(path.read_bytes()[:-20])
    ((number, reason),) = read(path)
    assert number == 0 and "no readable parquet file" in reason


def test_tables(tmp_path):
    path = tmp_path / "a.csv"
    texts = ["plain", 'with , and "quotes"', "two\nlines", "漢字", "x" * 200_000, ""]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["id", "text"], [], *enumerate(texts)])
    # The header is line 1, then comes a blank line; the third text has two lines.
    numbers = [3, 4, 5, 7, 8, 9]
    expected = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    assert read(path) == list(zip(numbers, expected, strict=True))
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(path.with_suffix(".csv.gz")) == read(path)


def test_quotes_are_ordinary_characters_of_a_tsv_file(tmp_path):
    path = tmp_path / "a.tsv"
    texts = ['"a" word', '"never closed', 'two ""', "a, b", "x" * 200_000, ""]
    rows = [f"{number}\t{text}\r\n" for number, text in enumerate(texts)]
    path.write_text("id\ttext\r\n" + "".join(rows), encoding="utf-8-sig", newline="")
    assert read(path) == [(number + 2, {"id": str(number), "text": text}) for number, text in enumerate(texts)]
    path.write_text("id\ttext\n1\ta\tb\n")
    assert "remove tabs and line breaks from its fields" in read(path)[0][1]


def test_carriage_returns_within_the_lines_of_a_table(tmp_path):
    path = tmp_path / "a.csv"
    # The first file ends its lines as early Macintoshes did.
    for content, expected in ((b"id,text\r1,a\r", [1]), (b'id,text\n1,a\rb\n2,"c\rd"\n', [2, 3])):
        path.write_bytes(content)
        records = read(path)
        assert [number for number, _ in records] == expected
        assert "carriage return within a line" in records[0][1]
    assert records[1][1] == {"id": "2", "text": "c\rd"}


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pretrain.data.formats.MAX_FIELD_CHARACTERS", 100)
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"open\n' + "a line\n" * 1000 + "2,b\n")
    records = read(path)
    assert "a field of more than 100 characters; close its quote" in records[0][1]
    assert records[-1][1] == {"id": "2", "text": "b"}


def test_damaged_tables(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,a\n2\n3,b,c\n4,latin \xe9\n5,"a"b\n6,"two\nlines"\n7,"never closed\n8,c\n')
    records = read(path)
    assert [number for number, _ in records] == [2, 3, 4, 5, 6, 7, 0]
    assert records[0][1] == {"id": "1", "text": "a"} and records[5][1] == {"id": "6", "text": "two\nlines"}
    width = "bad: a row without 2 fields like the first row; quote its fields"
    assert records[1][1] == records[2][1] == width
    assert "not UTF-8" in records[3][1] and "double the quotes" in records[4][1]
    assert records[6][1] == "bad: a quote of the row in line 9 is never closed; close it"
    for header in (b"text,text", b"t\xe9xt"):
        path.write_bytes(header + b"\na,b\n")
        ((number, reason),) = read(path)
        assert number == 0 and "does not name each column once" in reason


@pytest.mark.parametrize(
    "suffix, compress", [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor(write_checksum=True).compress)]
)
def test_compressed_files(tmp_path, suffix, compress):
    path = tmp_path / f"a.jsonl.{suffix}"
    records = [{"text": f"document {index} {index * 7919 % 2003}"} for index in range(2000)]
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    # Two concatenated members, as from `cat a.gz b.gz`.
    whole = compress(b"".join(lines[:1000])) + compress(b"".join(lines[1000:]))
    path.write_bytes(whole)
    assert read(path) == list(enumerate(records, start=1))

    for size in (len(whole) - 1, len(whole) * 3 // 4, 10):
        path.write_bytes(whole[:size])
        *good, (number, reason) = read(path)
        assert number == 0 and "ends early" in reason
        assert all(record in records or record.startswith("bad: ") for _, record in good)

    damaged = bytearray(whole)
    damaged[len(whole) // 4] ^= 0xFF
    path.write_bytes(damaged)
    number, reason = read(path)[-1]
    assert number == 0 and "damaged" in reason


def test_file_formats(tmp_path):
    names = {
        "a.jsonl": ".jsonl",
        "a.b.JSON.gz": ".json",
        "a.txt.zst": ".txt",
        "a.parquet": ".parquet",
        "a.parquet.gz": None,
        "a.csv": ".csv",
        "a.tsv.gz": ".tsv",
        "a.xlsx": None,
        "a.gz": None,
        "a": None,
    }
    assert {name: file_format(tmp_path / name) for name in names} == names
