"""Read files of JSON: one object per line, or one array of objects."""

import string
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ..rows.reading import Reading
from ..runtime.errors import UserError
from ..runtime.named import load_named
from .formats import SURROGATE, BadRecord, as_json, open_text, parse_json, wrong_encoding


def read_json(path: Path, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the lines that are not blank, the elements of an array, or the conversations that a program exported."""
    return read_lines(path, reading, may_be_array=True)


def read_lines(path: Path, reading: Reading, *, may_be_array: bool = False) -> Iterator[tuple[int, str | BadRecord]]:
    """Yield the lines that are not blank, or the elements of an array."""
    with open_text(path, reading.encoding, "\n") as file:
        numbered = enumerate(file, start=1)
        lines = ((number, line.rstrip("\r\n")) for number, line in numbered if line.strip(string.whitespace))
        start, first = next(lines, (0, ""))
        if may_be_array and first.lstrip().startswith("["):
            text = first + file.read()
            records = parse_json(wrong_encoding(reading.encoding, text) if SURROGATE.search(text) else text)
            records = load_named("hf_pretrain.data.chat_exports:read_export")(records) or records
            yield from ((number, as_json(record)) for number, record in enumerate(records, start=1))
            return
        second = next(lines, None)
        # Programs that print JSON for people begin so.
        opens = first.strip() == "[" or (first.strip() == "{" and second and second[1].lstrip().startswith('"'))
        is_spread = second is not None and opens
        if is_spread or (second is None and may_be_array):
            whole = "\n".join([first, *(line for _, line in chain([second] if second else [], lines))])
            exported = load_named("hf_pretrain.data.chat_exports:read_export")(whole) if may_be_array else None
            if exported:
                yield from ((number, as_json(record)) for number, record in enumerate(exported, start=1))
                return
            if is_spread:
                shapes = "one object per line (`jq -c`), or in a .json file one array of objects"
                chats = "Of Telegram's exports, only personal chats in which both write are read."
                raise UserError(f"{path} holds JSON over several lines. Write {shapes}. {chats}")
        yield from chain([(start, first)] if first else [], [second] if second else [], lines)
