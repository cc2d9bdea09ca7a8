"""Files of every format, damaged and odd ones included."""

import csv
import gzip
import json
import re

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import BadRecord, parse_json, read_file
from hf_pretrain.rows.reading import Reading


LINES = b"".join(json.dumps({"text": f"document {number} {number**7}"}).encode() + b"\n" for number in range(2000))


def read(path, **how):
    """Return the records of a file, with the reason in place of a `BadRecord`."""
    records = []
    for number, content in read_file(path, Reading(**how)):
        try:
            records.append((number, parse_json(content)))
        except BadRecord as error:
            records.append((number, f"bad: {error.reason}"))
    return records


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path, name):
    path = tmp_path / name
    lines = [
        b'\xef\xbb\xbf{"text": "after a byte order mark"}\r',
        b"",
        b'{"text": "cut off',
        b'{"text": "latin \xe9"}',
        b'{"text": "a\0"}',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"text": "no end of line"}',
    ]
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    numbers, records = zip(*read(path), strict=True)
    assert numbers == (1, 3, 4, 5, 6, 7, 8)
    assert (records[0], records[-1]) == ({"text": "after a byte order mark"}, {"text": "no end of line"})
    faults = ["broken JSON: Unterminated", "not UTF-8", "broken JSON: Invalid control", "cannot be read", "limit"]
    for record, words in zip(records[1:-1], faults, strict=True):
        assert record.startswith("bad: ") and words in record


def test_a_json_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('  \n[{"text": "a"},\n {"text": "b"}, 5]')
    assert read(path) == [(1, {"text": "a"}), (2, {"text": "b"}), (3, 5)]
    path.write_text('[{"text": "a"},\n {"text": ]')
    with pytest.raises(ValueError, match="a.json: broken JSON: Expecting value"):
        read(path)


def test_paragraphs_of_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\n\nfirst\r\n  document\r\n\r\n\n第二\n \nlatin ".encode() + b"\xe9\n\nlast")
    records = read(path)
    assert records[:2] == [(3, {"text": "first\n  document"}), (7, {"text": "第二"})] and records[3][0] == 11
    assert records[2][1].startswith("bad: not UTF-8; pass the right --encoding: cp1252 reads ")
    assert [text for _, text in read(path, encoding="latin-1")][2] == {"text": "latin é"}
    path.write_text("\none\n\ntwo\n")
    assert read(path, whole_files=True) == [(1, {"text": "\none\n\ntwo\n"})]
    # Markdown would fall into headings and halves of code.
    path = path.rename(tmp_path / "a.md")
    assert read(path) == [(1, {"text": "\none\n\ntwo\n"})]


PAIRS = {
    "Q: 2+2?\nA: 4\n\nq: Why?\n\na: Because.\nSo it is: a rule.\n": [
        ("2+2?", "4"),
        ("Why?", "Because.\nSo it is: a rule."),
    ],
    "\n**Question 1:** Who?\n**Answer 1:** I.\n": [("Who?", "I.")],
    "问：你好吗？\n答：很好。\n问题：再见？\n答案： 再见。": [("你好吗？", "很好。"), ("再见？", "再见。")],
    "Q: a\nQ: b\nA: c": None,
    "A: a\nQ: b\nA: c": None,
    "Q: a\nA: b\nQ: c": None,
    "Q: a\nA:\nQ: b\nA: c": None,
    "A title\n\nQ: a\nA: b": None,
    "A story. Q: was not there.": None,
}


@pytest.mark.parametrize("text", PAIRS)
def test_pairs_in_a_text_file(tmp_path, text, capsys):
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    if PAIRS[text] is None:
        with pytest.raises(
            ValueError, match="a.txt holds plain text, and records are wanted.*`Q:` before each question"
        ):
            list(read_file(path, Reading(kind="conversation")))
        return
    records = [parse_json(content) for _, content in read_file(path, Reading(kind="conversation"))]
    assert [(record["prompt"], record["completion"]) for record in records] == PAIRS[text]
    assert f"a.txt as {len(records)} pairs of question and answer" in capsys.readouterr().err
    assert len(load_documents([str(path)], Reading(kind="conversation", validation_fraction=0))[0]) == len(records)
    # A run on text reads the same file as paragraphs.
    assert read(path)[0][1]["text"] in text


@pytest.mark.parametrize(
    ("encoding", "word", "others"),
    [
        ("cp1252", "R\u00f6ntgen", "gb18030 reads .*R\u9c0atgen"),
        ("cp1251", "\u041f\u0440\u0438\u0432\u0435\u0442", ""),
        ("cp932", "\u65e5\u672c", ""),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.txt"])
def test_a_wrong_encoding_shows_what_others_read(tmp_path, encoding, word, others, name):
    line = {"a.csv": "text\n{}\n{}\n", "a.json": '[{{"text": "{}"}}, {{"text": "{}"}}]', "a.txt": "{}\n\n{}\n"}[name]
    path = tmp_path / name
    path.write_bytes(line.format(f"Wer? {word}!", word).encode(encoding))
    with pytest.raises(
        ValueError, match=f"not UTF-8; pass the right --encoding: .*{encoding} reads .*Wer. {word}!"
    ) as raised:
        load_documents([str(path)])
    assert re.search(others, str(raised.value))
    # Lines of one fault are counted together.
    assert name == "a.json" or "2 x not UTF-8" in str(raised.value)


TABLE = pandas.DataFrame({"text": ["plain", "早上好，你好吗？", "再见"] * 20, "标签": "好"})
CONTENTS = {
    "a.csv": TABLE.to_csv(index=False),
    "a.json": TABLE.to_json(orient="records", force_ascii=False),
    "a.jsonl": TABLE.to_json(orient="records", lines=True, force_ascii=False),
    "a.txt": "\n\n".join(TABLE["text"]),
}


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "utf-8-sig", "utf-16-le"])
@pytest.mark.parametrize("name", CONTENTS)
def test_every_encoding_is_read_or_named(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes(CONTENTS[name].encode(encoding))
    # The mark at the beginning of a file is enough.
    for given in (encoding, "utf-8", "gbk") if encoding in ("utf-16", "utf-8-sig") else (encoding,):
        assert [record["text"] for _, record in read(path, encoding=given)] == TABLE["text"].to_list()
    if given != encoding:
        return
    wanted = {"gb18030": "not UTF-8; pass the right --encoding: gb18030 reads ", "utf-16-le": "--encoding utf-16-le"}
    with pytest.raises(ValueError, match=wanted[encoding]):
        load_documents([str(path)], Reading(streaming=True))


@pytest.mark.parametrize("name", ["gb18031", "hex"])
def test_an_unknown_encoding_is_named(tmp_path, name):
    (tmp_path / "b.txt").write_bytes(b"a\xff\x00")
    with pytest.raises(ValueError, match="b.txt is not UTF-16-LE. Pass the right --encoding"):
        read(tmp_path / "b.txt", encoding="utf-16-le")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=f"--encoding {name} is unknown"):
        read(tmp_path / "a.txt", encoding=name)


def test_json_over_several_lines_is_named(tmp_path):
    for name, value in (
        ("a.json", {"data": [{"text": "a"}] * 9}),
        ("a.jsonl", [{"text": "a"}]),
        ("b.jsonl", {"text": "a"}),
    ):
        (tmp_path / name).write_text(json.dumps(value, indent=2))
        with pytest.raises(ValueError, match=f"{name} holds JSON over several lines. Write one object per line"):
            read(tmp_path / name)


def test_a_table_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    texts = ["plain", 'with , and "quotes"', "two\nlines", "漢字", "x" * 200_000, "", "NA", "1.50"]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    expected = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    # The header is line 1, and the third text has two lines.
    assert read(path) == list(zip([2, 3, 4, 6, 7, 8, 9, 10], expected, strict=True))
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(path.with_suffix(".csv.gz")) == read(path)
    path.write_bytes(b"id,text\n1,a\n2\n3,b,c\n4,d\n")
    fault = "bad: a row without 2 fields like the first row; quote its fields"
    assert [record for _, record in read(path)] == [{"id": "1", "text": "a"}, fault, fault, {"id": "4", "text": "d"}]
    path.write_bytes(b"id,text\n1,latin \xe9\n2,a\n")
    assert [str(record)[:14] for _, record in read(path)] == ["bad: not UTF-8", "{'id': '2', 't"]


class Semicolons(csv.excel):
    """What Excel writes where the comma is the decimal point."""

    delimiter = ";"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "gb18030"])
@pytest.mark.parametrize(
    "name, dialect", [("a.csv", "excel"), ("a.csv", Semicolons), ("a.csv", "excel-tab"), ("a.tsv", "excel-tab")]
)
def test_every_separator_is_found(tmp_path, name, dialect, encoding):
    path = tmp_path / name
    # More separators of other kinds than of the file's own.
    rows = [["问题", "text"], ["a;b;c;d", "one; two; three\tfour\tfive,six,seven"], ["1,5", 'said "no";\nso, yes\t']]
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, dialect).writerows(rows)
    assert [list(record.values()) for _, record in read(path, encoding=encoding)] == rows[1:]
    assert [*read(path, encoding=encoding)[0][1]] == rows[0]


def test_names_with_separators(tmp_path):
    path = tmp_path / "a.csv"
    for header, names in (
        ('"id; no",text', ["id; no", "text"]),
        ('"a,""b"";";text', ['a,"b";', "text"]),
        ("text", ["text"]),
    ):
        path.write_text(f"{header}\n" + ("1" if len(names) == 1 else "1,2" if header[-5] == "," else "1;2"))
        assert [*read(path)[0][1]] == names
    path.write_text("id;text, raw\n1;a\n")
    with pytest.raises(ValueError, match="a.csv: the first row holds several separators, ',;'. Quote its names"):
        read(path)
    path = path.rename(tmp_path / "a.tsv")
    path.write_text("id\ttext, raw\n1\ta\n")
    assert read(path) == [(2, {"id": "1", "text, raw": "a"})]


@pytest.mark.parametrize("content", [b'id,text\n1,"a"b\n', b'id,text\n1,"never closed\n2,b\n', b"id,id\n1,a\n"])
def test_a_csv_file_with_a_fault_in_its_form_is_refused(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match="a.csv(:| cannot be read)"):
        read(tmp_path / "a.csv")


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), path)
    assert read(path) == [(1, {"text": "a"}), (2, {"text": None})]
    pq.write_table(pa.table({"id": [1], "content": ["a"]}), path)
    with pytest.raises(ValueError, match="no column 'text' but id, content"):
        read(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="a.parquet cannot be read"):
        read(path)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files(tmp_path, ending):
    path = tmp_path / f"a.jsonl.{ending}"

    def compress(data: bytes) -> bytes:
        return gzip.compress(data) if ending == "gz" else pa.compress(data, codec="zstd", asbytes=True)

    # Two concatenated members, as from `cat a.gz b.gz`.
    whole = compress(LINES[:30_000]) + compress(LINES[30_000:])
    path.write_bytes(whole)
    assert len(read(path)) == 2000
    for damaged in (whole[:-1], whole[: len(whole) * 3 // 4], b"\0" * 20 + whole):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"a.jsonl.{ending} cannot be read"):
            read(path)
