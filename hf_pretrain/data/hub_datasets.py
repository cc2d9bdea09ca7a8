"""Whole datasets on the Hub, `owner/name[:config][@revision]`, as tables of the library `datasets`."""

import datasets
from datasets import Dataset, IterableDataset

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
        `ValueError`: if there is no such dataset, configuration or split, or the Hub cannot be reached and the cache
            does not hold it.
    """
    dataset = DatasetName.parse(name)
    try:
        return datasets.load_dataset(
            dataset.repo_id,
            dataset.config,
            revision=dataset.revision,
            split=SPLIT,
            streaming=streaming,
            # NOTE: `load_dataset` refuses `num_proc` together with streaming.
            num_proc=None if streaming else num_proc,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{name!r} is no file here, and could not be loaded from the Hub (as name:config@revision): {error}"
        ) from error


__all__ = ["SPLIT", "load_hub_dataset"]
