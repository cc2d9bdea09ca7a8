"""
ModelScope (https://modelscope.cn), beside the Hub: `modelscope:owner/name` names a model or dataset there, and
`modelscope:owner/name:file` one of its files. The client is the package modelscope-hub, which reads
`MODELSCOPE_API_TOKEN` and `MODELSCOPE_ENDPOINT`.
"""

from typing import Any

from .command_line import announce
from .errors import UserError, needing_extra


PREFIX = "modelscope:"


def connect() -> Any:
    """Return ModelScope's client. Raise `UserError` if it is not installed."""
    with needing_extra("modelscope", f"{PREFIX} needs modelscope-hub"):
        from modelscope_hub import HubApi
    return HubApi()


def _reason(error: Exception) -> str:
    # The lines below the first one repeat the request and the answer.
    return str(error).partition("\n")[0]


def download(name: str, *, repo_type: str) -> str:
    """
    Download a repository or one of its files into the client's cache, unless it is there, and return its path.

    Args:
        name (`str`): `modelscope:owner/name` or `modelscope:owner/name:file`.
        repo_type (`str`): `model` or `dataset`.

    Raises:
        `UserError`: if ModelScope has no such files or cannot be reached, with the reason.
    """
    repo_id, _, file = name.removeprefix(PREFIX).partition(":")
    client = connect()
    announce(f"reading {name}")
    try:
        path = client.download_repo(repo_id, repo_type, allow_patterns=[file] if file else None) / file
        if not path.exists() or not any(path.iterdir() if path.is_dir() else [path]):
            raise FileNotFoundError("there are no such files")
    # The network and the server raise many types of errors.
    except Exception as error:
        login = "Check the name and the connection. For a private one, set MODELSCOPE_API_TOKEN."
        raise UserError(f"{name} cannot be downloaded: {_reason(error)}. {login}") from error
    return str(path)


def create(name: str, *, private: bool | None = None) -> None:
    """Create a model repository, public by default, if it does not exist. Raise `UserError` with the reason."""
    client, repo_id = connect(), name.removeprefix(PREFIX)
    try:
        if not client.repo_exists(repo_id, "model"):
            client.create_repo(repo_id, "model", visibility="private" if private else "public")
    except Exception as error:
        login = "Set MODELSCOPE_API_TOKEN, or log in with `modelscope login`."
        raise UserError(f"The repository {name} cannot be created or opened: {_reason(error)}. {login}") from error


def upload(name: str, folder: Any, *, message: str | None, revision: str | None) -> str:
    """Upload all files of a directory to a model repository, and return its address."""
    client, repo_id = connect(), name.removeprefix(PREFIX)
    # Its record of earlier uploads would lie in the directory.
    options = {"commit_message": message, "revision": revision, "use_cache": False, "disable_tqdm": True}
    client.upload_folder(repo_id, "model", folder, **options)
    return f"{client.legacy.endpoint}/models/{repo_id}"
