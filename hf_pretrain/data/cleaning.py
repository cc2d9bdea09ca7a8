"""
Clean text data: drop bad lines, short and repetitive records, duplicates and contaminated records, and count them.

The rules are few and simple, like the first steps of Gopher's and C4's cleaning (https://arxiv.org/abs/2112.11446,
table A1; https://arxiv.org/abs/1910.10683, section 2.2). The library datasketch finds near duplicates by MinHash and
locality-sensitive hashing (https://en.wikipedia.org/wiki/MinHash).
"""

import hashlib
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..rows.reading import Reading
from ..runtime.command_line import progress
from ..runtime.errors import UserError, needing_extra
from ..runtime.writing import check_output, written_whole
from .formats import BadRecord, check_values, write_json
from .records import Record, plain_text, read_records


# Length of a shingle in characters. The similarity of two texts is the Jaccard index of their sets of shingles.
_SHINGLE = 8
_NUM_HASHES = 128
# The index proposes an earlier text if all hashes of at least one band are equal. With 21 bands of 6 hashes, it
# proposes 99.9% of the texts with a Jaccard index of 0.85, and 93% of those with 0.7.
_BANDS = (21, 6)
_MIN_SIMILARITY = 0.7
# Largest share of characters in lines that repeat an earlier line of the text.
MAX_REPEATED_LINES = 0.5
# Least share of letters, of any script, among the characters that are not white space.
MIN_LETTERS = 0.4
# Least similarity of near duplicates by default.
NEAR_DUPLICATES = 0.85
# A record that shares this many characters in a row with held-out text is contaminated.
OVERLAP_CHARS = 60


def normalize(text: str) -> str:
    """Return a text in lower case, with single spaces and in Unicode's form NFKC, for near duplicates and overlap."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_digest(text: str) -> bytes:
    """Return 16 bytes that are equal for texts that differ at most in white space and the composition of accents."""
    # NFKC would make "x²" and "x2" equal.
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def find_flaw(text: str, min_chars: int) -> str:
    """Return the rule that a text breaks; "" if it breaks none."""
    text = text.strip()
    if len(text) < min_chars:
        return f"shorter than {min_chars} characters"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = dict.fromkeys(lines)
    repeated = sum(map(len, lines)) - sum(map(len, first))
    if repeated > MAX_REPEATED_LINES * len(text):
        return f"more than {MAX_REPEATED_LINES:.0%} in repeated lines"
    visible = [character for character in text if not character.isspace()]
    if sum(map(str.isalpha, visible)) < MIN_LETTERS * len(visible):
        return f"less than {MIN_LETTERS:.0%} letters"
    return ""


class DuplicateFinder:
    """
    Find exact and near duplicates of earlier texts.

    Args:
        similarity (`float`): least Jaccard index of near duplicates, estimated from their shingles; 0 finds exact
            duplicates only.

    Raises:
        `UserError`: for a similarity that the index would miss.
        `ImportError`: if near duplicates are wanted and datasketch is not installed.
    """

    def __init__(self, similarity: float):
        self._digests: set[bytes] = set()
        self._index: Any = None
        self._kept: list[Any] = []
        if similarity == 0:
            return
        if not _MIN_SIMILARITY <= similarity <= 1:
            raise UserError(f"--near_duplicates {similarity} must lie between {_MIN_SIMILARITY} and 1, or be 0.")
        with needing_extra("data", "Near duplicates need datasketch"):
            from datasketch import MinHash, MinHashLSH
        self._new_hash = MinHash
        self._index = MinHashLSH(num_perm=_NUM_HASHES, params=_BANDS)
        self._similarity = similarity

    def add(self, document: str, plain: str) -> str:
        """
        Keep a document and return "", or return `exact duplicate` or `near duplicate` if an earlier one is like it.

        Args:
            document (`str`): the text, or the conversation in the internal form, that exact duplicates share.
            plain (`str`): the text that near duplicates are found by.
        """
        if (key := text_digest(document)) in self._digests:
            return "exact duplicate"
        self._digests.add(key)
        if self._index is None:
            return ""
        signature = self._new_hash(num_perm=_NUM_HASHES)
        signature.update_batch([piece.encode("utf-8", "surrogatepass") for piece in {*_windows(plain, _SHINGLE)}])
        # The index finds candidates; the estimate from the signatures decides.
        for place in self._index.query(signature):
            if self._kept[place].jaccard(signature) >= self._similarity:
                return "near duplicate"
        self._index.insert(len(self._kept), signature)
        self._kept.append(signature)
        return ""


class OverlapFinder:
    """
    Find texts that share `OVERLAP_CHARS` characters in a row with held-out texts, or that equal a shorter one.

    Args:
        texts (`Iterable[str]`): the held-out texts: a validation set, or the questions of evaluation tasks.
    """

    def __init__(self, texts: Iterable[str]):
        self._windows = {hash(window) for text in texts for window in _windows(text, OVERLAP_CHARS)}

    def finds(self, text: str) -> bool:
        """Return whether a text shares a window with the held-out texts, or equals a short one."""
        # Without held-out texts, the windows of the data need no hashes.
        return bool(self._windows) and any(hash(window) in self._windows for window in _windows(text, OVERLAP_CHARS))


def _windows(text: str, size: int) -> Iterator[str]:
    """Yield all runs of `size` characters of a normalized text; the whole text if it is shorter."""
    text = normalize(text)
    return (text[i : i + size] for i in range(max(1, len(text) - size + 1)))


def held_out_texts(records: Iterable[Record]) -> Iterator[str]:
    """
    Yield the texts of held-out records.

    Raises:
        `UserError`: for a bad line. The search would miss its text without a message.
    """
    for record in records:
        if record.reason:
            raise UserError(f"--held_out {record.source}:{record.line} cannot be read: {record.reason}.")
        yield plain_text(record)


def clean_records(
    records: Iterable[Record], held_out: OverlapFinder, *, min_chars: int, near_duplicates: float
) -> Iterator[tuple[Record, str, str]]:
    """Yield each record with its line of JSON and the reason to drop it; the reason is "" for a record to keep."""
    duplicates = DuplicateFinder(near_duplicates)
    for record in records:
        try:
            for name, value in (record.content or {}).items():
                check_values([name, value], name)
            line, reason = write_json(record.content), record.reason
        except BadRecord as error:
            # No file can hold it.
            line, reason = "", error.reason
        if reason:
            yield record, "", f"bad line: {reason}"
            continue
        text = plain_text(record)
        reason = find_flaw(text, min_chars) or ("in the held-out data" if held_out.finds(text) else "")
        yield record, line, reason or duplicates.add(record.text, text)


def clean_data(
    names: list[str],
    output: str,
    reading: Reading,
    *,
    min_chars: int = 20,
    near_duplicates: float = NEAR_DUPLICATES,
    held_out: Iterable[str] = (),
    more_held_out: Iterable[str] = (),
) -> str:
    """
    Clean data: write the good records as JSONL, and list the dropped ones with line and reason in `<output>.dropped`.
    Return the counts as text.

    Args:
        names (`list[str]`), held_out (`Iterable[str]`): data and held-out data, named as in `--dataset_name`.
        output (`str`): the JSONL file to write. The list of the dropped records is beside it.
        reading ([`~rows.reading.Reading`]): how the user wants both to be read.
        min_chars (`int`): least number of characters, without white space at the ends.
        near_duplicates (`float`): least similarity at which the later of two records is dropped; 0 keeps near
            duplicates.
        more_held_out (`Iterable[str]`): further held-out texts.

    Raises:
        `UserError`: if a name leads to no data, no record is good, or `output` is inside a checkpoint, exists, or is
            not the name of a JSONL file.
    """
    check_output(output, "--output")
    path, dropped_path = Path(output), Path(f"{output}.dropped")
    if path.suffix != ".jsonl":
        raise UserError(f"--output {output}: the command writes JSONL, so end the name in .jsonl.")
    with written_whole(path.parent, lock=f".{path.name}.lock") as scratch:
        # Under the lock: another process may write them now.
        for file in (path, dropped_path):
            if file.exists():
                raise UserError(f"{file} exists. Choose another --output, or delete this file.")
        finder = OverlapFinder(itertools.chain(held_out_texts(read_records(held_out, reading)), more_held_out))
        reasons = Counter[str]()
        with (
            (scratch / path.name).open("w", encoding="utf-8") as kept,
            (scratch / dropped_path.name).open("w", encoding="utf-8") as dropped,
            progress("cleaning") as bar,
        ):
            records = read_records(names, reading)
            for record, line, reason in clean_records(
                records, finder, min_chars=min_chars, near_duplicates=near_duplicates
            ):
                bar.update()
                reasons[reason] += 1
                if reason:
                    found = {"source": record.source, "line": record.line, "reason": reason}
                    line = json.dumps(found | {"start": record.text[:80]}, ensure_ascii=False)
                (dropped if reason else kept).write(line + "\n")
        num_kept = reasons.pop("", 0)
        counts = [f"{num_kept + reasons.total():,} records read, {num_kept:,} kept, {reasons.total():,} dropped"]
        counts += [f"  {number:>10,}  {reason}" for reason, number in reasons.most_common()]
        if not num_kept:
            raise UserError(f"No record is left, so {path.name} is not written: {'; '.join(counts)}.")
    return "\n".join(counts)
