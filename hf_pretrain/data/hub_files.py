"""
Single files of dataset repositories on the Hub: `owner/name:file.jsonl[@revision]` or `hf://datasets/owner/name/file`.

A repository such as MiniMind's holds several files with different columns, which `datasets` cannot load as one table.
The files are downloaded into the Hub's cache, and are then read line by line like files of this machine.
"""

import difflib
import fnmatch
import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download

# NOTE: `HTTPError` is the base class of all errors of the HTTP library, which has another name in each major version.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

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
        # Without a connection, the directory holds the files that an earlier call downloaded.
        root = Path(snapshot_download(file.repo_id, allow_patterns=file.config, **where))
        paths = sorted(path for path in root.rglob("*") if path.is_file() and file_format(path) is not None)
        found = [str(path) for path in paths if fnmatch.fnmatch(path.relative_to(root).as_posix(), file.config)]
        if not found:
            present = HfApi().list_repo_files(file.repo_id, **where)
            raise ValueError(f"{place}: no file of the repository matches; it holds {', '.join(present)}.")
        return found
    except HfHubHTTPError as error:
        raise ValueError(f"{place} cannot be downloaded: {_explain(file, error)}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError) as error:
        raise ValueError(
            f"{place} is not in the cache and cannot be downloaded: {error.__cause__ or error}. Check the connection, "
            "HF_HUB_OFFLINE and HF_ENDPOINT, or pass the path of a copy."
        ) from error


def _explain(file: DatasetName, error: HfHubHTTPError) -> str:
    """Return why the Hub refused, with the nearest file if there is no such file."""
    login = "Private and gated repositories need `hf auth login`"
    try:
        present = HfApi().list_repo_files(file.repo_id, repo_type="dataset", revision=file.revision)
    except HTTPError:
        return f"{error}. Check the name and the revision. {login}."
    if "*" in str(file.config) or file.config in present:
        return f"{error}. The repository has this file. {login}; otherwise try again later."
    data = [name for name in present if name.endswith(tuple(EXTENSIONS))] or present
    nearest = difflib.get_close_matches(str(file.config), data, n=1, cutoff=0)
    return f"the repository has no such file; the nearest one is {nearest[0] if nearest else 'none'}."


__all__ = ["download_hub_files", "parse_hub_file"]
