"""
Repositories on the Hub: which files of a directory are pushed, and how checkpoints are listed and downloaded.
"""

import json
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
from ..weights.files import read_json
from .model_card import CARD_NAME, CURVE_NAME


logger = logging.get_logger(__name__)

# These files of a run are pushed, with the shards that an index names, and no others. A pattern such as *.json would let
# training text out: nonfinite-*.json holds rows of it.
PUBLISHED = (
    *(CARD_NAME, CURVE_NAME, "evaluation.json", TRAINER_STATE_NAME, *CODE_FILES),
    *(
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
_SHARD = re.compile(r"[\w-]+\.safetensors")
# Trainer pickles its arguments into this file. A checkpoint of another program may have it.
PICKLED_ARGUMENTS = "training_args.bin"
_CHECKPOINT = re.compile(r"(last-checkpoint|checkpoint-(\d+))/" + re.escape(TRAINER_STATE_NAME))
# How directories begin that hold a push or a download under way.
STAGING_PREFIX = ".hub-"


def create_repository(repo_id: str, *, private: bool | None = None) -> str:
    """The full id of a model repository on the Hub, created if need be; `ValueError` with the reason if refused."""
    try:
        return HfApi().create_repo(repo_id, private=private, exist_ok=True).repo_id
    except Exception as error:  # Whatever the network and the server come up with.
        raise ValueError(
            f"The Hub does not give the repository {repo_id}: {describe_error(error)}. Log in with `hf auth login` or set "
            "HF_TOKEN (with write permission)."
        ) from error


def published_files(folder: str | Path, *, also: Iterable[str] = ()) -> list[str]:
    """
    The names of the files in a directory that may leave this machine: `PUBLISHED`, the shards that the index of the
    weights names, and what matches a pattern of `also`.
    """
    folder = Path(folder)
    names = {name for name in PUBLISHED if (folder / name).is_file()}
    names |= {path.name for pattern in also for path in folder.glob(pattern)}
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        shards = read_json(folder / SAFE_WEIGHTS_INDEX_NAME).get("weight_map", {}).values()
        names |= {SAFE_WEIGHTS_INDEX_NAME, *filter(_SHARD.fullmatch, map(str, shards))}
    return sorted(names)


def upload_command(folder: str | Path, repo_id: str, names: list[str]) -> str:
    """The command that pushes these files by hand."""
    return shlex.join(["hf", "upload", repo_id, str(folder), *(f"--include={name}" for name in names)])


def push_folder(folder: str | Path, repo_id: str, *, message: str = "Upload", also: Iterable[str] = ()) -> str:
    """
    Pushes the files of a directory that [`published_files`] names in one commit, and returns the URL of the repository.

    Raises:
        `ValueError`: if the push fails, with the reason and the command that tries again.
    """
    api = HfApi()
    names = published_files(folder, also=also)
    try:
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, allow_patterns=names)
    except Exception as error:  # Whatever the network and the server come up with.
        raise ValueError(
            f"The push to {repo_id} failed: {describe_error(error)}. The files are in {folder}; push them with "
            f"`{upload_command(folder, repo_id, names)}`."
        ) from error
    return f"{api.endpoint}/{repo_id}"


def newest_pushed_checkpoint(repo_id: str, revision: str | None) -> tuple[str, int, list[str]]:
    """Folder, step and files of the newest checkpoint in a repository."""
    files = HfApi().list_repo_files(repo_id, revision=revision)
    found = []
    for match in filter(None, map(_CHECKPOINT.fullmatch, files)):
        state = Path(hf_hub_download(repo_id, match[0], revision=revision))
        try:
            step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--resume_from_hub {repo_id}: {match[0]} names no global_step ({error!r}).") from error
        # It becomes part of a path.
        if type(step) is not int or step < 0 or (match[2] is not None and step != int(match[2])):
            raise ValueError(f"--resume_from_hub {repo_id}: {match[0]} has the impossible global_step {step!r}.")
        found.append((step, match[1]))
    if not found:
        raise ValueError(
            f"--resume_from_hub {repo_id}: the repository holds no checkpoint; it was not pushed with --hub_strategy "
            f"checkpoint. Train on from its weights with --model_name_or_path {repo_id}."
        )
    step, folder = max(found)
    return folder, step, [path for path in files if path.startswith(f"{folder}/")]


def download_checkpoint(repo_id: str, folder: str, files: list[str], target: Path, revision: str | None):
    """Downloads beside `target` and renames, so that a download that breaks off leaves no half checkpoint."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=target.parent) as scratch:
        snapshot_download(repo_id, allow_patterns=files, revision=revision, local_dir=scratch)
        try:
            os.rename(Path(scratch) / folder, target)
        except OSError:
            # Another machine on the same file system may have been first.
            if not (target / TRAINER_STATE_NAME).is_file():
                raise


def remove_staging(output_dir: str | Path) -> None:
    """Removes what pushes and downloads of a killed run left in `output_dir`; nothing may be under way there."""
    for path in Path(output_dir).glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def describe_error(error: BaseException) -> str:
    """One line of an error, without the token in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    return text.replace(token, "<token>") if token else text


def link_or_copy(source: str | Path, target: str | Path):
    """A hard link, or a copy where the file system has none."""
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
    "upload_command",
]
