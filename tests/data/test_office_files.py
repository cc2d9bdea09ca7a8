"""Files of Word and Excel, and PDF files."""

import datetime
import gzip
import io
import tracemalloc
import zipfile

import pytest

from hf_pretrain.data import office_files
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import parse_json, read_file
from hf_pretrain.data.records import read_records
from hf_pretrain.data.sources import find_sources
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from tests.data.office import run, text, write_docx, write_pdf, write_word, write_xlsx


pytest.importorskip("mammoth")
TEXT = "第一段 of a report. 你好"
SCHEMA = "http://schemas.openxmlformats.org/officeDocument/2006/math"
MATH = f'<m:oMath xmlns:m="{SCHEMA}"><m:r><m:t>y</m:t></m:r></m:oMath>'
RUBY = f"<w:ruby><w:rubyPr/><w:rt>{text('hanzi')}</w:rt><w:rubyBase>{text('汉字')}</w:rubyBase></w:ruby>"
PAGE = run('<w:br w:type="page"/>')
FOOT, END = (run(f'<w:{kind}noteReference w:id="2"/>') for kind in ("foot", "end"))
BODIES = {
    f"<w:p>{text('line one')}{run('<w:br/>')}{text('line two')}{run('<w:cr/><w:tab/>')}{text('three')}</w:p>": (
        "line one\nline two\n\tthree"
    ),
    f"<w:p>{text('a')}{FOOT}{text('b')}{END}</w:p><w:p>{text('c')}</w:p>": "a[1]b[2]\n\nc\n\n[1] foot\n\n[2] end",
    f"<w:p>{text('Figure ')}<w:fldSimple w:instr=' SEQ Figure '>{text('7')}</w:fldSimple>{run(RUBY)}</w:p>": (
        "Figure 7汉字"
    ),
    # Changes are accepted. A page's end within a paragraph parts words, and others are no lines of their own.
    f"<w:p>{text('a')}<w:del>{run('<w:delText>no</w:delText>')}</w:del><w:ins>{text('b')}</w:ins></w:p>"
    f"<w:p>{PAGE}{text('c')}{PAGE}{text('d')}</w:p>": ("ab\n\nc\nd"),
}


@pytest.mark.parametrize("body", BODIES)
def test_what_a_word_file_shows_is_its_text(tmp_path, body):
    write_word(tmp_path / "a.docx", body, footnote="foot", endnote="end")
    (record,) = read_records([str(tmp_path / "a.docx")], Reading(kind=None))
    assert record.text.strip() == BODIES[body]


def test_a_word_file_without_its_formulas_says_so(tmp_path, caplog):
    write_word(tmp_path / "a.docx", f"<w:p>{text('x = ')}{MATH}</w:p>")
    (record,) = read_records([str(tmp_path / "a.docx")], Reading(kind=None))
    assert record.text.strip() == "x =" and "a.docx: formulas are left out" in caplog.text


def test_documents_of_word_and_pdf(tmp_path):
    write_docx(tmp_path / "a.docx", TEXT, "The second.")
    write_pdf(tmp_path / "b.PDF", "A page of text.")
    (tmp_path / "c.docx.gz").write_bytes(gzip.compress((tmp_path / "a.docx").read_bytes()))
    records = list(read_records([str(tmp_path)], Reading(kind=None)))
    assert [record.source.rsplit("/")[-1] for record in records] == ["a.docx", "b.PDF", "c.docx.gz"]
    assert records[1].text.split() == "A page of text.".split() and "\f" not in records[1].text
    assert records[0].text.split() == records[2].text.split() == [*TEXT.split(), "The", "second.", "cell"]
    # Beside records, they describe them.
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    assert find_sources(str(tmp_path)) == [str(tmp_path / "d.jsonl")]


def test_a_sheet_is_a_table(tmp_path):
    day = datetime.datetime(2024, 1, 2)
    rows = [["question", "answer", "day"], ["2+2?", 4, day], [None] * 3, ["half?", 0.5], ["NA", True, None]]
    path = tmp_path / "a.xlsx"
    write_xlsx(path, rows, empty=[], more=[["question", "answer"], ["=1+1", "of a formula"], ["more?", "1"]])
    found = [(number, parse_json(content)) for number, content in read_file(path, Reading(kind="conversation"))]
    assert found == [
        (2, {"question": "2+2?", "answer": "4", "day": "2024-01-02"}),
        (4, {"question": "half?", "answer": "0.5", "day": ""}),
        (5, {"question": "NA", "answer": "True", "day": ""}),
        # Its value is not in the file.
        (2, {"question": "", "answer": "of a formula"}),
        (3, {"question": "more?", "answer": "1"}),
    ]
    how = {"validation_fraction": 0, "max_rejected_ratio": 0.5}
    assert len(load_documents([str(path)], Reading(kind="conversation", **how))[0]) == 5
    documents, _ = load_documents([str(path)], Reading(columns=["text=question"], **how))
    assert documents["text"][:] == ["2+2?", "half?", "NA", "more?"]


def test_cells_are_what_excel_shows(tmp_path):
    values = [0, "two_x000D_\nlines_x0009_", "_x005F_x000D_", 0.1 + 0.2, 1e20, "#DIV/0!", "_x00e9_"]
    path = tmp_path / "a.xlsx"
    write_xlsx(path, [[value] for value in ["text", *values, datetime.datetime(2024, 1, 2, 3, 4)]])
    found = [parse_json(content)["text"] for _, content in read_file(path, Reading(kind="conversation"))]
    assert found == ["0", "two\nlines\t", "_x000D_", "0.3", str(10**20), "_x00e9_", "2024-01-02 03:04:00"]


def test_a_stray_cell_costs_no_memory(tmp_path):
    path = tmp_path / "a.xlsx"
    write_xlsx(path, [["text"], *[[]] * 49_998, [None] * 99 + ["stray"]])
    tracemalloc.start()
    with pytest.raises(UserError):
        list(read_file(path, Reading(kind="conversation")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A table of all its cells would have 5,000,000.
    assert peak < 20e6


def test_files_below_the_limits_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(office_files, "MAX_CELLS", 400)
    monkeypatch.setattr(office_files, "MAX_PART_BYTES", 100_000)
    write_xlsx(tmp_path / "a.xlsx", [["text", "more"]] * 200)
    assert len(list(read_file(tmp_path / "a.xlsx", Reading()))) == 199
    write_pdf(tmp_path / "a.pdf", "text", padding=90_000)
    write_word(tmp_path / "a.docx", f"<w:p>{text('text')}{' ' * 90_000}</w:p>")
    for name in ("a.pdf", "a.docx"):
        assert [record.text.strip() for record in read_records([str(tmp_path / name)], Reading(kind=None))] == ["text"]


def test_a_sheet_with_a_wrong_size(tmp_path):
    path = tmp_path / "a.xlsx"
    write_xlsx(path, [["text"], ["a"], ["b"]])
    old, new = path.read_bytes(), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(old)) as source, zipfile.ZipFile(new, "w") as target:
        for item in source.namelist():
            target.writestr(item, source.read(item).replace(b'<dimension ref="A1:A3"', b'<dimension ref="A1"'))
    assert b'ref="A1"' in zipfile.ZipFile(new).read("xl/worksheets/sheet1.xml")
    path.write_bytes(new.getvalue())
    assert [record.text for record in read_records([str(path)], Reading(kind=None))] == ["a", "b"]
