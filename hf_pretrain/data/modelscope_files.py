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

from ..runtime.errors import UserError
from ..runtime.installation import install_command
from ..runtime.names import MODELSCOPE, DatasetName
from .formats import file_format


logger = logging.get_logger(__name__)


def download_modelscope_files(name: str) -> list[str]:
    """
    Download the data files of a dataset repository on ModelScope. Return their paths in ModelScope's cache.

    Without a connection, return a single file from the cache, with a warning.

    Args:
        name (`str`): `modelscope://owner/name[:file][@revision]`. The file may be a pattern with `*`; without it, the
            function takes all data files of the repository.

    Raises:
        `ValueError`: if `modelscope-hub` is not installed, ModelScope cannot be reached and the cache may lack a file,
            or there is no such repository or file.
    """
    try:
        import modelscope_hub as modelscope
    except ImportError:
        raise UserError(f"{name} needs modelscope-hub: {install_command('modelscope')}") from None
    file = DatasetName.parse(name.removeprefix(MODELSCOPE))
    pattern = file.config or "*"
    api = modelscope.HubApi()
    # Without a revision, the cache would answer with a file of any revision.
    repository: dict[str, Any] = {
        "repo_id": file.repo_id,
        "repo_type": "dataset",
        "revision": file.revision or "master",
    }
    try:
        present = [entry for entry in api.list_repo_files(**repository) if not entry.is_dir]
        wanted = [e for e in present if file_format(Path(e.path)) and fnmatch.fnmatch(e.path, pattern)]
        if not wanted:
            there = ", ".join(sorted(entry.path for entry in present))
            raise UserError(f"{name}: no data file of the repository matches; it holds {there}.")
        # The cache keeps files that the repository no longer has. Download and return only those of the list.
        files = [{"Path": entry.path, "Size": entry.size or None, "Sha256": entry.sha256} for entry in wanted]
        root = api.download_repo(**repository, file_list=files)
        return [str(path) for path in sorted(root / entry.path for entry in wanted)]
    except modelscope.NetworkError as error:
        try:
            # A pattern names no file of the cache. The cache cannot tell whether it holds all files that match.
            path = api.download_file(**repository, file_path=pattern, local_files_only=True)
        except modelscope.CacheError:
            raise UserError(
                f"{name} is not in the cache, or perhaps only in part, and cannot be downloaded: {error}. Check the "
                "connection and MODELSCOPE_ENDPOINT, name single files, or pass the path of a copy."
            ) from error
        logger.warning(f"ModelScope cannot be reached, so {name} is read from the cache: {error}.")
        return [str(path)]
    except modelscope.HubError as error:
        raise UserError(
            f"{name} cannot be downloaded: {error}. Check the name and the revision; private repositories need "
            "MODELSCOPE_API_TOKEN."
        ) from error


__all__ = ["download_modelscope_files"]
