"""
Checkpoints of models in shards, and what every stage does with a model and its optimizer.

Of models that transformers shards while it loads them (`--fsdp_size`, FSDP2), Trainer saves the weights and refuses the
rest. Here the optimizer's state is gathered by names of parameters, whole on one rank, so that any number of processes can
go on from it.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from ..weights.adapters import base_model_of
from .optimizers import Muon, deepspeed_muon, muon_parameter_groups, optimizer_name


logger = logging.get_logger(__name__)


class ShardedCheckpointMixin(Trainer):
    """
    A `Trainer` that saves and resumes what transformers sharded, compiles the layers (`--torch_compile`) and trains with
    Muon (`--optim_preset`), whatever the stage.
    """

    # Of the optimizer's groups.
    _weight_decays: list[float | None] = []

    def __init__(self, *args: Any, **kwargs: Any):
        model, training_args = kwargs.get("model", args[0] if args else None), kwargs.get("args")
        is_resumable = (
            getattr(model, "is_distributed_loading_by_transformers", False)
            and training_args is not None
            and not training_args.save_only_model
        )
        if is_resumable:
            # Trainer's constructor refuses what is mended here.
            training_args.save_only_model = True
        super().__init__(*args, **kwargs)
        if is_resumable:
            training_args.save_only_model = False
        if self.is_deepspeed_enabled:
            self._check_deepspeed_config(self.accelerator.state.deepspeed_plugin.hf_ds_config.config)
        if getattr(self.args, "compiles_layers", False):
            for layer in base_model_of(self.model).model.layers:
                layer.compile(**self.args.compile_options)

    def create_accelerator_and_postprocess(self) -> None:
        # NOTE: with bf16, accelerate's FSDP2 casts the inputs of every layer: the loss's divisors, its weights and the
        # rotary table. With this policy parameters, inputs and the reduction of gradients stay float32; autocast
        # computes in bf16, as under every other launcher.
        given = self.args.fsdp_plugin_args
        if given is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            self.args.fsdp_plugin_args = (given or {}) | {"mixed_precision_policy": MixedPrecisionPolicy()}
            version = str(self.args.fsdp_plugin_args.get("fsdp_version", os.environ.get("FSDP_VERSION", "1")))
            if version != "2":
                raise ValueError(
                    f"FSDP version {version} is not supported. Write `fsdp_version: 2` into the accelerate config, as "
                    "recipes/accelerate_configs/fsdp2.yaml does."
                )
        super().create_accelerator_and_postprocess()

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        # NOTE: accelerate wraps every model in autocast but those of FSDP2, for which it relies on the casting policy.
        if self.is_fsdp_enabled:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def _check_deepspeed_config(self, config: dict[str, Any]):
        """Warns of blocks that override the recipe's flags; refuses an optimizer that offloading would replace."""
        for block in ("optimizer", "scheduler"):
            if block in config:
                logger.warning(
                    f"The DeepSpeed config has a `{block}` block: it overrides --optim, --learning_rate and "
                    "--lr_scheduler_type of this run. Remove the block to let the recipe decide."
                )
        offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
        optimizer = optimizer_name(self.args)
        if optimizer == "muon":
            if "optimizer" in config or offload != "none" or config.get("zero_optimization", {}).get("stage", 0) == 3:
                raise ValueError(
                    "--optim_preset muon needs whole matrices and its own optimizer: not possible with ZeRO-3, offloading, or "
                    "an `optimizer` block in the DeepSpeed config. Use ds_configs/zero2.json, or --fsdp_size."
                )
            if self.args.max_grad_norm:
                # NOTE: it writes the updates over the gradients before their norm is taken, and clipping shrinks them.
                raise ValueError(
                    "DeepSpeed's Muon would clip its updates instead of the gradients: pass --max_grad_norm 0 with "
                    "--optim_preset muon."
                )
            return
        if offload != "none" and "optimizer" not in config and not optimizer.startswith(("adamw_torch", "adagrad")):
            # NOTE: accelerate's map_pytorch_optim_to_deepspeed takes DeepSpeedCPUAdam for whatever else it is given.
            raise ValueError(
                f"With an offloaded optimizer accelerate would replace --optim {optimizer} by Adam without a word. "
                "Use --optim adamw_torch, or a config that does not offload (ds_configs/zero2.json)."
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=options)
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights: dict[str, Any] = {}
        for path in sorted(Path(resume_from_checkpoint).glob("*.safetensors")):
            weights |= load_file(path)
        # A tied head is not in the file.
        options = StateDictOptions(full_state_dict=True, strict=False)
        result = set_model_state_dict(self.model, weights, options=options)
        missing = set(result.missing_keys) - set(self.model._tied_weights_keys or {})
        if missing or result.unexpected_keys:
            raise ValueError(
                f"{resume_from_checkpoint} lacks {sorted(missing)}, has too many: {result.unexpected_keys}."
            )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # NOTE: a tied head is not in the file, and Trainer would warn that it is missing.
        model = base_model_of(self.model)
        tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def create_optimizer(self, model: Any = None):
        if self.optimizer is None and optimizer_name(self.args) == "muon":
            optimizer_class = deepspeed_muon if self.is_deepspeed_enabled else Muon
            self.optimizer = optimizer_class(
                muon_parameter_groups(model or self.model, weight_decay=self.args.weight_decay),
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        optimizer = super().create_optimizer(model)
        # A DeepSpeed config's own optimizer has no groups yet.
        self._weight_decays = [group.get("weight_decay") for group in getattr(optimizer, "param_groups", ())]
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_deepspeed_enabled and self._weight_decays:
            # NOTE: of a universal checkpoint, ZeRO-3 gives every group the weight decay of the first one, and all the
            # same counter of steps, which each of them would advance.
            for group, weight_decay in zip(self.optimizer.param_groups, self._weight_decays, strict=True):
                if weight_decay is not None:
                    group["weight_decay"] = weight_decay
            optimizer = self.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            for state in optimizer.state.values():
                if torch.is_tensor(state.get("step")):
                    state["step"] = state["step"].clone()
        if not self.is_distributed_loading_by_transformers or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state, schedule = (
            torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        self.lr_scheduler.load_state_dict(schedule)
        if state["state"]:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=options)
            return
        # NOTE: of an optimizer without state (SGD), torch cannot tell the device; its rates are all that there is.
        for group, learning_rate in zip(self.optimizer.param_groups, schedule["_last_lr"], strict=True):
            group["lr"] = learning_rate


__all__ = ["ShardedCheckpointMixin"]
