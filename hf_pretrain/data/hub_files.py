"""
Single files of dataset repositories on the Hub: `owner/name:file.jsonl[@revision]` or `hf://datasets/owner/name/file`.

A repository such as MiniMind's holds several files with different columns, which `datasets` cannot load as one table.
The files are downloaded into the Hub's cache, and are then read line by line like files of this machine.
"""

import difflib
import fnmatch
import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ..runtime.names import DatasetName
from .formats import EXTENSIONS, file_format


def parse_hub_file(name: str) -> DatasetName | None:
    """Return the repository, file or pattern, and revision that a name stands for; `None` for any other name."""
    match = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", name)
    if match:
        return DatasetName(match[1], match[3], match[2])
    parsed = DatasetName.parse(name)
    # A configuration of a dataset does not end like a file.
    is_file = parsed.config is not None and file_format(Path(parsed.config)) is not None
    return parsed if is_file and re.fullmatch(r"[\w.-]+/[\w.-]+", parsed.repo_id) else None


def download_hub_files(file: DatasetName) -> list[str]:
    """
    Download a file of a dataset repository, or all files that match a pattern. Return their paths in the Hub's cache.

    Args:
        file ([`~runtime.names.DatasetName`]): its `config` is the path in the repository, or a pattern with `*`.

    Raises:
        `ValueError`: if the Hub cannot be reached, or has no such repository or file.
    """
    place = f"{file.repo_id}:{file.config}"
    where = {"repo_type": "dataset", "revision": file.revision}
    assert file.config is not None
    try:
        if "*" not in file.config:
            return [hf_hub_download(file.repo_id, file.config, **where)]
        present = HfApi().list_repo_files(file.repo_id, **where)
        names = sorted(name for name in present if fnmatch.fnmatch(name, file.config) and file_format(Path(name)))
        if not names:
            raise ValueError(f"{place}: no file of the repository matches; it holds {', '.join(present)}.")
        return [hf_hub_download(file.repo_id, name, **where) for name in names]
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{place} is not in the cache and cannot be downloaded: {error}. Check the connection, HF_HUB_OFFLINE and "
            "HF_ENDPOINT, or pass the path of a copy."
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{place} cannot be downloaded: {_explain(file, error)}") from error


def _explain(file: DatasetName, error: HfHubHTTPError) -> str:
    """Return why the Hub refused, with the nearest file if there is no such file."""
    try:
        present = HfApi().list_repo_files(file.repo_id, repo_type="dataset", revision=file.revision)
    except HfHubHTTPError:
        return f"{error}. Check the name and the revision; private and gated repositories need `hf auth login`."
    data = [name for name in present if name.endswith(tuple(EXTENSIONS))] or present
    nearest = difflib.get_close_matches(str(file.config), data, n=1, cutoff=0)
    return f"the repository has no such file; the nearest one is {nearest[0] if nearest else 'none'}."


__all__ = ["download_hub_files", "parse_hub_file"]
