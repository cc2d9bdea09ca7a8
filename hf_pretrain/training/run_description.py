"""
Describe runs in the manifests of their checkpoints, and compare the descriptions. A run resumes exactly, or it refuses
to resume and gives the reason.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.utils import logging

from ..checkpoints.manifest import MANIFEST_NAME, read_manifest
from ..runtime.ranks import Ranks
from .optimizers import optimizer_name


logger = logging.get_logger(__name__)

# Arguments that a user may change on purpose when resuming. The run warns about the change.
_SETTINGS = (
    *("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps"),
    *("max_steps", "num_train_epochs", "bf16", "fp16", "eval_steps", "save_steps", "logging_steps"),
    "lr_scheduler_type",
)
# Fields of a config that Trainer, `from_pretrained` and `save_pretrained` change.
_CHANGING_FIELDS = ("use_cache", "dtype", "architectures", "auto_map")


def describe_data(dataset: Any, num_samples: int = 1024) -> dict[str, Any]:
    """
    Return the number of rows of a dataset and a digest of evenly spaced rows. For a stream, return a digest of its
    description; for any other kind of dataset, return an empty `dict`.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return {"digest": _digest(dataset.info.description)}
    if not isinstance(dataset, datasets.Dataset):
        return {}
    # A sample keeps this fast for large datasets, and still shows added or removed rows: they shift all rows after
    # them.
    step = max(1, len(dataset) // num_samples)
    # Read plain Python values: the digest must not depend on the format in which the dataset returns rows.
    sample = dataset.with_format(None)[range(0, len(dataset), step)]
    return {"rows": len(dataset), "digest": _digest(json.dumps(sample, default=repr, sort_keys=True))}


def describe_config(model: PreTrainedModel) -> list[str]:
    """
    Return two digests of a model's config. The first covers the whole config; manifests of earlier versions hold this
    one only. The second leaves out the fields that training and saving change. Two models have the same config if they
    share a digest.
    """
    config = model.config.to_dict()
    # A new version of transformers does not by itself make a resume inexact.
    config.pop("transformers_version", None)
    # It changes the first weights only, and manifests of earlier versions do not know it.
    config.pop("zero_init_residual", None)
    lasting = {name: value for name, value in config.items() if name not in _CHANGING_FIELDS}
    return [_digest(json.dumps(fields, default=repr, sort_keys=True)) for fields in (config, lasting)]


class RunDescription:
    """
    All values that must be equal for an exact resume, and the versions.

    Args:
        args ([`~transformers.TrainingArguments`]): the arguments of the run.
        layout (`str`): the layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
        dataset: the training set.
        model ([`~transformers.PreTrainedModel`]): the model before training, because Trainer changes its config.
    """

    def __init__(self, args: TrainingArguments, layout: str, dataset: Any, model: PreTrainedModel):
        self.args, self.layout = args, layout
        self.data, self.config = describe_data(dataset), describe_config(model)
        self._is_stream = isinstance(dataset, datasets.IterableDataset)

    def after(self, state: TrainerState) -> dict[str, Any]:
        """Return the description, with the progress of the run."""
        args = self.args
        # Only in these two cases does the order of the rows depend on the batch size or the workers.
        order = {}
        # Do not rename this key: saved manifests hold it.
        rows_per_device = {"rows a device": args.per_device_train_batch_size}
        if args.train_sampling_strategy == "group_by_length":
            order = rows_per_device
        elif self._is_stream and args.dataloader_num_workers > 1:
            order = {"loader workers": args.dataloader_num_workers, **rows_per_device}
        return {
            "step": state.global_step,
            "num_tokens": state.num_input_tokens_seen,
            "world_size": args.world_size,
            "threads": torch.get_num_threads(),
            "batch_size": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "layout": self.layout,
            "optimizer": optimizer_name(args),
            "save_only_model": args.save_only_model,
            "seed": args.data_seed if args.data_seed is not None else args.seed,
            "data": self.data,
            "order": order,
            "settings": {name: getattr(args, name) for name in _SETTINGS},
            "config": self.config,
            "versions": {name: version(name) for name in ("hf_pretrain", "torch", "transformers")},
        }

    def check_same_data(self, ranks: Ranks) -> None:
        """Raise `ValueError` if the ranks read different data. All ranks must call this method."""
        # Every rank sees all descriptions, so either all ranks raise or none does.
        descriptions = ranks.gather(self.data)
        if any(description != descriptions[0] for description in descriptions):
            raise ValueError(
                f"The ranks read different data: {descriptions}. A file changed while they read it, or differs "
                "between the machines. Make the files equal, and start again."
            )

    def check_resume(self, checkpoint: str, state: TrainerState) -> None:
        """
        Warn about differences between this run and the run that saved `checkpoint`. Skip one without a manifest.

        Raises:
            `ValueError`: if this run cannot resume from the checkpoint, or not exactly without
                `--allow_inexact_resume`.
        """
        if not Path(checkpoint, MANIFEST_NAME).exists():
            return
        now = self.after(state)
        # Manifests of earlier versions lack some fields. Fill them with the run's own values, which compare as equal.
        then = now | read_manifest(checkpoint)["run"]
        fatal, inexact = _find_obstacles(then, now)
        if fatal:
            raise ValueError(
                f"This run cannot resume from {checkpoint}: {'; '.join(fatal)}. Use the settings that it was saved "
                f"with, or start a new run from its weights: --model_name_or_path {checkpoint}."
            )
        # Plain `TrainingArguments` lack the flag.
        if inexact and not getattr(self.args, "allow_inexact_resume", False):
            raise ValueError(
                f"Resuming from {checkpoint} would not be exact: {'; '.join(inexact)}. Restore the earlier settings "
                "and data, or resume nevertheless with --allow_inexact_resume."
            )
        if then["world_size"] != now["world_size"]:
            logger.warning(
                f"{checkpoint} was saved by {then['world_size']} process(es) and {now['world_size']} resume it. Each "
                "step takes the same rows, but random numbers (dropout) differ."
            )
        elif then["threads"] != now["threads"] and self.args.device.type == "cpu":
            logger.warning(
                f"{checkpoint} was saved by a run with {then['threads']} thread(s) and this run has {now['threads']}: "
                f"sums differ in their last bits. For an exact resume, set OMP_NUM_THREADS={then['threads']}."
            )
        if inexact:
            logger.warning(f"Resuming from {checkpoint} although {'; '.join(inexact)}.")
        if changed := _changed_settings(then, now):
            logger.warning(f"Resuming from {checkpoint} with other settings: {', '.join(changed)}.")


def _find_obstacles(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    Return the reasons that forbid resuming, and the reasons that make it inexact.

    Args:
        then (`dict`): the result of [`RunDescription.after`] from the manifest of a checkpoint.
        now (`dict`): the result of [`RunDescription.after`] for this run.
    """
    fatal, inexact = [], []
    ranks = f"{then['world_size']} process(es)"
    if then["layout"] != now["layout"]:
        fatal.append(f"its optimizer state has the layout {then['layout']}, and this run's is {now['layout']}")
    # DeepSpeed's shards fit one world size. Other layouts hold whole tensors or reshard on load.
    elif then["layout"].startswith("ZeRO") and then["world_size"] != now["world_size"]:
        fatal.append(
            f"{ranks} wrote its {then['layout']} shards, and {now['world_size']} would read them. Launch as many as "
            "then, or convert the shards as docs/checkpoints.md says "
            "(`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state ...`)"
        )
    if then["optimizer"] != now["optimizer"]:
        fatal.append(f"its optimizer was {then['optimizer']}, this run's is {now['optimizer']}")
    if then["save_only_model"]:
        fatal.append("it was saved with --save_only_model and has no optimizer state")
    batch = [run["batch_size"] * run["accumulation"] * run["world_size"] for run in (then, now)]
    if batch[0] != batch[1]:
        inexact.append(
            f"its global batch was {batch[0]} rows ({ranks} x {then['batch_size']} x {then['accumulation']}) and this "
            f"run's is {batch[1]}: rows would be skipped or seen twice"
        )
    if then["seed"] != now["seed"]:
        inexact.append(f"its seed was {then['seed']}, this run's is {now['seed']}: the order of the rows would change")
    if then["data"] != now["data"]:
        inexact.append(f"its data differed ({then['data'] or 'unknown'} then, {now['data'] or 'unknown'} now)")
    if then["order"] != now["order"]:
        inexact.append(f"the order of its rows depended on {then['order']}, this run's depends on {now['order']}")
    # A manifest of an earlier version holds one digest instead of a list.
    digests = [{run["config"]} if isinstance(run["config"], str) else set(run["config"]) for run in (then, now)]
    if not digests[0] & digests[1]:
        inexact.append("its model has another config (--config_overrides)")
    return fatal, inexact


def _changed_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the settings that a user changed, as `name then -> now`. Arguments as in [`_find_obstacles`]."""
    # A manifest of an earlier version may lack some settings.
    settings = now["settings"] | then["settings"]
    return [
        f"{name} {settings[name]} -> {value}" for name, value in now["settings"].items() if settings[name] != value
    ]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


__all__ = ["RunDescription", "describe_config", "describe_data"]
