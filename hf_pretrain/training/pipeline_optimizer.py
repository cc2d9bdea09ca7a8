"""The optimizer of a run whose layers are spread over processes (`pipeline.py`)."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, get_scheduler
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..checkpoints.optimizer_state import check_names
from ..model.modeling_minimind import MiniMindForCausalLM
from .optimizers import OPTIMIZERS, Muon, complete_schedule, muon_parameter_groups, restore_settings
from .pipeline import Pipeline
from .training_arguments import LMTrainingArguments


class PipelineOptimizer:
    """
    The optimizer of a run and its schedule, for the weights of this rank, with the state of the whole model in
    checkpoints.

    Args:
        model ([`MiniMindForCausalLM`]): the whole model, before its stages are taken.
        args ([`~training.training_arguments.LMTrainingArguments`]): settled arguments.
    """

    def __init__(self, model: MiniMindForCausalLM, args: LMTrainingArguments):
        self.args, self.is_muon = args, OPTIMIZERS[args.optim_preset].build is not None
        names = {parameter: name for name, parameter in model.named_parameters()}
        if self.is_muon:
            rates = {"learning_rate": args.learning_rate, "weight_decay": args.weight_decay}
            groups = muon_parameter_groups(model, **rates)
        else:
            # As Trainer does: vectors, which are norms, have no decay.
            matrices, vectors = ([each for each in names if (each.dim() > 1) is is_in] for is_in in (True, False))
            groups = [
                {"params": matrices, "weight_decay": args.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
        self.groups = [group | {"params": [names[each] for each in group["params"]]} for group in groups]

    def build(self, pipeline: Pipeline, num_steps: int) -> None:
        """Make optimizer and schedule for the weights of a pipeline, over `num_steps` steps."""
        # Fused updates cannot mix split and whole tensors.
        kinds, self.own = (False, True) if pipeline.mesh["tp"].size() > 1 else (False,), []
        self.pipeline, own_groups = pipeline, []
        for number, group in enumerate(self.groups):
            for is_split in kinds:
                weights = {name: pipeline.weights[name] for name in group["params"] if name in pipeline.weights}
                fitting = [name for name, each in weights.items() if isinstance(each, DTensor) == is_split]
                self.own.append((number, fitting if len(kinds) > 1 else list(weights)))
                own_groups.append(group | {"params": [weights[name] for name in self.own[-1][1]]})
        args = self.args
        if self.is_muon:
            adamw = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            ranks = pipeline.ranks_of_stage
            self.optimizer = Muon(own_groups, lr=args.learning_rate, **adamw, ranks=ranks)
        else:
            cls, settings = Trainer.get_optimizer_cls_and_kwargs(args)
            self.optimizer = cls(own_groups, **settings)
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=complete_schedule(args, num_steps),
        )
        self._new_groups = [dict(group) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Update the weights, and then the learning rates. `last_rate` is that of the first group."""
        self.last_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()

    @property
    def _names(self) -> list[str]:
        return [name for _, names in self.own for name in names]

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of optimizer and schedule as those of one process. All ranks call this method."""
        own, settings = self.optimizer.state_dict(), {}
        for (number, _), group in zip(self.own, own["param_groups"], strict=True):
            settings[number] = group | {"params": self.groups[number]["params"]}
        state = self.pipeline.gather({name: own["state"].get(i, {}) for i, name in enumerate(self._names)})
        first = [[number for number, _ in self.own].index(each) for each in settings]
        # The schedule has lists with a value for each group.
        schedule = {
            name: [value[i] for i in first] if isinstance(value, list) else value
            for name, value in self.scheduler.state_dict().items()
        }
        whole = {name: state[name] for group in settings.values() for name in group["params"] if name in state}
        return {"state": whole, "param_groups": list(settings.values())}, schedule

    def load(self, directory: str | Path) -> None:
        """
        Take the whole states of a checkpoint, as [`~checkpoints.optimizer_state.load_optimizer`] does.

        Raises:
            `UserError`: if they belong to another model.
        """
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
        state, schedule = (torch.load(Path(directory, name), **options) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        check_names(state, [name for group in self.groups for name in group["params"]], directory)
        own, numbers = self.optimizer.state_dict()["param_groups"], [number for number, _ in self.own]
        rates = {number: group["initial_lr"] for number, group in zip(numbers, own, strict=True)}
        # Muon has other groups under DeepSpeed.
        fits = list(rates.values()) == [group.get("initial_lr") for group in state["param_groups"]]
        if fits:
            groups = zip(numbers, own, strict=True)
            own = [state["param_groups"][number] | {"params": group["params"]} for number, group in groups]
        loaded = {}
        for i, name in enumerate(self._names):
            weight = self.pipeline.weights[name]
            loaded[i] = {key: _like(value, weight) for key, value in state["state"].get(name, {}).items()}
        self.optimizer.load_state_dict({"state": loaded, "param_groups": own})
        lists = {name: value for name, value in self.scheduler.state_dict().items() if isinstance(value, list)}
        if fits:
            lists = {name: [schedule[name][number] for number in numbers] for name in lists}
        self.scheduler.load_state_dict(schedule | lists)
        if self.args.allow_inexact_resume or not fits:
            restore_settings(self.optimizer, self.scheduler, self._new_groups)


def _like(value: Any, weight: torch.Tensor) -> Any:
    """Split a whole tensor of the state of an optimizer as its weight is split."""
    is_split = isinstance(weight, DTensor) and isinstance(value, torch.Tensor) and value.shape == weight.shape
    return distribute_tensor(value, weight.device_mesh, weight.placements) if is_split else value
