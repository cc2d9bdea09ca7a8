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
import random
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
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pretrain.tokenizer.training import train_tokenizer
from tests.faults.driving import CLOCKS
from tests.invariants.launching import BIN, ROOT, free_port, launcher_command, process_options, start
from tests.toys import EXPERTS, toy_model, write_jsonl


COMMON = "--use_cpu --bf16 false --validation_fraction 0.2 --max_steps 4 --logging_steps 1 --eval_steps 2"
COMMON += " --save_steps 2 --report_to none"
TEXTS = "--dataset_name train.jsonl --max_length 32 --model_name_or_path dense"
CHATS = "--dataset_name chats.jsonl --max_length 64 --model_name_or_path dense"
PAIRS = "--dataset_name pairs.jsonl --max_length 64 --model_name_or_path dense"
TASKS = "--dataset_name tasks.jsonl --rewards length --num_generations 2 --max_completion_length 8"
ADAMW = "--optim_preset adamw --learning_rate 1e-2"
ZERO = f"--deepspeed {ROOT}/ds_configs/zero"

# Name: stage, launcher and flags. A later value of a flag replaces an earlier one.
RUNS: dict[str, tuple[str, str, str]] = {
    "pretrain-muon": ("pretrain", "python", TEXTS),
    "pretrain-scratch": ("pretrain", "python", "--dataset_name train.jsonl --max_length 32 --preset tiny"),
    "pretrain-moe": ("pretrain", "python", f"{TEXTS} --model_name_or_path moe {ADAMW}"),
    "pretrain-stream": ("pretrain", "python", f"{TEXTS} --streaming true --packing wrapped {ADAMW}"),
    "pretrain-padded": ("pretrain", "python", f"{TEXTS} --packing none --gradient_accumulation_steps 2 {ADAMW}"),
    "pretrain-torchrun": ("pretrain", "torchrun", f"{TEXTS} --model_name_or_path moe"),
    "pretrain-accelerate": ("pretrain", "accelerate:ddp", f"{TEXTS} {ADAMW}"),
    "pretrain-fsdp2": ("pretrain", "torchrun", f"{TEXTS} --fsdp_size 2 {ADAMW}"),
    "pretrain-zero2": ("pretrain", "deepspeed", f"{TEXTS} {ADAMW} {ZERO}2.json"),
    "pretrain-zero3": ("pretrain", "deepspeed", f"{TEXTS} --model_name_or_path moe {ADAMW} {ZERO}3.json"),
    "sft": ("sft", "python", CHATS),
    "sft-lora": ("sft", "python", f"{CHATS} --use_peft --lora_r 4"),
    "sft-published": ("sft", "python", f"{CHATS} --model_name_or_path llama --use_peft"),
    "sft-torchrun": ("sft", "torchrun", f"{CHATS} --model_name_or_path moe"),
    "dpo": ("dpo", "python", PAIRS),
    "dpo-torchrun": ("dpo", "torchrun", f"{PAIRS} --use_peft"),
    "reward": ("reward", "python", PAIRS),
    "grpo": ("grpo", "python", f"{TASKS} --model_name_or_path dense --per_device_train_batch_size 4"),
    "distill": ("distill", "python", f"{CHATS} --teacher_name_or_path moe"),
}
# Runs that go on from the first checkpoint of another run: their launcher, and their rows per step and process.
RESUMED = {
    "pretrain-muon": ("torchrun", 4),
    "pretrain-zero2": ("python", 16),
    "sft-lora": ("python", 8),
    "dpo": ("torchrun", 4),
}
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


def make_workspace(path: Path) -> None:
    """Write toy models (dense, MoE, and one of transformers), texts, conversations, preferences and tasks."""
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 12))) for _ in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    sizes = {"vocab_size": 320, "max_position_embeddings": 256, "num_key_value_heads": 2}
    for name, fields in (("dense", {}), ("moe", EXPERTS)):
        toy_model(**sizes | fields).save_pretrained(path / name)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    LlamaForCausalLM(LlamaConfig(**sizes | shape | ids)).save_pretrained(path / "llama")
    for name in ("dense", "moe", "llama"):
        tokenizer.save_pretrained(path / name)
    write_jsonl(path / "train.jsonl", texts)
    write_jsonl(path / "chats.jsonl", [{"prompt": f"{text}?", "completion": text} for text in texts])
    write_jsonl(path / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)])
    write_jsonl(path / "tasks.jsonl", [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(40)])
    write_jsonl(path / "prompts.jsonl", [{"prompt": text} for text in texts[:4]])


def record(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Train the named runs in the workspace at `path`, and return what they produced, by name."""
    found: dict[str, Any] = {}
    for name in names:
        stage, launcher, flags = RUNS[name]
        found[name] = _train(path, name, stage, launcher, flags)
        found[name]["plan"] = _call(path, launcher, stage, f"{flags} {COMMON} --dry_run --output_dir {name}-plan")
        if name in RESUMED:
            other, size = RESUMED[name]
            resumed = f"{flags.split(ZERO)[0]} --resume_from_checkpoint {name}/checkpoint-2"
            resumed += f" --per_device_train_batch_size {size}"
            found[f"{name}-resumed"] = _train(path, f"{name}-resumed", stage, other, resumed)
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


def _train(path: Path, name: str, stage: str, launcher: str, flags: str) -> dict[str, Any]:
    """Train one run, and return its log, the digests of its tensors, its output and its card."""
    output = _call(path, launcher, stage, f"{COMMON} {flags} --output_dir {name}")
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
    words = [*launcher_command(launcher), str(ROOT / f"recipes/{stage}.py"), *flags.split()]
    result = start(words, cwd=path, HF_HOME=str(path / "cache"))
    assert result.returncode == 0, f"{stage} {flags}: {result.stdout[-3000:]}"
    return _constant(result.stdout, path)


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
