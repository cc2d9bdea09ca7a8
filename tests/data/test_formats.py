"""Files of every format, damaged and odd ones included."""

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import ENCODINGS, BadRecord, parse_json, read_file, wrong_encoding
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError


# A property of any input. Examples share a directory, which each writes anew.
for_any = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


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


QUESTIONS, ANSWERS = (
    ("Q: ", "q:", "\n**Question 1:** ", "问：", "问题："),
    ("A: ", "\na:", "**Answer 1:** ", "答：", "答案："),
)
TEXTS = ("2+2?", "Because.\nSo it is: a rule.\n", "再见。")
pairs = st.tuples(*map(st.sampled_from, (QUESTIONS, TEXTS, ANSWERS, TEXTS)))


@for_any
@given(
    st.lists(pairs, min_size=1, max_size=3), st.sampled_from(["", "A title\n\n", "So: ", "lost", "empty"]), st.data()
)
def test_only_a_text_of_pairs_is_read_as_pairs(tmp_path, pairs, fault, data):
    path = tmp_path / "a.txt"
    parts = [part for question, asked, answer, said in pairs for part in (question + asked, answer + said)]
    place = data.draw(st.integers(0, len(parts) - 1))
    if fault in ("lost", "empty"):
        parts[place : place + 1] = [] if fault == "lost" else ["A:" if place % 2 else "Q:"]
    path.write_text(fault * (fault not in ("lost", "empty")) + "\n".join(parts), encoding="utf-8")
    if fault:
        with pytest.raises(UserError):
            read(path, kind="conversation")
    else:
        expected = [{"prompt": asked.strip(), "completion": said.strip()} for _, asked, _, said in pairs]
        assert read(path, kind="conversation") == [*enumerate(expected, start=1)]


def test_a_run_on_conversations_says_that_it_reads_pairs(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text("Q: Why?\nA: So.\n\nQ: When?\nA: Now.\n")
    documents, _ = load_documents([str(path)], Reading(kind="conversation", validation_fraction=0))
    assert len(documents) == 2 and "a.txt as 2 pairs of question and answer" in capsys.readouterr().err
    # A run on text reads the same file as paragraphs.
    assert read(path)[0][1] == {"text": "Q: Why?\nA: So."}


LETTERS = dict(zip(ENCODINGS, ("早上好你好吗", "éßöñçà", "приветж", "日本語テスト"), strict=True))
named_texts = st.sampled_from(ENCODINGS).flatmap(
    lambda name: st.tuples(st.just(name), st.text(LETTERS[name], min_size=1, max_size=9))
)


@for_any
@given(named_texts, st.integers(0, 60))
def test_a_wrong_encoding_shows_what_the_right_one_reads(named, num_before):
    encoding, text = named
    data = ("a" * num_before + text + "a" * 60).encode(encoding)
    found = data.decode("utf-8", "surrogateescape")
    # By chance, the bytes may be UTF-8.
    assume("\udc80" <= max(found) <= "\udcff")
    reason = wrong_encoding("utf-8", found).reason
    assert reason.startswith("not UTF-8; pass the right --encoding: ")
    assert text[0] in reason.partition(f"{encoding} reads ")[2][:40] and len(reason) < 500


WRITERS = {
    "a.csv": lambda texts: "text,标签\n" + "".join(f"{text},好\n" for text in texts),
    "a.json": lambda texts: json.dumps([{"text": text} for text in texts], ensure_ascii=False),
    "a.jsonl": lambda texts: "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
    "a.txt": "\n\n".join,
}
WITH_MARK = ("utf-16", "utf-8-sig")


@for_any
@given(
    st.sampled_from([*WRITERS]),
    st.sampled_from(["gb18030", "utf-16-le", "utf-16-be", *WITH_MARK]),
    st.lists(st.text("az早上好é", min_size=1), min_size=1, max_size=9),
)
def test_every_encoding_is_read(tmp_path, name, encoding, texts):
    path = tmp_path / name
    path.write_bytes(WRITERS[name](texts).encode(encoding))
    # The mark at the beginning of a file is enough.
    for given_encoding in (encoding, "utf-8", "gbk") if encoding in WITH_MARK else (encoding,):
        assert [record["text"] for _, record in read(path, encoding=given_encoding)] == texts


class Semicolons(csv.excel):
    """What Excel writes where the comma is the decimal point."""

    delimiter = ";"


cells = st.text('a漢1.,;\t"\n', max_size=9) | st.just("NA")


@for_any
@given(
    st.sampled_from([("a.csv", "excel"), ("a.csv", Semicolons), ("a.csv", "excel-tab"), ("a.tsv", "excel-tab")]),
    st.sampled_from(["utf-8-sig", "utf-16", "gb18030"]),
    st.lists(st.tuples(cells, cells), max_size=4),
)
def test_every_table_with_every_separator_is_read(tmp_path, form, encoding, rows):
    path = tmp_path / form[0]
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, form[1]).writerows([["问题", "text"], *rows])
    # A text of several lines moves the rows after it.
    numbers = [2 + sum(1 + "".join(row).count("\n") for row in rows[:place]) for place in range(len(rows))]
    expected = [dict(zip(["问题", "text"], row, strict=True)) for row in rows]
    assert read(path, encoding=encoding) == list(zip(numbers, expected, strict=True))


def test_a_table_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"id,text\n1,{'x' * 200_000}\n")
    assert read(path) == [(2, {"id": "1", "text": "x" * 200_000})]
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(path.with_suffix(".csv.gz")) == read(path)
    path.write_bytes(b"id,text\n1,a\n2\n3,b,c\n4,d\n")
    fault = "bad: a row without 2 fields like the first row; quote its fields"
    assert [record for _, record in read(path)] == [{"id": "1", "text": "a"}, fault, fault, {"id": "4", "text": "d"}]
    path.write_bytes(b"id,text\n1,latin \xe9\n2,a\n")
    assert [str(record)[:14] for _, record in read(path)] == ["bad: not UTF-8", "{'id': '2', 't"]


def test_names_with_separators(tmp_path):
    path = tmp_path / "a.csv"
    for header, names in (
        ('"id; no",text', ["id; no", "text"]),
        ('"a,""b"";";text', ['a,"b";', "text"]),
        ("text", ["text"]),
    ):
        path.write_text(f"{header}\n" + ("1" if len(names) == 1 else "1,2" if header[-5] == "," else "1;2"))
        assert [*read(path)[0][1]] == names
    path = tmp_path / "a.tsv"
    path.write_text("id\ttext, raw\n1\ta\n")
    assert read(path) == [(2, {"id": "1", "text, raw": "a"})]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", None]}), path)
    assert read(path) == [(1, {"text": "a"}), (2, {"text": None})]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError):
        read(path)


COMPRESSORS = {"gz": gzip.compress, "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}
LINES = b"".join(json.dumps({"text": f"document {number} {number**7}"}).encode() + b"\n" for number in range(500))
# Two concatenated members, as from `cat a.gz b.gz`.
MEMBERS = {ending: [compress(LINES[:9000]), compress(LINES[9000:])] for ending, compress in COMPRESSORS.items()}


@pytest.mark.parametrize("ending", COMPRESSORS)
@for_any
@given(data=st.data())
def test_a_compressed_file_is_read_whole_or_refused(tmp_path, ending, data):
    path, whole, boundary = tmp_path / f"a.jsonl.{ending}", b"".join(MEMBERS[ending]), len(MEMBERS[ending][0])
    path.write_bytes(whole)
    assert len(read(path)) == 500
    # Nothing tells a file that ends with a member from a whole one.
    cut = data.draw(st.integers(1, len(whole) - 1).filter(lambda place: place != boundary))
    for damaged in (whole[:cut], b"\0" * 20 + whole):
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            read(path)
