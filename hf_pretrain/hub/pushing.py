"""
Repositories on the Hub: choose the files of a directory to push, and push them.

| `--hub_strategy` | pushed |
|---|---|
| `end` | the model at the end |
| `every_save` (default) | the model at each checkpoint, and at the end |
| `checkpoint` | the same, and the newest complete checkpoint as `checkpoint-N/` |
| `all_checkpoints` | the same, and every complete checkpoint |

Each push is one commit. It uploads hard links, so checkpoint rotation cannot remove the files during the upload.
A checkpoint that is saved while a push is in progress waits, and a newer one takes its place. `all_checkpoints` pushes
all of them.
"""

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import REPOCARD_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from ..model.configuration_minimind import CODE_FILES
from ..runtime.errors import UserError


logger = logging.get_logger(__name__)

# A run pushes only these files. A pattern such as *.json could publish training text.
PUBLISHED = (
    *(REPOCARD_NAME, TRAINER_STATE_NAME, *CODE_FILES),
    *("config.json", "generation_config.json", "model.safetensors", "evaluation.json"),
    *("adapter_config.json", "adapter_model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)
# The prefix of directories that hold a push in progress.
_STAGING_PREFIX = ".hub-"


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

    These are `PUBLISHED`, and the files that match a pattern in `also`.
    """
    folder = Path(folder)
    names = {name for name in PUBLISHED if (folder / name).is_file()}
    return sorted(names | {path.name for pattern in also for path in folder.glob(pattern)})


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


def remove_staging(output_dir: str | Path) -> None:
    """Delete the unfinished pushes of a killed run. None may be in progress in `output_dir`."""
    for path in Path(output_dir).glob(f"{_STAGING_PREFIX}*"):
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


class HubPusher:
    """
    Push checkpoints and the final model of one run. Only the main process uses it.

    Args:
        output_dir (`str` or `Path`): the directory of the run.
        strategy (`str`): a value of [`~transformers.trainer_utils.HubStrategy`].
        revision (`str`, *optional*): the branch to push to.
        pushes_always (`bool`): push a checkpoint even while the previous push is in progress.
        write_card (`Callable`): writes the model card into `output_dir`, before each push of a checkpoint.
        gives_up (`Callable`): returns whether to stop waiting for pushes.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        strategy: str = "every_save",
        revision: str | None = None,
        pushes_always: bool = False,
        write_card: Callable[[], None],
        gives_up: Callable[[], bool] = lambda: False,
    ):
        self.output_dir, self.strategy, self.revision = Path(output_dir), HubStrategy(strategy), revision
        # `all_checkpoints` pushes every checkpoint, so a newer one must not replace a waiting one.
        self.pushes_always = pushes_always or self.strategy == HubStrategy.ALL_CHECKPOINTS
        self.write_card, self.gives_up = write_card, gives_up
        self.repo_id: str | None = None
        # Outcome of the last push, for the report at the end of a run.
        self.report: str | None = None
        self._hub = HfApi()
        # The pushes that have not ended, and the directories that they push.
        self._pushes: dict[Future, Path] = {}
        self._errors: list[str] = []

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Push a complete checkpoint in the background. It replaces one that waits for the end of a push."""
        if self.strategy == HubStrategy.END:
            return
        self.write_card()
        # In the output directory, because hard links work only within one file system.
        staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self.output_dir))
        for name in published_files(checkpoint):
            link_or_copy(checkpoint / name, staging / name)
        # Copy the card instead of linking it, because the next push rewrites it in place.
        shutil.copy2(self.output_dir / REPOCARD_NAME, staging)
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            shutil.copytree(checkpoint, staging / checkpoint.name, copy_function=link_or_copy)
        if not self.pushes_always:
            for push in [push for push in self._pushes if push.cancel()]:
                shutil.rmtree(self._pushes.pop(push))
        # `run_as_future` uses one thread, so pushes run one after another.
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        self._pushes[self._hub.run_as_future(self._upload, staging, message)] = staging

    def _upload(self, staging: Path, message: str) -> None:
        """Push everything in `staging` in one commit. Remove `staging`."""
        try:
            self._hub.upload_folder(
                repo_id=self.repo_id,
                folder_path=staging,
                commit_message=message,
                revision=self.revision,
                # Delete and add in one commit: the repository never lacks a checkpoint.
                delete_patterns=f"{PREFIX_CHECKPOINT_DIR}-*/*" if self.strategy == HubStrategy.CHECKPOINT else None,
            )
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def finish(self) -> None:
        """Wait for all pushes, until `gives_up` returns `True`."""
        while self._pushes:
            if self.gives_up():
                logger.warning(f"A push to {self.repo_id} was cancelled. The checkpoints are in {self.output_dir}.")
                break
            # Wait in short intervals, to notice a second signal of the user.
            for push in wait(self._pushes, timeout=0.2).done:
                del self._pushes[push]
                if (error := push.exception()) is not None:
                    self._errors.append(describe_error(error))
                    logger.warning(f"A push to {self.repo_id} failed: {self._errors[-1]}")

    def push_model(self, *, message: str | None) -> None:
        """Push the model in `output_dir`, and set `report`. The run is saved, so a failed push does not fail it."""
        try:
            url = push_folder(self.output_dir, str(self.repo_id), message=message, revision=self.revision)
        except UserError as error:
            logger.warning(str(error))
            self.report = f"FAILED: {error}"
            return
        failed = f" ({len(self._errors)} pushes during the run failed: {self._errors[-1]})" if self._errors else ""
        self.report = f"{url}{failed}"
