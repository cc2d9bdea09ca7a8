"""
LoRA files of MiniMind (`lora_identity_768.pth`): merge them into a base model, and write them from peft adapters.

MiniMind adapts every square projection with rank 16, and adds `B(A(x))` without a factor. Its file holds the matrices
`A` `(rank, hidden_size)` and `B` `(hidden_size, rank)` of each projection, in the layout of its weights.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..loading.adapters import adapter_base, load_adapter, merge_adapter
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.writing import LOCK_NAME, written_whole
from .comparing import ExportReport, compare
from .exporting import DTYPES, to_stock_model, upstream_file_name
from .importing import load_upstream
from .layouts import LAYOUTS, stock_layout, upstream_layout
from .weight_files import read_tensors, resolve


RANK = 16


def load_merged(
    source: str, *, base: str | None = None, config: Mapping[str, Any] | str | None = None, dtype: str | None = None
) -> tuple[MiniMindForCausalLM, ExportReport | None]:
    """
    Return the model at `source` in eval mode: weights, an adapter merged into its base model, or the model `base` with
    a LoRA file of MiniMind. For an adapter, also return the difference of the merge from the unmerged model.

    Args:
        config: as in [`~weights.importing.load_upstream`].
        dtype (`str`, *optional*): the dtype to export. A merge is computed in float32, and rounded to the dtype of the
            base model only if this is not given.
    """
    if base is not None:
        return merge_upstream_lora(load_upstream(base, config=config), source).eval(), None
    adapted_base = adapter_base(source)
    model = load_upstream(adapted_base or source, config=config)
    if adapted_base is None:
        return model, None
    base_dtype, model = model.dtype, model.float()
    # If possible, the unmerged model is transformers' own, in which no row is reordered.
    layout = stock_layout(model.config)
    is_stock = model.half_split_adapters and LAYOUTS[layout].half_split
    reference = load_adapter(to_stock_model(model, layout) if is_stock else copy.deepcopy(model), source).eval()
    merged = merge_adapter(load_adapter(model, source)).eval()
    report = compare(merged, reference, path=f"The merge of {source}", format="merged", dtype="float32", is_exact=True)
    return merged if dtype else merged.to(base_dtype), report


def merge_upstream_lora(base: MiniMindForCausalLM, path: str | Path) -> MiniMindForCausalLM:
    """
    Add a LoRA file of MiniMind to the weights of a model, in place and in float32.

    Raises:
        `UserError`: for tensors that do not belong to a LoRA of this model.
    """
    tensors = read_tensors(resolve(path))
    # The query and key rows follow the generation that the names belong to, whatever the base came from.
    layout = LAYOUTS["v1" if any(name.startswith("layers.") for name in tensors) else "v3"]
    weights = {layout.name(name): (name, weight) for name, weight in base.float().state_dict().items()}
    for name in [name for name in tensors if name.endswith(".lora.A.weight")]:
        stem = name.removesuffix(".lora.A.weight")
        a, b = tensors.pop(name).float(), tensors.pop(f"{stem}.lora.B.weight", torch.empty(0, 0)).float()
        ours, weight = weights.get(f"{stem}.weight", ("", torch.empty(0)))
        if b.shape[1] != len(a) or (len(b), a.shape[1]) != weight.shape:
            sizes = f"adapts a matrix {len(b)} x {a.shape[1]}, and the base has {tuple(weight.shape)}"
            raise UserError(f"{path}: {stem} {sizes}. Name the base model that the LoRA was trained on.")
        weight += layout.join(ours, [b @ a], base.config)
    if tensors:
        raise UserError(f"{path} is no LoRA file of MiniMind: it holds {', '.join(list(tensors)[:3])}.")
    return base


def write_upstream_lora(
    adapter: str | Path, directory: str | Path, *, name: str | None = None, dtype: str | None = None
) -> ExportReport:
    """
    Write an adapter of peft as a LoRA file of MiniMind, read it back, and compare the logits.

    Args:
        adapter (`str` or `Path`): directory or Hub id of the adapter.
        directory (`str` or `Path`): a new or empty directory.
        name (`str`, *optional*): first part of the file's name, such as `lora_identity`; by default `lora`.
        dtype (`str`, *optional*): dtype of the file; by default float32.

    Raises:
        `UserError`: if `adapter` is no adapter, or not of MiniMind's form.
    """
    base, dtype = adapter_base(adapter), dtype or "float32"
    if base is None or dtype not in DTYPES:
        raise UserError(f"--format lora writes an adapter of peft in {', '.join(DTYPES)}, not {adapter} in {dtype}.")
    adapted = load_adapter(load_upstream(base, dtype=torch.float32), adapter)
    config = adapted.get_base_model().config
    tensors = _to_upstream(adapted, str(adapter))
    with written_whole(directory, lock=LOCK_NAME) as aside:
        file = aside / upstream_file_name(config, name or "lora")
        torch.save({name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}, file)
        merged = merge_upstream_lora(load_upstream(base), file).eval()
        names = {"path": directory, "format": "MiniMind's LoRA", "dtype": dtype}
        return compare(merge_adapter(adapted).eval(), merged, **names, is_exact=dtype == "float32")


def _to_upstream(adapted: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return MiniMind's tensors of an adapter. MiniMind loads no other projections and no other rank."""
    from peft.tuners.lora import LoraLayer

    model = adapted.get_base_model()
    layout = LAYOUTS[upstream_layout(model.config)]
    parts = {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}
    linear = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear = {path.removesuffix(".base_layer"): linear[path] for path in linear if ".lora_" not in path}
    square = [path for path, module in linear.items() if module.in_features == module.out_features]
    has_rank = all(part.r == {"default": RANK} for part in parts.values())
    if parts.keys() != set(square) or not has_rank or adapted.peft_config["default"].use_dora:
        targets = " ".join(dict.fromkeys(path.rpartition(".")[2] for path in square))
        flags = f"`--lora_r {RANK} --lora_target_modules {targets}` and without --use_dora"
        raise UserError(f"{name} is not of the form of MiniMind's LoRA. Train with {flags}, or merge the adapter.")
    tensors: dict[str, torch.Tensor] = {}
    for path, part in parts.items():
        b = part.lora_B["default"].weight * part.scaling["default"]
        ((theirs, b),) = layout.split(f"{path}.weight", b.detach(), model.config)
        stem = theirs.removesuffix("weight")
        tensors |= {f"{stem}lora.A.weight": part.lora_A["default"].weight.detach(), f"{stem}lora.B.weight": b}
    return tensors
