"""
Save and load what a checkpoint holds beside the model, in one form for all launchers: optimizer, schedule and loss
scale (`checkpoints/optimizer_state.py`). All ranks must call these functions.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import SCALER_NAME, TRAINER_STATE_NAME
from transformers.utils import logging

from ..checkpoints import optimizer_state, whole_weights, zero_state
from ..checkpoints.directory import checkpoint_path
from ..checkpoints.manifest import find_damage
from ..runtime.ranks import on_main_process
from ..weights.weight_files import read_json


if TYPE_CHECKING:
    from .base_trainer import RunTrainer

logger = logging.get_logger(__name__)


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


def restore_best(trainer: "RunTrainer", checkpoint: str) -> None:
    """
    Choose the best checkpoint anew by the log of a resumed run. The recorded one may belong to another metric, and its
    path to another working directory or an earlier place of the run.
    """
    state, args = trainer.state, trainer.args
    if not args.load_best_model_at_end:
        return
    key, sign = f"eval_{args.metric_for_best_model.removeprefix('eval_')}", 1 if args.greater_is_better else -1
    values = _evaluations(state.log_history, key)
    # Of equal values, the first one is the best.
    steps = sorted(values, key=lambda step: sign * values[step], reverse=True)
    # A run that resumed into another directory left its best checkpoint in the old one.
    places = [Path(path).parent for path in (checkpoint, state.best_model_checkpoint) if path is not None]

    def find() -> tuple[int | None, str | None]:
        for step, path in ((step, checkpoint_path(place, step)) for step in steps for place in places):
            if path.is_dir() and not find_damage(path):
                # Another run may have left a checkpoint of this step there.
                log = read_json(path / TRAINER_STATE_NAME)["log_history"]
                if _evaluations(log, key).get(step) == values[step]:
                    return step, str(path)
        return None, None

    state.best_global_step, state.best_model_checkpoint = on_main_process(args, find)
    state.best_metric = values.get(state.best_global_step)
    if steps and state.best_global_step != steps[0]:
        logger.warning(
            f"Step {steps[0]} has the best {key}, {values[steps[0]]:.4g}, but its checkpoint is gone or damaged. "
            f"--load_best_model_at_end chooses from {state.best_model_checkpoint or 'the next evaluations'} on."
        )


def _evaluations(log: list[dict[str, Any]], key: str) -> dict[int, float]:
    """Return the finite values of a figure of the log by their steps."""
    return {entry["step"]: entry[key] for entry in log if key in entry and math.isfinite(entry[key])}
