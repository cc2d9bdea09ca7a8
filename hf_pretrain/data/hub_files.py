"""
Single files of dataset repositories on the Hub: `owner/name:file.jsonl[@revision]` or `hf://datasets/owner/name/file`.

A repository such as MiniMind's holds several files with different columns, which `datasets` cannot load as one table.
The files are downloaded into the Hub's cache, and are then read line by line like files of this machine.
"""

import difflib
import fnmatch
import glob
import re
from pathlib import Path

from huggingface_hub import HfApi, get_cached_repo_tree, hf_hub_download, parse_hf_uri, snapshot_download

# NOTE: `HTTPError` is the base class of all errors of the HTTP library, which has another name in each major version.
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionResolutionError,
)

from ..runtime.errors import UserError
from ..runtime.names import DatasetName
from .formats import EXTENSIONS, file_format


_URI_OF_DATASETS = "hf://datasets/"


def parse_hub_file(name: str) -> DatasetName | None:
    """
    Return the repository, file or pattern, and revision that a name stands for; `None` for any other name.

    Raises:
        `ValueError`: for a name that begins with `hf://datasets/` and names no file.
    """
    if name.startswith(_URI_OF_DATASETS):
        try:
            # Some revisions have slashes, such as `refs/convert/parquet`; huggingface_hub knows which ones.
            uri = parse_hf_uri(name)
        except ValueError as error:
            raise UserError(f"{error} Write hf://datasets/owner/name@revision/file.jsonl.") from error
        if not uri.path_in_repo:
            raise UserError(f"{name} names no file. Add its path, or for a whole dataset pass {uri.id}.")
        return DatasetName(uri.id, uri.path_in_repo, uri.revision)
    parsed = DatasetName.parse(name)
    # A configuration of a dataset does not end like a file.
    is_file = parsed.config is not None and file_format(Path(parsed.config)) is not None
    return parsed if is_file and re.fullmatch(r"[\w.-]+/[\w.-]+", parsed.repo_id) else None


def download_hub_files(file: DatasetName) -> list[str]:
    """
    Download a file of a dataset repository, or all data files that match a pattern. Return their paths in the Hub's
    cache.

    Without a connection, the cache answers if it holds the file, or the list of all files and each one that matches.

    Args:
        file ([`~runtime.names.DatasetName`]): its `config` is the path in the repository, or a pattern with `*`.

    Raises:
        `ValueError`: if the Hub cannot be reached and the cache may lack a file, or there is no such repository or
            file.
    """
    place = f"{file.repo_id}:{file.config}"
    where = {"repo_type": "dataset", "revision": file.revision}
    assert file.config is not None
    try:
        if "*" not in file.config:
            return [hf_hub_download(file.repo_id, file.config, **where)]
        # The files of a commit never change, so the list and the files belong together.
        where["revision"] = HfApi().resolve_revision(file.repo_id, **where).resolved
        present = _list_files(file.repo_id, **where)
        names = [name for name in present if file_format(Path(name)) and fnmatch.fnmatch(name, file.config)]
        if not names:
            raise UserError(f"{place}: no data file of the repository matches; it holds {', '.join(present)}.")
        root = Path(snapshot_download(file.repo_id, allow_patterns=[glob.escape(name) for name in names], **where))
        return [str(path) for path in sorted(root / name for name in names)]
    except HfHubHTTPError as error:
        raise UserError(f"{place} cannot be downloaded: {_explain(file, error)}") from error
    except (LocalEntryNotFoundError, RevisionResolutionError, OfflineModeIsEnabled, HTTPError) as error:
        raise UserError(
            f"{place} is not in the cache, or perhaps only in part, and cannot be downloaded: "
            f"{error.__cause__ or error}. Check the connection, HF_HUB_OFFLINE and HF_ENDPOINT, name single files, or "
            "pass the path of a copy."
        ) from error


def _list_files(repo_id: str, *, repo_type: str, revision: str) -> list[str]:
    """Return the files of a commit, from the list that `snapshot_download` leaves in the cache or from the Hub."""
    try:
        return [entry.path for entry in get_cached_repo_tree(repo_id, repo_type=repo_type, revision=revision)]
    except CachedRepoTreeNotFoundError:
        return HfApi().list_repo_files(repo_id, repo_type=repo_type, revision=revision)


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
