"""
Native copies of other programs' models: what the rest of the package reads in place of a GGUF file, a model of the
package index, or weights of MiniMind's code or of transformers.

A copy is a directory as this package writes it, with the dtype of the source, its tokenizer and `origin.json`. It lies
in `HF_HOME/hf_pretrain/native`, and its name has digests of the path of the source, and of the sizes and times of the
source's files and the code of the conversion. To find it, a start reads no weights. A source that has changed gets a
new copy in place of the old one. Of a model above `LARGEST_BYTES`, the copy holds all but the weights, which each
start reads from the source: such a model takes no second place on the disk.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from transformers.utils import CONFIG_NAME, logging

from ..loading.native import ORIGIN_NAME, is_native_checkpoint
from ..runtime import modelscope
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.names import is_gguf
from ..runtime.writing import locked, written_whole
from ..tokenizer.pretrained import find_tokenizer, save_tokenizer
from .importing import load_upstream
from .upstream_lora import merge_upstream_lora
from .weight_files import resolve


logger = logging.get_logger(__name__)
COPIES = Path(HF_HOME, "hf_pretrain", "native")
LARGEST_BYTES = 4 << 30
_SUFFIXES = {".json", ".safetensors", ".bin", ".pth", ".gguf", ".jinja"}


def make_native(name: str, config: Mapping[str, Any] | None = None, lora: Path | None = None) -> str:
    """
    Return the native directory of a model: its own, or a copy, which the first of the processes that ask writes.

    Args:
        name (`str`): as for [`~weights.importing.load_upstream`], or `modelscope:owner/name`.
        config (`dict`, *optional*): fields of the config that the source lacks.
        lora (`Path`, *optional*): a LoRA file of MiniMind, to merge into the copy.

    Raises:
        `UserError`: if the model cannot be converted.
    """
    if name.startswith(modelscope.PREFIX):
        name = modelscope.download(name, repo_type="model")
    path = resolve(name)
    if lora is None and is_native_checkpoint(path):
        return str(path)
    files = [*(path.iterdir() if path.is_dir() else [path, path.with_name(CONFIG_NAME)]), *filter(None, [lora])]
    stats = {file.name: file.stat() for file in sorted(files) if file.suffix in _SUFFIXES and file.is_file()}
    # A file that replaces another one may keep the time of its content, but not that of its change.
    times = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()]
    code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(__file__).parent.glob("*.py"))]
    origin = [str(path.resolve()), config, *([str(lora.resolve())] if lora else [])]
    stem = f"{path.stem}-{_digest(origin)}"
    directory = COPIES / f"{stem}-{_digest([code, times])}"
    if not (directory / CONFIG_NAME).is_file():
        COPIES.mkdir(parents=True, exist_ok=True)
        # The ranks of a run ask at once.
        with locked(COPIES / f"{stem}.lock", patience_seconds=7200):
            if not (directory / CONFIG_NAME).is_file():
                for old in COPIES.glob(f"{stem}-*"):
                    shutil.rmtree(old, ignore_errors=True)
                _write_copy(name, path, config, directory, lora)
    return str(directory)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _write_copy(name: str, path: Path, config: Mapping[str, Any] | None, directory: Path, lora: Path | None) -> None:
    if not is_gguf(name) and not is_native_checkpoint(path):
        logger.warning(f"{name} was not written by hf_pretrain: converting it.")
    model = load_upstream(name, config=config)
    model = merge_upstream_lora(model, lora) if lora else model
    origin: dict[str, Any] = {"is_published": bool(model.name_or_path), "half_split": model.half_split_adapters}
    size = sum(parameter.nbytes for parameter in model.parameters())
    with written_whole(directory) as scratch:
        if size > LARGEST_BYTES and lora is None:
            announce(f"{name}: its {size / 1e9:.1f} GB of weights are read from there at each start, without a copy")
            origin["weights"] = {"path": str(path.resolve()), "config": config}
            model.config.save_pretrained(scratch)
            model.generation_config.save_pretrained(scratch)
        else:
            announce(f"{name}: writing a native copy of {size / 1e6:,.0f} MB below {COPIES}")
            model.save_pretrained(scratch)
        # Without a tokenizer that can be read, the run names one, or says what is wrong with this one.
        with suppress(UserError):
            if (tokenizer := find_tokenizer(name)) is not None:
                save_tokenizer(tokenizer, scratch)
        (scratch / ORIGIN_NAME).write_text(json.dumps(origin) + "\n", encoding="utf-8")


def copies_bytes() -> int:
    """Return the size of all native copies."""
    return sum(file.stat().st_size for file in COPIES.rglob("*") if file.is_file())


def remove_copies() -> None:
    """Remove all native copies."""
    shutil.rmtree(COPIES, ignore_errors=True)
