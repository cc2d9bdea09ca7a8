"""
A model as a page that runs it in a browser tab: llama.cpp for WebAssembly (https://github.com/ngxson/wllama, MIT)
beside a GGUF file. Any static server shows it.
"""

import hashlib
import json
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..loading.native import DEFAULT_SAMPLING, own_sampling
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..runtime.writing import locked, written_whole
from ..tokenizer.control_tokens import check_chat_template, control_spellings, encode_prompt
from .gguf import FILE_NAME


VERSION = "3.13.0"
# Archives of the npm registry: digest, and names of files there and in the directory. The second one is for Safari
# and older browsers.
ENGINES = {
    "wllama": (
        "a9eaac205ff9a1d6fdbea395a48652bd5febc56511a7b66b736d862bf726d2d5",
        {"esm/index.min.js": "wllama.js", "esm/wasm/wllama.wasm": "wllama.wasm", "LICENCE": "wllama-LICENCE.txt"},
    ),
    "wllama-compat": (
        "4114beb68a61a0ab14ac3fe4416648b45d8a940e2e6aed5fe91eb6328ba6479d",
        {"wasm/wllama.js": "wllama-compat.js", "wasm/wllama.wasm": "wllama-compat.wasm"},
    ),
}
PAGE = Path(__file__).with_name("browser_page")
# Some servers of static files, such as the Hub's, and browsers' caches refuse larger files.
PART_BYTES = 500_000_000
# More positions would take memory for keys and values that a tab may not have.
MOST_POSITIONS = 8192
_QUESTION = [{"role": "user", "content": "Why?"}]


def find_engine(name: str) -> Path:
    """
    Return an archive of `ENGINES` in the cache. If it is not there, download it from the npm registry, or from the
    one that `NPM_CONFIG_REGISTRY` names.

    Raises:
        `UserError`: if the registry cannot be reached, or sends another archive.
    """
    directory = Path(HF_HOME, "hf_pretrain", "engines")
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / f"{name}-{VERSION}.tgz"
    with locked(directory / f"{archive.name}.lock", patience_seconds=600):
        if not archive.is_file():
            registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
            url = f"{registry}/@wllama/{name}/-/{archive.name}"
            announce(f"downloading {url}")
            with written_whole(directory) as scratch:
                try:
                    with urllib.request.urlopen(url, timeout=60) as response:
                        (scratch / archive.name).write_bytes(response.read())
                except (urllib.error.URLError, TimeoutError) as error:
                    raise UserError(f"{url} cannot be downloaded: {error}. Put the file into {directory}.") from error
    if hashlib.sha256(archive.read_bytes()).hexdigest() != ENGINES[name][0]:
        archive.unlink()
        raise UserError(f"{archive} was another archive than that of wllama {VERSION}, and is deleted. Try again.")
    return archive


def check_tokenizer(tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raise `UserError` if a page cannot chat with this tokenizer."""
    if tokenizer is None:
        raise UserError("A page needs the tokenizer of its model. Pass --tokenizer.")
    check_chat_template(tokenizer)


def write_page(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, model_name: str
) -> None:
    """
    Write the page and its engine beside `model.gguf`, and cut that into parts.

    Args:
        directory (`Path`): holds the GGUF file.
        model ([`MiniMindForCausalLM`]): the model, for its settings of the sampling.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): its tokenizer, with a chat template.
        model_name (`str`): the title of the page.
    """
    check_tokenizer(tokenizer)
    (directory / "Modelfile").unlink(missing_ok=True)
    parts = _cut(directory / FILE_NAME)
    for engine, (_, files) in ENGINES.items():
        with tarfile.open(find_engine(engine)) as archive:
            for name, target in files.items():
                source = archive.extractfile(f"package/{name}")
                assert source is not None
                with source, (directory / target).open("wb") as file:
                    shutil.copyfileobj(source, file)
    prompts = {tuple(encode_prompt(tokenizer, _QUESTION, enable_thinking=each)) for each in (True, False)}
    about: dict[str, Any] = {
        "name": model_name,
        "parts": parts,
        "bytes": sum(part["bytes"] for part in parts),
        "engine_bytes": sum((directory / name).stat().st_size for name in ENGINES["wllama"][1].values()),
        "context": min(model.config.max_position_embeddings, MOST_POSITIONS),
        "sampling": DEFAULT_SAMPLING | own_sampling(model.generation_config),
        "thinks": len(prompts) > 1,
        "control_tokens": control_spellings(tokenizer),
    }
    text = json.dumps(about, indent=1, ensure_ascii=False)
    (directory / "model.json").write_text(text + "\n", encoding="utf-8")
    contents = {path: path.read_text(encoding="utf-8") for path in sorted(PAGE.iterdir())}
    # The caches of earlier pages are of no use for another model.
    version = hashlib.sha256("".join([VERSION, text, *contents.values()]).encode()).hexdigest()[:16]
    for path, content in contents.items():
        if path.name == "worker.js":
            content = content.replace("VERSION", version)
        (directory / path.name).write_text(content, encoding="utf-8")


def _cut(path: Path) -> list[dict[str, Any]]:
    """Cut a file into parts of at most `PART_BYTES`, remove it if there are several, and describe them."""
    parts: list[dict[str, Any]] = []
    is_one = path.stat().st_size <= PART_BYTES
    with path.open("rb") as file:
        while piece := file.read(PART_BYTES):
            part = path if is_one else path.with_name(f"{path.name}.{len(parts)}")
            if not is_one:
                part.write_bytes(piece)
            digest = hashlib.sha256(piece).hexdigest()
            parts.append({"name": part.name, "bytes": len(piece), "sha256": digest})
    if not is_one:
        path.unlink()
    return parts
