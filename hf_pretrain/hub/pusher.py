"""
Push the checkpoints and the model of a run. A push does not delay the run, and a failed push loses nothing.

| `--hub_strategy` | pushed |
|---|---|
| `end` | the model at the end |
| `every_save` (default) | the model at each checkpoint, and at the end |
| `checkpoint` | the same, and the newest complete checkpoint as `last-checkpoint/` |
| `all_checkpoints` | the same, and every complete checkpoint as `checkpoint-N/` |

Each push is one commit. It uploads hard links, so checkpoint rotation cannot remove the files during the upload.
A checkpoint that is saved while a push is in progress waits, and a newer one takes its place. `all_checkpoints` pushes
all of them.
"""

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..runtime.errors import UserError
from .model_card import CARD_NAME
from .repository import (
    PICKLED_ARGUMENTS,
    STAGING_PREFIX,
    describe_error,
    link_or_copy,
    published_files,
    push_folder,
)


logger = logging.get_logger(__name__)


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
        self._pushes: list[Future] = []
        # The newest checkpoint that was saved while a push was in progress.
        self._waiting: Path | None = None
        self._errors: list[str] = []

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Push a complete checkpoint in the background, or remember it while the previous push is in progress."""
        if self.strategy == HubStrategy.END:
            return
        if not self.pushes_always and any(not push.done() for push in self._pushes):
            logger.warning(f"{checkpoint} waits: the previous push is still in progress.")
            self._waiting = checkpoint
            return
        self._waiting = None
        self.write_card()
        # In the output directory, because hard links work only within one file system.
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.output_dir))
        for name in published_files(checkpoint):
            link_or_copy(checkpoint / name, staging / name)
        # Copy the card instead of linking it, because the next push rewrites it in place.
        shutil.copy2(self.output_dir / CARD_NAME, staging)
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        whole = names.get(self.strategy)
        if whole is not None:
            ignore = shutil.ignore_patterns(PICKLED_ARGUMENTS)
            shutil.copytree(checkpoint, staging / whole, copy_function=link_or_copy, ignore=ignore)
        # `run_as_future` uses one thread, so pushes run one after another.
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        self._pushes.append(self._hub.run_as_future(self._upload, staging, message, whole))

    def _upload(self, staging: Path, message: str, whole: str | None) -> None:
        """Push everything in `staging` in one commit that replaces the older `whole`. Remove `staging`."""
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
            shutil.rmtree(staging, ignore_errors=True)

    def finish(self) -> None:
        """Wait for the pushes in progress and for the checkpoint that waits, until `gives_up` returns `True`."""
        while self._pushes or self._waiting:
            if self.gives_up():
                logger.warning(f"A push to {self.repo_id} was cancelled. The checkpoints are in {self.output_dir}.")
                break
            # Wait in short intervals, to notice a second signal of the user.
            for push in wait(self._pushes, timeout=0.2).done:
                self._pushes.remove(push)
                if (error := push.exception()) is not None:
                    self._errors.append(describe_error(error))
                    logger.warning(f"A push to {self.repo_id} failed: {self._errors[-1]}")
            if self._waiting and not self._pushes:
                self.push_checkpoint(self._waiting)

    def push_model(self, *, message: str | None, revision: str | None = None) -> None:
        """Push the model in `output_dir`, and set `report`. The run is saved, so a failed push does not fail it."""
        try:
            url = push_folder(self.output_dir, str(self.repo_id), message=message, revision=revision or self.revision)
        except UserError as error:
            logger.warning(str(error))
            self.report = f"FAILED: {error}"
            return
        failed = f" ({len(self._errors)} pushes during the run failed: {self._errors[-1]})" if self._errors else ""
        self.report = f"{url}{failed}"


__all__ = ["HubPusher"]
