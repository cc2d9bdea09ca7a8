"""
Files of weights that somebody else wrote: found, read without running anything of them, and checked value by value.
"""

import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)

from ..runtime.names import is_path, split_hub_name


logger = logging.get_logger(__name__)


# Rotary tables and masks that some versions saved: computed, never read.
_BUFFERS = re.compile(r"(pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq|attention\.mask)$")
_STANDARD_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# What is often found in place of weights, by its first bytes in lower case.
_NO_WEIGHTS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself. Run `git lfs pull`, or download the file.",
    b"<!doctype": "is a web page, not the file itself. Download the file by its `resolve` link.",
    b"<html": "is a web page, not the file itself. Download the file by its `resolve` link.",
    b"gguf": "is a GGUF file, which is not read here. Convert the .pth or safetensors that it was made of.",
}


def resolve(path: str | Path) -> Path:
    """
    A local path; that of a Hub id, or of one file in it (`owner/name:file`), is where the files needed are downloaded to.

    Raises:
        `ValueError`: where there is neither.
    """
    local = Path(path)
    if local.exists():
        return local
    repo_id, file = split_hub_name(str(path))
    if is_path(path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise ValueError(f"{path}: no such file or directory. A Hub id is owner/name, or owner/name:file.pth.")
    try:
        folder = snapshot_download(repo_id, allow_patterns=_needed(repo_id, file))
    except OSError as error:
        raise ValueError(
            f"{path} is neither a file or directory here nor a model that the Hub gives: {error}"
        ) from error
    if file is not None and not Path(folder, file).is_file():
        raise ValueError(f"{repo_id} holds no file {file}.")
    return Path(folder, file) if file else Path(folder)


def _needed(repo_id: str, file: str | None) -> list[str]:
    """The files of a Hub id that are read: one model's weights, and what is small."""
    if file is not None:
        return [file, (Path(file).parent / "config.json").as_posix()]
    try:
        names = [sibling.rfilename for sibling in HfApi().model_info(repo_id).siblings or []]
    except Exception:
        # Clients of HTTP differ in their errors. The download says what is wrong, or finds what it got before.
        return []
    # Whole checkpoints of a run lie in folders.
    names = [name for name in names if "/" not in name]
    weights = choose_weights(names, f"{repo_id}:")
    small = [name for name in names if name.endswith((".json", ".jinja"))]
    is_index = weights.endswith(".json")
    return small + (_shard_names(Path(hf_hub_download(repo_id, weights))) if is_index else [weights])


def choose_weights(names: Collection[str], prefix: str) -> str:
    """
    Which of the files in a directory holds the weights, or lists their shards.

    Args:
        names: of the files.
        prefix (`str`): what makes a name one that a user can give, for messages.

    Raises:
        `ValueError`: for none, or for several that may be different models.
    """
    found = [name for name in _STANDARD_NAMES if name in names]
    # Trainer's checkpoints keep the state of random numbers beside the weights.
    found_pth = sorted(name for name in names if name.endswith(".pth") and not name.startswith("rng_state"))
    if not found and not found_pth:
        raise ValueError(f"{prefix[:-1]} should hold model.safetensors, pytorch_model.bin or a .pth; it holds none.")
    if len(found_pth) > 1 or (found and found_pth):
        several = ", ".join(found + found_pth)
        raise ValueError(
            f"{prefix[:-1]} holds several files of weights ({several}): name one, such as {prefix}{found_pth[0]}."
        )
    if len(found) > 1:
        logger.warning(f"{prefix[:-1]}: taking {found[0]}, leaving {', '.join(found[1:])} aside.")
    return (found + found_pth)[0]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ValueError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """
    All tensors of a file, or of a directory's: safetensors, shards, pytorch_model.bin, one `.pth`. Names come without
    the prefixes of `torch.compile` and DDP; computed buffers are left out.

    Raises:
        `ValueError`: for what is missing, ambiguous, damaged, more than tensors, not of floats or not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    for full_name, tensor in _read_all(path).items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", full_name)
        if _BUFFERS.search(name):
            continue
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ValueError(f"{path}: {name} is of {tensor.dtype}; only float weights can be converted.")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds values that are not finite (saved in float16 and overflowed?).")
        if name in tensors:
            raise ValueError(
                f"{path} holds {name} twice, with and without a prefix such as module. Delete one of them."
            )
        tensors[name] = tensor
    adapters = [name for name in tensors if ".lora." in name]
    if adapters:
        raise ValueError(
            f"{path} holds a LoRA adapter of MiniMind ({adapters[0]}), not a model. These cannot be converted yet: merge "
            "it into its base with MiniMind's own code, and convert the merged file."
        )
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
    weight_map = read_json(index).get("weight_map")
    shards = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not shards or any(Path(shard).name != shard for shard in shards):
        raise ValueError(f"{index} must name files beside it, and names {shards or 'none'}.")
    return shards


def _read_all(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        path = path / choose_weights([file.name for file in path.iterdir() if file.is_file()], f"{path}/")
    if not path.name.endswith(".index.json"):
        return _read_file(path)
    shards = _shard_names(path)
    missing = [shard for shard in shards if not path.with_name(shard).is_file()]
    if missing:
        raise ValueError(f"{path.parent} lacks the shard(s) {', '.join(missing)} that {path.name} names.")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = _read_file(path.with_name(shard))
        twice = sorted(part.keys() & tensors.keys())
        if twice:
            raise ValueError(
                f"{path.parent}: {twice[0]} stands in {shard} and in a shard before it. Which one is right?"
            )
        tensors |= part
    return tensors


def check_content(path: Path) -> None:
    """Raises `ValueError` for a file that cannot hold weights, by its first bytes, or whose checksums are wrong."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ValueError(f"{path} is empty. Download or copy it again.")
    for beginning, what in _NO_WEIGHTS.items():
        if head.lstrip().lower().startswith(beginning):
            raise ValueError(f"{path} {what}")
    if not head.startswith(b"PK"):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Download or copy it again.") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} is wrong. Download or copy it again.")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        check_content(path)
        if path.suffix == ".safetensors":
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read, or is damaged: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Of a file that is no pickle at all, torch raises whatever its bytes happen to mean.
        refused = re.search(r"(?:Unsupported|Trying to|Can only)[^\n]*", str(error))
        if refused is None or not isinstance(error, pickle.UnpicklingError):
            reason = str(error).partition("\n")[0].partition("(1)")[0].strip()
            raise ValueError(f"{path} is not a file of weights, or is damaged: {reason}") from error
        raise ValueError(
            f"{path} holds more than tensors and was refused before anything of it ran. Ask for a file with a plain "
            f"state dict, best as safetensors. ({refused[0]})"
        ) from error
    # MiniMind's own resume files keep the state dict beside the optimizer's.
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    is_tensor = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    )
    if not is_tensor:
        raise ValueError(f"{path} holds no state dict: a dictionary of names and tensors is expected.")
    return content


__all__ = [
    "check_content",
    "check_shards",
    "choose_weights",
    "read_json",
    "read_tensors",
    "resolve",
]
