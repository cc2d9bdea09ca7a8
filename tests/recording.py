"""
Record what a matrix of toy runs produces, and compare it after a change that may not change any number:

    python -m tests.recording write before.json
    python -m tests.recording compare before.json

It records the losses, a digest of every tensor of every checkpoint, the output, the report, the plan, the card,
exports in each format, and the answers of `generate`, `chat` and `serve`. Two records of one machine and one version
of the libraries are equal, bit for bit.
"""

import difflib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file

from tests.faults.driving import CLOCKS
from tests.invariants.launching import BIN, ROOT, free_port, process_options
from tests.matrix import RESUMED, RUNS, call, launch_of, make_workspace


ANSWERING = ("dense", "llama", "sft", "sft-lora", "sft-published", "dpo")
SERVED = {"sft": "llama.cpp", "sft-lora": "llama.cpp", "llama": "transformers", "moe": "transformers"}
EXPORTS = [("sft", "llama float32"), ("sft", "upstream"), ("sft", "gguf q8_0"), ("sft-lora", "minimind float32")]
EXPORTS += [("sft-published", "minimind"), ("sft-published", "gguf float32")]
EXPORTS += [("pretrain-moe", "minimind bfloat16"), ("moe", "upstream"), ("llama", "minimind"), ("dense", "gguf q4_0")]
# What differs from run to run: times, speeds and memory.
_VARYING = (
    r"\d[\d.,:]* ?(?:s|min|minutes?|seconds?|hours?|tokens/s|[KMG]i?B)\b|\d{4}-\d\d-\d\d[T ][\d:.]+|\d+:\d\d:\d\d"
)
_MARKUP = re.compile(r"<(svg|style|script).*?</\1>|<[^>]*>", re.DOTALL)
_CLOCKS = {*CLOCKS, "step_time", "train_runtime"}
_CLOCKS |= {f"train_{each}_per_second" for each in ("samples", "steps", "tokens")}


def record(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Train the named runs in the workspace at `path`, and return what they produced, by name."""
    found: dict[str, Any] = {}
    for name in names:
        found[name] = _train(path, name)
        stage, launcher, flags = launch_of(name)
        found[name]["plan"] = _call(path, launcher, stage, f"{flags} --dry_run --output_dir {name}-plan")
        if name in RESUMED:
            found[f"{name}-resumed"] = _train(path, f"{name}-resumed")
    for name in ANSWERING:
        if (path / name).is_dir():
            found[f"{name}-answers"] = _answers(path, name)
    for name, engine in SERVED.items():
        if (path / name).is_dir():
            found[f"{name}-served"] = _serve(path, name, engine)
    for name, export in EXPORTS:
        if (path / name).is_dir():
            found[f"{name}-{export}"] = _export(path, name, *export.split())
    return found


def _train(path: Path, name: str) -> dict[str, Any]:
    """Train one run, and return its log, the digests of its tensors, its output and its card."""
    stage, launcher, flags = launch_of(name)
    output = _call(path, launcher, stage, f"{flags} --output_dir {name}")
    state = json.loads((path / name / "trainer_state.json").read_text())
    return {
        "log": [{key: entry[key] for key in sorted(entry) if key not in _CLOCKS} for entry in state["log_history"]],
        "tensors": {
            str(file.relative_to(path)): _digests(file) for file in sorted((path / name).rglob("*.safetensors"))
        },
        "output": output,
        "page": _page(_constant(_text(path / name / "report.html"), path)),
        "card": _constant(_text(path / name / "README.md"), path),
    }


def _page(text: str) -> str:
    """Return the words of a page without its commit and the random end of the run's name."""
    words = re.sub(r"\s+", " ", re.sub(_MARKUP, " ", text))
    return re.sub(r"[0-9a-f]{40}(-dirty)?|(?<= run_name )\S+", "#", words)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _call(path: Path, launcher: str, stage: str, flags: str) -> str:
    """Start a recipe in the workspace, and return the lines of its output without what varies."""
    return _constant(call(path, launcher, stage, flags, HF_HOME=str(path / "cache")), path)


def _constant(text: str, path: Path) -> str:
    return re.sub(
        _VARYING,
        "#",
        text.replace(str(path), "WORKSPACE").replace(str(ROOT), "ROOT").replace(str(BIN), "ROOT/.venv/bin"),
    )


def _digests(file: Path) -> dict[str, str]:
    """Return a digest of the bits of each tensor of a file."""
    return {
        name: hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + _bytes(tensor)).hexdigest()[:16]
        for name, tensor in sorted(load_file(file).items())
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _answers(path: Path, name: str) -> dict[str, str]:
    """Return the greedy and sampled answers of a model to a file of prompts, and those of the terminal chat."""
    found = {}
    for temperature in ("0", "0.8"):
        file = f"answers-{name}-{temperature}.jsonl"
        flags = f"--model_name_or_path {name} --input prompts.jsonl --output {file} --temperature {temperature}"
        # The samples of llama.cpp depend on what it computes at the same moment.
        flags += " --engine transformers" if temperature != "0" else ""
        _call(path, "python", "generate", f"{flags} --max_new_tokens 12 --seed 1 --use_cpu")
        found[temperature] = (path / file).read_text(encoding="utf-8")
    chat = f"--model_name_or_path {name} --prompt river --temperature 0 --max_new_tokens 12 --use_cpu"
    return found | {"chat": _call(path, "python", "chat", chat)}


def _serve(path: Path, name: str, engine: str) -> dict[str, Any]:
    """Return the answers of a server to OpenAI's requests, whole and streamed."""
    port = free_port()
    words = ["--model_name_or_path", name, "--port", str(port), "--engine", engine, "--use_cpu"]
    options = process_options(HF_HOME=str(path / "cache")) | {"cwd": path, "stdout": subprocess.DEVNULL}
    url, found = f"http://127.0.0.1:{port}", {}
    limits = {"model": name, "temperature": 0, "max_tokens": 12}
    bodies = {
        "chat/completions": {"messages": [{"role": "user", "content": "river stone?"}]},
        "completions": {"prompt": "green light"},
    }
    process = subprocess.Popen([sys.executable, str(ROOT / "recipes/serve.py"), *words], **options)
    try:
        while process.poll() is None:
            with suppress(OSError):
                found["health"] = requests.get(f"{url}/health", timeout=60).json()
                break
            time.sleep(0.2)
        for route, body in bodies.items():
            answer = requests.post(f"{url}/v1/{route}", json=body | limits, timeout=300).json()
            found[route] = {key: value for key, value in answer.items() if key in ("choices", "usage", "error")}
            stream = requests.post(f"{url}/v1/{route}", json=body | limits | {"stream": True}, timeout=300).text
            found[f"{route} streamed"] = re.sub(r'"(id|created|request_id)":\s*("[^"]*"|\d+)', "", stream).splitlines()
        return found
    finally:
        process.terminate()
        process.wait()


def _export(path: Path, name: str, layout: str, dtype: str = "") -> dict[str, Any]:
    """Convert a model, and return the output, the digests of the files and the texts among them."""
    target = path / "exports" / f"{name}-{layout}-{dtype}"
    flags = f"--from {name} --to {target} --format {layout}" + (f" --dtype {dtype}" if dtype else "")
    output = _call(path, "python", "convert", flags)
    files = sorted(file for file in target.rglob("*") if file.is_file())
    digests = {
        str(file.relative_to(target)): _digests(file) if file.suffix == ".safetensors" else _digest(file, path)
        for file in files
    }
    return {"output": output, "files": digests}


def _digest(file: Path, path: Path) -> str:
    """Return a text as it is, a digest of the tensors of a `.pth` file, and a digest of any other file."""
    if file.suffix == ".pth":
        return str({name: hashlib.sha256(_bytes(value)).hexdigest()[:16] for name, value in torch.load(file).items()})
    if file.suffix in (".md", ".json", ".jinja", "") and file.stat().st_size < 20_000:
        return _constant(_text(file), path)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Write a record, or compare this checkout with one."""
    action, file, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        make_workspace(Path(directory))
        found = json.loads(json.dumps(record(Path(directory), names or RUNS)))
    if action == "write":
        Path(file).write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False), encoding="utf-8")
        return
    before = {name: each for name, each in json.loads(Path(file).read_text(encoding="utf-8")).items() if name in found}
    texts = [json.dumps(each, indent=1, sort_keys=True, ensure_ascii=False) for each in (before, found)]
    print("\n".join(difflib.unified_diff(*map(str.splitlines, texts), lineterm="", n=2)) or "equal")
    sys.exit(before != found)


if __name__ == "__main__":
    main()
