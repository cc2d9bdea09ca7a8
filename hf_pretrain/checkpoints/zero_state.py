"""
Gather and distribute what DeepSpeed's ZeRO keeps in partitions: the float32 weights and the state of the optimizer.

ZeRO trains one flat tensor per parameter group and rank (stage 3: per sub-group). DeepSpeed's public functions read
and write the part of one parameter in it. Only the momentum of Muon at stages 1 and 2 lies elsewhere. All ranks must
call these functions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..runtime.errors import UserError


# Float16's loss scale, in the terms of torch's `GradScaler`.
SCALE, GROWTH = "scale", "_growth_tracker"


def gather(engine: Any, *, is_writer: bool) -> dict[str, Any]:
    """
    Return the whole state of the optimizer by names of parameters, on the CPU of the rank with `is_writer`, and the
    learning rates of the parameter groups.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    zero, names = engine.optimizer, _names(engine)
    _link(zero)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for parameters, flat in _partitions(zero):
        of_group = zero.optimizer.state.get(flat, {})
        for parameter in parameters:
            values = {}
            # The order of the keys is the same on all ranks, and each tensor is a collective.
            for key in sorted(of_group):
                value = of_group[key]
                if _is_scalar(value):
                    values[key] = torch.tensor(float(value))
                elif not _is_whole_momentum(zero, key):
                    whole = safe_get_full_optimizer_state(parameter, key)
                    values[key] = whole.cpu() if is_writer else whole
            if is_writer and values:
                state[names[parameter]] = values
    for name, momentum in _whole_momenta(zero, names):
        if is_writer:
            state[name] = {"momentum_buffer": momentum.float().cpu()}
    # DeepSpeed's own schedulers set no `initial_lr`.
    rates = [
        {"params": [], **{name: group[name] for name in ("lr", "initial_lr") if name in group}}
        for group in zero.optimizer.param_groups
    ]
    return {"state": state, "param_groups": rates}


def load_optimizer(engine: Any, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """
    Distribute the whole state of an optimizer by names of parameters.

    Raises:
        `UserError`: for a state of another shape than its parameter, such as Adafactor's: a partition has no rows.
    """
    from deepspeed.utils import safe_set_full_optimizer_state

    zero, names = engine.optimizer, _names(engine)
    is_of_torch = type(zero.optimizer).__module__.startswith("torch.")
    for parameters, flat in _partitions(zero):
        own = zero.optimizer.state[flat]
        # A parameter that never had a gradient has no state.
        first = next((found for parameter in parameters if (found := state.get(names[parameter]))), {})
        for key, value in first.items():
            if _is_scalar(value):
                own[key] = torch.tensor(float(value)) if is_of_torch else int(value) if key == "step" else float(value)
            elif _is_whole_momentum(zero, key):
                held = [state[names[parameter]][key].flatten() for parameter in _held(zero, flat)]
                own[key] = torch.cat(held or [value.new_zeros(0)]).to(flat.device)
            else:
                own[key] = torch.zeros_like(flat)
    _link(zero)
    for parameters, flat in _partitions(zero):
        for parameter in parameters:
            for key, value in state.get(names[parameter], {}).items():
                if not _is_scalar(value) and not _is_whole_momentum(zero, key):
                    if value.shape != getattr(parameter, "ds_shape", parameter.shape):
                        raise UserError(
                            f"ZeRO cannot partition {key} of {names[parameter]}, of the shape {tuple(value.shape)}. "
                            "Resume without DeepSpeed."
                        )
                    safe_set_full_optimizer_state(parameter, value.to(flat.device), key)


def load_weights(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Distribute whole weights by name: those that the model computes with, and the float32 ones of the optimizer."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        if name in weights:
            with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(weights[name])
            if parameter.requires_grad:
                safe_set_full_fp32_param(parameter, weights[name].to(parameter.device, torch.float32))


def whole_parameter(parameter: nn.Parameter) -> AbstractContextManager:
    """Return a block in which a parameter is whole. Under ZeRO-3, all ranks must enter it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([parameter])


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """Return the loss scale of float16 and the number of steps since it grew, or `None` in other precisions."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return None
    # DeepSpeed counts from the last overflow, and grows before a step that follows a multiple of `scale_window`.
    steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {SCALE: float(scaler.cur_scale), GROWTH: (steps - 1) % scaler.scale_window + 1 if steps else 0}


def load_loss_scale(scaler: Any, saved: dict[str, Any]) -> None:
    """Continue with a loss scale of [`loss_scale`] or of torch's `GradScaler`, in DeepSpeed's or torch's scaler."""
    if isinstance(scaler, torch.amp.GradScaler):
        # Beyond its interval, it would never grow.
        steps = min(saved[GROWTH], scaler.get_growth_interval() - 1)
        scaler.load_state_dict(scaler.state_dict() | {SCALE: saved[SCALE], GROWTH: steps})
        return
    scaler.cur_scale = saved[SCALE]
    scaler.last_overflow_iter = scaler.cur_iter - saved[GROWTH] - 1


def _names(engine: Any) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def _partitions(zero: Any) -> Iterator[tuple[list[nn.Parameter], torch.Tensor]]:
    """Give each flat tensor that this rank trains, with the parameters that lie in its group."""
    if _is_stage_3(zero):
        return zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
    return zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)


def _is_scalar(value: Any) -> bool:
    return not (torch.is_tensor(value) and value.dim())


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _link(zero: Any) -> None:
    """
    Let DeepSpeed's functions find the state of each parameter.

    NOTE: at stages 1 and 2, DeepSpeed links all groups after the update of the first one, when the others have no
    state yet.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    if not _is_stage_3(zero):
        for parameters, flat in _partitions(zero):
            lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


def _is_whole_momentum(zero: Any, key: str) -> bool:
    """
    Return whether a state is Muon's momentum at stages 1 and 2. Each rank keeps that of whole parameters, unless the
    optimizer is offloaded.
    """
    is_muon = any(group.get("use_muon") for group in zero.optimizer.param_groups)
    return key == "momentum_buffer" and is_muon and not _is_stage_3(zero) and not zero.cpu_offload


def _held(zero: Any, flat: torch.Tensor) -> list[nn.Parameter]:
    """Return the parameters of which at least a part lies in this rank's flat tensor of a group, in their order."""
    number = next(i for i, other in enumerate(zero.single_partition_of_fp32_groups) if other is flat)
    return zero.params_in_partition[number]


def _whole_momenta(zero: Any, names: dict[nn.Parameter, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the whole momentum of each parameter that Muon trains at stages 1 and 2."""
    if not _is_whole_momentum(zero, "momentum_buffer"):
        return
    own: dict[str, torch.Tensor] = {}
    for _, flat in _partitions(zero):
        momentum = zero.optimizer.state.get(flat, {}).get("momentum_buffer")
        if momentum is not None:
            held = _held(zero, flat)
            parts = momentum.split([parameter.numel() for parameter in held])
            own |= {names[parameter]: part.view(parameter.shape) for parameter, part in zip(held, parts, strict=True)}
    # Two ranks hold the momentum of a parameter on their border.
    holders: list[dict[str, torch.dtype]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(holders, {name: momentum.dtype for name, momentum in own.items()})
    for parameter, name in names.items():
        ranks = [rank for rank, held_there in enumerate(holders) if name in held_there]
        if ranks:
            dtype = holders[ranks[0]][name]
            whole = own.get(name, torch.empty(parameter.shape, dtype=dtype, device=parameter.device)).contiguous()
            dist.broadcast(whole, src=ranks[0])
            yield name, whole
