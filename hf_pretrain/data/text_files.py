"""Read plain text, as documents or as pairs of question and answer."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ..rows.reading import Reading
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from .columns import columns_of
from .formats import DOCUMENTS, file_format, open_text, write_json


# Beginnings of questions, which the group matches, and of answers.
PAIR_MARKS = re.compile(r"(?im)^[>#* \t]*(?:(Q|Question|问题?|提问)|A|Answer|答案?|回答)[ \t]*\d*[ \t]*\**[:：]\**")


def read_text_file(path: Path, reading: Reading) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a file as objects, or a whole file as one."""
    # A heading alone, or half a block of code, is no document.
    texts = _read_paragraphs(path, reading.encoding, reading.whole_files or file_format(path) == ".md")
    return ((number, write_json({columns_of(reading)[0]: text})) for number, text in texts)


def _read_paragraphs(path: Path, encoding: str, whole_files: bool) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs between blank lines, each with the number of its first line, or the whole text."""
    with open_text(path, encoding, None) as file:
        if whole_files:
            yield 1, file.read()
            return
        for is_blank, group in groupby(enumerate(file, start=1), lambda numbered: not numbered[1].strip()):
            if not is_blank:
                numbers, lines = zip(*group, strict=True)
                yield numbers[0], "".join(lines).removesuffix("\n")


def read_pairs(path: Path, reading: Reading) -> Iterator[tuple[int, str]]:
    """
    Yield questions and answers as JSON, each pair with its number, from a text in which a mark begins each of them.

    Raises:
        `UserError`: if the text is of another form.
    """
    content = "" if file_format(path) in DOCUMENTS else next(_read_paragraphs(path, reading.encoding, True))[1]
    before, *parts = PAIR_MARKS.split(content)
    texts = [text.strip() for text in parts[1::2]]
    is_question = [mark is not None for mark in parts[::2]]
    if not texts or before.strip() or not all(texts) or is_question != [True, False] * (len(texts) // 2):
        form = "JSONL, or as .txt with `Q:` before each question and `A:` before each answer"
        raise UserError(f"{path} holds plain text, and records are wanted. Write them as {form}.")
    announce(f"reading {path} as {len(texts) // 2} pairs of question and answer")
    pairs = zip(texts[::2], texts[1::2], strict=True)
    yield from ((i, write_json({"prompt": q, "completion": a})) for i, (q, a) in enumerate(pairs, start=1))
