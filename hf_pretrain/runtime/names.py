"""Parse the names that users give to models and datasets: local paths, and ids on the Hugging Face Hub."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError


_WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".gguf")


def hint(word: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the known word most similar to `word`, or that begins with it."""
    known = list(known)
    longer = [name for name in known if name.startswith(word) and len(name) < 2 * len(word)]
    # The parts of a long name are similar to those of unrelated ones, such as `use_lora` and `use_dora`.
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.9 if "_" in word else 0.8) or sorted(longer, key=len)
    return f"; the nearest one is {near[0]}" if near else ""


def check_word(flag: str, word: str, known: Iterable[str]) -> None:
    """Raise `UserError` if a flag has an unknown value. The message names a similar one."""
    known = list(known)
    if word not in known:
        raise UserError(f"{flag} {word} is unknown{hint(word, known)}. All: {', '.join(known)}.")


def is_gguf(name: str | Path) -> bool:
    """Return whether a name means a GGUF file: a path, a file on the Hub, or a model of the package index."""
    return str(name).startswith("embedded:") or str(name).endswith(".gguf")


def is_path(name: str | Path) -> bool:
    """Return whether `name` can only be a local path, existing or not. Any other name may be a Hub id."""
    text = str(name)
    if Path(text).exists():
        return True
    repo_id, file = split_hub_name(text)
    # A Hub id has at most one slash, so a name with two slashes can only be a path.
    # If there is a directory `data`, `data/sft-tin` is a mistyped path, not a model of a Hub user called `data`. The
    # recipes write to `out/`, so a name that begins with `out/` is always a path, even before the first run.
    is_beside_others = Path(text).parent != Path(".") and Path(text).parent.is_dir()
    return file is None and (
        text.startswith((".", "/", "~", "out/"))
        or text.endswith(_WEIGHT_SUFFIXES)
        or repo_id.count("/") > 1
        or is_beside_others
    )


def split_hub_name(name: str) -> tuple[str, str | None]:
    """
    Split the name of a model, `owner/name[:file]`, into its Hub id and the file in that repository.

    Returns:
        `tuple`: `("owner/name", "full_sft_512.pth")`, or `(name, None)` if `name` has no file. The file may lie in a
            folder.
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w./ -]+)", name)
    return (match[1], match[2]) if match else (name, None)


@dataclass(frozen=True)
class DatasetName:
    """
    The name of a dataset in its parts: `name`, `name:config`, `name[split]` or all, `name:config[split]@revision`.

    Args:
        repo_id (`str`): the Hub id, or `embedded`.
        config (`str`, *optional*): the configuration, or the part of the embedded corpora.
        revision (`str`, *optional*): a branch, tag or commit.
        split (`str`, *optional*): a split as `datasets` reads it, such as `test_sft` or `train[:10%]`.
    """

    repo_id: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, name: str) -> "DatasetName":
        """Split a name as a user types it. An empty part counts as left out."""
        # Split off the revision first: a branch may contain a colon, but a configuration never contains @.
        rest, _, revision = name.partition("@")
        rest, _, split = rest[:-1].partition("[") if rest.endswith("]") else (rest, "", "")
        repo_id, _, config = rest.partition(":")
        return cls(repo_id, config or None, revision or None, split or None)

    @property
    def is_embedded(self) -> bool:
        """True if an installed package holds or makes the data (`embedded:chatterbot`, `reasoning_gym:gcd`)."""
        return self.repo_id in ("embedded", "reasoning_gym")


def may_be_checkpoint(name: str | Path) -> bool:
    """
    Return whether `name` is a directory or may be a Hub id. Only these can hold a config or a tokenizer; a single
    weight file cannot.
    """
    text = str(name)
    return Path(name).is_dir() or not (is_path(name) or split_hub_name(text)[1] or text.startswith("embedded:"))


def is_local(name: str) -> bool:
    """Return whether a dataset or model name is a path or a glob on this machine."""
    # A split stands in brackets, too.
    repo_id = DatasetName.parse(name).repo_id
    return "://" not in name and (is_path(name) or any(mark in repo_id for mark in "*?["))


def public_name(name: str) -> str:
    """Return a name that shows neither the directories of this machine nor passwords, for what may be pushed."""
    if name.startswith("file://") or is_local(name):
        return Path(name).name
    # An address may hold a password, and in its query a signature.
    return re.sub(r"^(\w+://)[^/@]*@", r"\1", re.sub(r"^(https?://[^?]*)\?.*", r"\1", name))
