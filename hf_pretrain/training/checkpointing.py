"""
Checkpoints that are whole or not there.

A checkpoint is written into `.saving/` by all ranks, flushed, described by a manifest (`manifest.py`), renamed to
`checkpoint-N` by one rank, read back and compared. Only then is it pushed, and only then do older ones go. So whatever
kills a run, `output_dir` holds checkpoints that verify, and perhaps leftovers that the next run removes.

Going on from one (`resuming.py` says which) is exact, or refused with the reason.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch.distributed as dist
from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import CONFIG_NAME, logging

from ..checkpoints.directory import (
    SAVING,
    newest_checkpoint,
    remove_leftovers,
    rotate_checkpoints,
    set_aside,
    summarize,
)
from ..checkpoints.manifest import MANIFEST_NAME, find_damage, flush, read_manifest, write_manifest
from ..runtime.locking import hold_output_dir, release_output_dir
from ..runtime.processes import on_main_process, on_saving_processes
from ..weights.adapters import is_adapted
from .optimizers import optimizer_name
from .resuming import EXIT_NOT_SAVED
from .sharding import ShardedCheckpointMixin


logger = logging.get_logger(__name__)

DATA_POSITION_NAME = "data_position.json"
# Flags that may be changed on purpose when a run goes on, and are told.
_SETTINGS = (
    *("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps"),
    *("max_steps", "num_train_epochs", "bf16", "fp16"),
)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG}


# What has to be the same


def describe_data(dataset: Any, num_samples: int = 1024) -> dict[str, Any]:
    """The number of rows and a digest of some of them, evenly spaced; of a stream, a digest of how it describes itself."""
    if isinstance(dataset, datasets.IterableDataset):
        return {"digest": _digest(dataset.info.description)}
    if not isinstance(dataset, datasets.Dataset):
        return {}
    step = max(1, len(dataset) // num_samples)
    sample = dataset.with_format(None)[range(0, len(dataset), step)]
    return {"rows": len(dataset), "digest": _digest(json.dumps(sample, default=repr, sort_keys=True))}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What of a run keeps it from reading a checkpoint at all, and what keeps it from going on exactly unasked."""
    fatal, inexact = [], []
    ranks = f"{then['world_size']} process(es)"
    if then["layout"] != now["layout"]:
        fatal.append(f"its optimizer state is that of {then['layout']}, this run uses {now['layout']}")
    elif then["layout"].startswith("ZeRO") and then["world_size"] != now["world_size"]:
        fatal.append(
            f"its {then['layout']} shards are those of {ranks}. Launch as many, or convert them as docs/checkpoints.md "
            "says (`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state ...`)"
        )
    if then["optimizer"] != now["optimizer"]:
        fatal.append(f"it was trained with --optim {then['optimizer']}, this run has {now['optimizer']}")
    if then["save_only_model"]:
        fatal.append("it was saved with --save_only_model and has no optimizer state")
    batch = [run["batch_size"] * run["accumulation"] * run["world_size"] for run in (then, now)]
    if batch[0] != batch[1]:
        inexact.append(
            f"its global batch was {batch[0]} rows ({ranks} x {then['batch_size']} x {then['accumulation']}) and this "
            f"run's is {batch[1]}: rows would be skipped or seen twice"
        )
    if then["seed"] != now["seed"]:
        inexact.append(f"its seed was {then['seed']}, this run's is {now['seed']}: the rows come in another order")
    if then["data"] != now["data"]:
        inexact.append(f"its data were other ones ({then['data'] or 'unknown'} then, {now['data'] or 'unknown'} now)")
    if then["order"] != now["order"]:
        inexact.append(f"its rows came in an order that depends on {then['order']}, this run's on {now['order']}")
    if then["config"] != now["config"]:
        inexact.append("its model has another config (--config_overrides)")
    return fatal, inexact


class CheckpointMixin(ShardedCheckpointMixin):
    """A `Trainer` whose checkpoints are whole or not there, and which goes on from one exactly or not at all."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._saving: str | None = None
        super().__init__(*args, **kwargs)

    @cached_property
    def _data_description(self) -> dict[str, Any]:
        return describe_data(self.train_dataset)

    @cached_property
    def _config_digest(self) -> str:
        """As the run begins: Trainer changes some fields while it trains."""
        config = self.accelerator.unwrap_model(self.model).config.to_dict()
        config.pop("transformers_version", None)
        return _digest(json.dumps(config, default=repr, sort_keys=True))

    def _describe_run(self) -> dict[str, Any]:
        """What has to be the same to go on exactly, and what is good to know."""
        args = self.args
        if self.is_deepspeed_enabled:
            layout = f"ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"
        else:
            layout = "FSDP" if self.is_fsdp_enabled or self.is_distributed_loading_by_transformers else "one file"
        return {
            "step": self.state.global_step,
            "num_tokens": self.state.num_input_tokens_seen,
            "world_size": args.world_size,
            "batch_size": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "layout": layout,
            "optimizer": optimizer_name(args),
            "save_only_model": args.save_only_model,
            "seed": args.data_seed if args.data_seed is not None else args.seed,
            "data": self._data_description,
            "order": self._describe_order(),
            "settings": {name: getattr(args, name) for name in _SETTINGS},
            "config": self._config_digest,
            "versions": {name: version(name) for name in ("hf_pretrain", "torch", "transformers")},
        }

    def _describe_order(self) -> dict[str, Any]:
        """What the order of the rows depends on beside the seed."""
        args = self.args
        if args.train_sampling_strategy == "group_by_length":
            return {"rows a device": args.per_device_train_batch_size}
        if isinstance(self.train_dataset, datasets.IterableDataset) and args.dataloader_num_workers > 1:
            return {"loader workers": args.dataloader_num_workers, "rows a device": args.per_device_train_batch_size}
        return {}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        # Before Trainer changes the config.
        self._describe_run()
        self._check_same_data()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = on_main_process(self.args, lambda: newest_checkpoint(self.args.output_dir))
        if resume_from_checkpoint and Path(resume_from_checkpoint, MANIFEST_NAME).exists():
            self._check_resume(str(resume_from_checkpoint))
        on_saving_processes(self.args, self._check_space)
        with self._holding_output_dir():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @contextmanager
    def _holding_output_dir(self) -> Iterator[None]:
        """Keeps other runs out of `output_dir`, for callers who did not do so before."""
        output_dir = self.args.output_dir
        is_new = self.args.save_strategy != "no" and on_main_process(self.args, lambda: hold_output_dir(output_dir))
        try:
            yield
        finally:
            if is_new:
                release_output_dir(output_dir)

    def _check_same_data(self) -> None:
        if self.args.world_size == 1:
            return
        descriptions: list[Any] = [None] * self.args.world_size
        dist.all_gather_object(descriptions, self._data_description)
        if any(description != descriptions[0] for description in descriptions):
            raise ValueError(
                f"The ranks read different data: {descriptions}. Did a file change meanwhile, or differ between the "
                "machines? Start again."
            )

    def compare_trainer_and_checkpoint_args(self, training_args: Any, trainer_state: Any) -> None:
        # NOTE: Trainer compares a share of the steps (`--eval_steps 0.1`) with the number that it became, and warns.
        steps = (training_args.eval_steps, training_args.logging_steps, training_args.save_steps)
        if all(number is None or number >= 1 for number in steps):
            super().compare_trainer_and_checkpoint_args(training_args, trainer_state)

    def _check_resume(self, checkpoint: str) -> None:
        now = self._describe_run()
        # What an earlier version did not write is not compared.
        then = now | read_manifest(checkpoint)["run"]
        fatal, inexact = _differences(then, now)
        if fatal:
            raise ValueError(
                f"This run cannot go on from {checkpoint}: {'; '.join(fatal)}. Or start a new run from its weights: "
                f"--model_name_or_path {checkpoint}."
            )
        if inexact and not getattr(self.args, "allow_inexact_resume", False):
            raise ValueError(
                f"Going on from {checkpoint} would not be exact: {'; '.join(inexact)}. Restore what it had, or go on "
                "nevertheless with --allow_inexact_resume."
            )
        if then["world_size"] != now["world_size"]:
            logger.warning(
                f"{checkpoint} was saved by {then['world_size']} process(es) and {now['world_size']} go on: the same "
                "rows in each step, but random numbers (dropout) are others."
            )
        if inexact:
            logger.warning(f"Going on from {checkpoint} although {'; '.join(inexact)}.")
        # An earlier version may have written fewer settings.
        settings = now["settings"] | then["settings"]
        changed = [f"{k} {settings[k]} -> {v}" for k, v in now["settings"].items() if settings[k] != v]
        if changed:
            logger.warning(f"Going on from {checkpoint} with other settings: {', '.join(changed)}.")

    # Saving

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer pushes while it saves. A checkpoint is pushed when it is whole, by `_push_checkpoint`."""

    def _push_checkpoint(self, checkpoint: Path) -> None:
        """What `--push_to_hub` does with a checkpoint; for subclasses. All ranks call it."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output_dir = Path(super()._get_output_dir(trial))
        target = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        source = output_dir / SAVING / target.name
        # It may have been renamed or deleted meanwhile.
        on_main_process(self.args, lambda: hold_output_dir(output_dir))
        on_saving_processes(self.args, lambda: self._make_room(source, target))
        self._saving = str(output_dir / SAVING)
        try:
            with self._reporting_full_disks(target):
                super()._save_checkpoint(model, trial)
        finally:
            self._saving = None
        self.accelerator.wait_for_everyone()
        # Trainer looked for the best one beside it.
        if self.state.best_model_checkpoint == str(source):
            self.state.best_model_checkpoint = str(target)
        on_saving_processes(self.args, lambda: self._publish(source, target))
        if self.args.push_to_hub:
            self._push_checkpoint(target)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(target, limit=self.args.save_total_limit, best=Path(best) if best else None)

    def _make_room(self, source: Path, target: Path) -> None:
        with self._reporting_full_disks(target):
            remove_leftovers(target.parent)
            source.mkdir(parents=True)

    def _publish(self, source: Path, target: Path) -> None:
        """Gives a written checkpoint its name, once it is described and on the disk."""
        with self._reporting_full_disks(target):
            if self.state.best_model_checkpoint == str(target):
                self.state.save_to_json(str(source / TRAINER_STATE_NAME))
            write_manifest(source, self._describe_run())
            if target.exists():
                # Of a run that then went on from an older one.
                os.rename(target, source.with_name("replaced"))
            os.rename(source, target)
            flush(target.parent)
            damage = find_damage(target)
            if damage:
                aside = set_aside(target)
                raise OSError(errno.EIO, f"what was written to {aside} reads back otherwise: {summarize(damage)}")
            shutil.rmtree(source.parent)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves a model aside; its files get their names once all are on the disk, and config.json is the last one."""
        if self._saving is not None:
            super().save_model(output_dir, _internal_call)
            return
        target = Path(output_dir or self.args.output_dir)
        source = target / SAVING / "model"
        on_saving_processes(self.args, lambda: self._make_room(source, target / CONFIG_NAME))
        with self._reporting_full_disks(target / CONFIG_NAME):
            super().save_model(str(source), _internal_call)
        self.accelerator.wait_for_everyone()
        on_saving_processes(self.args, lambda: self._publish_model(source, target))

    def _publish_model(self, source: Path, target: Path) -> None:
        with self._reporting_full_disks(target / CONFIG_NAME):
            for path in (*source.rglob("*"), source):
                flush(path)
            written = {path.name for path in source.iterdir()}
            if any(map(_WEIGHTS.fullmatch, written)):
                for path in target.iterdir():
                    if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                        # Of an earlier model, in another number of shards.
                        path.unlink()
            for name in sorted(written, key=lambda name: (name == CONFIG_NAME, name)):
                if (target / name).is_dir():
                    shutil.rmtree(target / name)
                os.replace(source / name, target / name)
            flush(target)
            shutil.rmtree(source.parent)

    def save_state(self) -> None:
        with self._reporting_full_disks(Path(self.args.output_dir, TRAINER_STATE_NAME)):
            super().save_state()

    # Disks

    def _checkpoint_bytes(self) -> int:
        """An estimate of a checkpoint's size, by AdamW's two moments; DeepSpeed keeps float32 weights besides."""
        num_saved = get_model_param_count(self.model, trainable_only=is_adapted(self.model))
        trainable = 0 if self.args.save_only_model else get_model_param_count(self.model, trainable_only=True)
        return 4 * num_saved + (12 if self.is_deepspeed_enabled else 8) * trainable

    def _check_space(self) -> None:
        """Ends a run that could not keep what it trains, before its first step."""
        if self.args.save_strategy == "no":
            return
        output_dir = Path(self.args.output_dir)
        with self._reporting_full_disks(output_dir / "the first checkpoint"):
            output_dir.mkdir(parents=True, exist_ok=True)
            kept = len(sort_checkpoints(str(output_dir)))
            # Old checkpoints go after the new one is there.
            more = max(1, (self.args.save_total_limit or 0) + 1 - kept)
            if self.args.max_steps > 0 and self.args.save_strategy == "steps" and self.args.save_steps >= 1:
                more = min(more, max(1, self.args.max_steps // int(self.args.save_steps)))
            needed, free = more * self._checkpoint_bytes(), shutil.disk_usage(output_dir).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{more} checkpoint(s) take about {_mib(needed)}, {_mib(free)} are free")

    @contextmanager
    def _reporting_full_disks(self, target: Path) -> Iterator[None]:
        """Ends the run with `EXIT_NOT_SAVED` where the disk takes no more; what was saved before stays."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            # Writers of safetensors and torch keep the number to themselves.
            free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
            is_writers = isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error)
            is_full = free < self._checkpoint_bytes() and is_writers
            if getattr(error, "errno", None) not in _DISK_ERRORS and not is_full:
                raise
            if self.args.should_save:
                shutil.rmtree(target.parent / SAVING, ignore_errors=True)
            self._end_unsaved(target, error, free)

    def _end_unsaved(self, target: Path, error: Exception, free: int) -> NoReturn:
        kept = sort_checkpoints(str(target.parent)) if target.parent.is_dir() else []
        print(
            f"{target} could not be saved: {error}. A checkpoint takes about {_mib(self._checkpoint_bytes())}, "
            f"{_mib(free)} were free. "
            + (
                f"{kept[-1]} is whole: make room and go on with `--resume_from_checkpoint auto`."
                if kept
                else "Nothing was lost that had been saved. Make room, or choose another --output_dir."
            ),
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_NOT_SAVED)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


__all__ = ["DATA_POSITION_NAME", "CheckpointMixin", "describe_data"]
