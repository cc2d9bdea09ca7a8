"""Weight files of other programs: find them, read them without running their code, and check every value."""

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
from huggingface_hub.errors import HTTPError
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

from ..runtime.errors import UserError
from ..runtime.names import is_path, split_hub_name


logger = logging.get_logger(__name__)


# Rotary tables and attention masks that some versions saved. This package computes them, so skip them.
_BUFFERS = re.compile(r"(pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq|attention\.mask)$")
_STANDARD_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# First bytes, in lower case, of files that users often mistake for weights.
_NO_WEIGHTS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file itself. Run `git lfs pull`, or download the file.",
    b"<!doctype": "is a web page, not the file itself. Download the file by its `resolve` link.",
    b"<html": "is a web page, not the file itself. Download the file by its `resolve` link.",
    b"gguf": "is a GGUF file, which cannot be read. Convert the .pth or safetensors file that it was made from.",
}


def resolve(path: str | Path) -> Path:
    """
    Return the local path of `path`. If it is a Hub id, or a file in a repository (`owner/name:file`), download it.

    Raises:
        `ValueError`: if there is neither a local path nor such a repository.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    repo_id, file = split_hub_name(str(path))
    if is_path(path) or not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise UserError(f"{path}: no such file or directory. A Hub id is owner/name, or owner/name:file.pth.")
    try:
        folder = snapshot_download(repo_id, allow_patterns=_needed(repo_id, file))
    except (OSError, HTTPError) as error:
        try:
            # There is no network, or the Hub refuses. An earlier run may have downloaded the files.
            folder = snapshot_download(repo_id, local_files_only=True)
        except (OSError, HTTPError):
            raise UserError(f"{path} is neither a file or directory here nor a model on the Hub: {error}") from error
    if file is not None and not Path(folder, file).is_file():
        raise UserError(f"{repo_id} holds no file {file}.")
    return Path(folder, file) if file else Path(folder)


def _needed(repo_id: str, file: str | None) -> list[str]:
    """Return the patterns of the files to download: the weights of one model, and the small files."""
    if file is not None:
        # The config beside the file gives the fields that no shape shows.
        return [file, (Path(file).parent / "config.json").as_posix()]
    # List the files first: a repository may hold many models, and downloading all of them would take long.
    names = [sibling.rfilename for sibling in HfApi().model_info(repo_id).siblings or []]
    # A run's repository holds whole checkpoints in folders. Only the finished model lies at the top.
    names = [name for name in names if "/" not in name]
    weights = choose_weights(names, f"{repo_id}:")
    small = [name for name in names if name.endswith((".json", ".jinja"))]
    is_index = weights.endswith(".json")
    return small + (_shard_names(Path(hf_hub_download(repo_id, weights))) if is_index else [weights])


def choose_weights(names: Collection[str], prefix: str) -> str:
    """
    Return the file that holds the weights of a directory, or that lists their shards.

    Args:
        names (`Collection[str]`): the names of the files in the directory.
        prefix (`str`): text before a file name that makes it a name a user can pass, for messages.

    Raises:
        `ValueError`: if there is none, or if there are several that may be different models.
    """
    found = [name for name in _STANDARD_NAMES if name in names]
    # Standard names have this order of precedence. Each .pth may be a different model, so there must be only one.
    # Trainer's checkpoints also hold the states of the random number generators (rng_state*.pth).
    found_pth = sorted(name for name in names if name.endswith(".pth") and not name.startswith("rng_state"))
    if not found and not found_pth:
        raise UserError(f"{prefix[:-1]} must hold model.safetensors, pytorch_model.bin or a .pth; it holds none.")
    if len(found_pth) > 1 or (found and found_pth):
        several = ", ".join(found + found_pth)
        raise UserError(
            f"{prefix[:-1]} holds several files of weights ({several}): name one, such as {prefix}{found_pth[0]}."
        )
    if len(found) > 1:
        logger.warning(f"{prefix[:-1]}: reading {found[0]} and ignoring {', '.join(found[1:])}.")
    return (found + found_pth)[0]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise `ValueError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file that can be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return content


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """
    Return all tensors of a file or directory: safetensors, shards, pytorch_model.bin, or one `.pth`.

    The names come without the prefixes of `torch.compile` and DDP, and without computed buffers.

    Raises:
        `ValueError`: if a file is missing, ambiguous or damaged, or holds anything but tensors; if a tensor does not
            hold floats, or is not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    for full_name, tensor in _read_all(path).items():
        # Both prefixes may occur, in either order.
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", full_name)
        if _BUFFERS.search(name):
            continue
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UserError(
                f"{path}: {name} has the dtype {tensor.dtype}; only floating-point weights can be converted."
            )
        # Check here: otherwise a NaN in a weight would show only in the first loss of a run.
        if not tensor.isfinite().all():
            raise UserError(f"{path}: {name} holds values that are not finite (saved in float16 and overflowed?).")
        # "module.x" and "x" become the same name, and nothing tells which of the two is right.
        if name in tensors:
            raise UserError(
                f"{path} holds {name} twice, with and without a prefix such as module. Delete one of them."
            )
        tensors[name] = tensor
    # MiniMind's own adapters have ".lora." in the names of tensors, and peft's have "lora_A".
    adapters = [name for name in tensors if ".lora." in name]
    if adapters:
        raise UserError(
            f"{path} holds a LoRA adapter of MiniMind ({adapters[0]}), not a model, and cannot be converted. Merge it "
            "into its base model with MiniMind's own code, and convert the merged file."
        )
    return tensors


def check_shards(name_or_path: str | Path) -> None:
    """
    Raise `ValueError` if an index names shards outside of its directory or repository. transformers would read them.
    """
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
    """Return the shards that an index names. Raise `ValueError` unless all of them lie beside it."""
    weight_map = read_json(index).get("weight_map")
    # The index may come from the network, and "../../x" in it would read files outside of the directory.
    shards = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not shards or any(Path(shard).name != shard for shard in shards):
        raise UserError(f"{index} must name files beside it, and names {shards or 'none'}.")
    return shards


def _read_all(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, of a directory, or of the shards in an index."""
    if path.is_dir():
        path = path / choose_weights([file.name for file in path.iterdir() if file.is_file()], f"{path}/")
    if not path.name.endswith(".index.json"):
        return _read_file(path)
    shards = _shard_names(path)
    missing = [shard for shard in shards if not path.with_name(shard).is_file()]
    if missing:
        raise UserError(f"{path.parent} lacks the shard(s) {', '.join(missing)} that {path.name} names.")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        # If two shards hold a tensor, one may be an older version. Choosing one of them would be a guess.
        part = _read_file(path.with_name(shard))
        twice = sorted(part.keys() & tensors.keys())
        if twice:
            raise UserError(
                f"{path.parent}: {twice[0]} stands in {shard} and in a shard before it. Save the model again."
            )
        tensors |= part
    return tensors


def check_content(path: Path) -> None:
    """Raise `ValueError` if the first bytes or the checksums of a file show that it cannot hold weights."""
    with path.open("rb") as file:
        head = file.read(64)
    # An interrupted download may leave an empty file, for which every reader has another error.
    if not head:
        raise UserError(f"{path} is empty. Download or copy it again.")
    for beginning, what in _NO_WEIGHTS.items():
        if head.lstrip().lower().startswith(beginning):
            raise UserError(f"{path} {what}")
    # A .pth or .bin file of torch is a zip archive, with a checksum for every entry.
    if not head.startswith(b"PK"):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path} is damaged: {error}. Download or copy it again.") from error
    if damaged is not None:
        raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong. Download or copy it again.")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in one file. Pickles are read with `weights_only=True`, which runs no code."""
    try:
        check_content(path)
        if path.suffix == ".safetensors":
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read, or is damaged: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # NOTE: torch's restricted unpickler begins its messages with these words. For a file that is not a pickle at
        # all, torch may raise any error.
        refused = re.search(r"(?:Unsupported|Trying to|Can only)[^\n]*", str(error))
        if refused is None or not isinstance(error, pickle.UnpicklingError):
            reason = str(error).partition("\n")[0].partition("(1)")[0].strip()
            raise UserError(f"{path} is not a file of weights, or is damaged: {reason}") from error
        raise UserError(
            f"{path} holds more than tensors and was refused before any of its code ran. Ask for a file with a plain "
            f"state dict, best as safetensors. ({refused[0]})"
        ) from error
    # MiniMind's own resume files hold the model's state dict under `model`, beside the optimizer's.
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    # Check the types: an optimizer's state is a dictionary, too.
    is_tensor = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    )
    if not is_tensor:
        raise UserError(f"{path} holds no state dict: a dictionary of names and tensors is expected.")
    return content


__all__ = [
    "check_content",
    "check_shards",
    "choose_weights",
    "read_json",
    "read_tensors",
    "resolve",
]
