"""
Save and load what a checkpoint holds beside the model, in one form for all launchers: optimizer, schedule and loss
scale (`checkpoints/optimizer_state.py`). All ranks must call these functions.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import SCALER_NAME

from ..checkpoints import optimizer_state, whole_weights, zero_state


if TYPE_CHECKING:
    from .base_trainer import RunTrainer


def zero_engine(trainer: "RunTrainer") -> Any:
    """Return DeepSpeed's engine if ZeRO partitions the state of the optimizer, otherwise `None`."""
    is_zero = trainer.is_deepspeed_enabled and trainer.model_wrapped.zero_optimization()
    return trainer.model_wrapped if is_zero else None


def keeps_state_on_disk(trainer: "RunTrainer") -> bool:
    """Return whether ZeRO-Infinity swaps the state of the optimizer to a disk. Only DeepSpeed can save it then."""
    engine = zero_engine(trainer)
    return engine is not None and getattr(engine.optimizer, "swap_optimizer", False)


def _parts(trainer: "RunTrainer") -> tuple[Any, Any, Any]:
    """Return model, optimizer and schedule without the wrappers of accelerate and DeepSpeed."""
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    return trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer.optimizer, scheduler


def save_state(trainer: "RunTrainer", directory: str) -> None:
    """Write optimizer, schedule and, under ZeRO, the loss scale into a checkpoint."""
    engine, is_writer = zero_engine(trainer), trainer.args.should_save
    optimizer_state.save_optimizer(directory, *_parts(trainer), engine=engine, is_writer=is_writer)
    if engine is not None and is_writer and (scale := zero_state.loss_scale(engine)) is not None:
        torch.save(scale, Path(directory, SCALER_NAME))


def load_state(trainer: "RunTrainer", checkpoint: str) -> bool:
    """
    Load what [`save_state`] wrote under any launcher, and under DeepSpeed and FSDP the weights. Return whether the
    settings of the parameter groups were loaded, too.
    """
    engine, scale = zero_engine(trainer), Path(checkpoint, SCALER_NAME)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        load_weights(trainer, checkpoint)
    if scale.is_file():
        scaler = trainer.accelerator.scaler if engine is None else engine.optimizer.loss_scaler
        # Another precision has none, or a static one.
        if isinstance(scaler, torch.amp.GradScaler) or getattr(scaler, "dynamic", False):
            zero_state.load_loss_scale(scaler, torch.load(scale, weights_only=True))
    return optimizer_state.load_optimizer(checkpoint, *_parts(trainer), engine=engine)


def load_weights(trainer: "RunTrainer", checkpoint: str) -> None:
    """Load the weights of a checkpoint into a wrapped or sharded model."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    whole_weights.load_weights(checkpoint, model, engine=zero_engine(trainer))
