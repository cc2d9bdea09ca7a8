"""Find weight files of other programs, and read them without running their code."""

import json
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..runtime.errors import UserError
from ..runtime.json_files import read_json
from ..runtime.names import is_path, split_hub_name
from .package_models import find_gguf


# Rotary tables and attention masks that some versions saved. This package computes them, so skip them.
_BUFFERS = re.compile(r"(pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq|attention\.mask)$")
# In the order of precedence.
_STANDARD_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def resolve(path: str | Path) -> Path:
    """
    Return the local path of `path`. If it is a Hub id, or a file in a repository (`owner/name:file`), download it.

    Raises:
        `UserError`: if there is neither a local path nor such a repository.
    """
    local = find_gguf(path) or Path(path).expanduser()
    if local.exists():
        return local
    repo_id, file = split_hub_name(str(path))
    if is_path(path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise UserError(f"{path}: no such file or directory. A Hub id is owner/name, or owner/name:file.pth.")
    try:
        found = Path(snapshot_download(repo_id, allow_patterns=_needed(repo_id, file)), file or "")
    # JSON: something else than a Hub answers.
    except (OSError, HTTPError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is neither a file or directory here nor a model on the Hub: {error}") from error
    if not found.exists():
        raise UserError(f"{repo_id} holds no file {file}.")
    return found


def _needed(repo_id: str, file: str | None) -> list[str] | None:
    """Return patterns of the files to download: the weights of one model, and the small files."""
    if constants.HF_HUB_OFFLINE:
        return None
    if file is not None:
        # The config beside the file gives the fields that no shape shows.
        return [file, (Path(file).parent / "config.json").as_posix()]
    # List the files first: a repository may hold many models, and a run's repository holds checkpoints in folders.
    names = [name for name in HfApi().list_repo_files(repo_id) if "/" not in name]
    stem, suffix = choose_weights(names, f"{repo_id}:").removesuffix(".index.json").rsplit(".", 1)
    # The names of the shards of `model.safetensors.index.json` begin with `model`.
    weights = [name for name in names if name.startswith(stem) and name.endswith(suffix)]
    return [*weights, *(name for name in names if name.endswith((".json", ".jinja")))]


def choose_weights(names: Collection[str], prefix: str) -> str:
    """
    Return the file that holds the weights of a directory, or that lists their shards.

    Args:
        names (`Collection[str]`): the names of the files in the directory.
        prefix (`str`): text before a file name that makes it a name a user can pass, for messages.

    Raises:
        `UserError`: if there is none, or if there are several that may be different models.
    """
    found = [name for name in _STANDARD_NAMES if name in names][:1]
    # Each .pth may be a different model. Trainer's checkpoints hold the states of random number generators, too.
    found += sorted(name for name in names if name.endswith(".pth") and not name.startswith("rng_state"))
    if not found:
        raise UserError(f"{prefix[:-1]} must hold model.safetensors, pytorch_model.bin or a .pth; it holds none.")
    if len(found) > 1:
        several = f"{prefix[:-1]} holds several files of weights ({', '.join(found)})"
        raise UserError(f"{several}: name one, such as {prefix}{found[-1]}.")
    return found[0]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """
    Return all tensors of a file or directory: safetensors, shards, pytorch_model.bin, or one `.pth`.

    The names come without the prefixes of `torch.compile` and DDP, and without computed buffers.

    Raises:
        `UserError`: if a file is missing, ambiguous or damaged, or holds anything but tensors; if a tensor does not
            hold floats.
    """
    if path.is_dir():
        path = path / choose_weights([file.name for file in path.iterdir() if file.is_file()], f"{path}/")
    files = [path]
    if path.name.endswith(".index.json"):
        files = [path.with_name(shard) for shard in sorted(set(read_json(path)["weight_map"].values()))]
    tensors: dict[str, torch.Tensor] = {}
    for full_name, tensor in (item for file in files for item in _read_file(file).items()):
        # Both prefixes may occur, in either order.
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", full_name)
        if _BUFFERS.search(name):
            continue
        if not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            raise UserError(f"{path}: {name} is no floating-point tensor; a plain state dict is expected.")
        tensors[name] = tensor
    return tensors


def _read_file(path: Path) -> dict[str, Any]:
    """Return the content of one file. Pickles are read with `weights_only=True`, which runs no code."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # torch does not compare the checksums in its zip archives.
        damaged = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None
        content = {} if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and zipfile raise many types for files of something else
        raise UserError(
            f"{path} is not a file of weights, or is damaged, and was refused before any code in it ran. Download it "
            "again (`git lfs pull` for a Git LFS pointer), or ask for a plain state dict, best as safetensors."
        ) from error
    if damaged:
        raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong. Download or copy it again.")
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no state dict: a dictionary of names and tensors is expected.")
    # MiniMind's own resume files hold the model's state dict under `model`, beside the optimizer's.
    return content["model"] if isinstance(content.get("model"), dict) else content
