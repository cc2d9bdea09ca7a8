"""
Variants of pretraining for `benchmarks/learning.py`: the default without one of its ingredients (`--leave_out`), and
the default with an idea from public training records (`--candidates`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.model import experts, loss
from hf_pretrain.training.optimizers import MOMENTUM, muon_parameter_groups


Z_LOSS = 1e-4


@dataclass
class Variant:
    """
    What a run does instead of the default or in addition to it.

    Args:
        fields (`Callable`, *optional*): takes the width of the model and returns fields of the config.
        settings (`dict`, *optional*): training arguments.
        replacements (`dict`, *optional*): dotted names of the package, and what they stand for instead.
        prepare_model (`Callable`, *optional*): changes the new model.
        follow_optimizer (`Callable`, *optional*): takes the optimizer, the model and the number of steps, and
            registers hooks on the optimizer.
    """

    fields: Callable[[int], dict[str, Any]] = lambda width: {}
    settings: dict[str, Any] = field(default_factory=dict)
    replacements: dict[str, Any] = field(default_factory=dict)
    prepare_model: Callable[[MiniMindForCausalLM], None] = lambda model: None
    follow_optimizer: Callable[[torch.optim.Optimizer, torch.nn.Module, int], None] | None = None


class OptimizerFollower(TrainerCallback):
    """Callback that calls `follow` with the optimizer of the run, before the first step."""

    def __init__(self, follow: Callable[[torch.optim.Optimizer, torch.nn.Module, int], None]):
        self.follow = follow

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.follow(getattr(optimizer, "optimizer", optimizer), model, state.max_steps)


@torch.no_grad()
def scale_residual_branches(model: MiniMindForCausalLM) -> None:
    """Start the last matrix of each residual branch as GPT-2 does: divided by `sqrt(2 * number of layers)`."""
    config: MiniMindConfig = model.config
    for module in model.modules():
        if getattr(module, "ends_residual_branch", False):
            module.weight.normal_(std=config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)


def cautious_weight_decay(optimizer: torch.optim.Optimizer, model: torch.nn.Module, max_steps: int) -> None:
    """Decay only the weights that the update moves towards zero (https://arxiv.org/abs/2510.12402)."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    before: list[list[torch.Tensor]] = []

    def keep_weights(optimizer, args, kwargs):
        before[:] = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def decay(optimizer, args, kwargs):
        for group, olds, weight_decay in zip(optimizer.param_groups, before, decays, strict=True):
            for parameter, old in zip(group["params"], olds, strict=True):
                towards_zero = (old - parameter) * old > 0
                parameter.sub_(group["lr"] * weight_decay * old * towards_zero)

    optimizer.register_step_pre_hook(keep_weights)
    optimizer.register_step_post_hook(decay)


def decaying_weight_decay(optimizer: torch.optim.Optimizer, model: torch.nn.Module, max_steps: int) -> None:
    """Reduce the weight decay to zero along a line."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    steps = iter(range(max_steps))

    def decay(optimizer, args, kwargs):
        share = 1 - next(steps) / max_steps
        for group, weight_decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = weight_decay * share

    optimizer.register_step_pre_hook(decay)


def warm_up_momentum(optimizer: torch.optim.Optimizer, model: torch.nn.Module, max_steps: int) -> None:
    """Raise Muon's momentum along a line, from the default to 0.95."""
    steps = iter(range(max_steps))

    def raise_momentum(optimizer, args, kwargs):
        momentum = MOMENTUM + (0.95 - MOMENTUM) * next(steps) / max_steps
        for group in optimizer.param_groups:
            group["momentum"] = momentum

    optimizer.register_step_pre_hook(raise_momentum)


def average_last_weights(optimizer: torch.optim.Optimizer, model: torch.nn.Module, max_steps: int) -> None:
    """End with the mean of the weights after each of the last 10% of the steps."""
    average = AveragedModel(model)
    steps = iter(range(1, max_steps + 1))

    @torch.no_grad()
    def update(optimizer, args, kwargs):
        step = next(steps)
        if step > 0.9 * max_steps:
            average.update_parameters(model)
        if step == max_steps:
            model.load_state_dict(average.module.state_dict())

    optimizer.register_step_post_hook(update)


def cross_entropy_with_z_loss(hidden_states, weight, labels, *, loss_mask=None, num_items_in_batch=None):
    """
    Compute the loss of training, plus `Z_LOSS` times the squared logarithm of the softmax's denominator
    (https://arxiv.org/abs/2204.02311, section 5).
    """
    cross_entropy = loss.linear_masked_cross_entropy(
        hidden_states, weight, labels, loss_mask=loss_mask, num_items_in_batch=num_items_in_batch
    )
    if not torch.is_grad_enabled():
        return cross_entropy
    weights = F.pad(loss.prediction_weights(labels, loss_mask)[:, 1:], (0, 1))
    squares = (hidden_states @ weight.T).float().logsumexp(-1).square()
    divisor = weights.sum() if num_items_in_batch is None else num_items_in_batch
    return cross_entropy + Z_LOSS * (squares * weights).sum() / divisor


def float32_router(self: experts.MiniMindTopKRouter, hidden_states: torch.Tensor):
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits, weights, indices = route(self, hidden_states.float())
    return logits, weights.to(hidden_states.dtype), indices


def with_vector_rate(factor: float) -> Callable[..., list[dict[str, Any]]]:
    """Return a `muon_parameter_groups` that multiplies the learning rate of vectors (the weights of norms)."""

    def groups(model, **kwargs):
        result = muon_parameter_groups(model, **kwargs)
        for group in result:
            if all(parameter.ndim < 2 for parameter in group["params"]):
                group["lr"] *= factor
        return result

    return groups


route = experts.MiniMindTopKRouter.forward

# What the default of pretraining adds to plain Muon, and what a run without it does.
INGREDIENTS: dict[str, Variant] = {
    "zero init": Variant(fields=lambda width: {"zero_init_residual": False}),
    "lower momentum": Variant(replacements={"hf_pretrain.training.optimizers.MOMENTUM": 0.95}),
    "embedding rate": Variant(replacements={"hf_pretrain.training.optimizers.embedding_factor": lambda width: 1.0}),
}

CANDIDATES: dict[str, Variant] = {
    "warmup-stable-decay": Variant(settings={"lr_scheduler_type": "warmup_stable_decay"}),
    "initializer_range of 1 / sqrt(width)": Variant(fields=lambda width: {"initializer_range": width**-0.5}),
    "initializer_range of 0.05": Variant(fields=lambda width: {"initializer_range": 0.05}),
    "scaled residual branches": Variant(
        fields=lambda width: {"zero_init_residual": False}, prepare_model=scale_residual_branches
    ),
    "QK norm": Variant(fields=lambda width: {"qk_norm": True}),
    "cautious weight decay": Variant(follow_optimizer=cautious_weight_decay),
    "decaying weight decay": Variant(follow_optimizer=decaying_weight_decay),
    "momentum warm-up": Variant(follow_optimizer=warm_up_momentum),
    "averaged weights": Variant(follow_optimizer=average_last_weights),
    "z-loss": Variant(
        replacements={"hf_pretrain.model.modeling_minimind.linear_masked_cross_entropy": cross_entropy_with_z_loss}
    ),
    "half the rate for vectors": Variant(
        replacements={"hf_pretrain.training.optimizers.muon_parameter_groups": with_vector_rate(0.5)}
    ),
    "twice the rate for vectors": Variant(
        replacements={"hf_pretrain.training.optimizers.muon_parameter_groups": with_vector_rate(2)}
    ),
    "float32 router": Variant(replacements={"hf_pretrain.model.experts.MiniMindTopKRouter.forward": float32_router}),
}
