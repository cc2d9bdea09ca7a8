"""
Clean text data: drop bad lines, short and repetitive records, duplicates and contaminated records, and count them.

The rules are few and simple, like the first steps of Gopher's and C4's cleaning (https://arxiv.org/abs/2112.11446,
table A1; https://arxiv.org/abs/1910.10683, section 2.2). The library datasketch finds near duplicates by MinHash and
locality-sensitive hashing (https://en.wikipedia.org/wiki/MinHash).
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .records import Record


# Length of a shingle in characters. The similarity of two texts is the Jaccard index of their sets of shingles.
_SHINGLE = 8
_NUM_HASHES = 64
# A record that shares this many characters in a row with held-out text is contaminated.
OVERLAP_CHARS = 60


@dataclass(frozen=True)
class CleaningRules:
    """
    Limits for the records to keep.

    Args:
        min_chars (`int`): least number of characters, without white space at the ends.
        max_repeated_lines (`float`): largest share of characters in lines that repeat an earlier line of the text.
        min_letters (`float`): least share of letters, of any script, among the characters that are not white space.
        near_duplicates (`float`, *optional*): least similarity, the estimated Jaccard index of the shingles, at which
            the later of two records is dropped; `None` keeps near duplicates.
    """

    min_chars: int = 20
    max_repeated_lines: float = 0.5
    min_letters: float = 0.4
    near_duplicates: float | None = 0.85


@dataclass
class CleaningReport:
    """
    The result of a cleaning.

    Args:
        num_records (`int`), num_kept (`int`): number of records that were read, and that were written.
        dropped (`Counter`): number of dropped records for each reason.
    """

    num_records: int = 0
    num_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.num_records:,} records read, {self.num_kept:,} kept, {self.dropped.total():,} dropped"]
        lines += [f"  {number:>10,}  {reason}" for reason, number in self.dropped.most_common()]
        return "\n".join(lines)


def plain_text(record: Record) -> str:
    """Return the text of a record as people read it. For a conversation, it is the contents of all messages."""
    if not record.text.startswith("{"):
        return record.text
    try:
        parts = json.loads(record.text)
    except ValueError:
        return record.text
    if not isinstance(parts, dict):
        return record.text
    messages = [message for name in ("prompt", "messages", "chosen", "rejected") for message in parts.get(name) or []]
    return "\n".join(str(message.get("content", "")) for message in messages) or record.text


def normalize(text: str) -> str:
    """Return a text in lower case, with single spaces and in Unicode's form NFKC, for the comparison of texts."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def find_flaw(text: str, rules: CleaningRules) -> str:
    """Return the rule that a text breaks; "" if it breaks none."""
    text = text.strip()
    if len(text) < rules.min_chars:
        return f"shorter than {rules.min_chars} characters"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = dict.fromkeys(lines)
    repeated = sum(map(len, lines)) - sum(map(len, first))
    if repeated > rules.max_repeated_lines * len(text):
        return f"more than {rules.max_repeated_lines:.0%} in repeated lines"
    visible = [character for character in text if not character.isspace()]
    if sum(map(str.isalpha, visible)) < rules.min_letters * len(visible):
        return f"less than {rules.min_letters:.0%} letters"
    return ""


class DuplicateFinder:
    """
    Find exact and near duplicates of earlier texts.

    Args:
        similarity (`float`, *optional*): least Jaccard index of near duplicates; `None` finds exact duplicates only.

    Raises:
        `ImportError`: if near duplicates are wanted and datasketch is not installed.
    """

    def __init__(self, similarity: float | None):
        self._digests: set[bytes] = set()
        self._index: Any = None
        self._kept: list[Any] = []
        if similarity is None:
            return
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise ImportError('Near duplicates need datasketch: pip install "hf_pretrain[data]"') from error
        self._new_hash = MinHash
        self._index = MinHashLSH(threshold=similarity, num_perm=_NUM_HASHES)
        self._similarity = similarity

    def add(self, text: str) -> str:
        """Return `exact duplicate` or `near duplicate` if an earlier text is like it, else keep it and return ""."""
        text = normalize(text)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._digests:
            return "exact duplicate"
        self._digests.add(digest)
        if self._index is None:
            return ""
        pieces = {text[i : i + _SHINGLE] for i in range(max(1, len(text) - _SHINGLE + 1))}
        signature = self._new_hash(num_perm=_NUM_HASHES)
        signature.update_batch([piece.encode("utf-8", "surrogatepass") for piece in pieces])
        # The index finds candidates; the estimate from the signatures decides.
        for key in self._index.query(signature):
            if self._kept[key].jaccard(signature) >= self._similarity:
                return "near duplicate"
        key = len(self._kept)
        self._kept.append(signature)
        self._index.insert(key, signature)
        return ""


class OverlapFinder:
    """
    Find texts that share `OVERLAP_CHARS` characters in a row with held-out texts.

    Args:
        texts (`Iterable[str]`): the held-out texts: a validation set, or the questions of evaluation tasks.
    """

    def __init__(self, texts: Iterable[str]):
        self._windows = {hash(window) for text in texts for window in _windows(normalize(text))}

    def finds(self, text: str) -> bool:
        """Return whether a text shares a window with the held-out texts."""
        return bool(self._windows) and any(hash(window) in self._windows for window in _windows(normalize(text)))


def _windows(text: str) -> Iterator[str]:
    for i in range(len(text) - OVERLAP_CHARS + 1):
        yield text[i : i + OVERLAP_CHARS]


def clean_records(
    records: Iterable[Record], rules: CleaningRules, held_out: OverlapFinder
) -> Iterator[tuple[Record, str]]:
    """Yield each record with the reason to drop it; the reason is "" for a record to keep."""
    duplicates = DuplicateFinder(rules.near_duplicates)
    for record in records:
        if record.reason:
            yield record, f"bad line: {re.sub(r'[0-9]+', 'N', record.reason)[:80]}"
            continue
        text = plain_text(record)
        reason = find_flaw(text, rules) or ("in the held-out data" if held_out.finds(text) else "")
        yield record, reason or duplicates.add(text)


def write_cleaned(
    records: Iterable[Record], path: Path, rules: CleaningRules, held_out: OverlapFinder
) -> CleaningReport:
    """
    Write the good records as JSONL, and list the dropped ones with line and reason in `<path>.dropped.jsonl`.

    Args:
        records (`Iterable[Record]`): the result of [`~data.records.read_records`].
        path (`Path`): the file to write.
        rules ([`CleaningRules`]): the limits.
        held_out ([`OverlapFinder`]): the held-out texts, which the good records must not overlap.
    """
    report = CleaningReport()
    dropped_path = path.with_name(f"{path.name}.dropped.jsonl")
    scratch = path.with_name(f".{path.name}")
    with scratch.open("w", encoding="utf-8") as kept, dropped_path.open("w", encoding="utf-8") as dropped:
        for record, reason in clean_records(records, rules, held_out):
            report.num_records += 1
            if reason:
                report.dropped[reason] += 1
                where = {"source": record.source, "line": record.line, "reason": record.reason or reason}
                dropped.write(json.dumps(where | {"start": record.text[:80]}, ensure_ascii=False) + "\n")
                continue
            report.num_kept += 1
            content = record.content if isinstance(record.content, dict) else {"text": record.text}
            kept.write(json.dumps(content, ensure_ascii=False) + "\n")
    # Rename the file once it is complete, so that no half file has this name.
    scratch.replace(path)
    return report


__all__ = [
    "CleaningReport",
    "CleaningRules",
    "DuplicateFinder",
    "OverlapFinder",
    "clean_records",
    "find_flaw",
    "normalize",
    "plain_text",
    "write_cleaned",
]
