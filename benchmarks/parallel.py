"""
Train one toy model with experts under every launcher and kind of parallelism on this machine, on CPU processes, and
compare each with one process.

    python -m benchmarks.parallel --output out/parallel.json

It prints a table, and writes a list of objects with `name`, `num_processes`, `loss_difference` (the largest over the
steps), `weight_difference` (the largest over all weights), `held_bytes` (most in tensors of the first rank) and
`sent_bytes` (what the first rank handed to collectives and messages). SGD shows a wrong scale of gradients, which
AdamW would hide.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.bench import ROOT
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.tokenizer.training import train_tokenizer


BIN = Path(sys.executable).parent
NUM_STEPS, ROWS = 6, 8
# Name: launcher, number of processes, recipe, flags, rows per micro-batch and micro-batches of a process.
WAYS: dict[str, tuple[str, int, str, str, tuple[int, int]]] = {
    "python": ("python", 1, "pretrain", "", (8, 1)),
    "python, 4 micro-batches": ("python", 1, "pretrain", "", (2, 4)),
    "DDP": ("torchrun", 2, "pretrain", "", (2, 2)),
    "accelerate": ("accelerate", 2, "pretrain", "", (2, 2)),
    **{f"ZeRO-{stage}": ("deepspeed", 2, "pretrain", f"--deepspeed {ROOT}/ds_configs/zero{stage}.json", (2, 2))
       for stage in (1, 2, 3)},
    "FSDP2": ("torchrun", 2, "pretrain", "--fsdp_size 2", (2, 2)),
    "HSDP 2 x 2": ("torchrun", 4, "pretrain", "--fsdp_size 2 --dp_replicate_size 2", (1, 2)),
    "TP": ("torchrun", 2, "pretrain", "--tp_size 2", (8, 1)),
    "EP": ("torchrun", 2, "pretrain", "--fsdp_size 2 --ep_size 2", (2, 2)),
    "PP, GPipe": ("torchrun", 2, "pipeline", "--pp_size 2 --pp_schedule gpipe", (2, 4)),
    "PP, 1F1B": ("torchrun", 2, "pipeline", "--pp_size 2", (2, 4)),
    "PP, interleaved": ("torchrun", 2, "pipeline", "--pp_size 2 --pp_schedule interleaved", (2, 4)),
    "PP 2 x TP 2": ("torchrun", 4, "pipeline", "--pp_size 2 --tp_size 2", (2, 4)),
    "PP 2 x DP 2 x TP 2": ("torchrun", 8, "pipeline", "--pp_size 2 --dp_size 2 --tp_size 2", (2, 2)),
}  # fmt: skip


def make_toy(directory: Path) -> None:
    """Write a toy model with experts, its tokenizer, and texts of uneven length."""
    generator = random.Random(0)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet", "birds", "home", "far", "to"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 18))) for _ in range(40)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = MiniMindConfig(**sizes, qk_norm=True, num_experts=4, num_shared_experts=1, router_aux_loss_coef=0.5)
    MiniMindForCausalLM(config).save_pretrained(directory / "toy")
    tokenizer.save_pretrained(directory / "toy")
    lines = (json.dumps({"text": text}) for text in texts)
    (directory / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")


def launcher_words(launcher: str, num_processes: int) -> list[str]:
    """Return the command that starts a script in so many processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        return [str(BIN / launcher), "--nproc_per_node", str(num_processes), "--master_port", port]
    if launcher == "deepspeed":
        devices = ",".join(map(str, range(num_processes)))
        return [str(BIN / launcher), "--include", f"localhost:{devices}", "--master_port", port]
    config = ROOT / "recipes/accelerate_configs/ddp.yaml"
    words = ["launch", "--config_file", str(config), "--num_processes", str(num_processes)]
    return [str(BIN / launcher), *words, "--main_process_port", port]


def run(name: str, directory: Path) -> dict[str, Any]:
    """Train the toy in one way, and return the losses, the weights, and what the first rank held and sent."""
    launcher, num_processes, recipe, flags, (size, accumulation) = WAYS[name]
    output = directory / f"{list(WAYS).index(name)}"
    words = [
        *launcher_words(launcher, num_processes), str(ROOT / "benchmarks/parallel_rank.py"), recipe, *flags.split(),
        *("--model_name_or_path", str(directory / "toy"), "--dataset_name", str(directory / "texts.jsonl")),
        *("--packing", "bfd", "--max_length", "32", "--validation_fraction", "0", "--max_steps", str(NUM_STEPS)),
        *("--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(accumulation)),
        *("--optim", "sgd", "--learning_rate", "0.1", "--weight_decay", "0", "--max_grad_norm", "0"),
        *("--bf16", "false", "--use_cpu", "--save_strategy", "no", "--logging_steps", "1", "--report_to", "none"),
        *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--output_dir", str(output)),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    result = subprocess.run(words, cwd=directory, env=os.environ | environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} ended with status {result.returncode}:\n{result.stdout}\n{result.stderr}")
    entries = map(json.loads, (output / "log.jsonl").read_text(encoding="utf-8").splitlines())
    record = json.loads((output / "parallel-0.json").read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    return record | {"losses": losses, "weights": load_file(output / "model.safetensors")}


def compare(name: str, way: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the table for one way."""
    losses = zip(way["losses"], reference["losses"], strict=True)
    assert way["weights"].keys() == reference["weights"].keys()
    weights = ((way["weights"][each] - weight).abs().max().item() for each, weight in reference["weights"].items())
    return {
        "name": name,
        "num_processes": WAYS[name][1],
        "losses": way["losses"],
        "loss_difference": max(abs(one - other) for one, other in losses),
        "weight_difference": max(weights),
        "held_bytes": way["held_bytes"],
        "sent_bytes": sum(way["sent_bytes"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="out/parallel.json")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="Ways to try.")
    args = parser.parse_args()
    print(f"{'':24} {'processes':>9} {'last loss':>9} {'losses':>9} {'weights':>9} {'held':>9} {'sent':>9}")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        make_toy(Path(directory))
        reference = run("python", Path(directory))
        for name in args.only:
            row = compare(name, reference if name == "python" else run(name, Path(directory)), reference)
            rows.append(row)
            figures = f"{row['losses'][-1]:9.6f} {row['loss_difference']:9.1e} {row['weight_difference']:9.1e}"
            sizes = f"{row['held_bytes'] / 1e3:6.0f} kB {row['sent_bytes'] / 1e3:6.0f} kB"
            print(f"{name:24} {row['num_processes']:9} {figures} {sizes}", flush=True)
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
