"""
Training with 8-bit floats (`--fp8`), through torchao.

Each linear layer of the decoder casts its inputs and weights to float8, with one scale per token and per output
channel. The gradients of the weights stay in bf16. Such scales depend on no other row of a micro-batch, so the loss
stays the same at any batch size, accumulation and number of processes; a scale per tensor would break this.

NOTE: accelerate can do the conversion too (`AORecipeKwargs`), but Trainer passes it no such handler. Without one, it
would convert the experts' routers and leave out the first projection, with a scale per tensor.
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..runtime.errors import UserError, needing_extra


if TYPE_CHECKING:
    from .training_arguments import LMTrainingArguments

# Units for float8 matrix products came with NVIDIA's Ada and Hopper cards.
LEAST_CAPABILITY = (8, 9)
# The size of a matrix that the kernels need.
_MULTIPLE = 16


def check_float8(args: "LMTrainingArguments") -> None:
    """Raise `UserError` for a machine, a precision, a stage or a kind of sharding that cannot train in float8."""
    if args.fp8_emulate and not args.fp8:
        raise UserError("--fp8_emulate says how --fp8 computes, and --fp8 is missing. Add --fp8.")
    if not args.fp8:
        return
    if not args.has_masked_loss:
        raise UserError(
            "--fp8 trains in pretraining, fine-tuning and distillation only. Elsewhere a reference model or a sampler "
            "would compute in another precision than the trained model. Leave it out."
        )
    has_units = args.device.type == "cuda" and torch.cuda.get_device_capability(args.device) >= LEAST_CAPABILITY
    if not has_units and not args.fp8_emulate:
        raise UserError(
            f"--fp8 needs a GPU of compute capability 8.9 or newer, and this run uses {args.device.type}. Leave it "
            "out. To see its losses without its speed, add --fp8_emulate."
        )
    if not args.bf16:
        raise UserError("--fp8 computes everything but the linear layers in bf16. Add --bf16.")
    # A layer keeps its weight from the forward to the backward pass, which is all that sharded weights would save.
    if args.shards_weights:
        raise UserError(
            "--fp8 cannot train with sharded weights (ZeRO-3, FSDP, --fsdp_size, --tp_size, --ep_size). Use DDP or "
            "ds_configs/zero2.json, or leave --fp8 out."
        )
    if os.environ.get("ACCELERATE_FP8_BACKEND", "ao").lower() != "ao":
        raise UserError("--fp8 computes with torchao. Pass --fp8_backend ao to accelerate launch, or leave it out.")


def convert_to_float8(layers: nn.Module, *, emulates: bool) -> None:
    """
    Let the linear layers in `layers` compute in float8. Their parameters stay the same objects with the same names.

    Args:
        layers (`nn.Module`): the decoder layers of a model.
        emulates (`bool`): whether to round to float8 and multiply in float32, on any device.

    Raises:
        `UserError`: without torchao, and for a matrix whose sizes are no multiples of 16.
    """
    with needing_extra("fp8", "--fp8 needs torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) and (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE):
            raise UserError(
                f"--fp8 needs matrices whose sizes are multiples of {_MULTIPLE}, and {name} of the decoder layers has "
                f"{module.out_features} x {module.in_features}. Change the sizes of the model, or leave --fp8 out."
            )
    config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulates)
    convert_to_float8_training(layers, config=config)
