"""
Native directories: checkpoints that this package wrote, and the copies that `weights.localizing` makes of other
programs' models.

A copy also holds `origin.json`, which tells where its weights come from.
"""

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.json_files import read_json
from ..runtime.named import load_named
from ..runtime.names import may_be_checkpoint


ORIGIN_NAME = "origin.json"
# The sampling of chats where the model has no values of its own.
DEFAULT_SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.0}


def own_sampling(config: GenerationConfig) -> dict[str, Any]:
    """Return those of the settings of `DEFAULT_SAMPLING` that a model has of its own."""
    return {name: value for name in DEFAULT_SAMPLING if (value := getattr(config, name)) is not None}


def is_native_checkpoint(path: str | Path) -> bool:
    """Return whether `path`, a directory or Hub id, holds a checkpoint that this package wrote."""
    if not may_be_checkpoint(path):
        return False
    try:
        return "format_version" in MiniMindConfig.get_config_dict(path)[0]
    except OSError:
        # There is no such repository, or it has no config.json.
        return False


def localize(name: str, *, config: dict[str, Any] | None = None) -> str:
    """
    Return the native directory (or Hub id) of a model that any name names. Another program's model gets a copy, as
    [`~weights.localizing.make_native`] describes.
    """
    if is_native_checkpoint(name):
        return name
    return load_named("hf_pretrain.weights.localizing:make_native")(name, config)


def load_native_checkpoint(path: str | Path, *, name: str = "", **loading: Any) -> MiniMindForCausalLM:
    """
    Load a checkpoint that this package wrote. Unlike `from_pretrained`, initialize no tensor that is missing.

    Args:
        path (`str` or `Path`): a native directory or Hub id.
        name (`str`): of what a copy is: adapters name their base so.
        **loading: for `from_pretrained`.

    Raises:
        `UserError`: if a tensor is missing, unexpected, of another shape or not finite, or if a file is damaged.
    """
    # transformers ignores a damaged one, and with it the stop tokens.
    if (settings := Path(path, GENERATION_CONFIG_NAME)).is_file():
        read_json(settings)
    origin = read_json(Path(path, ORIGIN_NAME)) if Path(path, ORIGIN_NAME).is_file() else {}
    source: Any = path
    if "weights" in origin:
        # The copy holds no weights, because they are large.
        weights = load_named("hf_pretrain.weights.importing:load_upstream")(**origin["weights"]).state_dict()
        loading, source = {"config": MiniMindConfig.from_pretrained(path), "state_dict": weights} | loading, None
    try:
        # Without `ignore_mismatched_sizes`, transformers raises on the first wrong shape. We report all of them.
        loading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = MiniMindForCausalLM.from_pretrained(source, **loading)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} has no readable weights: {error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} has weights that are a pickle of more than tensors. No code in it ran.") from error
    complaint = f"{path} does not fit its config"
    check_names(complaint, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    if not origin:
        # The values of a copy were checked when it was written.
        check_finite(model, path)
    else:
        # Of MiniMind's own files there are no models in transformers that peft could load.
        name_base(model, name if origin["is_published"] else "", half_split=origin["half_split"])
    if source is None:
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def name_base(model: MiniMindForCausalLM, name: str, *, half_split: bool) -> None:
    """Set the name by which an adapter of a model finds it, and the order of rows in the adapter's files."""
    # `from_pretrained(None, ...)` has set the name "None".
    model.name_or_path = model.config._name_or_path = name
    model.half_split_adapters = half_split


def check_finite(model: MiniMindForCausalLM, path: str | Path):
    """Raise `UserError` if a parameter holds a value that is not finite."""
    # NOTE: under ZeRO-3 every parameter is empty here and passes. There, only the first loss shows a NaN.
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            fix = "The file is damaged, or use --dtype bfloat16 or float32 for large values"
            raise UserError(f"{path}: {name} holds values that are not finite in {parameter.dtype}. {fix}.")


def check_names(complaint: str, missing: Collection[str], unexpected: Collection[str], misshapen: Collection[tuple]):
    """
    Raise `UserError` for tensors that are missing, unexpected or of another shape, and name five of each. `misshapen`
    holds names, shapes, and the shapes that they should have.
    """
    shapes = [f"{name} is {tuple(found)} and should be {tuple(shape)}" for name, found, shape in misshapen]
    problems = []
    for kind, names in {"missing": missing, "unexpected": unexpected, "of another shape": shapes}.items():
        first = ", ".join(sorted(names)[:5])
        problems += [f"{len(names)} {kind}: {first}{'...' if len(names) > 5 else ''}"] if names else []
    if problems:
        raise UserError(f"{complaint}. Tensors {'; '.join(problems)}.")
