"""
The Muon optimizer, and missing parameters of transformers' learning-rate schedules.

Muon (https://kellerjordan.github.io/posts/muon/) replaces the update of a matrix by the nearest orthogonal matrix.
This implementation scales the updates to the size of AdamW's (https://arxiv.org/abs/2502.16982, section 2.2), so that
both take the same learning rate and weight decay. `torch.optim.Muon` does not serve: it takes no stacked experts, and
neither shares the matrices out to the ranks nor gathers sharded ones.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

from ..loading.adapters import is_adapted
from ..runtime.devices import has_bfloat16_units
from ..runtime.errors import UserError


# Coefficients of the quintic Newton-Schulz iteration. The polynomial is steep at zero, so small singular values grow
# fast. In return, the iteration ends near 1 instead of exactly at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_NEWTON_SCHULZ_STEPS = 5
# Momentum of Muon's matrices. It won the comparison in docs/performance.md.
MOMENTUM = 0.85
# Number of elements that a rank orthogonalizes at a time. This bounds the memory for gathered copies of matrices.
MAX_ELEMENTS = 2**24


def complete_schedule(args: TrainingArguments, num_steps: int) -> dict[str, Any] | None:
    """Return `lr_scheduler_kwargs` with what a schedule needs. transformers has no defaults for some schedules."""
    given = args.lr_scheduler_kwargs
    if args.lr_scheduler_type == "warmup_stable_decay":
        return {"num_decay_steps": math.ceil(0.2 * num_steps), "min_lr_ratio": 0.1} | (given or {})
    return given or {"min_lr_rate": 0.1} if args.lr_scheduler_type == "cosine_with_min_lr" else given


@contextmanager
def refusing(flag: str, value: Any) -> Iterator[None]:
    """Raise `UserError` if a library refuses the `value` of a flag."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if value is None:
            raise
        raise UserError(f"{flag} {value} does not fit: {error}. Correct the names and values.") from error


def restore_settings(optimizer: torch.optim.Optimizer, scheduler: Any, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer and its schedule the settings of parameter groups, as they were before a resume."""
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        # DeepSpeed has replaced the parameters.
        group.update(given | {name: group[name] for name in ("params", "lr")})
    # DeepSpeed's wrapper holds the schedule.
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [given["initial_lr"] for given in groups]
        # Compute the rates of the next step again.
        scheduler.last_epoch -= 1
        scheduler.step()


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter. Under ZeRO-3 a parameter is empty between its uses, and has a `ds_shape`."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_matrix_of_muon(name: str, parameter: nn.Parameter) -> bool:
    """
    Return whether Muon trains a parameter. It trains the matrices of the layers, including stacked experts.
    Embeddings, head and routers stay with AdamW.
    """
    return len(whole_shape(parameter)) >= 2 and ".layers." in f".{name}" and not name.endswith("mlp.gate.weight")


def muon_parameter_groups(model: nn.Module, *, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """
    Return parameter groups for [`Muon`]: vectors without weight decay, AdamW's matrices, the embedding, and Muon's
    matrices. Each device mesh of DTensors gets its own groups, because fused updates cannot mix meshes.

    Args:
        model (`nn.Module`): the model; frozen parameters are left out.
        learning_rate (`float`): learning rate of all groups but the embedding.
        weight_decay (`float`): weight decay of matrices.
    """
    groups: dict[tuple[bool, bool, float, Any], list[nn.Parameter]] = defaultdict(list)
    embedding_rate = learning_rate
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            is_embedding = "embed_tokens" in name
            if is_embedding:
                # At width 512, the loss with a factor of 2.5 was higher than with a factor of 1
                # (`benchmarks/results/learning-minimind2-small.json`).
                embedding_rate = learning_rate * (2.5 * min(1.0, 192 / whole_shape(parameter)[-1]))
            decay = weight_decay if len(whole_shape(parameter)) >= 2 else 0.0
            groups[is_matrix_of_muon(name, parameter), is_embedding, decay, mesh].append(parameter)
    return [
        {
            "params": parameters,
            "use_muon": use_muon,
            "lr": embedding_rate if is_embedding else learning_rate,
            "weight_decay": decay,
        }
        # Trainer logs the learning rate of the first group, which must not be the embedding's.
        for (use_muon, is_embedding, decay, _), parameters in sorted(groups.items(), key=lambda item: item[0][:3])
    ]


class Muon(torch.optim.Optimizer):
    """
    Muon for the matrices of the layers and torch's AdamW for all other parameters, in one optimizer.

    Muon orthogonalizes each matrix of a stacked parameter, such as the experts, separately. The ranks share the
    matrices out.

    Args:
        groups (`Iterable[dict]`): the result of [`muon_parameter_groups`].
        lr (`float`): learning rate of groups without their own. Updates of Muon are scaled by
            `0.2 * sqrt(max(rows, columns))`.
        momentum (`float`, defaults to 0.85): Nesterov momentum of Muon.
        betas (`tuple[float, float]`), eps (`float`): decay rates and epsilon of AdamW.
        ranks ([`~torch.distributed.ProcessGroup`], *optional*): the ranks that train these parameters; all by default.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = MOMENTUM,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ranks: dist.ProcessGroup | None = None,
    ):
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self._ranks = ranks
        rest = [group for group in self.param_groups if not group["use_muon"]]
        # AdamW shares the group dictionaries and the state, so that schedulers and checkpoints see one optimizer.
        # AdamW's constructor adds its own settings to the groups.
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True) if rest else None

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._adamw is not None:
            # Share the groups and the state again: `load_state_dict` replaces them by new objects.
            self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        for group in self.param_groups:
            if group["use_muon"]:
                self._step_muon(group)
        return loss

    def _step_muon(self, group: dict[str, Any]):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        # Nesterov momentum: look ahead from the buffers, which already hold these gradients.
        directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        torch._foreach_add_(parameters, parameters, alpha=-group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            by_shape[parameter.shape].append(index)
        for shape, indices in by_shape.items():
            scale = 0.2 * math.sqrt(max(shape[-2:]))
            at_a_time = max(1, MAX_ELEMENTS // shape.numel()) * num_ranks(self._ranks)
            for start in range(0, len(indices), at_a_time):
                part = indices[start : start + at_a_time]
                updates = orthogonalize_together([directions[index] for index in part], self._ranks)
                torch._foreach_add_([parameters[index] for index in part], updates, alpha=-group["lr"] * scale)


def num_ranks(ranks: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(ranks) if dist.is_initialized() else 1


def orthogonalize_together(matrices: list[torch.Tensor], ranks: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """
    Orthogonalize matrices that all ranks have: each rank takes its share, and all ranks gather the results. Sharded
    matrices are gathered before, and each rank keeps its shards of the results.

    Args:
        matrices (`list` of `torch.Tensor` of one shape `(..., rows, columns)`): all ranks pass the same ones.
        ranks ([`~torch.distributed.ProcessGroup`], *optional*): these ranks; all by default.

    Returns:
        `list[torch.Tensor]`: the results of [`orthogonalize`], in the dtype and sharding of `matrices`.
    """
    # `full_tensor` is a collective: all ranks gather the matrices in the same order.
    whole = [matrix.full_tensor() if isinstance(matrix, DTensor) else matrix for matrix in matrices]
    size, rank = num_ranks(ranks), dist.get_rank(ranks) if dist.is_initialized() else 0
    share = math.ceil(len(whole) / size)
    # The last ranks may repeat the last matrix, so that all shares have one size.
    own = torch.stack([whole[min(index, len(whole) - 1)] for index in range(rank * share, (rank + 1) * share)])
    # (share, ..., rows, columns) -> (number of matrices, rows, columns), and back
    # The results for tall matrices are transposed views, which gloo gathers and NCCL refuses.
    updates = orthogonalize(own.flatten(0, -3)).view(own.shape).contiguous()
    if size > 1:
        gathered = updates.new_empty(share * size, *own.shape[1:])
        dist.all_gather_into_tensor(gathered, updates, group=ranks)
        updates = gathered
    return [_like(update, matrix) for update, matrix in zip(updates.to(own.dtype), matrices, strict=False)]


def _like(update: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Keep this rank's shard of an update that all ranks have, if the matrix is sharded."""
    if not isinstance(matrix, DTensor):
        return update
    mesh = matrix.device_mesh
    whole = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, matrix.placements)


def deepspeed_muon(
    groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """
    Return DeepSpeed's Muon for the groups of [`muon_parameter_groups`]. ZeRO cuts matrices into flat partitions, and
    only DeepSpeed's own implementation can reassemble them.

    DeepSpeed scales updates by `sqrt(max(1, rows / columns))`. The learning rate of each group corrects this to our
    scale, and its weight decay is divided by the same factor.
    """
    # Import here: the import compiles kernels, and runs without DeepSpeed must not wait for that.
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    # NOTE: DeepSpeed's standard iteration computes in bfloat16 on every CPU, which is slow without bfloat16 units. Its
    # "gram" iteration computes in float32 where there are no float16 units.
    ns_method = "standard" if has_bfloat16_units(get_accelerator().device_name()) else "gram"

    of_deepspeed: list[dict[str, Any]] = []
    for group in groups:
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
        if not group["use_muon"]:
            of_deepspeed.append({**group, "betas": betas, "eps": eps})
            continue
        by_columns: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            by_columns[whole_shape(parameter)[-1]].append(parameter)
        for columns, parameters in by_columns.items():
            # 0.2 * sqrt(columns) * sqrt(max(1, rows / columns)) = 0.2 * sqrt(max(rows, columns))
            scale = 0.2 * math.sqrt(columns)
            own = {"params": parameters, "lr": group["lr"] * scale, "weight_decay": group["weight_decay"] / scale}
            of_deepspeed.append({**group, **own, "momentum": MOMENTUM, "ns_method": ns_method})
    return MuonWithAuxAdam(of_deepspeed)


def build_muon(model: nn.Module, args: TrainingArguments, *, uses_deepspeed: bool) -> torch.optim.Optimizer:
    """Return the Muon optimizer of a run; under DeepSpeed, DeepSpeed's own. Raise `UserError` for an adapter."""
    if is_adapted(model):
        raise UserError("--optim_preset muon trains no adapters. Pass --optim_preset adamw with --use_peft.")
    groups = muon_parameter_groups(model, learning_rate=args.learning_rate, weight_decay=args.weight_decay)
    adamw: dict[str, Any] = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if not uses_deepspeed:
        return Muon(groups, lr=args.learning_rate, **adamw)
    optimizer = deepspeed_muon(groups, **adamw)
    # NOTE: DeepSpeed's class has no defaults, and some schedules of transformers read the learning rate there.
    optimizer.defaults["lr"] = args.learning_rate
    return optimizer


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """
    Return approximations of the nearest orthogonal matrices. Five steps of a Newton-Schulz iteration bring the
    singular values to between about 0.7 and 1.2 (https://kellerjordan.github.io/posts/muon/).

    Args:
        matrices (`torch.Tensor` of shape `(num_matrices, rows, columns)`): matrices of any float dtype.

    Returns:
        `torch.Tensor` of shape `(num_matrices, rows, columns)`: bfloat16 where the device has bfloat16 units, else
        float32.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    states = matrices.to(torch.bfloat16 if has_bfloat16_units(matrices.device.type) else torch.float32)
    if is_tall:
        # The Gram matrix of the shorter side is smaller.
        states = states.mT
    # The iteration converges for singular values up to 1, and the Frobenius norm bounds them. With the clamp, a zero
    # matrix stays zero.
    states = states / torch.linalg.matrix_norm(states, keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_NEWTON_SCHULZ_STEPS):
        # a * X + (b * XX' + c * (XX')^2) X, in two fused products.
        gram = states @ states.mT
        states = torch.baddbmm(states, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), states, beta=a)
    return states.mT if is_tall else states


def prepare_deepspeed_muon(config: dict[str, Any], args: Any) -> None:
    """Set what DeepSpeed's Muon needs in the config of a run, and refuse what it cannot follow."""
    for block in config.keys() & {"optimizer", "scheduler"}:
        # NOTE: DeepSpeed's schedulers give all groups one learning rate, and Muon's matrices need their own.
        raise UserError(
            f"The `{block}` block of the DeepSpeed config would override Muon, the optimizer of this run. "
            "Remove the block, or pass --optim_preset adamw."
        )
    clipping = config.get("gradient_clipping", 0.0)
    limit = args.max_grad_norm if clipping == "auto" else clipping
    if limit:
        # NOTE: DeepSpeed overwrites the gradients with Muon's updates before it computes their norm. Clipping would
        # therefore shrink the updates.
        raise UserError(
            f"DeepSpeed would clip Muon's updates instead of the gradients, at {limit:g}. Leave --max_grad_norm "
            'out, and set `gradient_clipping` to "auto" in the DeepSpeed config; or pass --optim_preset adamw.'
        )
    if config["zero_optimization"].get("stage") == 3:
        # NOTE: under ZeRO-3, DeepSpeed's Muon refuses reduce-scatter.
        config["zero_optimization"]["reduce_scatter"] = False
    # NOTE: with an offloaded optimizer, accelerate would replace Muon by DeepSpeed's Adam for CPUs.
    config["zero_force_ds_cpu_optimizer"] = False


class OptimizerPreset(NamedTuple):
    """
    A value of `--optim_preset`.

    Args:
        learning_rate (`float`): its default peak rate of pretraining at width 192. It was the best one of the preset
            `tiny` (docs/performance.md).
        max_grad_norm (`float`): its default clipping; 0 for none.
        build (`Callable`, *optional*): returns the optimizer of a run; `None` for the optimizer of `--optim`.
        prepare_deepspeed (`Callable`, *optional*): sets what it needs in a DeepSpeed config, and refuses the rest.
    """

    learning_rate: float
    max_grad_norm: float
    build: Callable[..., torch.optim.Optimizer] | None = None
    prepare_deepspeed: Callable[[dict[str, Any], Any], None] | None = None


def describe_own_optimizer(arguments: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """
    Return the class and the settings of an optimizer that the user passes to a trainer, or `None` without one.

    Args:
        arguments (`dict`): may hold `optimizers` and `optimizer_cls_and_kwargs`, as [`~transformers.Trainer`] takes
            them.
    """
    optimizer, chosen = (arguments.get("optimizers") or (None,))[0], arguments.get("optimizer_cls_and_kwargs")
    if optimizer is not None:
        groups = enumerate(optimizer.param_groups)
        settings = {
            f"group {i}": {name: group[name] for name in sorted(group.keys() - {"params"})} for i, group in groups
        }
        return type(optimizer).__name__, settings
    return None if chosen is None else (chosen[0].__name__, chosen[1])


def check_optimizer(args: TrainingArguments) -> None:
    """Raise `UserError` if the optimizer of `--optim` needs a package, or `--optim_args` another optimizer."""
    if args.optim_args and OPTIMIZERS[args.optim_preset].build is not None:
        fix = "Leave it out, or pass --optim_preset adamw"
        raise UserError(
            f"--optim_args {args.optim_args} has no effect with --optim_preset {args.optim_preset}. {fix}."
        )
    try:
        # GaLore and others raise `ValueError` without a model.
        with suppress(ValueError):
            Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise UserError(f"--optim {args.optim.value}: {error}") from error


OPTIMIZERS = {
    "adamw": OptimizerPreset(2e-3, TrainingArguments.max_grad_norm),
    # Muon's updates have the same size however large the gradients are, so it needs no clipping.
    "muon": OptimizerPreset(8e-3, 0.0, build_muon, prepare_deepspeed_muon),
}
