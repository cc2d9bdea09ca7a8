"""
The Hub: what a run pushes, how it goes on from what was pushed, and what never leaves the machine.

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

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, get_token, hf_hub_download, snapshot_download
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from .adapters import is_adapted
from .configuration_minimind import CODE_FILES
from .model_card import CARD_NAME, CURVE_NAME, RunFacts, format_run_card
from .resuming import newest_checkpoint
from .stopping import StoppingMixin
from .tokenization import save_tokenizer
from .training_args import LMTrainingArguments
from .weight_files import read_json


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
_NEVER = "training_args.bin"
_CHECKPOINT = re.compile(r"(last-checkpoint|checkpoint-(\d+))/" + re.escape(TRAINER_STATE_NAME))
# How directories begin that hold a push or a download under way.
_STAGING = ".hub-"


def create_repository(repo_id: str, *, private: bool | None = None) -> str:
    """The full id of a model repository on the Hub, created if need be; `ValueError` with the reason if refused."""
    try:
        return HfApi().create_repo(repo_id, private=private, exist_ok=True).repo_id
    except Exception as error:  # Whatever the network and the server come up with.
        raise ValueError(
            f"The Hub does not give the repository {repo_id}: {_describe(error)}. Log in with `hf auth login` or set "
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


def _upload_command(folder: str | Path, repo_id: str, names: list[str]) -> str:
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
            f"The push to {repo_id} failed: {_describe(error)}. The files are in {folder}; push them with "
            f"`{_upload_command(folder, repo_id, names)}`."
        ) from error
    return f"{api.endpoint}/{repo_id}"


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
            folder, step, files = _newest_pushed(repo_id, args.hub_revision)
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
                _download(repo_id, folder, files, Path(local), args.hub_revision)
        except OSError as error:
            raise ValueError(f"--resume_from_hub {repo_id}: {_describe(error)}") from error
    logger.warning(f"Resuming from {local} ({repo_id} has step {step}).")
    args.resume_from_checkpoint = local


def _newest_pushed(repo_id: str, revision: str | None) -> tuple[str, int, list[str]]:
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


def _download(repo_id: str, folder: str, files: list[str], target: Path, revision: str | None):
    """Downloads beside `target` and renames, so that a download that breaks off leaves no half checkpoint."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=target.parent) as scratch:
        snapshot_download(repo_id, allow_patterns=files, revision=revision, local_dir=scratch)
        try:
            os.rename(Path(scratch) / folder, target)
        except OSError:
            # Another machine on the same file system may have been first.
            if not (target / TRAINER_STATE_NAME).is_file():
                raise


def remove_staging(output_dir: str | Path) -> None:
    """Removes what pushes and downloads of a killed run left in `output_dir`; nothing may be under way there."""
    for path in Path(output_dir).glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _describe(error: BaseException) -> str:
    """One line of an error, without the token in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    return text.replace(token, "<token>") if token else text


def _link(source: str | Path, target: str | Path):
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class HubPushMixin(StoppingMixin):
    """
    Trainer's pushing, without what it pickles, and with its errors reported instead of raised or lost.

    Args:
        run_facts ([`~model_card.RunFacts`], *optional*): what the model card says of the data.
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
            command = _upload_command(output_dir, self.hub_model_id, published_files(output_dir))
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
                    f"{_describe(error)}. Nothing was trained yet. Log in with `hf auth login` or set HF_TOKEN (with "
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
        card = format_run_card(
            self.accelerator.unwrap_model(self.model),
            self.args,
            self.state,
            self.run_facts,
            repo_id=self.hub_model_id or Path(self.args.output_dir).name,
            sharding=self._describe_sharding(),
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
            self._push_errors.append(_describe(error))
            logger.warning(f"{checkpoint} could not be pushed: {self._push_errors[-1]}")
            return
        message = f"Step {checkpoint.name.rpartition('-')[2]}"
        self._pushes.append(self._hub.run_as_future(self._upload, staging, message, whole))

    def _stage(self, checkpoint: Path, strategy: HubStrategy) -> tuple[Path, str | None]:
        """A directory of links, laid out as the repository; and the name in it of the whole checkpoint, if any."""
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.args.output_dir))
        for name in published_files(checkpoint):
            _link(checkpoint / name, staging / name)
        # The next step writes its card into the same file.
        shutil.copy2(Path(self.args.output_dir, CARD_NAME), staging)
        whole = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}.get(strategy)
        if whole is not None:
            ignore = shutil.ignore_patterns(_NEVER)
            shutil.copytree(checkpoint, staging / whole, copy_function=_link, ignore=ignore)
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
                self._push_errors.append(_describe(error))
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
            self._final_error = _describe(error)
            logger.warning(f"The push to {self.hub_model_id} failed: {self._final_error}")
            return None


__all__ = [
    "PUBLISHED",
    "HubPushMixin",
    "create_repository",
    "published_files",
    "pull_checkpoint",
    "push_folder",
    "remove_staging",
]
