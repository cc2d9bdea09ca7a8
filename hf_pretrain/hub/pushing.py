"""
Repositories on the Hub: choose the files of a directory to push, and push them.

| `--hub_strategy` | pushed |
|---|---|
| `end` | the model at the end |
| `every_save` (default) | the model at each checkpoint, and at the end |
| `checkpoint` | the same, and the newest complete checkpoint as `checkpoint-N/` |
| `all_checkpoints` | the same, and every complete checkpoint |

Each push is one commit. It uploads hard links, so checkpoint rotation cannot remove the files during the upload, and
copies without local paths of files that hold such paths. It fails if the Hub answers nothing for ten minutes.
A checkpoint that is saved while a push is in progress waits, and a newer one takes its place. `all_checkpoints` pushes
all of them.
"""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_session, get_token
from huggingface_hub.constants import REPOCARD_NAME
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import ADAPTER_CONFIG_NAME, logging

from ..checkpoints.manifest import MANIFEST_NAME, read_manifest, write_manifest
from ..model.configuration_minimind import CODE_FILES
from ..run_directory.directory import PUSH_PREFIX
from ..runtime import modelscope
from ..runtime.errors import UserError
from ..runtime.names import public_name


logger = logging.get_logger(__name__)

# A run pushes only these files. A pattern such as *.json could publish training text.
PUBLISHED = (
    *(REPOCARD_NAME, TRAINER_STATE_NAME, *CODE_FILES),
    *("config.json", "generation_config.json", "model.safetensors", "evaluation.json"),
    *(ADAPTER_CONFIG_NAME, "adapter_model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model"),
)
# The Hub's client would wait without limit for a Hub that accepts a commit and never answers.
ANSWER_SECONDS = 600.0


def create_repository(repo_id: str, *, private: bool | None = None, is_space: bool = False) -> str:
    """
    Create a model repository on the Hub if it does not exist, and return its full id.

    Args:
        repo_id (`str`): `owner/name`, or a name in the user's own namespace.
        private (`bool`, *optional*): whether a new repository is private; by default as the account is set.
        is_space (`bool`): create a Space of static files instead.

    Raises:
        `UserError`: if the Hub refuses or cannot be reached, with the reason.
    """
    if is_space and repo_id.startswith(modelscope.PREFIX):
        raise UserError(f"{repo_id}: only a Space of the Hugging Face Hub shows a page.")
    if repo_id.startswith(modelscope.PREFIX):
        modelscope.create(repo_id, private=private)
        return repo_id
    hub = HfApi()
    get_session().timeout = ANSWER_SECONDS
    try:
        # `create_repo` returns the full id, which adds the user's namespace to a bare name.
        kind = {"repo_type": "space", "space_sdk": "static"} if is_space else {}
        return hub.create_repo(repo_id, private=private, exist_ok=True, **kind).repo_id
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
    is_space: bool = False,
) -> str:
    """
    Push the files that [`published_files`] names in one commit, and return the URL of the repository.

    Args:
        folder (`str` or `Path`): the directory.
        repo_id (`str`): an existing repository.
        message (`str`): the commit message.
        also (`Iterable[str]`): glob patterns of further files.
        revision (`str`, *optional*): the branch to push to.
        is_space (`bool`): the repository is a Space.

    Raises:
        `UserError`: if the push fails, with the reason and the command that tries again.
    """
    kind = {"repo_type": "space"} if is_space else {}
    # Names, not patterns such as *.json: the directory of a run also holds rows of the training data.
    names = published_files(folder, also=also)
    try:
        with tempfile.TemporaryDirectory(prefix=PUSH_PREFIX, dir=folder) as staging:
            for name in names:
                link_or_copy(Path(folder, name), Path(staging, name))
            return _upload(repo_id, staging, message=message, revision=revision, **kind)
    # As above, catch every type of error: the user gets the reason and the command.
    except Exception as error:
        words = [*(["--repo-type=space"] if is_space else []), *(f"--include={name}" for name in names)]
        command = shlex.join(["hf", "upload", repo_id, str(folder), *words])
        if repo_id.startswith(modelscope.PREFIX):
            target = repo_id.removeprefix(modelscope.PREFIX)
            command = shlex.join(["modelscope", "upload", target, str(folder), "--include", *names])
        raise UserError(
            f"The push to {repo_id} failed: {describe_error(error)}. The files are in {folder}; push them with "
            f"`{command}`."
        ) from error


def _upload(repo_id: str, folder: str | Path, *, message: str | None, revision: str | None, **options: Any) -> str:
    """Upload all files of a directory in one commit, and return the address of the repository."""
    if repo_id.startswith(modelscope.PREFIX):
        return modelscope.upload(repo_id, folder, message=message, revision=revision)
    api = HfApi()
    api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision, **options)
    return f"{api.endpoint}/{'spaces/' if options.get('repo_type') == 'space' else ''}{repo_id}"


def describe_error(error: BaseException) -> str:
    """Return an error as one line, without the user's token."""
    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    # Some errors quote the request with its headers.
    return text.replace(token, "<token>") if token else text


def _public(value: Any) -> Any:
    """Return JSON content in which the names of directories and files of this machine stand without their paths."""
    if isinstance(value, dict):
        return {name: _public(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_public(part) for part in value]
    return public_name(value) if isinstance(value, str) and Path(value).name != value else value


def link_or_copy(source: str | Path, target: str | Path):
    """
    Make a hard link, or a copy if the file system has no links. A state or an adapter's config loses its local paths.
    """
    if Path(source).name in (TRAINER_STATE_NAME, ADAPTER_CONFIG_NAME):
        content = _public(json.loads(Path(source).read_text(encoding="utf-8")))
        Path(target).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass
class HubPusher:
    """
    Push checkpoints and the final model of one run. Only the main process uses it.

    Args:
        output_dir (`Path`): the directory of the run.
        write_card (`Callable`): writes the model card into `output_dir`, before each push of a checkpoint.
        strategy (`str`): a value of [`~transformers.trainer_utils.HubStrategy`].
        revision (`str`, *optional*): the branch to push to.
        pushes_always (`bool`): push a checkpoint even while the previous push is in progress.
        gives_up (`Callable`): returns whether to stop waiting for pushes.
        repo_id (`str`, *optional*): the repository, before the first push.
        report (`str`, *optional*): outcome of the last push, for the report at the end of a run.
    """

    output_dir: Path
    write_card: Callable[[], None]
    strategy: str = HubStrategy.EVERY_SAVE
    revision: str | None = None
    pushes_always: bool = False
    gives_up: Callable[[], bool] = lambda: False
    repo_id: str | None = None
    report: str | None = None
    _hub: HfApi = field(default_factory=HfApi)
    # The pushes that have not ended, and the directories that they push.
    _pushes: dict[Future, Path] = field(default_factory=dict)
    _errors: list[str] = field(default_factory=list)

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Push a complete checkpoint in the background. It replaces one that waits for the end of a push."""
        if self.strategy == HubStrategy.END:
            return
        self.write_card()
        # In the output directory, because hard links work only within one file system.
        staging = Path(tempfile.mkdtemp(prefix=PUSH_PREFIX, dir=self.output_dir))
        for name in published_files(checkpoint):
            link_or_copy(checkpoint / name, staging / name)
        # Copy the card instead of linking it, because the next push rewrites it in place.
        shutil.copy2(self.output_dir / REPOCARD_NAME, staging)
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            shutil.copytree(checkpoint, staging / checkpoint.name, copy_function=link_or_copy)
        # `all_checkpoints` pushes every checkpoint, so a newer one must not replace a waiting one.
        if not self.pushes_always and self.strategy != HubStrategy.ALL_CHECKPOINTS:
            for push in [push for push in self._pushes if push.cancel()]:
                shutil.rmtree(self._pushes.pop(push))
        # `run_as_future` uses one thread, so pushes run one after another.
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        self._pushes[self._hub.run_as_future(self._upload, staging, message)] = staging

    def _upload(self, staging: Path, message: str) -> None:
        """Push everything in `staging` in one commit. Remove `staging`."""
        try:
            for manifest in staging.glob(f"*/{MANIFEST_NAME}"):
                # The checksums changed with the files. It is a link to the run's own manifest, which stays.
                run = read_manifest(manifest.parent)["run"]
                manifest.unlink()
                write_manifest(manifest.parent, _public(run))
            _upload(
                str(self.repo_id),
                staging,
                message=message,
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
