"""
Describe runs in the manifests of their checkpoints, and compare the descriptions. A run resumes exactly, or it refuses
to resume and gives the reason.

A description holds the settings that change an update (`settings.py`), and digests of the contents that some of them
only name: data, tokenizer, config, adapter, and weights that training does not change.
"""

from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments
from transformers.utils import logging

from ..checkpoints.manifest import MANIFEST_NAME, read_manifest
from ..runtime.errors import UserError
from ..runtime.ranks import Ranks
from ..weights.adapters import is_adapted
from .optimizers import optimizer_name
from .settings import (
    ADAPTER_FLAGS,
    CONTENT_FLAGS,
    DATA_FLAGS,
    MODEL_FLAGS,
    WEIGHT_FLAGS,
    describe_settings,
    plain,
)


logger = logging.get_logger(__name__)

# Fields of a config that change no update of a resumed run. Trainer, `from_pretrained` and `save_pretrained` change
# most of them: the name is a path, and the special tokens are the tokenizer's. `zero_init_residual` changes the first
# weights only.
_CHANGING_FIELDS = {
    *("use_cache", "dtype", "architectures", "auto_map", "transformers_version", "zero_init_residual"),
    *("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"),
}
# Fields of an adapter's config that change no update of a resumed run.
_ADAPTER_NAMES = {"base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping"}
# If one of these differs, the weights of the checkpoint do not fit.
_ADAPTER_SHAPE = {"peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_dora"}
# Columns that TRL computes with the reference model. On a GPU, their last bits may change; its weights do not.
_REFERENCE_COLUMNS = {"ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"}
_MAX_REASONS = 8


def describe_data(dataset: Any) -> dict[str, Any]:
    """
    Return the number of rows of a dataset and a digest of all rows. For a stream, return a digest of its description;
    for any other kind of dataset, return an empty `dict`.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return {"digest": _digest(dataset.info.description)}
    if not isinstance(dataset, datasets.Dataset):
        return {}
    return {"rows": len(dataset), "digest": _digest_rows(dataset)}


# A run describes its data twice, for its record and for its checkpoints.
@lru_cache(maxsize=2)
def _digest_rows(dataset: datasets.Dataset) -> str:
    """Return a digest of all rows, whatever the format in which the dataset returns them."""
    digest = xxhash.xxh3_128()
    names = [name for name in dataset.column_names if name not in _REFERENCE_COLUMNS]
    for table in dataset.select_columns(names).with_format("arrow").iter(batch_size=1000):
        # NOTE: a slice would be serialized with some bytes of the rows after it. `take` copies the rows of a batch.
        for batch in table.take(np.arange(len(table))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def describe_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fields of a model's config that change the updates of a resumed run."""
    config = model.config.to_dict()
    return plain({name: value for name, value in config.items() if name not in _CHANGING_FIELDS})


def digest_weights(parameters: Iterable[torch.Tensor]) -> str:
    """
    Return a digest of weights that training does not change. If they are sharded, all ranks must call this function;
    under ZeRO-3, the digest covers the shards of this rank.
    """
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        weight = getattr(parameter, "ds_tensor", parameter).detach()
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class RunDescription:
    """
    All values that must be equal for an exact resume, and the versions.

    Args:
        args ([`~transformers.TrainingArguments`]): the training arguments of the run.
        layout (`str`): the layout of the optimizer state: `ZeRO-<stage>`, `FSDP` or `one file`.
        dataset: the training set.
        model ([`~transformers.PreTrainedModel`]): the model before training, because Trainer changes its config.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): the tokenizer of the rows.
        others (dataclasses): the other arguments of the run.
        fixed_weights (`dict[str, str]`, *optional*): results of [`digest_weights`], by the role of the weights.
    """

    def __init__(
        self,
        args: TrainingArguments,
        layout: str,
        dataset: Any,
        model: Any,
        *,
        tokenizer: Any = None,
        others: Iterable[Any] = (),
        fixed_weights: dict[str, str] | None = None,
    ):
        self.args, self.layout = args, layout
        self.data, self.config = describe_data(dataset), describe_config(model)
        self.settings, self.fixed_weights = describe_settings(args, others), fixed_weights or {}
        self.adapter = _describe_adapter(model)
        is_tokenizer = isinstance(tokenizer, PreTrainedTokenizerBase)
        # GRPO renders its prompts during the training.
        words = (sorted(tokenizer.get_vocab().items()), tokenizer.chat_template) if is_tokenizer else None
        self.tokenizer = _digest(str(words)) if words else None
        self._is_stream = isinstance(dataset, datasets.IterableDataset)

    def after(self, state: TrainerState) -> dict[str, Any]:
        """Return the description, with the progress of the run."""
        args = self.args
        # Only in these cases does the order of the rows, or the loss, depend on the batch size or the workers.
        order: dict[str, Any] = {}
        rows_per_device = {"per_device_train_batch_size": args.per_device_train_batch_size}
        # Plain `TrainingArguments` lack the attribute.
        if args.train_sampling_strategy == "group_by_length" or getattr(args, "loss_depends_on_micro_batch", False):
            order = rows_per_device
        elif self._is_stream and args.dataloader_num_workers > 1:
            order = {"dataloader_num_workers": args.dataloader_num_workers, **rows_per_device}
        return {
            "step": state.global_step,
            "num_tokens": state.num_input_tokens_seen,
            "world_size": args.world_size,
            "threads": torch.get_num_threads(),
            "batch_size": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            # Tensor-parallel ranks share their rows.
            "data_ranks": args.world_size // getattr(args, "tp_size", 1),
            "layout": self.layout,
            "optimizer": optimizer_name(args),
            "save_only_model": args.save_only_model,
            "data": self.data,
            "order": order,
            "settings": self.settings,
            "config": self.config,
            "adapter": self.adapter,
            "tokenizer": self.tokenizer,
            "fixed_weights": self.fixed_weights,
            "versions": {name: version(name) for name in ("hf_pretrain", "torch", "transformers")},
        }

    def check_same_data(self, ranks: Ranks) -> None:
        """Raise `ValueError` if the ranks read different data. All ranks must call this method."""
        # Every rank sees all descriptions, so either all ranks raise or none does.
        descriptions = ranks.gather(self.data)
        if any(description != descriptions[0] for description in descriptions):
            raise UserError(
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
        then, now = read_manifest(checkpoint)["run"], self.after(state)
        if then.keys() != now.keys():
            raise UserError(
                f"This run cannot resume from {checkpoint}: another version of hf_pretrain wrote its {MANIFEST_NAME}. "
                "Resume with that version, or start a new run from its weights: --model_name_or_path "
                f"{checkpoint}."
            )
        fatal, inexact = _find_obstacles(then, now)
        if fatal:
            raise UserError(
                f"This run cannot resume from {checkpoint}: {_join(fatal)}. Use the settings that it was saved "
                f"with, or start a new run from its weights: --model_name_or_path {checkpoint}."
            )
        # Plain `TrainingArguments` lack the flag.
        if inexact and not getattr(self.args, "allow_inexact_resume", False):
            raise UserError(
                f"Resuming from {checkpoint} would not be exact: {_join(inexact)}. Restore the earlier settings "
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
            logger.warning(f"Resuming from {checkpoint} although {_join(inexact)}.")


def _find_obstacles(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    Return the reasons that forbid resuming, and the reasons that make it inexact.

    Args:
        then (`dict`): the result of [`RunDescription.after`] from the manifest of a checkpoint.
        now (`dict`): the result of [`RunDescription.after`] for this run.
    """
    fatal, inexact = _compare_states(then, now), _compare_contents(then, now)
    shape, scale = _compare_adapters(then, now)
    batch = [run["batch_size"] * run["accumulation"] * run["data_ranks"] for run in (then, now)]
    if batch[0] != batch[1]:
        inexact.append(
            f"its global batch was {batch[0]} rows ({then['data_ranks']} process(es) x {then['batch_size']} x "
            f"{then['accumulation']}) and this run's is {batch[1]}: rows would be skipped or seen twice"
        )
    inexact += _changes(then["order"], now["order"], then["order"].keys() | now["order"].keys())
    names = (then["settings"].keys() | now["settings"].keys()) - CONTENT_FLAGS
    return fatal + shape, inexact + scale + _changes(then["settings"], now["settings"], names)


def _compare_states(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the reasons for which this run cannot read the optimizer state. Arguments as in [`_find_obstacles`]."""
    fatal = []
    if then["layout"] != now["layout"]:
        fatal.append(f"its optimizer state has the layout {then['layout']}, and this run's is {now['layout']}")
    # DeepSpeed's shards fit one world size. Other layouts hold whole tensors or reshard on load.
    elif then["layout"].startswith("ZeRO") and then["world_size"] != now["world_size"]:
        fatal.append(
            f"{then['world_size']} process(es) wrote its {then['layout']} shards, and {now['world_size']} would read "
            "them. Launch as many as then, or convert the shards as docs/checkpoints.md says "
            "(`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state ...`)"
        )
    if then["optimizer"] != now["optimizer"]:
        fatal.append(f"its optimizer was {then['optimizer']}, this run's is {now['optimizer']}")
    if then["save_only_model"]:
        fatal.append("it was saved with --save_only_model and has no optimizer state")
    return fatal


def _compare_adapters(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the reasons for which the adapter of the checkpoint does not fit, and those of an inexact resume."""
    before, after = then["adapter"] or {}, now["adapter"] or {}
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if not differing:
        return [], []
    flags = _changes(then["settings"], now["settings"], ADAPTER_FLAGS)
    if not before or not after:
        trained = [f"trained {'an adapter' if config else 'all weights'}" for config in (before, after)]
        return [f"it {trained[0]}, and this run {trained[1].replace('trained', 'trains')} (--use_peft)"], []
    reason = f"its adapter differed ({', '.join(flags or _changes(before, after, differing, flag=''))})"
    return ([reason], []) if differing & _ADAPTER_SHAPE else ([], [reason])


def _compare_contents(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the contents that differ, with the flags that changed. Arguments as in [`_find_obstacles`]."""

    def flags(names: set[str]) -> str:
        return "".join(f"; {change}" for change in _changes(then["settings"], now["settings"], names))

    inexact = []
    if then["data"] != now["data"]:
        rows = [run["data"].get("rows", "an unknown number of") for run in (then, now)]
        inexact.append(f"its data differed ({rows[0]} rows then, {rows[1]} now{flags(DATA_FLAGS)})")
    if then["tokenizer"] != now["tokenizer"]:
        inexact.append(f"its tokenizer had another vocabulary or chat template{flags({'tokenizer_name_or_path'})}")
    if then["config"] != now["config"]:
        fields = _changes(then["config"], now["config"], then["config"].keys() | now["config"].keys(), flag="")
        inexact.append(f"its model had another config ({', '.join(fields)}{flags(MODEL_FLAGS)})")
    for role in then["fixed_weights"].keys() & now["fixed_weights"].keys():
        if then["fixed_weights"][role] != now["fixed_weights"][role]:
            inexact.append(f"its {role} had other weights{flags(WEIGHT_FLAGS)}")
    return inexact


def _changes(then: dict[str, Any], now: dict[str, Any], names: Iterable[str], *, flag: str = "--") -> list[str]:
    """Return a text for each of `names` whose value differs."""
    return [
        f"{flag}{name} was {then.get(name)} and is now {now.get(name)}"
        for name in sorted(names)
        if then.get(name) != now.get(name)
    ]


def _join(reasons: list[str]) -> str:
    more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    return "; ".join(reasons[:_MAX_REASONS] + more)


def _describe_adapter(model: Any) -> dict[str, Any] | None:
    """Return the config of the adapter that is trained; `None` without one."""
    if not is_adapted(model):
        return None
    config = model.peft_config[model.active_adapter].to_dict()
    return plain({name: value for name, value in config.items() if name not in _ADAPTER_NAMES})


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()


__all__ = ["RunDescription", "describe_config", "describe_data", "digest_weights"]
