"""Read .xlsx, .docx and .pdf files as tables of texts (extra `documents`)."""

import datetime
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers.utils import logging

from ..rows.reading import Reading
from ..runtime.errors import UserError, needing_extra
from .columns import columns_of
from .formats import BadRecord, file_format
from .tables import read_table


logger = logging.get_logger(__name__)

# Largest size of a part of a file, in bytes, once it is decompressed: more text than any book, a few seconds to read.
MAX_PART_BYTES = 100_000_000
# Largest number of cells of a sheet, empty ones included.
MAX_CELLS = 20_000_000
# How Excel writes control characters, and an underscore in front of a text that reads so.
_ESCAPED = re.compile("_x(00[01][0-9A-F]|005F)_")
_ERRORS = ("#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#N/A")
# Elements of Word that mammoth drops with their text: fields, such as the number of a figure, and the text below ruby.
_FIELDS = re.compile(rb"</?w:(fldSimple|ruby|rubyBase)\b[^>]*>|<w:rt>.*?</w:rt>", re.DOTALL)


def read_office_file(path: Path, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the rows of all sheets of an .xlsx file as objects, or the whole text of another file as one."""
    tables = read_tables(path, columns_of(reading)[0])
    return chain.from_iterable(read_table(path, iter(rows)) for rows in tables)


def read_tables(path: Path, text_column: str) -> list[list[tuple[int, list[str]]]]:
    """
    Return tables: their rows as texts, each with its number. The first row of a table names the columns.

    An .xlsx file has a table per sheet. Another file is a table whose only cell holds the whole text.

    Raises:
        `UserError`: if the file is damaged, inflates to more than `MAX_PART_BYTES` or holds no text.
        `ImportError`: if the extra is not installed.
    """
    with needing_extra("documents", f"{path} needs mammoth, openpyxl and pdfminer.six"):
        import mammoth  # noqa: F401
        import openpyxl
        import pdfminer  # noqa: F401  the readers import their parts
    content, extension = pa.input_stream(path).read(), file_format(path)
    try:
        if extension == ".xlsx":
            for item in zipfile.ZipFile(io.BytesIO(content)).infolist():
                # The rows of a sheet are read one by one.
                _check_size(path, 0 if item.filename.startswith("xl/worksheets/") else item.file_size)
            return _read_sheets(path, openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True))
        text = _read_docx(path, content) if extension == ".docx" else _read_pdf(path, content)
    except UserError:
        raise
    # The libraries raise errors of many kinds for damaged files.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    # pdfminer writes (cid:7) for a character that the font of the file does not name.
    if not text.strip() or text.count("(cid:") * 100 > len(text):
        raise UserError(f"{path} holds no text, like a scan. Recognise its characters first (OCR), or remove it.")
    return [[(0, [text_column]), (1, [text.replace("\f", "\n")])]]


def _check_size(path: Path, size: int) -> None:
    if size > MAX_PART_BYTES:
        raise UserError(f"{path} holds a part of over {MAX_PART_BYTES:,} bytes, decompressed. Save its text as .txt.")


def _read_pdf(path: Path, content: bytes) -> str:
    from pdfminer.high_level import extract_text

    for stream in re.finditer(rb"stream\r?\n(.*?)endstream", content, re.DOTALL):
        with suppress(zlib.error):
            _check_size(path, len(zlib.decompressobj().decompress(stream[1], MAX_PART_BYTES + 1)))
    return extract_text(io.BytesIO(content))


def _read_docx(path: Path, content: bytes) -> str:
    """
    Return the text of a Word file with its notes at the end. Changes count as accepted. Comments, headers and footers
    are left out.
    """
    from mammoth import docx

    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(whole := io.BytesIO(), "w") as new:
        for item in old.infolist():
            if item.filename.endswith((".xml", ".rels")):
                _check_size(path, item.file_size)
                new.writestr(item.filename, _FIELDS.sub(b"", old.read(item)).replace(b"<w:cr/>", b"<w:br/>"))
    found = docx.read(whole)
    if any("oMath" in message.message for message in found.messages):
        logger.warning(f"{path}: formulas are left out.")
    references: list[Any] = []
    text = _write_element(found.value, references)
    # A note may refer to another one, which then follows.
    for number, reference in enumerate(references, start=1):
        body = found.value.notes.resolve(reference).body
        text += f"[{number}] {''.join(_write_element(part, references) for part in body).strip()}\n\n"
    return text


def _write_element(element: Any, references: list[Any]) -> str:
    """Return an element of mammoth's as text, and append its references to notes."""
    from mammoth import documents

    if isinstance(element, documents.Text):
        return element.value
    if isinstance(element, documents.NoteReference):
        references.append(element)
        return f"[{len(references)}]"
    if isinstance(element, documents.Break):
        # A form feed ends a page.
        return "\n" if element.break_type == "line" else "\f"
    if isinstance(element, documents.Tab):
        return "\t"
    children = element.children if isinstance(element, documents.HasChildren) else []
    text = "".join(_write_element(child, references) for child in children)
    return text.strip("\f") + "\n\n" if isinstance(element, documents.Paragraph) else text


def _read_sheets(path: Path, book: Any) -> list[list[tuple[int, list[str]]]]:
    """Return the rows of each sheet that hold a value. All rows of a sheet have the same number of cells."""
    tables = []
    for sheet in book.worksheets:
        # Some programs write a wrong size.
        sheet.reset_dimensions()
        cells = ([_write_cell(value) for value in row] for row in sheet.iter_rows(values_only=True))
        rows = [(number, row) for number, row in enumerate(cells, start=1) if any(row)]
        width = max((len(row) for _, row in rows), default=0)
        if width * len(rows) > MAX_CELLS:
            raise UserError(f"{path} has a value in column {width:,} of a sheet. Delete it if it is a stray one.")
        tables.append([(number, row + [""] * (width - len(row))) for number, row in rows])
    return tables


def _write_cell(value: Any) -> str:
    """Return a value of a sheet as text: numbers of at most 15 digits, dates as in ISO 8601, and errors as nothing."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.15g}"
    # A cell with a date has the time of midnight.
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    if value is None or value in _ERRORS:
        return ""
    return re.sub("\r\n?", "\n", _ESCAPED.sub(lambda match: chr(int(match[1], 16)), str(value)))
