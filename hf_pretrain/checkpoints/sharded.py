"""
Checkpoints of models that transformers shards while it loads them (`--fsdp_size`, FSDP2).

Trainer saves their weights and refuses to save the optimizer. These functions gather the whole optimizer state on one
rank, keyed by parameter name, so that any number of processes can resume from it. All ranks must call them.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..runtime.errors import UserError


def save_optimizer(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    is_writer: bool,
) -> None:
    """Gather the state of `optimizer`, and write it and the scheduler's state on the rank with `is_writer`."""
    # On the CPU: the whole state may not fit into the memory of one GPU.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # A collective: every rank contributes its shards, and only rank 0 receives the whole state.
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if is_writer:
        torch.save(state, Path(directory, OPTIMIZER_NAME))
        torch.save(scheduler.state_dict(), Path(directory, SCHEDULER_NAME))


def load_optimizer(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Load the files of [`save_optimizer`] into the `optimizer` and `scheduler` of a sharded model."""
    state, schedule = (
        torch.load(Path(directory, name), map_location="cpu", weights_only=True)
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
    )
    scheduler.load_state_dict(schedule)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def load_weights(directory: str | Path, model: PreTrainedModel) -> None:
    """
    Load the safetensors files of a checkpoint into a sharded model.

    Raises:
        `UserError`: if tensors are missing or unexpected. A tied head is not in the files.
    """
    weights: dict[str, Any] = {}
    # Every rank reads the whole checkpoint; set_model_state_dict keeps this rank's shards.
    for path in sorted(Path(directory).glob("*.safetensors")):
        weights |= load_file(path)
    # NOTE: `set_model_state_dict` reports no missing tensors: it keeps the model's own values in their place.
    names = model.state_dict().keys()
    # A tied output head shares the embedding's tensor, which safetensors stores once.
    missing = names - weights.keys() - model.all_tied_weights_keys.keys()
    unexpected = weights.keys() - names
    if missing or unexpected:
        raise UserError(
            f"{directory} does not fit the model: missing {sorted(missing)}, unexpected {sorted(unexpected)}."
        )
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
