"""Repositories on the Hub: choose the files of a directory to push, and find and download checkpoints."""

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi, get_token, hf_hub_download, snapshot_download
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..model.configuration_minimind import CODE_FILES
from ..runtime.errors import UserError
from ..weights.files import read_json
from .model_card import CARD_NAME, CURVE_NAME


logger = logging.get_logger(__name__)

# A run pushes only these files and the shards that an index names. A pattern such as *.json would publish training
# text, because nonfinite-*.json holds rows of it.
PUBLISHED = (
    *(CARD_NAME, CURVE_NAME, TRAINER_STATE_NAME, *CODE_FILES),
    *("config.json", "generation_config.json", "model.safetensors", "evaluation.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)
_SHARD = re.compile(r"[\w-]+\.safetensors")
# Trainer pickles its arguments into this file, and loading a pickle runs code. This package writes none, but a
# checkpoint of another program may have it.
PICKLED_ARGUMENTS = "training_args.bin"
_CHECKPOINT = re.compile(r"(last-checkpoint|checkpoint-(\d+))/" + re.escape(TRAINER_STATE_NAME))
# The prefix of directories that hold a push or a download in progress.
STAGING_PREFIX = ".hub-"


def create_repository(repo_id: str, *, private: bool | None = None) -> str:
    """
    Create a model repository on the Hub if it does not exist, and return its full id.

    Args:
        repo_id (`str`): `owner/name`, or a name in the user's own namespace.
        private (`bool`, *optional*): whether a new repository is private; by default as the account is set.

    Raises:
        `ValueError`: if the Hub refuses or cannot be reached, with the reason.
    """
    hub = HfApi()
    try:
        # `create_repo` returns the full id, which adds the user's namespace to a bare name.
        return hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
    # The network and the server raise many types of errors. Each of them means that there is no repository to push to.
    except Exception as error:
        raise UserError(
            f"The Hub repository {repo_id} cannot be created or opened at {hub.endpoint}: {describe_error(error)}. "
            "Log in with `hf auth login` or set HF_TOKEN (with write permission)."
        ) from error


def published_files(folder: str | Path, *, also: Iterable[str] = ()) -> list[str]:
    """
    Return the names of the files in a directory that may leave this machine.

    These are `PUBLISHED`, the shards that the index of the weights names, and the files that match a pattern in
    `also`.
    """
    folder = Path(folder)
    names = {name for name in PUBLISHED if (folder / name).is_file()}
    names |= {path.name for pattern in also for path in folder.glob(pattern)}
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        shards = read_json(folder / SAFE_WEIGHTS_INDEX_NAME).get("weight_map", {}).values()
        # The pattern keeps an index from naming files in other directories.
        names |= {SAFE_WEIGHTS_INDEX_NAME, *filter(_SHARD.fullmatch, map(str, shards))}
    return sorted(names)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    message: str | None = "Upload",
    also: Iterable[str] = (),
    revision: str | None = None,
) -> str:
    """
    Push the files that [`published_files`] names in one commit, and return the URL of the repository.

    Args:
        folder (`str` or `Path`): the directory.
        repo_id (`str`): an existing repository.
        message (`str`): the commit message.
        also (`Iterable[str]`): glob patterns of further files.
        revision (`str`, *optional*): the branch to push to.

    Raises:
        `ValueError`: if the push fails, with the reason and the command that tries again.
    """
    api = HfApi()
    # Names, not patterns such as *.json: the directory of a run also holds rows of the training data.
    names = published_files(folder, also=also)
    try:
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, allow_patterns=names, revision=revision
        )
    # As above, catch every type of error: the user gets the reason and the command.
    except Exception as error:
        command = shlex.join(["hf", "upload", repo_id, str(folder), *(f"--include={name}" for name in names)])
        raise UserError(
            f"The push to {repo_id} failed: {describe_error(error)}. The files are in {folder}; push them with "
            f"`{command}`."
        ) from error
    return f"{api.endpoint}/{repo_id}"


def newest_pushed_checkpoint(repo_id: str, revision: str | None) -> tuple[str, int, list[str], str]:
    """
    Return the folder, step and files of the newest checkpoint in a repository, and the commit that holds them.

    Raises:
        `ValueError`: if there is none, or its step is unreadable.
    """
    # One request returns the files and their commit. Read all of them from it: a push may replace files meanwhile.
    info = HfApi().model_info(repo_id, revision=revision)
    files = [sibling.rfilename for sibling in info.siblings or ()]
    found = []
    for match in filter(None, map(_CHECKPOINT.fullmatch, files)):
        step = read_json(Path(hf_hub_download(repo_id, match[0], revision=info.sha))).get("global_step")
        # The step becomes part of a path on this machine, so it must be a plain number.
        if not str(step).isdecimal() or (match[2] is not None and int(step) != int(match[2])):
            raise UserError(f"--resume_from_hub {repo_id}: {match[0]} has the invalid global_step {step!r}.")
        found.append((int(step), match[1]))
    if not found:
        raise UserError(
            f"--resume_from_hub {repo_id}: the repository holds no checkpoint, because it was not pushed with "
            f"--hub_strategy checkpoint. Start from its weights with --model_name_or_path {repo_id}."
        )
    # At equal steps, `last-checkpoint` wins over `checkpoint-N`, because its name comes later in the alphabet.
    step, folder = max(found)
    return folder, step, [path for path in files if path.startswith(f"{folder}/")], info.sha


def download_checkpoint(repo_id: str, folder: str, files: list[str], target: Path, revision: str):
    """
    Download a checkpoint beside `target` and rename it, so that an interrupted download leaves no incomplete
    checkpoint.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Download beside the target, because a rename works only within one file system.
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=target.parent) as scratch:
        snapshot_download(repo_id, allow_patterns=files, revision=revision, local_dir=scratch)
        try:
            os.rename(Path(scratch) / folder, target)
        except OSError:
            # Another machine on the same file system may have been faster.
            if not (target / TRAINER_STATE_NAME).is_file():
                raise


def remove_staging(output_dir: str | Path) -> None:
    """Delete the unfinished pushes and downloads of a killed run. None may be in progress in `output_dir`."""
    for path in Path(output_dir).glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def describe_error(error: BaseException) -> str:
    """Return an error as one line, without the user's token."""
    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    # Some errors quote the request with its headers.
    return text.replace(token, "<token>") if token else text


def link_or_copy(source: str | Path, target: str | Path):
    """Make a hard link, or a copy if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


__all__ = [
    "PICKLED_ARGUMENTS",
    "PUBLISHED",
    "STAGING_PREFIX",
    "create_repository",
    "describe_error",
    "download_checkpoint",
    "link_or_copy",
    "newest_pushed_checkpoint",
    "published_files",
    "push_folder",
    "remove_staging",
]
