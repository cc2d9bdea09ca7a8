"""
Files of weights that somebody else wrote: found, read without running anything of them, and checked value by value.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file


# Rotary tables and masks that some versions saved: computed, never read.
_BUFFERS = re.compile(r"(pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq|attention\.mask)$")


def resolve(path: str | Path) -> Path:
    """A local path, downloaded if it is a Hub id; raises `ValueError` where there is neither."""
    if Path(path).exists():
        return Path(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith("."):
        patterns = ["*.json", "*.jinja", "*.safetensors", "*.bin", "*.pth"]
        try:
            # Whole checkpoints of a run lie in folders.
            return Path(snapshot_download(str(path), allow_patterns=patterns, ignore_patterns="*/*"))
        except OSError as error:
            raise ValueError(
                f"{path} is neither a file or directory here nor a model that the Hub gives: {error}"
            ) from error
    raise ValueError(f"{path}: no such file or directory.")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ValueError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON file that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """
    All tensors of a file, or of the first of a directory's: safetensors, shards, pytorch_model.bin, one `.pth`. Names
    come without the prefixes of `torch.compile` and DDP; computed buffers are left out.

    Raises:
        `ValueError`: for what is missing, ambiguous, damaged, more than tensors, not of floats or not finite.
    """
    tensors = {}
    for name, tensor in _read_all(path).items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", name)
        if _BUFFERS.search(name):
            continue
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ValueError(f"{path}: {name} is of {tensor.dtype}; only float weights can be converted.")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds values that are not finite (saved in float16 and overflowed?).")
        tensors[name] = tensor
    return tensors


def check_shards(name_or_path: str | Path) -> None:
    """Raises `ValueError` if the shards of a directory or Hub id lie outside of it: transformers would follow."""
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        index = cached_file(
            str(name_or_path),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if index is not None:
            _shard_names(Path(index))


def _shard_names(index: Path) -> list[str]:
    shards = sorted(set(read_json(index).get("weight_map", {}).values()))
    if not shards or any(Path(shard).name != shard for shard in shards):
        raise ValueError(f"{index} must name files beside it, and names {shards or 'none'}.")
    return shards


def _read_all(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file():
        return _read_file(path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return _read_file(path / name)
        index = path / f"{name}.index.json"
        if index.is_file():
            shards = _shard_names(index)
            missing = [shard for shard in shards if not (path / shard).is_file()]
            if missing:
                raise ValueError(f"{path} lacks the shard(s) {', '.join(missing)} that {index.name} names.")
            return {key: value for shard in shards for key, value in _read_file(path / shard).items()}
    candidates = sorted(path.glob("*.pth"))
    if len(candidates) == 1:
        return _read_file(candidates[0])
    found = f"several .pth files ({', '.join(file.name for file in candidates)}): name one" if candidates else "none"
    raise ValueError(f"{path} should hold model.safetensors, pytorch_model.bin or one .pth; it holds {found}.")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and was refused before anything of it ran. Ask for a file with a plain "
            f"state dict, best as safetensors. ({str(error).splitlines()[0]})"
        ) from error
    except (SafetensorError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a file of weights, or is damaged: {error}") from error
    # MiniMind's own resume files keep the state dict beside the optimizer's.
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict: a dictionary of names and tensors is expected.")
    return content


__all__ = ["check_shards", "read_json", "read_tensors", "resolve"]
