"""
Choose the optimizer of a run, and the defaults that depend on it: the learning rate and the clipping.

`choose_optimizer` runs in the constructor of the training arguments. `keep_optimizer` runs once the checkpoint to
resume from is known. Both read only what all ranks share, so all ranks choose the same optimizer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..checkpoints.manifest import MANIFEST_NAME, read_manifest
from ..runtime.errors import UserError
from ..weights.adapters import AdapterArguments, adapter_base
from ..weights.model_arguments import UNKNOWN_WIDTH, ModelArguments
from .deepspeed_support import check_deepspeed_optimizer, refill_deepspeed_config
from .optimizers import default_learning_rate


if TYPE_CHECKING:
    from .arguments import LMTrainingArguments

# The arguments whose defaults depend on the optimizer.
_DEPENDENT = ("learning_rate", "max_grad_norm")


def choose_optimizer(args: "LMTrainingArguments") -> None:
    """
    Set `optim`, `optim_preset`, `learning_rate` and `max_grad_norm` where the user left them out.

    Without `optim_preset`, the optimizer is the one of `optim` if the user names it, and otherwise the default of the
    stage. `args.left_out` has the names of the arguments that the user left out.

    Raises:
        `ValueError`: for `--optim_preset muon` together with another `--optim`.
    """
    args.left_out = {name for name in ("optim", "optim_preset", *_DEPENDENT) if getattr(args, name) is None}
    is_optim_given = args.optim is not None
    if not is_optim_given:
        args.optim = TrainingArguments.default_optim
    elif args.optim_preset == "muon" and args.optim != TrainingArguments.default_optim:
        raise UserError(f"--optim {args.optim} and --optim_preset muon exclude each other: leave one of them out.")
    if args.optim_preset is None:
        args.optim_preset = "adamw" if is_optim_given else args.default_optim_preset
    _complete(args)


def keep_optimizer(args: "LMTrainingArguments", others: Iterable[Any], *, checkpoint: str | None) -> None:
    """
    Keep the optimizer, the learning rate and the clipping of the checkpoint to resume from, where the user left them
    out. Train new and loaded adapters with AdamW.

    Args:
        args ([`LMTrainingArguments`]): the run's training arguments.
        others (dataclasses): the run's other arguments. The learning rate follows from the width of their model.
        checkpoint (`str`, *optional*): the checkpoint to resume from. Without a manifest, it counts as one of AdamW.

    Raises:
        `ValueError`: for Muon with an adapter, or with a DeepSpeed config that Muon cannot follow.
    """
    run: dict[str, Any] = {}
    if checkpoint is not None and Path(checkpoint, MANIFEST_NAME).exists():
        run = read_manifest(checkpoint)["run"]
    if "optim_preset" in args.left_out and args.optim_preset == "muon" and checkpoint is not None:
        if run.get("optimizer") != "muon":
            args.optim_preset = "adamw"
            # The optimizer may also be another one of `--optim`.
            args.optim = OptimizerNames(run.get("optimizer", args.optim))
    elif checkpoint is None and any(_trains_adapter(other) for other in others):
        use_adamw_for_adapter(args)
    models = [other for other in others if isinstance(other, ModelArguments)]
    _complete(args, run.get("settings", {}), *(model.hidden_size for model in models))
    refill_deepspeed_config(args)
    if args.deepspeed_plugin is not None:
        check_deepspeed_optimizer(args.deepspeed_plugin.deepspeed_config, args)


def use_adamw_for_adapter(args: "LMTrainingArguments") -> None:
    """Choose AdamW instead of Muon for an adapter. Raise `ValueError` for `--optim_preset muon`."""
    if args.optim_preset != "muon":
        return
    if "optim_preset" not in args.left_out:
        raise UserError("--optim_preset muon is not possible, because the run trains an adapter. Leave it out.")
    args.optim_preset = "adamw"
    _complete(args)


def _complete(
    args: "LMTrainingArguments", settings: dict[str, Any] | None = None, hidden_size: int = UNKNOWN_WIDTH
) -> None:
    """
    Set the arguments that depend on the optimizer, unless the user gave them. The values of `settings` win, and
    `hidden_size` is the width of the model.
    """
    # Muon's updates have the same size however large the gradients are, so it needs no clipping.
    is_muon = args.optim_preset == "muon"
    defaults = {
        "learning_rate": default_learning_rate(args.optim_preset, hidden_size),
        "max_grad_norm": 0.0 if is_muon else TrainingArguments.max_grad_norm,
    }
    for name in args.left_out.intersection(_DEPENDENT):
        setattr(args, name, (settings or {}).get(name, defaults[name]))


def _trains_adapter(arguments: Any) -> bool:
    """Return whether the dataclass asks for a new adapter, or names an adapter as the model to train."""
    if isinstance(arguments, AdapterArguments):
        return arguments.use_peft
    return isinstance(arguments, ModelArguments) and adapter_base(arguments.model_name_or_path) is not None


__all__ = ["choose_optimizer", "keep_optimizer", "use_adamw_for_adapter"]
