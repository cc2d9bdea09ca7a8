"""Files of Word and Excel, and PDF files."""

import datetime
import gzip
import io
import sys
import tracemalloc
import zipfile
import zlib

import pytest

from hf_pretrain.data import office_files
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import parse_json, read_file
from hf_pretrain.data.records import read_records
from hf_pretrain.data.sources import find_sources
from hf_pretrain.rows.reading import Reading


TEXT = "第一段 of a report. 你好"


def write_pdf(path, text: str, *, padding: int = 0) -> None:
    """Write a PDF file of one page by hand, as PDF 1.7 (ISO 32000-1, 7.5) describes it."""
    stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
    kind = " /Filter /FlateDecode" if padding else ""
    # Latin-1 gives a character for each byte.
    stream = zlib.compress(stream.encode() + b" " * padding).decode("latin-1") if padding else stream
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",  # noqa: E501
        f"<< /Length {len(stream)}{kind} >>\nstream\n{stream}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    content, places = "%PDF-1.7\n", []
    for number, value in enumerate(objects, start=1):
        places.append(len(content))
        content += f"{number} 0 obj\n{value}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    content += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    content += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{content.index('xref')}\n%%EOF\n"
    path.write_bytes(content.encode("latin-1"))


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def write_word(path, body: str, **notes: str) -> None:
    """Write a Word file by hand, with a note of each kind (ECMA-376, 17)."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", f"<w:document {WORD}><w:body>{body}</w:body></w:document>")
        for kind, text in notes.items():
            note = f'<w:{kind} w:id="2"><w:p><w:r><w:{kind}Ref/><w:t>{text}</w:t></w:r></w:p></w:{kind}>'
            file.writestr(f"word/{kind}s.xml", f"<w:{kind}s {WORD}>{note}</w:{kind}s>")


def run(inside: str) -> str:
    return f"<w:r>{inside}</w:r>"


def text(value: str) -> str:
    return run(f'<w:t xml:space="preserve">{value}</w:t>')


MATH = (
    '<m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:r><m:t>y</m:t></m:r></m:oMath>'
)
RUBY = f"<w:ruby><w:rubyPr/><w:rt>{text('hanzi')}</w:rt><w:rubyBase>{text('汉字')}</w:rubyBase></w:ruby>"
PAGE = run('<w:br w:type="page"/>')
FOOT, END = (run(f'<w:{kind}noteReference w:id="2"/>') for kind in ("foot", "end"))
BODIES = {
    f"<w:p>{text('line one')}{run('<w:br/>')}{text('line two')}{run('<w:cr/><w:tab/>')}{text('three')}</w:p>": (
        "line one\nline two\n\tthree"
    ),
    f"<w:p>{text('a')}{FOOT}{text('b')}{END}</w:p><w:p>{text('c')}</w:p>": ("a[1]b[2]\n\nc\n\n[1] foot\n\n[2] end"),
    f"<w:p>{text('Figure ')}<w:fldSimple w:instr=' SEQ Figure '>{text('7')}</w:fldSimple>{run(RUBY)}</w:p>": (
        "Figure 7汉字"
    ),
    # Changes are accepted. A page's end within a paragraph parts words, and others are no lines of their own.
    f"<w:p>{text('a')}<w:del>{run('<w:delText>no</w:delText>')}</w:del><w:ins>{text('b')}</w:ins></w:p>"
    f"<w:p>{PAGE}{text('c')}{PAGE}{text('d')}</w:p>": ("ab\n\nc\nd"),
}


@pytest.mark.parametrize("body", BODIES)
def test_what_a_word_file_shows_is_its_text(tmp_path, body):
    pytest.importorskip("mammoth")
    write_word(tmp_path / "a.docx", body, footnote="foot", endnote="end")
    (record,) = read_records([str(tmp_path / "a.docx")], Reading(kind=None))
    assert record.text.strip() == BODIES[body]


def test_a_word_file_without_its_formulas_says_so(tmp_path, caplog):
    pytest.importorskip("mammoth")
    write_word(tmp_path / "a.docx", f"<w:p>{text('x = ')}{MATH}</w:p>")
    (record,) = read_records([str(tmp_path / "a.docx")], Reading(kind=None))
    assert record.text.strip() == "x =" and "a.docx: formulas are left out" in caplog.text


def write_docx(path, *paragraphs: str) -> None:
    document = pytest.importorskip("docx").Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    document.add_table(1, 1).cell(0, 0).text = "cell"
    document.save(path)


def write_xlsx(path, rows: list[list], **sheets: list[list]) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for row in rows:
        book.active.append(row)
    for name, others in sheets.items():
        sheet = book.create_sheet(name)
        for row in others:
            sheet.append(row)
    book.save(path)


def test_documents_of_word_and_pdf(tmp_path):
    pytest.importorskip("mammoth")
    pytest.importorskip("pdfminer")
    write_docx(tmp_path / "a.docx", TEXT, "The second.")
    write_pdf(tmp_path / "b.PDF", "A page of text.")
    (tmp_path / "c.docx.gz").write_bytes(gzip.compress((tmp_path / "a.docx").read_bytes()))
    records = list(read_records([str(tmp_path)], Reading(kind=None)))
    assert [record.source.rsplit("/")[-1] for record in records] == ["a.docx", "b.PDF", "c.docx.gz"]
    assert [record.text.split() for record in records][1] == "A page of text.".split()
    assert "\f" not in records[1].text
    assert records[0].text.split() == records[2].text.split() == [*TEXT.split(), "The", "second.", "cell"]
    assert len(load_documents([str(tmp_path)], Reading(validation_fraction=0))[0]) == 3
    with pytest.raises(ValueError, match="plain text, and records are wanted"):
        load_documents([str(tmp_path / "a.docx")], Reading(kind="conversation"))
    # Beside records, they describe them.
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    assert find_sources(str(tmp_path)) == [str(tmp_path / "d.jsonl")]


def test_documents_without_text_and_damaged_ones(tmp_path):
    pytest.importorskip("mammoth")
    pytest.importorskip("pdfminer")
    pytest.importorskip("openpyxl")
    write_pdf(tmp_path / "scan.pdf", "")
    # pdfminer gives such text for fonts that name no characters.
    write_docx(tmp_path / "codes.docx", "(cid:3)(cid:17) " * 20)
    for name in ("a.pdf", "a.docx", "a.xlsx"):
        (tmp_path / name).write_bytes(b"no such file")
    for name, words in (
        *((f"a.{ending}", rf"a.{ending} cannot be read: .*Save it again") for ending in ("pdf", "docx", "xlsx")),
        ("scan.pdf", "scan.pdf holds no text, like a scan"),
        ("codes.docx", "codes.docx holds no text, like a scan"),
    ):
        with pytest.raises(ValueError, match=words):
            list(read_file(tmp_path / name, Reading()))


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
    write_xlsx(path, [["question", "answer"], ["a", "b", "stray", "stray"]])
    with pytest.raises(ValueError, match="a.xlsx: the first row does not name each column once"):
        list(read_file(path, Reading(kind="conversation")))


def test_cells_are_what_excel_shows(tmp_path):
    rows = [
        ["text"],
        [0],
        ["two_x000D_\nlines_x0009_"],
        ["_x005F_x000D_"],
        [0.1 + 0.2],
        [1e20],
        ["#DIV/0!"],
        ["_x00e9_"],
    ]
    path = tmp_path / "a.xlsx"
    write_xlsx(path, [*rows, [datetime.datetime(2024, 1, 2, 3, 4)]])
    found = [parse_json(content)["text"] for _, content in read_file(path, Reading(kind="conversation"))]
    assert found == ["0", "two\nlines\t", "_x000D_", "0.3", str(10**20), "_x00e9_", "2024-01-02 03:04:00"]


def test_a_stray_cell_costs_no_memory(tmp_path):
    path = tmp_path / "a.xlsx"
    book = pytest.importorskip("openpyxl").Workbook()
    book.active.append(["text"])
    book.active.cell(50_000, 100, "stray")
    book.save(path)
    tracemalloc.start()
    with pytest.raises(ValueError, match="the first row does not name each column once"):
        list(read_file(path, Reading(kind="conversation")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A table of all its cells would have 5,000,000.
    assert peak < 20e6


def test_a_stray_cell_beside_many_rows_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(office_files, "MAX_CELLS", 10_000)
    path, book = tmp_path / "a.xlsx", pytest.importorskip("openpyxl").Workbook()
    for row in range(200):
        book.active.append([f"text {row}", "more"])
    book.save(path)
    assert len(list(read_file(path, Reading(text_column="text 0")))) == 199
    book.active.cell(1, 100, "stray")
    book.save(path)
    with pytest.raises(ValueError, match="a value in column 100 of a sheet"):
        list(read_file(path, Reading(text_column="text 0")))


@pytest.mark.parametrize("ending", ["pdf", "docx"])
def test_a_file_that_inflates_is_refused(tmp_path, monkeypatch, ending):
    pytest.importorskip("mammoth")
    pytest.importorskip("pdfminer")
    monkeypatch.setattr(office_files, "MAX_PART_BYTES", 100_000)
    path = tmp_path / f"a.{ending}"
    for size in (90_000, 110_000):
        if ending == "pdf":
            write_pdf(path, "text", padding=size)
        else:
            write_word(path, f"<w:p>{text('text')}{' ' * size}</w:p>")
        if size == 90_000:
            assert [record.text.strip() for record in read_records([str(path)], Reading(kind=None))] == ["text"]
    with pytest.raises(ValueError, match=rf"a.{ending} holds a part of over 100,000 bytes, decompressed"):
        list(read_file(path, Reading()))


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


@pytest.mark.parametrize("name", ["a.docx", "a.pdf", "a.xlsx"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "mammoth", None)
    (tmp_path / name).write_bytes(b"a")
    with pytest.raises(ImportError, match=rf"{name} needs mammoth, .*install.*\[documents\]"):
        load_documents([str(tmp_path / name)])
