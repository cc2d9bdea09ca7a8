"""Tell local paths from names on the Hub."""

import re
from pathlib import Path


_WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".gguf")


def is_path(name: str | Path) -> bool:
    """Whether `name` can only be a local path, be it there or not; anything else may be a Hub id."""
    text = str(name)
    if Path(text).exists():
        return True
    repo_id, file = split_hub_name(text)
    return file is None and (
        text.startswith((".", "/", "~")) or text.endswith(_WEIGHT_SUFFIXES) or repo_id.count("/") > 1
    )


def split_hub_name(name: str) -> tuple[str, str | None]:
    """The Hub id in `owner/name:full_sft_512.pth`, and the file in it; `None` where no file is named."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+):([\w./ -]+)", name)
    return (match[1], match[2]) if match else (name, None)


def may_be_checkpoint(name: str | Path) -> bool:
    """Whether `name` is a directory, or may be a Hub id: only there are configs and tokenizers looked for."""
    return Path(name).is_dir() or not (is_path(name) or split_hub_name(str(name))[1])


__all__ = ["is_path", "may_be_checkpoint", "split_hub_name"]
