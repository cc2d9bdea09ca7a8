"""
Files of dataset repositories on ModelScope: `modelscope://owner/name[:file.jsonl][@revision]`.

The files are downloaded into ModelScope's cache, and are then read line by line like files of this machine. The
package `modelscope-hub` (`hf_pretrain[modelscope]`) reads the variables `MODELSCOPE_ENDPOINT`, `MODELSCOPE_API_TOKEN`
and `MODELSCOPE_CACHE`.
"""

import fnmatch
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..runtime.names import MODELSCOPE, DatasetName
from .formats import file_format


logger = logging.get_logger(__name__)


def download_modelscope_files(name: str) -> list[str]:
    """
    Download the data files of a dataset repository on ModelScope. Return their paths in ModelScope's cache.

    Without a connection, return the files that the cache already holds, with a warning.

    Args:
        name (`str`): `modelscope://owner/name[:file][@revision]`. The file may be a pattern with `*`; without it, the
            function takes all data files of the repository.

    Raises:
        `ValueError`: if `modelscope-hub` is not installed, ModelScope cannot be reached, or it has no such repository
            or file.
    """
    try:
        import modelscope_hub as modelscope
    except ImportError:
        raise ValueError(f"{name} needs modelscope-hub: pip install 'hf_pretrain[modelscope]'.") from None
    file = DatasetName.parse(name.removeprefix(MODELSCOPE))
    pattern = file.config or "*"
    api = modelscope.HubApi()
    repository: dict[str, Any] = {"repo_id": file.repo_id, "repo_type": "dataset", "revision": file.revision}
    try:
        paths = _data_files(api.download_repo(**repository, allow_patterns=[pattern]), pattern)
        if not paths:
            there = ", ".join(sorted(entry.path for entry in api.list_repo_files(**repository)))
            raise ValueError(f"{name}: no data file of the repository matches; it holds {there}.")
        return paths
    except modelscope.NetworkError as error:
        try:
            paths = _data_files(api.download_repo(**repository, local_files_only=True), pattern)
        except modelscope.CacheError:
            paths = []
        if not paths:
            raise ValueError(
                f"{name} is not in the cache and cannot be downloaded: {error}. Check the connection and "
                "MODELSCOPE_ENDPOINT, or pass the path of a copy."
            ) from error
        logger.warning(f"ModelScope cannot be reached, so {name} is read from the cache: {error}.")
        return paths
    except modelscope.HubError as error:
        raise ValueError(
            f"{name} cannot be downloaded: {error}. Check the name and the revision; private repositories need "
            "MODELSCOPE_API_TOKEN."
        ) from error


def _data_files(directory: Path, pattern: str) -> list[str]:
    """Return the data files in `directory` whose path below it matches. The cache may hold others, too."""
    return [
        str(path)
        for path in sorted(directory.rglob("*"))
        if file_format(path) is not None and fnmatch.fnmatch(path.relative_to(directory).as_posix(), pattern)
    ]


__all__ = ["download_modelscope_files"]
