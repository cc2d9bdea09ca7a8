"""Files of Word and Excel, and PDF files, written by hand or by other libraries."""

import zipfile
import zlib
from pathlib import Path

import pytest


WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def write_pdf(path: Path, text: str, *, padding: int = 0) -> None:
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


def run(inside: str) -> str:
    return f"<w:r>{inside}</w:r>"


def text(value: str) -> str:
    return run(f'<w:t xml:space="preserve">{value}</w:t>')


def write_word(path: Path, body: str, **notes: str) -> None:
    """Write a Word file by hand, with a note of each kind (ECMA-376, 17)."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", f"<w:document {WORD}><w:body>{body}</w:body></w:document>")
        for kind, value in notes.items():
            note = f'<w:{kind} w:id="2"><w:p><w:r><w:{kind}Ref/><w:t>{value}</w:t></w:r></w:p></w:{kind}>'
            file.writestr(f"word/{kind}s.xml", f"<w:{kind}s {WORD}>{note}</w:{kind}s>")


def write_docx(path: Path, *paragraphs: str) -> None:
    document = pytest.importorskip("docx").Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    document.add_table(1, 1).cell(0, 0).text = "cell"
    document.save(path)


def write_xlsx(path: Path, rows: list[list], **sheets: list[list]) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for sheet, cells in [(book.active, rows), *((book.create_sheet(name), cells) for name, cells in sheets.items())]:
        for row in cells:
            sheet.append(row)
    book.save(path)
