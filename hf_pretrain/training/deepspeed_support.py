"""Read the DeepSpeed config of a run, and refuse or repair what DeepSpeed silently changes."""

import os
import sys
from typing import Any

import torch
from accelerate.utils import other
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging, strtobool

from ..runtime.errors import UserError
from .optimizers import optimizer_name


logger = logging.get_logger(__name__)

# NOTE: accelerate's `unwrap_model` imports DeepSpeed wherever it is installed, to recognize DeepSpeed's engine. The
# import takes a third of a second. As long as nothing has imported DeepSpeed, no model is an engine.
other.is_deepspeed_available = lambda: sys.modules.get("deepspeed") is not None


def turns_on_deepspeed(args: TrainingArguments) -> bool:
    """Return whether `--deepspeed`, or `accelerate launch` by an environment variable, turns DeepSpeed on."""
    return bool(args.deepspeed) or bool(strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))


def refill_deepspeed_config(args: TrainingArguments) -> None:
    """
    Replace the values `"auto"` in the config of `--deepspeed` again. The constructor of the arguments has replaced
    them before, but arguments have changed since then. For `accelerate launch`, Trainer replaces them.
    """
    if not args.deepspeed:
        return
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def check_deepspeed_config(config: dict[str, Any], args: TrainingArguments) -> None:
    """
    Warn about blocks that override the arguments of the run, and about a `--max_grad_norm` without effect. Refuse
    arguments that DeepSpeed would not follow.

    Raises:
        `ValueError`: in the cases of [`check_deepspeed_optimizer`], and for skipped steps.
    """
    check_deepspeed_optimizer(config, args)
    for block in ("optimizer", "scheduler"):
        if block in config:
            logger.warning(
                f"The DeepSpeed config has a `{block}` block: it overrides --optim, --learning_rate and "
                "--lr_scheduler_type of this run. Remove the block to let the recipe decide."
            )
    is_default = "max_grad_norm" in getattr(args, "left_out", ())
    if args.max_grad_norm and not is_default and "gradient_clipping" not in config:
        logger.warning(
            f"--max_grad_norm {args.max_grad_norm:g} has no effect, because the DeepSpeed config lacks "
            '`gradient_clipping`. To clip gradients, add `"gradient_clipping": "auto"` to the config.'
        )
    # Plain `TrainingArguments` lack the flag.
    if getattr(args, "on_nonfinite", "stop") == "skip":
        raise UserError(
            "--on_nonfinite skip is not possible under DeepSpeed, which updates the weights within its backward "
            "pass. Leave it out: the run then stops, and its checkpoints stay intact."
        )


def check_deepspeed_optimizer(config: dict[str, Any], args: TrainingArguments) -> None:
    """
    Raise `ValueError` if the DeepSpeed config would change the optimizer, its state or its updates, or if accelerate
    would replace an optimizer whose state is offloaded.
    """
    if (args.bf16 or args.fp16) and not config.get("zero_optimization", {}).get("stage", 0):
        # NOTE: in half precision without ZeRO, DeepSpeed creates the optimizer's state by a step with gradients of
        # zero. AdamW counts this step, so its first update is a quarter too small. ZeRO makes no such step.
        precision = "bf16" if args.bf16 else "fp16"
        raise UserError(
            f"The DeepSpeed config has stage 0, and the run trains in {precision}: DeepSpeed would make a step of the "
            f"optimizer before the training, and the run would save {precision} weights. Use stage 1 "
            "(ds_configs/zero1.json), or train in float32 (--bf16 false)."
        )
    optimizer = optimizer_name(args)
    if optimizer == "muon":
        for block in ("optimizer", "scheduler"):
            if block in config:
                # NOTE: DeepSpeed's schedulers give all groups one learning rate, and Muon's matrices need their own.
                raise UserError(
                    f"The `{block}` block of the DeepSpeed config would override Muon, the optimizer of this run. "
                    "Remove the block, or pass --optim_preset adamw."
                )
        # Without the key, DeepSpeed does not clip, whatever --max_grad_norm says (`check_deepspeed_config` warns).
        clipping = config.get("gradient_clipping", 0.0)
        limit = args.max_grad_norm if clipping == "auto" else clipping
        if limit:
            # NOTE: DeepSpeed overwrites the gradients with Muon's updates before it computes their norm. Clipping
            # would therefore shrink the updates.
            raise UserError(
                f"DeepSpeed would clip Muon's updates instead of the gradients, at {limit:g}. Leave --max_grad_norm "
                'out, and set `gradient_clipping` to "auto" in the DeepSpeed config; or pass --optim_preset adamw.'
            )
    elif (
        offloads_optimizer(config)
        and "optimizer" not in config
        and not optimizer.startswith(("adamw_torch", "adagrad"))
    ):
        # NOTE: accelerate's `map_pytorch_optim_to_deepspeed` returns DeepSpeedCPUAdam for every optimizer that it does
        # not know.
        raise UserError(
            f"With an offloaded optimizer accelerate would replace --optim {optimizer} by Adam, without a message. "
            "Use --optim adamw_torch, or a config without offloading (ds_configs/zero2.json)."
        )


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed keeps the state of the optimizer outside the accelerator's memory."""
    return config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none"


def let_muon_train(config: dict[str, Any]) -> None:
    """
    Set what DeepSpeed's Muon needs in the config of a run.

    NOTE: under ZeRO-3, DeepSpeed's Muon refuses reduce-scatter. With an offloaded optimizer, accelerate would replace
    Muon by DeepSpeed's Adam for CPUs; `zero_force_ds_cpu_optimizer` turns that off.
    """
    if config.get("zero_optimization", {}).get("stage") == 3:
        config["zero_optimization"]["reduce_scatter"] = False
    if offloads_optimizer(config):
        config["zero_force_ds_cpu_optimizer"] = False


def repair_universal_checkpoint(optimizer: Any, weight_decays: list[float | None]) -> None:
    """
    Restore the weight decays and step counters that DeepSpeed breaks when it loads a universal checkpoint.

    NOTE: ZeRO-3 gives every group the weight decay of the first group. Also, all parameters share one tensor as their
    step counter, so updating any of them advances the counter of all.

    Args:
        optimizer: the optimizer. DeepSpeed and accelerate may have wrapped it.
        weight_decays (`list[float | None]`): the weight decay of each group; `None` leaves a group as it is.
    """
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
    # Unwrap: only the innermost optimizer holds the state.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def float32_weights(model: nn.Module, *, trainable_only: bool) -> dict[str, torch.Tensor] | None:
    """
    Gather the float32 weights that DeepSpeed's optimizer keeps in addition to the half-precision ones. All ranks must
    call this function.

    Args:
        model (`nn.Module`): the model that DeepSpeed trains.
        trainable_only (`bool`): leave out frozen weights, such as the base model of an adapter.

    Returns:
        `dict[str, torch.Tensor]`: whole float32 tensors on the CPU by parameter name; `None` if the optimizer keeps no
        such copies.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    # Include both names of a tied matrix, because `load_state_dict` expects both.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if trainable_only and not parameter.requires_grad:
            continue
        # A collective: all ranks gather the parameters in the same order.
        weight = safe_get_full_fp32_param(parameter)
        if weight is None:
            return None
        weights[name] = weight.cpu()
    return weights


__all__ = [
    "check_deepspeed_config",
    "check_deepspeed_optimizer",
    "float32_weights",
    "let_muon_train",
    "refill_deepspeed_config",
    "repair_universal_checkpoint",
    "turns_on_deepspeed",
]
