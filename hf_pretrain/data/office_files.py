"""Read the text of .docx and .pdf files, and the sheets of .xlsx files (extra `documents`)."""

import io
from pathlib import Path

import pandas
import pyarrow as pa

from ..runtime.errors import UserError, needing_extra


def read_document(path: Path, extension: str) -> str:
    """Return the text of a .docx or .pdf file; raise `UserError` if it is damaged or has none."""
    with needing_extra("documents", f"{path} needs mammoth and pdfminer.six"):
        import mammoth
        from pdfminer.high_level import extract_text
    file = io.BytesIO(pa.input_stream(path).read())
    try:
        text = mammoth.extract_raw_text(file).value if extension == ".docx" else extract_text(file)
    # The libraries raise errors of many kinds for damaged files.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    # pdfminer writes (cid:7) for a character that the font of the file does not name.
    if not text.strip() or text.count("(cid:") * 100 > len(text):
        raise UserError(f"{path} holds no text, like a scan. Recognise its characters first (OCR), or remove it.")
    # A form feed ends a page.
    return text.replace("\f", "\n")


def read_sheets(path: Path) -> list[list[tuple[int, list[str]]]]:
    """Return the rows of each sheet of an .xlsx file as texts, with their numbers; raise `UserError` if damaged."""
    with needing_extra("documents", f"{path} needs openpyxl"):
        import openpyxl  # noqa: F401  pandas imports it late
    file = io.BytesIO(pa.input_stream(path).read())
    try:
        sheets = pandas.read_excel(file, sheet_name=None, header=None, dtype=str, keep_default_na=False)
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    tables = (enumerate(sheet.to_numpy().tolist(), start=1) for sheet in sheets.values())
    return [[(number, row) for number, row in rows if any(row)] for rows in tables]
