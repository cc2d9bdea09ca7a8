"""Find the files, embedded parts and Hub datasets that users name, and read their records."""

import re
from collections.abc import Iterator
from functools import partial
from glob import escape, glob
from pathlib import Path

from transformers.utils import logging

from ..rows.reading import Reading
from ..runtime.errors import UserError
from ..runtime.names import DatasetName, check_word
from .corpora import EMBEDDED_CORPORA, load_embedded
from .formats import DOCUMENTS, KNOWN, TEXT_EXTENSIONS, BadRecord, as_json, drop_padding, file_format, read_file
from .hub_datasets import download_hub_file, load_hub_dataset, parse_hub_file
from .remote_files import download_files


logger = logging.get_logger(__name__)

EMBEDDED_SOURCES = {f"embedded:{part}": part for part in EMBEDDED_CORPORA}


def find_sources(name: str) -> list[str] | None:
    """
    Return the embedded parts or files that a name stands for, in order, or `None` for the Hub id of a whole dataset.
    Download single files on the Hub and files at other addresses.

    Raises:
        `UserError`: if there is no such part or file, or a file is empty or of an unknown format.
    """
    if name == "embedded":
        return list(EMBEDDED_SOURCES)
    if name.startswith("embedded:"):
        check_word("The dataset", name, ("embedded", *EMBEDDED_SOURCES))
        return [name]
    if DatasetName.parse(name).repo_id == "reasoning_gym":
        raise UserError(f"{name} stands for prompts without answers to learn. Only `hf-pretrain grpo` reads them.")
    if not name.strip():
        raise UserError("The name of a dataset is empty. Name a file, a directory, a glob or a dataset on the Hub.")
    path = Path(name.removeprefix("file://")).expanduser()
    # A local file takes precedence over a file on the Hub.
    hub_file = None if path.exists() else parse_hub_file(name)
    if hub_file is not None:
        return [download_hub_file(hub_file)]
    if path.is_file():
        files = [path]
    elif "://" in name and not name.startswith("file://"):
        files = download_files(name, partial(_choose_files, name))
    # `owner/name[split]` is a glob, too, which then matches no file.
    elif path.exists() or (
        any(character in name for character in "*?[") and (DatasetName.parse(name).split is None or glob(str(path)))
    ):
        files = _list_files(path)
    # The path does not exist, but the name looks like one: a mistyped path must not become a query to the Hub.
    elif name.startswith(("/", ".", "~")) or file_format(path) is not None:
        raise UserError(f"There is no file or directory {name}. Check the name.")
    else:
        return None
    for file in files:
        if file_format(file) is None:
            raise UserError(f"{file} has an unknown ending; known are {KNOWN}.")
        if file.stat().st_size == 0:
            raise UserError(f"{file} is empty. Remove it or write it again.")
    return [str(file) for file in files]


def _list_files(path: Path) -> list[Path]:
    """
    Return the data files that a directory or glob stands for, each once and in order, and log how many are left out.

    A directory, also one that a glob matches, stands for all data files below it, through links too. Hidden files are
    left out.
    """
    found = [Path(match) for match in glob(str(path), recursive=True)] if not path.exists() else [path]
    below = [
        Path(file) for place in found if place.is_dir() for file in glob(f"{escape(str(place))}/**", recursive=True)
    ]
    # Sorted, because the order of a directory differs between file systems, and decides between two names of a file.
    present: dict[Path, Path] = {}
    for file in sorted(place for place in (*found, *below) if place.is_file()):
        present.setdefault(file.resolve(), file)
    if {"state.json", "dataset_info.json"} <= {file.name for file in present}:
        raise UserError(f"{path} holds what `Dataset.save_to_disk` wrote. Write Parquet: `Dataset.to_parquet`.")
    return _choose_files(path, [*present.values()])


def _choose_files(name: str | Path, present: list[Path]) -> list[Path]:
    """Return the data files among the files of a directory or glob, and log how many are left out."""
    files = [file for file in present if file_format(file) is not None]
    # Beside data, a README.md describes them; beside records, so does a paper.
    has_records = any(file_format(file) not in TEXT_EXTENSIONS for file in files)
    beside = (".md", *DOCUMENTS) if has_records else (".md",)
    files = [file for file in files if file_format(file) not in beside] or files
    if others := {*present} - {*files}:
        logger.warning(f"{name}: {len(files)} data files. {len(others)} others are left out, such as {min(others)}.")
    if not files:
        raise UserError(f"No file of {name} ends in {KNOWN}.")
    return files


def name_eval_sets(eval_names: list[str] | None, train_names: list[str]) -> dict[str, str]:
    """
    Return the names of validation data by the names that their figures get, such as `news` for `my/news.jsonl`. A
    single one has the name "", because its figures need none.

    Raises:
        `UserError`: if two have the same name, or the run would train on one.
    """
    names = eval_names or []
    # `embedded` holds all embedded parts.
    parts = {"embedded": {*EMBEDDED_SOURCES}}
    trained = set[str]().union(*(parts.get(name, {name}) for name in train_names))
    for name in names:
        if parts.get(name, {name}) & trained or names.count(name) > 1:
            raise UserError(f"--eval_dataset_name {name} is named twice or also by --dataset_name. Name it once.")
    if len(names) < 2:
        return dict(zip([""], names, strict=False))
    stems = [Path(name).name.partition(file_format(Path(name)) or "\0")[0] for name in names]
    labels = [re.sub(r"\W+", "_", stem).strip("_") for stem in stems]
    if len({*labels}) < len(labels):
        raise UserError(f"--eval_dataset_name {' '.join(names)}: two have the same name. Rename one.")
    return dict(zip(labels, names, strict=True))


def read_source(source: str, reading: Reading) -> Iterator[tuple[int, str | BadRecord]]:
    """
    Yield the records of a file, an embedded part or a Hub dataset as JSON text, each with its number.

    Args:
        source (`str`): one of the sources that [`find_sources`] returns, or the name of a Hub dataset.
        reading ([`~rows.reading.Reading`]): how the user wants it to be read. [`~data.records.check_record`] renames
            its columns.
    """
    if source in EMBEDDED_SOURCES:
        records = load_embedded(EMBEDDED_SOURCES[source], kind=reading.kind or "text")
        yield from ((number, as_json(record)) for number, record in enumerate(records, start=1))
    # All files that are read have a known ending, and a name with such an ending is always a file.
    elif file_format(Path(source)) is None:
        rows = load_hub_dataset(source)
        yield from ((number, as_json(drop_padding(row, rows.features))) for number, row in enumerate(rows, start=1))
    else:
        yield from read_file(Path(source), reading)
