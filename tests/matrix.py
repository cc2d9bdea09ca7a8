"""
The matrix of toy runs: stages and launchers, dense models and experts, adapters, and runs that others resume.

The fixture `trained` trains a run when the first test of a session asks for it. All other tests, of all workers, only
read its directory and its output. `tests/recording.py` records the same runs.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, launcher_command, start
from tests.toys import EXPERTS, toy_model, write_jsonl


COMMON = "--use_cpu --bf16 false --validation_fraction 0.2 --max_steps 4 --logging_steps 1 --eval_steps 2"
COMMON += " --save_steps 2 --report_to none"
TEXTS = "--dataset_name train.jsonl --max_length 32 --model_name_or_path dense"
CHATS = "--dataset_name chats.jsonl --max_length 64 --model_name_or_path dense"
PAIRS = "--dataset_name pairs.jsonl --max_length 64 --model_name_or_path dense"
TASKS = "--dataset_name tasks.jsonl --rewards length --num_generations 2 --max_completion_length 8"
BUDGET = "--max_steps -1 --max_tokens 2K --eval_steps 0.5 --eval_on_start"
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
    "pretrain-budget": ("pretrain", "python", f"{TEXTS} --eval_dataset_name news.jsonl code.jsonl {BUDGET}"),
    "sft": ("sft", "python", CHATS),
    "sft-lora": ("sft", "python", f"{CHATS} --use_peft --lora_r 4"),
    "sft-published": ("sft", "python", f"{CHATS} --model_name_or_path llama --use_peft"),
    "sft-torchrun": ("sft", "torchrun", f"{CHATS} --model_name_or_path moe"),
    "dpo": ("dpo", "python", PAIRS),
    "dpo-torchrun": ("dpo", "torchrun", f"{PAIRS} --use_peft"),
    "reward": ("reward", "python", PAIRS),
    "grpo": ("grpo", "python", f"{TASKS} --model_name_or_path dense --per_device_train_batch_size 4"),
    # It learns to prefer "yes".
    "judge": ("reward", "python", f"{PAIRS} --max_steps 20 --save_steps 10 --eval_steps 10 --learning_rate 1e-2"),
    "grpo-zero3": ("grpo", "deepspeed", f"{TASKS} --model_name_or_path moe --beta 0.1 {ZERO}3.json"),
    "rloo-torchrun": ("grpo", "torchrun", f"{TASKS} --model_name_or_path moe --beta 0.1 --algorithm rloo"),
    "distill": ("distill", "python", f"{CHATS} --teacher_name_or_path moe"),
}
# Runs that go on from the first checkpoint of another run: their launcher, and their rows per step and process.
RESUMED = {
    "pretrain-muon": ("torchrun", 4),
    "pretrain-zero2": ("python", 16),
    "sft-lora": ("python", 8),
    "dpo": ("torchrun", 4),
}


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
    for name in ("news", "code"):
        write_jsonl(path / f"{name}.jsonl", [f"{name} {n} rivers run" for n in range(40)])
    write_jsonl(path / "chats.jsonl", [{"prompt": f"{text}?", "completion": text} for text in texts])
    write_jsonl(path / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)])
    write_jsonl(path / "tasks.jsonl", [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(40)])
    write_jsonl(path / "prompts.jsonl", [{"prompt": text} for text in texts[:4]])


def launch_of(name: str) -> tuple[str, str, str]:
    """Return stage, launcher and flags of a run. `NAME-resumed` goes on from the first checkpoint of the run NAME."""
    if name in RUNS:
        stage, launcher, flags = RUNS[name]
        return stage, launcher, f"{COMMON} {flags}"
    first = name.removesuffix("-resumed")
    (stage, _, flags), (launcher, size) = RUNS[first], RESUMED[first]
    flags = f"{COMMON} {flags.split(ZERO)[0]} --resume_from_checkpoint {first}/checkpoint-2"
    return stage, launcher, f"{flags} --per_device_train_batch_size {size}"


def call(workspace: Path, launcher: str, stage: str, flags: str, **environment: str) -> str:
    """Start a recipe in the workspace, and return its output."""
    words = [*launcher_command(launcher), str(ROOT / f"recipes/{stage}.py"), *flags.split()]
    result = start(words, cwd=workspace, **environment)
    assert result.returncode == 0, f"{stage} {flags}: {result.stdout[-3000:]}"
    return result.stdout


@dataclass(frozen=True)
class Trained:
    """A finished run: its directory, and what it printed."""

    directory: Path
    output: str

    @property
    def log(self) -> list[dict[str, Any]]:
        return json.loads((self.directory / "trainer_state.json").read_text())["log_history"]

    def series(self, name: str) -> list[float]:
        """Return all logged values of a figure."""
        return [entry[name] for entry in self.log if name in entry]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(next(self.directory.glob("*model.safetensors")))

    def text(self, name: str) -> str:
        return (self.directory / name).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def toys(tmp_path_factory, worker_id) -> Path:
    """Return the directory of the toy models, their data and their runs. All workers of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "toys"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make_workspace(path)
    return path


@pytest.fixture(scope="session")
def trained(toys) -> Callable[[str], Trained]:
    """Return a function that returns a run. Its first call trains the run, after those that the flags name."""

    def get(name: str) -> Trained:
        stage, launcher, flags = launch_of(name)
        for other in {word.split("/")[0] for word in flags.split()} & RUNS.keys():
            get(other)
        output = toys / f"{name}.txt"
        with FileLock(f"{output}.lock"):
            if not output.exists():
                # A run that failed for the test before leaves a directory.
                shutil.rmtree(toys / name, ignore_errors=True)
                output.write_text(call(toys, launcher, stage, f"{flags} --output_dir {name}"), encoding="utf-8")
        return Trained(toys / name, output.read_text(encoding="utf-8"))

    return get
