"""
Datasets on the Hub.

A whole dataset, `owner/name:config[split]@revision`, is a table of the library `datasets`.

A repository such as MiniMind's holds several files with different columns, which `datasets` cannot load as one table.
Single files, `owner/name:file.jsonl[@revision]` or `hf://datasets/owner/name[@revision]/file.jsonl`, are downloaded
into the Hub's cache, and then read like files of this machine.
"""

import re
from pathlib import Path

import datasets
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi, errors, hf_hub_download

from ..runtime.errors import UserError
from ..runtime.names import DatasetName
from .formats import file_format


def load_hub_dataset(name: str, *, streaming: bool = False, num_proc: int | None = None) -> Dataset | IterableDataset:
    """
    Return a split of a Hub dataset. Without streaming, it is a table in the cache, mapped into memory.

    Args:
        name (`str`): `owner/name:config[split]@revision`; the parts after the name may be left out.
        streaming (`bool`, defaults to `False`): read from the Hub instead of downloading.
        num_proc (`int`, *optional*): number of processes that download and convert the files.

    Raises:
        `UserError`: if there is no such dataset, configuration, revision or split, or the Hub cannot be reached and
            the cache does not hold it.
    """
    dataset = DatasetName.parse(name)
    options = {"revision": dataset.revision, "split": dataset.split or "train", "streaming": streaming}
    # NOTE: `load_dataset` refuses `num_proc` together with streaming.
    options["num_proc"] = None if streaming else num_proc
    try:
        records = datasets.load_dataset(dataset.repo_id, dataset.config, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name!r} is no file here, and could not be loaded from the Hub: {error}") from error
    if dataset.revision is not None:
        _check_revision(name, dataset)
    return records


def _check_revision(name: str, dataset: DatasetName) -> None:
    """
    Raise `UserError` if another revision of a dataset was loaded.

    NOTE: `datasets` falls back to the newest entry of its cache, of any revision, if the Hub cannot be reached or a
    revision cannot be read. It only warns.
    """
    loaded = datasets.load_dataset_builder(dataset.repo_id, dataset.config, revision=dataset.revision).hash
    try:
        wanted = HfApi().resolve_revision(dataset.repo_id, repo_type="dataset", revision=dataset.revision).resolved
    except (errors.RevisionResolutionError, OSError, errors.HTTPError):
        wanted = None
    if loaded != wanted:
        raise UserError(f"{name!r} could not be loaded from the Hub. The cache holds {loaded}. Check HF_HUB_OFFLINE.")


def parse_hub_file(name: str) -> DatasetName | None:
    """Return the repository, file and revision that a name stands for; `None` for any other name."""
    # The form of fsspec. A glob of files is read by fsspec itself.
    name = re.sub(r"^hf://datasets/([^/@]+/[^/@]+)(@[^/]+)?/([^*?[]+)$", r"\1:\3\2", name)
    parsed = DatasetName.parse(name)
    # A configuration of a dataset does not end like a file.
    is_file = parsed.config is not None and parsed.split is None and file_format(Path(parsed.config)) is not None
    return parsed if is_file and re.fullmatch(r"[\w.-]+/[\w.-]+", parsed.repo_id) else None


def download_hub_file(file: DatasetName) -> str:
    """
    Download a file of a dataset repository, and return its path in the Hub's cache. Without a connection, the cache
    answers.

    Args:
        file ([`~runtime.names.DatasetName`]): its `config` is the path in the repository.

    Raises:
        `UserError`: if there is no such repository or file, or the Hub cannot be reached and the file is not in the
            cache.
    """
    place = f"{file.repo_id}:{file.config}"
    try:
        return hf_hub_download(file.repo_id, str(file.config), repo_type="dataset", revision=file.revision)
    except errors.RemoteEntryNotFoundError as error:
        present = HfApi().list_repo_files(file.repo_id, repo_type="dataset", revision=file.revision)
        raise UserError(f"{place}: the repository has no such file. It holds {', '.join(present)}.") from error
    # NOTE: `HTTPError` is the base class of all errors of the HTTP library, which has another name in each version.
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError) as error:
        raise UserError(
            f"{place} cannot be downloaded: {error.__cause__ or error} Check the name, the revision, the connection, "
            "HF_HUB_OFFLINE and HF_ENDPOINT. Private and gated repositories need `hf auth login`."
        ) from error
