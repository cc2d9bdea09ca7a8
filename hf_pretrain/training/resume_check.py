"""
Describe runs in the manifests of their checkpoints, and compare the descriptions. A run resumes exactly, or it refuses
to resume and gives the reason.

A description holds the settings that change an update, and the contents that some of them only name: data, tokenizer,
config, adapter, and weights that training does not change.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoints.directory import checkpoint_path
from ..checkpoints.manifest import MANIFEST_NAME, find_damage, read_manifest
from ..checkpoints.optimizer_state import is_whole
from ..checkpoints.zero_state import whole_parameter
from ..loading.adapters import is_adapted
from ..rows.manifest import describe_data
from ..runtime.errors import UserError
from ..runtime.flags import flags_of
from ..runtime.ranks import on_main_process
from ..tokenizer.chat_template import free_date
from .micro_batch import depends_on_micro_batch
from .training_arguments import LMTrainingArguments, optimizer_name, values_by_name


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


logger = logging.get_logger(__name__)

# Schedules that follow the losses.
ADAPTIVE = {"reduce_lr_on_plateau", "greedy"}
# Blocks of a DeepSpeed config that change an update and repeat no flag. transformers refuses a precision, clipping or
# batch that differs from the flags.
_DEEPSPEED_COMPARED = ("optimizer", "scheduler")
# Fields of a model's or an adapter's config that change no update of a resumed run. Trainer, `from_pretrained` and
# `save_pretrained` change most of them: the name is a path, and the special tokens are the tokenizer's.
# `zero_init_residual` changes the first weights only.
_CONFIG_HARMLESS = {
    *("use_cache", "dtype", "architectures", "auto_map", "transformers_version", "zero_init_residual"),
    *("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping"),
}


def describe_settings(args: LMTrainingArguments, others: Iterable[Any] = ()) -> dict[str, Any]:
    """
    Return all arguments of a run that change its updates, by name. `others` are the dataclasses beside its training
    arguments.
    """
    values = values_by_name(args, others)
    meanings, schedule = _meanings(*others, args), values["lr_scheduler_type"]
    harmless = {"ignored"} if schedule == "reduce_lr_on_plateau" else {"ignored", "evaluation"}
    # These schedules do not depend on the number of steps, unless the warmup is a share of it.
    if schedule == "constant" or (schedule == "constant_with_warmup" and not 0 < args.warmup_steps < 1):
        harmless.add("duration")
    deepspeed = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    # `create_accelerator_and_postprocess` chooses it for the device.
    del values["accelerator_config"]["non_blocking"]
    values["deepspeed"] = _compared_of_deepspeed(deepspeed)
    return _plain({name: values[name] for name in sorted(values) if meanings.get(name) not in harmless})


def _meanings(*parts: Any) -> dict[str, str]:
    """Return what a resume does with the arguments of dataclasses ([`~runtime.flags.flag`]), if they say it."""
    known = (flags_of(type(part)) for part in parts)
    return {name: about["resume"] for flags in known for name, about in flags.items() if "resume" in about}


def _compared_of_deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in _DEEPSPEED_COMPARED if name in config}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as a manifest holds them."""
    return json.loads(json.dumps(values, default=lambda part: sorted(part) if isinstance(part, set) else str(part)))


def describe_config(config: Any) -> dict[str, Any]:
    """Return the fields of a model's or an adapter's config that change the updates of a resumed run."""
    return _plain({name: value for name, value in config.to_dict().items() if name not in _CONFIG_HARMLESS})


def digest_weights(parameters: Iterable[torch.Tensor]) -> str:
    """
    Return a digest of weights that training does not change. If they are sharded, all ranks must call this function.
    """
    digest = xxhash.xxh3_128()
    for parameter in parameters:
        with whole_parameter(parameter):
            weight = parameter.detach()
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_fixed_weights(model: PreTrainedModel, args: LMTrainingArguments) -> dict[str, str]:
    """Return digests of the weights that change the updates but are in no checkpoint, by the role of the weights."""
    if is_adapted(model):
        # The base model is also the reference.
        return {"base model": digest_weights(weight for weight in model.parameters() if not weight.requires_grad)}
    return {"reference model": digest_weights(model.parameters())} if args.has_reference else {}


def describe_run(trainer: "RunTrainer") -> dict[str, Any]:
    """
    Return all values that must be equal for an exact resume, for the manifests of a run. All ranks must call this
    function before the training, because Trainer changes the config of the model.

    Args:
        trainer ([`~training.base_trainer.RunTrainer`]): the trainer of the run.

    Raises:
        `UserError`: if the ranks read different data.
    """
    run, args = trainer.run, trainer.args
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    # Every rank sees all descriptions, so either all ranks raise or none does.
    data = run.ranks.gather(describe_data(trainer.train_dataset))
    if any(description != data[0] for description in data):
        raise UserError(
            f"The ranks read different data: {data}. A file changed while they read it, or differs between the "
            "machines. Make the files equal, and start again."
        )
    adapter = describe_config(model.peft_config[model.active_adapter]) if is_adapted(model) else {}
    contents = {"data": data[0], "config": describe_config(model.config), "adapter": adapter}
    contents |= {role: {"digest": digest} for role, digest in run.fixed_weights.items()}
    if args.load_best_model_at_end:
        # Figures on other data would choose among the checkpoints.
        sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
        contents["validation data"] = {"digest": _digest(str([describe_data(rows) for rows in sets.values()]))}
    contents |= {} if args.date is None else {"date": {"date": args.date}}
    name, settings = run.own_optimizer or (optimizer_name(args), None)
    if settings is not None:
        contents["settings of the optimizer"] = _plain(settings)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        # GRPO renders its prompts during the training.
        words = (sorted(tokenizer.get_vocab().items()), free_date(tokenizer.chat_template))
        contents["vocabulary or chat template"] = {"digest": _digest(str(words))}
    settings = describe_settings(args, run.others)
    if depends_on_micro_batch(args, model.config):
        settings["per_device_train_batch_size"] = args.per_device_train_batch_size
    return {
        "world_size": args.world_size,
        "global_batch": args.rows_per_step,
        "layout": trainer.layout,
        "optimizer": name,
        "save_only_model": args.save_only_model,
        "settings": settings,
        "contents": contents,
    }


def check_resume(checkpoint: str, now: dict[str, Any], args: LMTrainingArguments, others: Iterable[Any] = ()) -> None:
    """
    Warn about differences between this run and the run that saved `checkpoint`. Skip one without a manifest.

    Args:
        checkpoint (`str`): the checkpoint to resume from.
        now (`dict`): the result of [`describe_run`] for this run.
        args ([`LMTrainingArguments`]): the training arguments.
        others (`Iterable`): the dataclasses beside them.

    Raises:
        `UserError`: if this run cannot resume from the checkpoint, or not exactly without `--allow_inexact_resume`.
    """
    if not Path(checkpoint, MANIFEST_NAME).exists():
        return
    then = read_manifest(checkpoint)["run"]
    if then.keys() != now.keys():
        raise UserError(
            f"This run cannot resume from {checkpoint}: another version of hf_pretrain wrote its {MANIFEST_NAME}. "
            f"Start a new run from its weights: --model_name_or_path {checkpoint}."
        )
    # A flag that is newer than the checkpoint did then what its default does now.
    defaults = {field.name: field.default for field in fields(args)}
    # Older versions did not compare it for a router loss per batch.
    defaults["per_device_train_batch_size"] = args.per_device_train_batch_size
    newer = (now["settings"].keys() - then["settings"].keys()) & defaults.keys()
    then["settings"] |= _plain({name: defaults[name] for name in newer})
    # Older versions could go back to a checkpoint, but did so only on request.
    then["settings"] = {name: value for name, value in then["settings"].items() if value or name != "rewind_spikes"}
    # Older versions compared the whole config of DeepSpeed.
    then["settings"]["deepspeed"] = _compared_of_deepspeed(then["settings"]["deepspeed"])
    fatal, inexact = _find_obstacles(then, now, _meanings(*others, args), is_whole=is_whole(checkpoint))
    if fatal:
        raise UserError(
            f"This run cannot resume from {checkpoint}: {'; '.join(fatal)}. Use the settings that it was saved "
            f"with, or start a new run from its weights: --model_name_or_path {checkpoint}."
        )
    if inexact and not args.allow_inexact_resume:
        raise UserError(
            f"Resuming from {checkpoint} would not be exact: {'; '.join(inexact)}. Restore the earlier settings "
            "and data, or resume nevertheless with --allow_inexact_resume."
        )
    if then["world_size"] != now["world_size"]:
        logger.warning(
            f"{checkpoint} was saved by {then['world_size']} process(es), and {now['world_size']} resume it. Each "
            "step takes the same rows, but random numbers (dropout) and the last bits of sums differ."
        )
    if inexact:
        logger.warning(f"Resuming from {checkpoint} although {'; '.join(inexact)}.")


def _find_obstacles(
    then: dict[str, Any], now: dict[str, Any], meanings: dict[str, str], *, is_whole: bool
) -> tuple[list[str], list[str]]:
    """
    Return the reasons that forbid resuming, and the reasons that make it inexact.

    Args:
        then (`dict`): the result of [`describe_run`] from the manifest of a checkpoint.
        now (`dict`): the result of [`describe_run`] for this run.
        meanings (`dict`): what a resume does with each argument.
        is_whole (`bool`): whether the optimizer state is whole, as any launcher reads it.
    """
    fatal = []
    if then["optimizer"] != now["optimizer"]:
        fatal.append(f"its optimizer was {then['optimizer']} and is now {now['optimizer']}")
    has_other_shards = then["layout"] != now["layout"] or then["world_size"] != now["world_size"]
    if not is_whole and has_other_shards and not then["save_only_model"]:
        fatal.append(
            f"an older version saved its optimizer state in shards ({then['layout']}, {then['world_size']} "
            f"process(es)), which this launch ({now['layout']}, {now['world_size']}) cannot read. Launch as then"
        )
    if then["save_only_model"]:
        fatal.append("it was saved with --save_only_model and has no optimizer state")
    inexact = []
    if then["global_batch"] != now["global_batch"]:
        # Rows would be skipped or seen twice.
        inexact.append(f"its global batch was {then['global_batch']} rows and is now {now['global_batch']}")
    changed = _changes(then["settings"], now["settings"], prefix="--")
    schedules = {run["settings"]["lr_scheduler_type"] for run in (then, now)}
    fixed = {"state", "schedule"} if schedules & ADAPTIVE else {"state"}
    if then["layout"] != now["layout"] and schedules & ADAPTIVE:
        # Its state has a learning rate for each parameter group, and launchers have different groups.
        fatal.append(f"its schedule adapts, and its state fits the layout {then['layout']}, not {now['layout']}")
    fatal += [changed.pop(name) for name in [*changed] if meanings.get(name) in fixed]
    flags = [text for name, text in changed.items() if meanings.get(name) == "content"]
    for name in sorted(then["contents"].keys() & now["contents"].keys()):
        before, after = then["contents"][name], now["contents"][name]
        if before != after:
            details = [*(_changes(before, after).values() if before and after else ()), *flags]
            reasons = fatal if name == "adapter" else inexact
            reasons.append(f"its {name} differed" + (f" ({', '.join(details)})" if details else ""))
    return fatal, inexact + [text for name, text in changed.items() if meanings.get(name) != "content"]


def _changes(then: dict[str, Any], now: dict[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Return a text for each value that differs, by its name. A digest says nothing to a reader."""
    return {
        name: f"{prefix}{name} was {then.get(name)} and is now {now.get(name)}"
        for name in sorted((then.keys() | now.keys()) - {"digest"})
        if then.get(name) != now.get(name)
    }


def restore_best(trainer: "RunTrainer", checkpoint: str) -> None:
    """
    Choose the best checkpoint of a resumed run anew, by its log, from those beside `checkpoint`. The recorded one may
    belong to another metric, and its path to another working directory or an earlier place of the run.
    """
    state, args = trainer.state, trainer.args
    if not args.load_best_model_at_end:
        return
    key, sign = f"eval_{args.metric_for_best_model.removeprefix('eval_')}", 1 if args.greater_is_better else -1
    # Trainer never takes the model before the first step for the best.
    entries = [entry for entry in state.log_history if entry["step"] and math.isfinite(entry.get(key, math.nan))]
    values = {entry["step"]: entry[key] for entry in entries}
    # Of equal values, the first one is the best.
    steps = sorted(values, key=lambda step: sign * values[step], reverse=True)
    paths = {step: str(checkpoint_path(Path(checkpoint).parent, step)) for step in steps}
    best = on_main_process(args, lambda: next((step for step in steps if not find_damage(paths[step])), None))
    state.best_global_step, state.best_metric, state.best_model_checkpoint = best, values.get(best), paths.get(best)
    if steps and best != steps[0]:
        logger.warning(
            f"Step {steps[0]} has the best {key}, and no intact checkpoint beside {checkpoint}. "
            f"--load_best_model_at_end now chooses from {paths.get(best, 'the next evaluations')} on."
        )


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()
