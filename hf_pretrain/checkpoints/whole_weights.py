"""Gather and load the whole weights of a model that a launcher has sharded. All ranks must call these functions."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ..loading.adapters import base_model_of, is_adapted
from ..runtime.errors import UserError
from ..runtime.named import load_named
from . import zero_state


def gather_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights of a model that FSDP2 shards, on the CPU of the first rank. Other ranks get none."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_weights(directory: str | Path, model: Any, *, engine: Any = None) -> None:
    """
    Load the safetensors files of a checkpoint into a model that FSDP2, tensor parallelism or DeepSpeed has wrapped.

    Args:
        directory (`str` or `Path`): the checkpoint.
        model ([`~transformers.PreTrainedModel`] or peft model): the model.
        engine (`deepspeed.DeepSpeedEngine`, *optional*): the engine around it.

    Raises:
        `UserError`: if tensors are missing or unexpected. A tied head is not in the files.
    """
    # Every rank reads the whole checkpoint, and keeps its shards.
    read = load_named("hf_pretrain.weights.adapted_model:read_adapter") if is_adapted(model) else None
    weights = read(directory, base_model_of(model)) if read else {}
    for path in () if weights else sorted(Path(directory).glob("*.safetensors")):
        weights |= load_file(path)
    # NOTE: `set_model_state_dict` reports no missing tensors: it keeps the model's own values in their place.
    names = _names_in_files(model)
    # A tied output head shares the embedding's tensor, which safetensors stores once.
    missing = names.keys() - weights.keys() - base_model_of(model).all_tied_weights_keys.keys()
    unexpected = weights.keys() - names.keys()
    if missing or unexpected:
        raise UserError(
            f"{directory} does not fit the model: missing {sorted(missing)}, unexpected {sorted(unexpected)}."
        )
    weights = {names[name]: weight for name, weight in weights.items()}
    if engine is not None:
        zero_state.load_weights(engine, weights)
    else:
        options = StateDictOptions(full_state_dict=True, strict=not is_adapted(model))
        set_model_state_dict(model, weights, options=options)


def _names_in_files(model: Any) -> dict[str, str]:
    """Return the names of a model's tensors by their names in files. peft shortens those of an adapter."""
    names = list(model.state_dict())
    if not is_adapted(model):
        return dict(zip(names, names, strict=True))
    from peft import get_peft_model_state_dict

    # peft renames the keys of any state: here, one of their numbers.
    numbers = {name: torch.tensor(number) for number, name in enumerate(names)}
    numbers = get_peft_model_state_dict(model, state_dict=numbers, save_embedding_layers=False)
    return {name: names[number] for name, number in numbers.items()}
