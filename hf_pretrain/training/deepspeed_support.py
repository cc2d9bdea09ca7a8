"""Read the DeepSpeed config of a run, and refuse what DeepSpeed would silently change."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import other
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import deepspeed as deepspeed_integration
from transformers.utils import strtobool

from ..loading.adapters import base_model_of, is_adapted
from ..runtime.errors import UserError
from .optimizers import OPTIMIZERS


def import_deepspeed_late() -> None:
    """
    Keep accelerate from importing DeepSpeed for runs that do not use it.

    NOTE: `unwrap_model` imports DeepSpeed wherever it is installed, to recognize DeepSpeed's engine. The import takes
    a third of a second. As long as nothing has imported DeepSpeed, no model is an engine.
    """
    other.is_deepspeed_available = lambda: sys.modules.get("deepspeed") is not None


def turns_on_deepspeed(args: TrainingArguments) -> bool:
    """Return whether `--deepspeed`, or `accelerate launch` by an environment variable, turns DeepSpeed on."""
    return bool(args.deepspeed) or bool(strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))


@contextmanager
def whole_weights() -> Iterator[None]:
    """
    Load models within the block whole on every rank.

    NOTE: while a ZeRO-3 config is registered, `from_pretrained` shards every model. A teacher or reward model has no
    engine that could gather its shards. transformers has no public getter for the config.
    """
    reference = deepspeed_integration._hf_deepspeed_config_weak_ref
    config = reference() if reference is not None else None
    deepspeed_integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            deepspeed_integration.set_hf_deepspeed_config(config)


def prepare_deepspeed_config(config: dict[str, Any], args: Any) -> None:
    """
    Refuse a DeepSpeed config that would change the optimizer, its state or its updates, and set what checkpoints and
    Muon need in it.

    Args:
        config (`dict`): the config of the run, which this function changes.
        args ([`~training.training_arguments.LMTrainingArguments`]): the training arguments.

    Raises:
        `UserError`: for a config that would train something else than the arguments say.
    """
    zero = config.setdefault("zero_optimization", {})
    if zero.get("stage") == 3:
        # Without it, the first checkpoint of a run in float32 would fail.
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if (args.bf16 or args.fp16) and not zero.get("stage", 0):
        # NOTE: in half precision without ZeRO, DeepSpeed creates the optimizer's state by a step with gradients of
        # zero. AdamW counts this step, so its first update is a quarter too small. ZeRO makes no such step.
        precision = "bf16" if args.bf16 else "fp16"
        raise UserError(
            f"The DeepSpeed config has stage 0, and the run trains in {precision}: DeepSpeed would make a step of the "
            f"optimizer before the training, and the run would save {precision} weights. Use stage 1 "
            "(ds_configs/zero1.json), or train in float32 (--bf16 false)."
        )
    if (prepare := OPTIMIZERS[args.optim_preset].prepare_deepspeed) is not None:
        prepare(config, args)
        return
    # Without it, DeepSpeed would not clip.
    config.setdefault("gradient_clipping", args.max_grad_norm)
    is_offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if is_offloaded and "optimizer" not in config and not args.optim.value.startswith(("adamw_torch", "adagrad")):
        # NOTE: accelerate's `map_pytorch_optim_to_deepspeed` returns DeepSpeedCPUAdam for every optimizer that it does
        # not know.
        raise UserError(
            f"With an offloaded optimizer accelerate would replace --optim {args.optim.value} by Adam, without a "
            "message. Use --optim adamw_torch, or a config without offloading (ds_configs/zero2.json)."
        )


def complete_deepspeed_config(args: Any) -> None:
    """
    Fill what is "auto" in the config of `--deepspeed` with the settled arguments: the values of the parsed ones, which
    it holds so far, may be other ones. A learning rate that follows from the width of the model was still `None`.

    Raises:
        `UserError`: for a number in the config that differs from a settled argument.
    """
    filled = deepspeed_integration.HfTrainerDeepSpeedConfig(args.deepspeed)
    # NOTE: a new config registers itself, and `from_pretrained` forgets it when it dies.
    deepspeed_integration.set_hf_deepspeed_config(args.hf_deepspeed_config)
    filled.trainer_config_process(args)
    refuse_mismatches(filled)
    prepare_deepspeed_config(filled.config, args)
    # accelerate's plugin has the same `dict`.
    args.hf_deepspeed_config.config.update(filled.config)


def refuse_mismatches(config: deepspeed_integration.HfTrainerDeepSpeedConfig) -> None:
    """Raise `UserError` for values of a DeepSpeed config that differ from the arguments."""
    if config.mismatches:
        texts = "; ".join(text.removeprefix("- ds ").replace(" vs hf ", ", but ") for text in config.mismatches)
        raise UserError(
            f'The DeepSpeed config has other values than the arguments: {texts}. Set these values to "auto" in the '
            "config, and pass them as flags."
        )


@contextmanager
def refusing_mismatches(accelerator: Any) -> Iterator[None]:
    """Within the block, transformers compares a DeepSpeed config with the number of steps. Raise [`UserError`]."""
    try:
        yield
    except ValueError:
        if (plugin := getattr(accelerator.state, "deepspeed_plugin", None)) is not None:
            refuse_mismatches(plugin.hf_ds_config)
        raise


def gather_from_deepspeed(accelerator: Any, engine: Any, model: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """
    Return the model to save, and its weights, or `None` for the model's own. All ranks must call this function.

    If DeepSpeed trains in half precision, the weights are the float32 ones that its optimizer keeps.

    Args:
        accelerator ([`~accelerate.Accelerator`]): prepared the engine.
        engine: DeepSpeed's engine.
        model ([`~transformers.PreTrainedModel`] or peft model): the model in the engine.
    """
    weights = {} if base_model_of(model).dtype == torch.float32 else _float32_weights(model)
    if not weights:
        return model, accelerator.get_state_dict(engine)
    if is_adapted(model):
        return model, weights
    # A float32 copy, because the config names the dtype of the model.
    copy = type(model)(model.config)
    copy.load_state_dict(weights)
    return copy, None


def _float32_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """
    Return the float32 weights that DeepSpeed's optimizer keeps in addition to the half-precision ones: whole tensors
    on the CPU, without the base model of an adapter. Return an empty `dict` if the optimizer keeps none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    # Include both names of a tied matrix, because `load_state_dict` expects both.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not is_adapted(model):
            # A collective: all ranks gather the parameters in the same order.
            weight = safe_get_full_fp32_param(parameter)
            if weight is None:
                return {}
            weights[name] = weight.cpu()
    return weights
