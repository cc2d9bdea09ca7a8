"""Whole datasets on the Hub, `owner/name[:config][@revision]`, as tables of the library `datasets`."""

import datasets
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, RevisionResolutionError

from ..runtime.errors import UserError
from ..runtime.names import DatasetName


# The only split that this package reads. Its validation sets come from a hash of the documents.
SPLIT = "train"


def load_hub_dataset(name: str, *, streaming: bool = False, num_proc: int | None = None) -> Dataset | IterableDataset:
    """
    Return the split `SPLIT` of a Hub dataset. Without streaming, it is a table in the cache, mapped into memory.

    Args:
        name (`str`): `owner/name[:config][@revision]`.
        streaming (`bool`, defaults to `False`): read from the Hub instead of downloading.
        num_proc (`int`, *optional*): number of processes that download and convert the files.

    Raises:
        `ValueError`: if there is no such dataset, configuration, revision or split, or the Hub cannot be reached and
            the cache does not hold it.
    """
    dataset = DatasetName.parse(name)
    try:
        records = datasets.load_dataset(
            dataset.repo_id,
            dataset.config,
            revision=dataset.revision,
            split=SPLIT,
            streaming=streaming,
            # NOTE: `load_dataset` refuses `num_proc` together with streaming.
            num_proc=None if streaming else num_proc,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{name!r} is no file here, and could not be loaded from the Hub (as name:config@revision): {error}"
        ) from error
    if dataset.revision is not None:
        _check_revision(name, dataset)
    return records


def _check_revision(name: str, dataset: DatasetName) -> None:
    """
    Raise `ValueError` if another revision of a dataset was loaded.

    NOTE: `datasets` falls back to the newest entry of its cache, of any revision, if the Hub cannot be reached or a
    revision cannot be read. It only warns.
    """
    loaded = datasets.load_dataset_builder(dataset.repo_id, dataset.config, revision=dataset.revision).hash
    try:
        wanted = HfApi().resolve_revision(dataset.repo_id, repo_type="dataset", revision=dataset.revision).resolved
    except (RevisionResolutionError, OSError, HTTPError):
        wanted = None
    if loaded != wanted:
        raise UserError(
            f"{name!r} could not be loaded from the Hub, and the newest copy in the cache is of another revision, "
            f"{loaded}. Check the connection, HF_HUB_OFFLINE and HF_ENDPOINT, or ask for that revision."
        )


__all__ = ["SPLIT", "load_hub_dataset"]
