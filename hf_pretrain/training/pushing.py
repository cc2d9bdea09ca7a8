"""
Push what a run saves to the Hub, and download what an earlier run pushed.

[`HubPushMixin`] gives any `Trainer` the meaning of `--push_to_hub`, `--hub_model_id`, `--hub_strategy` and
`--hub_private_repo`:

| `--hub_strategy` | what is pushed |
|---|---|
| `end` | the model at the end |
| `every_save` (default) | the model at each checkpoint, and at the end |
| `checkpoint` | the same, and the newest checkpoint whole as `last-checkpoint/` |
| `all_checkpoints` | the same, and every checkpoint whole as `checkpoint-N/` |

Each push is one commit, made beside the training from hard links, so that rotation cannot take the files away. While
one is under way, the next checkpoints wait and the newest of them is pushed (`all_checkpoints`: all of them are). A
push that fails is reported and loses nothing.
"""

import shutil
import tempfile
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..checkpoints.directory import newest_checkpoint
from ..hub.model_card import CARD_NAME, CURVE_NAME, RunFacts, format_run_card
from ..hub.repository import (
    PICKLED_ARGUMENTS,
    STAGING_PREFIX,
    describe_error,
    download_checkpoint,
    link_or_copy,
    newest_pushed_checkpoint,
    published_files,
    upload_command,
)
from ..tokenizer.loading import save_tokenizer
from ..weights.adapters import is_adapted
from .arguments import LMTrainingArguments
from .reporting import describe_training, resume_command
from .stopping import StoppingMixin


logger = logging.get_logger(__name__)


def pull_checkpoint(args: LMTrainingArguments) -> None:
    """
    Makes `--resume_from_hub ID` a local checkpoint: downloads the newest one that was pushed into `output_dir`, and
    points `resume_from_checkpoint` at it. A local checkpoint that is as new is taken instead.

    Without `--trust_checkpoint`, no file of it is unpickled: Trainer reads its own with `weights_only=True`, which
    neither DeepSpeed's shards nor those of torch.distributed.checkpoint are.

    Raises:
        `ValueError`: if the repository cannot be read, holds no checkpoint or one without the state of the optimizer,
            or if going on would unpickle it.
    """
    repo_id = args.resume_from_hub
    if repo_id is None:
        return
    if args.resume_from_checkpoint not in (None, "auto"):
        raise ValueError(
            f"--resume_from_hub {repo_id} and --resume_from_checkpoint {args.resume_from_checkpoint} name two "
            "checkpoints: leave one out."
        )
    if args.deepspeed_plugin is not None and not args.trust_checkpoint:
        raise ValueError(
            f"--resume_from_hub {repo_id}: DeepSpeed unpickles its shards (global_step*/*.pt), which runs whatever code "
            "was put into them. Add --trust_checkpoint if you trust everybody who can write to that repository."
        )
    output_dir = Path(args.output_dir)
    with args.main_process_first(desc="downloading the checkpoint"):
        try:
            folder, step, files = newest_pushed_checkpoint(repo_id, args.hub_revision)
            local = newest_checkpoint(output_dir, unverified=args.allow_inexact_resume)
            if local is None or int(local.rpartition("-")[2]) < step:
                local = str(output_dir / f"checkpoint-{step}")
                if not args.trust_checkpoint:
                    files = [path for path in files if path.count("/") == 1]
                state = "global_step" if args.deepspeed_plugin is not None else "optimizer"
                if not any(path.startswith(f"{folder}/{state}") for path in files):
                    raise ValueError(
                        f"--resume_from_hub {repo_id}: {folder}/ has no optimizer state that this run can read, and "
                        "would go on with a fresh one. It was saved with --save_only_model, or under "
                        f"another launcher. Start a new run from its weights: --model_name_or_path {repo_id}."
                    )
                download_checkpoint(repo_id, folder, files, Path(local), args.hub_revision)
        except OSError as error:
            raise ValueError(f"--resume_from_hub {repo_id}: {describe_error(error)}") from error
    logger.warning(f"Resuming from {local} ({repo_id} has step {step}).")
    args.resume_from_checkpoint = local


class HubPushMixin(StoppingMixin):
    """
    Trainer's pushing, without what it pickles, and with its errors reported instead of raised or lost.

    Args:
        run_facts ([`~hub.model_card.RunFacts`], *optional*): what the model card says of the data.
    """

    def __init__(self, *args, run_facts: RunFacts | None = None, **kwargs):
        self.run_facts = run_facts or RunFacts()
        self._pushes: list[Future] = []
        # The newest checkpoint, if a push was under way when it was saved.
        self._waiting: Path | None = None
        # Of the pushes during the run, and of the one at its end.
        self._push_errors: list[str] = []
        self._final_error: str | None = None
        super().__init__(*args, **kwargs)

    @cached_property
    def _hub(self) -> HfApi:
        return HfApi(token=self.args.hub_token)

    @property
    def push_report(self) -> str | None:
        """How the last push went, for the end of a run; `None` where nothing was to be pushed."""
        if not self.args.push_to_hub:
            return None
        if self._final_error is not None:
            output_dir = self.args.output_dir
            command = upload_command(output_dir, self.hub_model_id, published_files(output_dir))
            return f"FAILED: {self._final_error}. The run is complete in {output_dir}; push it with `{command}`."
        earlier = len(self._push_errors)
        failed = f" ({earlier} pushes during the run failed: {self._push_errors[-1]})" if earlier else ""
        return f"{self._hub.endpoint}/{self.hub_model_id}{failed}"

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository before training starts; raises `ValueError` where the Hub refuses."""
        if self.is_world_process_zero():
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            private = self.args.hub_private_repo if private is None else private
            try:
                self.hub_model_id = self._hub.create_repo(name, private=private, token=token, exist_ok=True).repo_id
            except Exception as error:  # Whatever the network and the server come up with.
                raise ValueError(
                    f"--push_to_hub: the Hub at {self._hub.endpoint} does not give the repository {name}: "
                    f"{describe_error(error)}. Nothing was trained yet. Log in with `hf auth login` or set HF_TOKEN (with "
                    "write permission), or leave --push_to_hub out."
                ) from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves; pushing is `push_to_hub`'s."""
        super().save_model(output_dir, _internal_call=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Weights, config, code and tokenizer. Trainer would pickle its arguments beside them."""
        if not self.args.should_save and not self.is_distributed_loading_by_transformers:
            return
        output_dir = output_dir or self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.save_pretrained(output_dir, state_dict=state_dict, is_main_process=self.args.should_save)
        if self.args.should_save and is_adapted(model):
            # peft leaves a card to be filled in.
            Path(output_dir, CARD_NAME).unlink()
        if self.args.should_save and self.processing_class is not None:
            save_tokenizer(self.processing_class, output_dir)

    def create_model_card(self, **kwargs: Any) -> None:
        """Writes the card of what was measured so far to `output_dir`; Trainer's own where the arguments are plain."""
        if not isinstance(self.args, LMTrainingArguments):
            super().create_model_card(**kwargs)
            return
        if not self.is_world_process_zero():
            return
        repo_id = self.hub_model_id or Path(self.args.output_dir).name
        card = format_run_card(
            self.accelerator.unwrap_model(self.model),
            self.state,
            self.run_facts,
            repo_id=repo_id,
            training=describe_training(self.args, self.state, self._describe_sharding()),
            command=resume_command(self.args, self.run_facts.recipe, repo_id),
            language=self.args.hub_language,
            license=self.args.hub_license,
            has_curve=Path(self.args.output_dir, CURVE_NAME).is_file(),
        )
        Path(self.args.output_dir, CARD_NAME).write_text(card, encoding="utf-8")

    def _describe_sharding(self) -> str:
        if self.is_deepspeed_enabled:
            return f"DeepSpeed ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers:
            return "FSDP2"
        return "DDP" if self.args.world_size > 1 else "one process"

    def _push_checkpoint(self, checkpoint: Path) -> None:
        """Pushes a checkpoint that was just saved, in the background."""
        strategy = HubStrategy(self.args.hub_strategy)
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        must_push = self.args.hub_always_push or strategy == HubStrategy.ALL_CHECKPOINTS
        if not must_push and any(not push.done() for push in self._pushes):
            logger.warning(f"{checkpoint} waits: the push before it is still under way.")
            self._waiting = checkpoint
            return
        self._waiting = None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._submit(checkpoint, strategy)

    def _submit(self, checkpoint: Path, strategy: HubStrategy):
        """Stages what of a checkpoint is to be pushed, and hands it to the thread that pushes."""
        try:
            self.create_model_card()
            staging, whole = self._stage(checkpoint, strategy)
        except OSError as error:
            self._push_errors.append(describe_error(error))
            logger.warning(f"{checkpoint} could not be pushed: {self._push_errors[-1]}")
            return
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        self._pushes.append(self._hub.run_as_future(self._upload, staging, message, whole))

    def _stage(self, checkpoint: Path, strategy: HubStrategy) -> tuple[Path, str | None]:
        """A directory of links, laid out as the repository; and the name in it of the whole checkpoint, if any."""
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=self.args.output_dir))
        for name in published_files(checkpoint):
            link_or_copy(checkpoint / name, staging / name)
        # The next step writes its card into the same file.
        shutil.copy2(Path(self.args.output_dir, CARD_NAME), staging)
        whole = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}.get(strategy)
        if whole is not None:
            ignore = shutil.ignore_patterns(PICKLED_ARGUMENTS)
            shutil.copytree(checkpoint, staging / whole, copy_function=link_or_copy, ignore=ignore)
        return staging, whole

    def _upload(self, staging: Path, message: str, whole: str | None):
        """One commit of all that was staged, in place of the older `whole`."""
        try:
            self._hub.upload_folder(
                repo_id=self.hub_model_id,
                folder_path=staging,
                commit_message=message,
                revision=self.args.hub_revision,
                delete_patterns=f"{whole}/*" if whole else None,
            )
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _finish_current_push(self) -> None:
        """
        Waits for the pushes under way, and for that of a newer checkpoint; keeps what went wrong. A second signal ends the
        wait.
        """
        if self._waiting is not None and not self._is_impatient:
            self._submit(self._waiting, HubStrategy(self.args.hub_strategy))
            self._waiting = None
        for push in self._pushes:
            while not push.done() and not self._is_impatient:
                wait([push], timeout=0.2)
            if not push.done():
                push.cancel()
                logger.warning(
                    f"A push to {self.hub_model_id} was given up. The checkpoints are in {self.args.output_dir}."
                )
                continue
            error = push.exception()
            if error is not None:
                self._push_errors.append(describe_error(error))
                logger.warning(f"A push to {self.hub_model_id} failed: {self._push_errors[-1]}")
        self._pushes = []

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """
        Saves, and pushes the model and its card from `output_dir`; all ranks call it. It always waits for the upload.

        Returns:
            [`~huggingface_hub.CommitInfo`], or `None` on other ranks and where the push failed; see `push_report`.
        """
        if token is not None:
            self._hub = HfApi(token=token)
        if self.hub_model_id is None:
            self.init_hf_repo(private=private)
        self.save_model()
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.create_model_card(**kwargs)
        self._finish_current_push()
        self._final_error = None
        try:
            return self._hub.upload_folder(
                repo_id=self.hub_model_id,
                folder_path=self.args.output_dir,
                commit_message=commit_message,
                revision=revision or self.args.hub_revision,
                allow_patterns=published_files(self.args.output_dir),
            )
        except Exception as error:  # Whatever it is: the run is saved, and must end well.
            self._final_error = describe_error(error)
            logger.warning(f"The push to {self.hub_model_id} failed: {self._final_error}")
            return None


__all__ = ["HubPushMixin", "pull_checkpoint"]
