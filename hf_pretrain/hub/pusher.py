"""
Push the checkpoints and the model of a run. A push does not delay the run, and a failed push loses nothing.

| `--hub_strategy` | pushed |
|---|---|
| `end` | the model at the end |
| `every_save` (default) | the model at each checkpoint, and at the end |
| `checkpoint` | the same, and the newest complete checkpoint as `last-checkpoint/` |
| `all_checkpoints` | the same, and every complete checkpoint as `checkpoint-N/` |

Each push is one commit. It uploads hard links, so checkpoint rotation cannot remove the files during the upload. A
checkpoint that is saved while a push is in progress waits. Only the newest waiting checkpoint is pushed;
`all_checkpoints` pushes all of them.
"""

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..runtime.errors import UserError
from .model_card import CARD_NAME
from .repository import (
    PICKLED_ARGUMENTS,
    STAGING_PREFIX,
    create_repository,
    describe_error,
    link_or_copy,
    published_files,
    upload_command,
)


logger = logging.get_logger(__name__)


class HubPusher:
    """
    Push checkpoints and the final model of one run. Only the main process uses it.

    Args:
        output_dir (`str` or `Path`): the directory of the run.
        strategy (`str`): a value of [`~transformers.trainer_utils.HubStrategy`].
        token (`str`, *optional*): the token to push with; by default the token of the login.
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
        token: str | None = None,
        revision: str | None = None,
        pushes_always: bool = False,
        write_card: Callable[[], None],
        gives_up: Callable[[], bool] = lambda: False,
    ):
        self.output_dir = Path(output_dir)
        self.strategy = HubStrategy(strategy)
        self.revision = revision
        self.pushes_always = pushes_always
        self.write_card, self.gives_up = write_card, gives_up
        self.repo_id: str | None = None
        self.use_token(token)
        self._pushes: list[Future] = []
        # The newest checkpoint that was saved while a push was in progress.
        self._waiting: Path | None = None
        self._errors: list[str] = []
        self._final_error: str | None = None

    def use_token(self, token: str | None) -> None:
        """Push with this token from now on."""
        self._hub = HfApi(token=token)

    def create_repository(self, name: str, *, private: bool | None = None, token: str | None = None) -> str:
        """
        Create the repository if it does not exist, and return its full id.

        Raises:
            `ValueError`: if the Hub refuses, with the reason.
        """
        try:
            self.repo_id = create_repository(name, private=private, token=token or self._hub.token)
        except ValueError as error:
            raise UserError(
                f"{error} Nothing was trained yet. Leave --push_to_hub out to train without the Hub."
            ) from error
        return self.repo_id

    @property
    def report(self) -> str | None:
        """Outcome of the last push, for the report at the end of a run; `None` without a repository."""
        if self.repo_id is None:
            return None
        if self._final_error is not None:
            command = upload_command(self.output_dir, self.repo_id, published_files(self.output_dir))
            return f"FAILED: {self._final_error}. The run is complete in {self.output_dir}; push it with `{command}`."
        earlier = len(self._errors)
        failed = f" ({earlier} pushes during the run failed: {self._errors[-1]})" if earlier else ""
        return f"{self._hub.endpoint}/{self.repo_id}{failed}"

    def takes(self, checkpoint: Path) -> bool:
        """Return whether the caller should call `push_checkpoint` now. Remember a checkpoint that has to wait."""
        if self.strategy == HubStrategy.END:
            return False
        # `all_checkpoints` pushes every checkpoint, so a newer one must not replace a waiting one.
        must_push = self.pushes_always or self.strategy == HubStrategy.ALL_CHECKPOINTS
        if not must_push and any(not push.done() for push in self._pushes):
            logger.warning(f"{checkpoint} waits: the previous push is still in progress.")
            self._waiting = checkpoint
            return False
        self._waiting = None
        return True

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Push a checkpoint in the background."""
        try:
            self.write_card()
            staging, whole = self._stage(checkpoint)
        except OSError as error:
            self._errors.append(describe_error(error))
            logger.warning(f"{checkpoint} could not be pushed: {self._errors[-1]}")
            return
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        # `run_as_future` uses one thread, so pushes run one after another.
        self._pushes.append(self._hub.run_as_future(self._upload, staging, message, whole))

    def _stage(self, checkpoint: Path) -> tuple[Path, str | None]:
        """
        Return a directory of links with the layout of the repository, and the name of the complete checkpoint in it.
        """
        # In the output directory, because hard links work only within one file system.
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.output_dir))
        for name in published_files(checkpoint):
            link_or_copy(checkpoint / name, staging / name)
        # Copy the card instead of linking it, because the next push rewrites it in place.
        shutil.copy2(self.output_dir / CARD_NAME, staging)
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        whole = names.get(self.strategy)
        if whole is not None:
            # Hard links cost no space, even for a checkpoint of many gigabytes.
            ignore = shutil.ignore_patterns(PICKLED_ARGUMENTS)
            shutil.copytree(checkpoint, staging / whole, copy_function=link_or_copy, ignore=ignore)
        return staging, whole

    def _upload(self, staging: Path, message: str, whole: str | None) -> None:
        """Push everything in `staging` in one commit that replaces the older `whole`."""
        try:
            self._hub.upload_folder(
                repo_id=self.repo_id,
                folder_path=staging,
                commit_message=message,
                revision=self.revision,
                # Delete and add in one commit: the repository never lacks a checkpoint.
                delete_patterns=f"{whole}/*" if whole else None,
            )
        finally:
            # Remove the links after a failure, too: the checkpoint itself is still in the output directory.
            shutil.rmtree(staging, ignore_errors=True)

    def finish(self) -> None:
        """Wait for the pushes in progress and for the checkpoint that waits, until `gives_up` returns `True`."""
        if self._waiting is not None and not self.gives_up():
            self.push_checkpoint(self._waiting)
            self._waiting = None
        for push in self._pushes:
            # Wait in short intervals, to notice a second signal of the user.
            while not push.done() and not self.gives_up():
                wait([push], timeout=0.2)
            if not push.done():
                # `cancel` stops only a push that has not begun.
                push.cancel()
                logger.warning(f"A push to {self.repo_id} was cancelled. The checkpoints are in {self.output_dir}.")
                continue
            error = push.exception()
            if error is not None:
                self._errors.append(describe_error(error))
                logger.warning(f"A push to {self.repo_id} failed: {self._errors[-1]}")
        self._pushes = []

    def push_model(self, *, message: str | None, revision: str | None = None) -> CommitInfo | None:
        """Push the model in `output_dir`. If the push fails, return `None`; `report` then gives the reason."""
        self._final_error = None
        try:
            return self._hub.upload_folder(
                repo_id=self.repo_id,
                folder_path=self.output_dir,
                commit_message=message,
                revision=revision or self.revision,
                # Names, not patterns such as *.json: the directory also holds rows of the training data.
                allow_patterns=published_files(self.output_dir),
            )
        except Exception as error:  # The run is saved, so a failed push must not fail the run.
            self._final_error = describe_error(error)
            logger.warning(f"The push to {self.repo_id} failed: {self._final_error}")
            return None


__all__ = ["HubPusher"]
