"""Read .xlsx, .docx and .pdf files as tables of texts (extra `documents`)."""

import io
from pathlib import Path

import pandas
import pyarrow as pa

from ..runtime.errors import UserError, needing_extra


def read_office_file(path: Path, extension: str, text_column: str | None) -> list[list[tuple[int, list[str]]]]:
    """
    Return tables: their rows as texts, each with its number. The first row of a table names the columns.

    An .xlsx file has a table per sheet. Another file is a table whose only cell holds the whole text.

    Raises:
        `UserError`: if the file is damaged or holds no text.
        `ImportError`: if the extra is not installed.
    """
    with needing_extra("documents", f"{path} needs mammoth, openpyxl and pdfminer.six"):
        import mammoth
        import openpyxl  # noqa: F401  pandas imports it late
        from pdfminer.high_level import extract_text
    file = io.BytesIO(pa.input_stream(path).read())
    try:
        if extension == ".xlsx":
            sheets = pandas.read_excel(file, sheet_name=None, header=None, dtype=str, keep_default_na=False)
            # A cell with a date has the time of midnight.
            sheets = {
                name: sheet.replace(r"^(\d{4}-\d\d-\d\d) 00:00:00$", r"\1", regex=True)
                for name, sheet in sheets.items()
            }
            tables = (enumerate(sheet.to_numpy().tolist(), start=1) for sheet in sheets.values())
            return [[(number, row) for number, row in rows if any(row)] for rows in tables]
        text = mammoth.extract_raw_text(file).value if extension == ".docx" else extract_text(file)
    # The libraries raise errors of many kinds for damaged files.
    except Exception as error:
        raise UserError(f"{path} cannot be read: {error!r}. Save it again, without a password.") from error
    # pdfminer writes (cid:7) for a character that the font of the file does not name.
    if not text.strip() or text.count("(cid:") * 100 > len(text):
        raise UserError(f"{path} holds no text, like a scan. Recognise its characters first (OCR), or remove it.")
    # A form feed ends a page.
    return [[(0, [str(text_column)]), (1, [text.replace("\f", "\n")])]]
