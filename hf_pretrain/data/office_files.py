"""Read the text of .docx and .pdf files, and the first sheet of .xlsx files (extra `documents`)."""

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from transformers.utils import logging

from ..runtime.errors import UserError, needing_extra


logger = logging.get_logger(__name__)


def read_document(path: Path, extension: str) -> str:
    """Return the text of a .docx or .pdf file; raise `UserError` if it has none or is damaged."""
    with needing_extra("documents", f"{path} needs mammoth and pdfminer.six"):
        import mammoth
        from pdfminer.high_level import extract_text
    file = io.BytesIO(pa.input_stream(path).read())
    try:
        text = mammoth.extract_raw_text(file).value if extension == ".docx" else extract_text(file)
    # The two libraries raise errors of many kinds for damaged files.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    # pdfminer writes (cid:7) for a character that the font of the file does not name.
    if not text.strip() or text.count("(cid:") * 100 > len(text):
        raise UserError(f"{path} holds no text, like a scan. Recognise its characters first (OCR), or remove it.")
    # A form feed ends a page.
    return text.replace("\f", "\n")


def read_sheet(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of the first sheet of an .xlsx file as texts, each with its number; empty rows are left out."""
    with needing_extra("documents", f"{path} needs openpyxl"):
        import openpyxl
    file = io.BytesIO(pa.input_stream(path).read())
    try:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        # NOTE: some programs write a wrong size of the sheet, and openpyxl would read only that part.
        sheet.reset_dimensions()
        rows = [["" if value is None else str(value) for value in row] for row in sheet.values]
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    if len(book.sheetnames) > 1:
        logger.warning(f"{path}: only the first of {len(book.sheetnames)} sheets is read, {book.sheetnames[0]!r}.")
    width = 0
    for number, row in enumerate(rows, start=1):
        filled = max((place for place, value in enumerate(row, start=1) if value), default=0)
        # The first row gives the width.
        width = width or filled
        if filled:
            yield number, row[: max(filled, width)] + [""] * (width - len(row))
