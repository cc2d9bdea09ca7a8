"""
The optimizer state of a checkpoint: whole tensors by the names of their parameters, whichever launcher wrote them. Any
launcher resumes from it, with any number of processes.

`optimizer.pt` has the form of torch's `Optimizer.state_dict()` with names instead of numbers, which torch's
`load_state_dict` reads, too. `scheduler.pt` holds the schedule. All ranks must call these functions.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..runtime.errors import UserError
from . import zero_state


def is_whole(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint holds a whole optimizer state. Older ones of DeepSpeed and FSDP hold shards."""
    return Path(checkpoint, OPTIMIZER_NAME).is_file()


def save_optimizer(
    directory: str | Path, model: nn.Module, optimizer: Any, scheduler: Any, *, engine: Any = None, is_writer: bool
) -> None:
    """
    Gather the state of an optimizer, and write it and the schedule on the rank with `is_writer`.

    Args:
        directory (`str` or `Path`): the checkpoint.
        model (`nn.Module`): the model, without DDP's or DeepSpeed's wrapper.
        optimizer ([`~torch.optim.Optimizer`]): the optimizer, without accelerate's wrapper.
        scheduler: the schedule.
        engine (`deepspeed.DeepSpeedEngine`, *optional*): the engine of a run under ZeRO.
        is_writer (`bool`): whether this rank writes.
    """
    if engine is not None:
        state = zero_state.gather(engine, is_writer=is_writer)
    elif is_sharded(model):
        # On the CPU: the whole state may not fit into the memory of one GPU.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
    else:
        state = _by_name(model, optimizer)
    if is_writer:
        torch.save(state, Path(directory, OPTIMIZER_NAME))
        torch.save(scheduler.state_dict(), Path(directory, SCHEDULER_NAME))


def load_optimizer(
    directory: str | Path, model: nn.Module, optimizer: Any, scheduler: Any, *, engine: Any = None
) -> bool:
    """
    Load what [`save_optimizer`] wrote under any launcher. The arguments are the same.

    Returns:
        `bool`: whether the settings of the parameter groups were loaded, too. Otherwise, the groups or their learning
        rates differ, as Muon's do under DeepSpeed, and they keep their own settings.

    Raises:
        `UserError`: if the file belongs to another model, or if an older version wrote it without names and the
            model is sharded.
    """
    # Each rank copies its shards from the mapped file. An optimizer with whole tensors would keep the mapping.
    is_plain = engine is None and not is_sharded(model)
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    saved = torch.load(Path(directory, OPTIMIZER_NAME), mmap=not is_plain, **options)
    schedule = torch.load(Path(directory, SCHEDULER_NAME), **options)
    groups = optimizer.param_groups
    fits = _rates(groups) == _rates(saved["param_groups"])
    if not fits and "lr_lambdas" in schedule:
        schedule |= {name: scheduler.state_dict()[name] for name in ("lr_lambdas", "_last_lr")}
    scheduler.load_state_dict(schedule)
    # The state by number of an older version, or of another program.
    has_names = not any(isinstance(name, int) for name in saved["state"])
    if has_names:
        check_names(saved, (name for name, _ in model.named_parameters()), directory)
    if is_plain:
        if has_names:
            names = enumerate(_order(model, optimizer))
            state = {number: saved["state"][name] for number, name in names if name in saved["state"]}
            saved = {"state": state, "param_groups": _own_groups(optimizer, saved, fits=fits)}
        optimizer.load_state_dict(saved)
        return fits
    if not has_names:
        raise UserError(
            f"{directory} does not name the parameters of its optimizer state, because an older version wrote it. "
            "Resume with the launcher that it was saved with; its next checkpoint resumes under any."
        )
    if engine is not None:
        zero_state.load_optimizer(engine, saved["state"])
    elif saved["state"]:
        order, numbered = _order(model, optimizer), _own_groups(optimizer, saved, fits=fits)
        whole = saved | {"param_groups": [_renamed(group, order) for group in numbered]}
        set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    if fits:
        for group, of_file in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group["lr"] = of_file["lr"]
    return fits


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 or tensor parallelism shards the parameters of a model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _rates(groups: list[dict[str, Any]]) -> list[float | None]:
    return [group.get("initial_lr") for group in groups]


def check_names(saved: dict[str, Any], names: Iterable[str], directory: str | Path) -> None:
    """Raise `UserError` if the state of an optimizer has parameters that are not among `names`."""
    if unknown := saved["state"].keys() - set(names):
        raise UserError(
            f"{directory} has the optimizer state of another model: this one has no {sorted(unknown)[:5]}."
        )


def _order(model: nn.Module, optimizer: Any) -> list[str | int]:
    """Return the names of an optimizer's parameters in torch's order; numbers for parameters of its own."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(parameter, number) for number, parameter in enumerate(parameters)]


def _renamed(group: dict[str, Any], order: list[str | int]) -> dict[str, Any]:
    return group | {"params": [order[number] for number in group["params"]]}


def _by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters."""
    order, state = _order(model, optimizer), optimizer.state_dict()
    groups = [_renamed(group, order) for group in state["param_groups"]]
    return {"state": {order[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _own_groups(optimizer: Any, saved: dict[str, Any], *, fits: bool) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with parameters by number, and if they fit with the saved settings."""
    groups = optimizer.state_dict()["param_groups"]
    if not fits:
        return groups
    pairs = zip(groups, saved["param_groups"], strict=True)
    return [group | of_file | {"params": group["params"]} for group, of_file in pairs]
