"""
Read checkpoints of three MiniMind generations, and of the transformers architectures that MiniMind's scripts export.

A [`~weights.layouts.WeightLayout`] describes how a program names and lays out the weights, and
`weights.foreign_configs` translates its config.json. The shapes in the file give the sizes of an empty model. In the
file's layout, the tensors of this empty model must have exactly the names and shapes of the file. This finds every
missing or additional tensor before any value is used.

    tensors in some layout -> sizes from shapes -> MiniMindConfig -> names and shapes compared -> MiniMindForCausalLM
"""

import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ..loading.native import check_finite, check_names, is_native_checkpoint, load_native_checkpoint, name_base
from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError, as_user_errors
from ..runtime.json_files import read_json
from .foreign_configs import merge_fields, read_fields
from .gguf import read_gguf
from .layouts import GENERATIONS, LAYOUTS, describe_layout
from .package_models import package_model
from .weight_files import read_tensors, resolve


logger = logging.get_logger(__name__)
Tensors = dict[str, torch.Tensor]


@as_user_errors()
def load_upstream(
    path: str | Path, *, config: Mapping[str, Any] | str | Path | None = None, dtype: torch.dtype | None = None
) -> MiniMindForCausalLM:
    """
    Load weights of a MiniMind generation, or of a transformers architecture that MiniMind's scripts export.

    Args:
        path (`str` or `Path`): a `.pth` file; a directory with `config.json` and `model.safetensors` (or shards),
            `pytorch_model.bin` or exactly one `.pth`; a GGUF file; a Hub id, or one file in it
            (`owner/name:full_sft_512.pth`); a model of the package index, such as `embedded:smollm2`. The weights may
            be in the layout of v1, v2 or v3, of `llama`, `qwen3`, `qwen3_moe` or `ernie4_5_moe`, or of this package.
        config (`dict` or path of a JSON file, *optional*): fields of config.json, by that program's names or ours.
            They override and complete the config.json in the directory or beside the file.
        dtype (`torch.dtype`, *optional*): the dtype of the model; by default the file's.

    Returns:
        [`MiniMindForCausalLM`] in eval mode, with the same logits and the same router loss.

    Raises:
        `UserError`: if a tensor is missing, unexpected, of another shape or not finite; if a size cannot be inferred
            or contradicts the config; if a pickle holds more than tensors (none of its code is run).
    """
    name, packaged, path = path, package_model(path), resolve(path)
    if is_native_checkpoint(path):
        if config:
            raise UserError(f"{path} was written by hf_pretrain, which saves its config: leave the config out.")
        return load_native_checkpoint(path, dtype=dtype or "auto").eval()
    if isinstance(config, str | Path):
        config = read_json(Path(config))
    if path.suffix == ".gguf":
        tensors, fields, published = read_gguf(path)
    else:
        tensors, fields, published = read_tensors(path), _read_config(path), {}
        if path.is_dir() and (settings := path / GENERATION_CONFIG_NAME).is_file():
            published = read_json(settings)
    raw = merge_fields(fields, config or {})
    layout = _recognise(tensors, raw, path)
    given = read_fields(raw, layout, has_experts=any(".experts." in name for name in tensors))
    inferred = _infer_sizes(tensors, layout, given)
    minimind_config = MiniMindConfig(**given | inferred)
    state_dict = _join(tensors, layout, minimind_config, path)

    # Of several dtypes, take one that rounds no tensor.
    file_dtype = reduce(torch.promote_types, {tensor.dtype for tensor in state_dict.values()})
    # The constructor would first draw random weights. `_join` has compared all names and shapes.
    loading = {"config": minimind_config, "state_dict": state_dict, "dtype": dtype or file_dtype}
    model = MiniMindForCausalLM.from_pretrained(None, **loading).eval()
    # A saved adapter names its base. Of MiniMind's own files there are no models in transformers that peft could load.
    name_base(model, "" if layout in GENERATIONS else str(name), half_split=LAYOUTS[layout].half_split)
    check_finite(model, path)
    # `save_pretrained` writes the dtype of the config, which still holds the one from before the cast.
    model.config.dtype = model.dtype
    if packaged is not None:
        published |= {"do_sample": True, "temperature": packaged.temperature}
        published["repetition_penalty"] = packaged.repetition_penalty
    _take_generation_config(model, published)
    shown = ", ".join(f"{name}={value}" for name, value in (given | inferred).items())
    log = logger.info if path.suffix == ".gguf" else logger.warning
    log(f"{path} was read as {describe_layout(layout)} in {file_dtype}, with {shown}.")
    return model


def _take_generation_config(model: MiniMindForCausalLM, published: dict[str, Any]) -> None:
    """Let a model stop and sample as its publisher says. One that does not sample would pass for a base model."""
    samples = published.get("do_sample") and published.get("temperature") != 0
    names = ["eos_token_id", "repetition_penalty"]
    names += ["do_sample", "temperature", "top_p", "top_k"] if samples else []
    settings = {name: published[name] for name in names if published.get(name) is not None}
    if "top_k" in settings:
        # vLLM writes -1 for all tokens, and transformers 0.
        settings["top_k"] = max(0, int(settings["top_k"]))
    model.generation_config.update(**settings)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields of the config.json in or beside `path`."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    raw = read_json(config) if config.is_file() else {}
    if "format_version" in raw:
        logger.warning(f"{config} belongs to a checkpoint of hf_pretrain, not to {path.name}, and is ignored.")
        return {}
    return raw


def _recognise(tensors: Tensors, raw: dict[str, Any], path: Path) -> str:
    """
    Return the layout of the weights. The names of the tensors tell the generation, the config a transformers
    architecture.
    """
    if "tok_embeddings.weight" in tensors:
        return "v1"
    if all(".lora." in name for name in tensors):
        raise UserError(f"{path} holds a LoRA of MiniMind: convert it with --base and the model that it adapts.")
    if "model.embed_tokens.weight" not in tensors:
        raise UserError(f"{path}: no generation of MiniMind has these names: {', '.join(list(tensors)[:4])}...")
    model_type = raw.get("model_type", "minimind")
    if model_type in LAYOUTS:
        return model_type
    if model_type != "minimind":
        raise UserError(f"{path}: model_type={model_type!r} is not one of minimind, {', '.join(list(LAYOUTS)[3:])}.")
    return "v3" if any(name.endswith("q_norm.weight") for name in tensors) else "v2"


def _infer_sizes(tensors: Tensors, layout: str, given: dict[str, Any]) -> dict[str, Any]:
    """
    Return the sizes that the shapes imply. `_join` compares all names and shapes with them afterwards.

    Raises:
        `UserError`: if a tensor that shows a size is missing or no matrix, or if `given` contradicts.
    """
    name_of = LAYOUTS[layout].name

    def shape(name: str) -> tuple[int, int]:
        tensor = tensors.get(name_of(name), torch.empty(0))
        if tensor.dim() != 2 or tensor.numel() == 0:
            raise UserError(f"The weights lack the matrix {name_of(name)}, which every MiniMind {layout} has.")
        return len(tensor), tensor.shape[1]

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    vocab_size, hidden_size = shape("model.embed_tokens.weight")
    q_rows, k_rows = shape(f"{attention}q_proj.weight")[0], shape(f"{attention}k_proj.weight")[0]
    # The number of rows is heads times head width, so one of the two must come from elsewhere.
    if f"{attention}q_norm.weight" in tensors:
        head_dim = tensors[f"{attention}q_norm.weight"].numel()
    elif "head_dim" in given or "num_attention_heads" in given:
        head_dim = given.get("head_dim") or max(q_rows // given["num_attention_heads"], 1)
    else:
        known = "give num_attention_heads (MiniMind2 has 8, MiniMind-V1 of 2024 has 16)"
        raise UserError(f"The weights do not show the number of heads: {known}.")
    head = tensors.get(name_of("lm_head.weight"))
    is_tied = head is None or head.equal(tensors[name_of("model.embed_tokens.weight")])
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        # If the numbers have a gap, `_join` reports the names.
        "num_hidden_layers": len({match[1] for name in tensors if (match := re.search(r"\blayers\.(\d+)\.", name))}),
        "num_attention_heads": q_rows // head_dim,
        "num_key_value_heads": k_rows // head_dim,
        "head_dim": head_dim,
        "qk_norm": LAYOUTS[layout].has_qk_norm,
        # An output head that equals the embedding may still be untied, so the config decides.
        "tie_word_embeddings": is_tied and given.get("tie_word_embeddings", True),
    }
    experts = {match[1] for name in tensors if (match := re.search(r"layers\.0\..*\bexperts\.(\d+)\.", name))}
    if experts:
        # A file may list shared experts or hold one MLP of their summed width. The sum of rows is the same.
        width = shape(f"{mlp}experts.0.gate_proj.weight")[0]
        shared = [name for name in tensors if re.search(r"layers\.0\..*shared_experts.*(gate_proj|w1)\.", name)]
        sizes |= {
            "num_experts": len(experts),
            "moe_intermediate_size": width,
            "num_shared_experts": sum(tensors[name].shape[:1].numel() for name in shared) // width,
        }
    else:
        sizes["intermediate_size"] = shape(f"{mlp}gate_proj.weight")[0]
    for name, size in sizes.items():
        if given.get(name, size) != size:
            raise UserError(f"The config says {name}={given[name]}, the weights say {size}.")
    return sizes


def _join(tensors: Tensors, layout: str, config: MiniMindConfig, path: Path) -> Tensors:
    """
    Return our state dict. First check that `tensors` has exactly the names and shapes that `layout` has for `config`.
    """
    target = LAYOUTS[layout]
    # A file without an output head has tied embeddings.
    tensors.setdefault(target.name("lm_head.weight"), tensors[target.name("model.embed_tokens.weight")])
    # Ernie adds these biases to the router's scores. MiniMind has none, so one that is not zero is unexpected.
    bias = "moe_statics.e_score_correction_bias"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(bias) or tensor.any()}
    # On the meta device a model of any size costs no memory.
    with torch.device("meta"):
        empty = MiniMindForCausalLM(config).state_dict()
    # Split our own empty model as the file should be split, so that names and shapes compare one to one.
    parts = {ours: dict(target.split(ours, tensor, config)) for ours, tensor in empty.items()}
    expected = {name: tensor.shape for split in parts.values() for name, tensor in split.items()}
    shapes = [(name, tensors[name].shape, shape) for name, shape in expected.items() if name in tensors]
    misshapen = [entry for entry in shapes if entry[1] != entry[2]]
    complaint = f"{path} does not fit {describe_layout(layout)} with the sizes found"
    check_names(complaint, expected.keys() - tensors.keys(), tensors.keys() - expected.keys(), misshapen)
    return {ours: target.join(ours, [tensors[name] for name in split], config) for ours, split in parts.items()}
