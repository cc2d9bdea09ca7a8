"""
Train a chat model with `hf-pretrain from_scratch` and with nanochat's own CPU script, on the same text and in the same
minutes, and compare the bits per byte of the answers of the same validation conversations.

    git clone https://github.com/karpathy/nanochat ../nanochat
    python -m benchmarks.from_scratch_nanochat --upstream ../nanochat --python ../nanochat/.venv/bin/python

nanochat's scripts run unchanged, with the flags of its `runs/runcpu.sh`, and need torch, pyarrow, filelock, requests,
psutil, rustbpe, tiktoken and wandb, and a C++ compiler. Only these settings differ:

- Its files of downloaded data hold our text: the embedded corpora, split as `hf_pretrain` splits them. MMLU and GSM8K
  are left out. Conversations end after the last whole answer within the sequence length of our fine-tuning.
- A few measured steps give the numbers of steps, split between its two stages as in its script (5,000 to 1,500).
- It spends no time on evaluations and samples.

Both sides score the same conversations in float32, each in its own chat format. The bits are those of the answers'
tokens, without the token that ends an answer. The script prints a table, and adds all figures to
`benchmarks/results/from-scratch-nanochat.json`. If it is interrupted, the same command with the same `--directory`
keeps a finished run of ours, and trains nanochat's again.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.bench import ROOT, environment
from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.rows.reading import Reading
from hf_pretrain.run_directory.history import read_run
from hf_pretrain.stages.from_scratch import PLAN_NAME


RESULTS = ROOT / "benchmarks/results/from-scratch-nanochat.json"
# Sizes and steps of nanochat's runs/runcpu.sh.
SIZES = "--depth=6 --head-dim=64 --window-pattern=L --max-seq-len=512"
BASE_STEPS, SFT_STEPS = 5000, 1500
SEQUENCE_TOKENS = 512
NO_EVALUATION = ("--eval-every=-1", "--eval-tokens=0")
# The first one compiles.
NUM_MEASURED_STEPS = 2


def cut(conversations: Dataset, tokenizer: PreTrainedTokenizerFast, max_length: int) -> list[list[dict[str, str]]]:
    """Return conversations that end after the last whole answer within `max_length` tokens; none without an answer."""
    kept = []
    for text in conversations["text"]:
        # Our chat template removes leading white space from answers. Both sides score the same bytes.
        messages = [message | {"content": message["content"].lstrip()} for message in json.loads(text)["messages"]]
        end = 0
        while end + 2 <= len(messages) and len(encode_conversation(tokenizer, messages[: end + 2])[0]) <= max_length:
            end += 2
        kept += [messages[:end]] if end else []
    return kept


@torch.inference_mode()
def score_ours(directory: Path, conversations: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Return the sums of nats of the answers under our chat model, of their tokens and of the tokens that end them."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = MiniMindForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    figures = {"nats": 0.0, "end_nats": 0.0, "answer_tokens": 0}
    for messages in conversations:
        ids, is_generated = encode_conversation(tokenizer, messages)
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
        # (seq_len - 1,)
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
        is_answer, is_end = torch.tensor(is_generated[1:]), torch.tensor(ids[1:]) == tokenizer.eos_token_id
        figures["nats"] += losses[is_answer & ~is_end].sum().item()
        figures["end_nats"] += losses[is_answer & is_end].sum().item()
        figures["answer_tokens"] += int((is_answer & ~is_end).sum())
    return figures | {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}


def write_shards(directory: Path, shards: list[list[Any]], column: str) -> None:
    """Write rows as nanochat's downloads: files of Parquet, with a list of their names."""
    directory.mkdir(parents=True)
    names = [f"shard_{number:05d}.parquet" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        pq.write_table(pa.table({column: pa.array(rows)}), directory / name, row_group_size=1024)
    (directory / "manifest.json").write_text(json.dumps(names), encoding="utf-8")


class Nanochat:
    """nanochat's scripts, with their data in a directory of their own."""

    def __init__(self, args: argparse.Namespace, directory: Path):
        self.directory, self.upstream, self.python = directory, args.upstream, args.python
        self.tokens_per_step = args.tokens_per_step

    def run(self, *words: str) -> str:
        """Run a command of nanochat's Python, and return its output."""
        own = {"NANOCHAT_BASE_DIR": str(self.directory), "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor")}
        # `python -m` finds nanochat's modules in the working directory, a script only by PYTHONPATH.
        env = os.environ | own | {"PYTHONPATH": str(self.upstream), "PYTHONUNBUFFERED": "1"}
        print("+", *words, flush=True)
        command = [self.python, *words]
        with subprocess.Popen(command, cwd=self.upstream, env=env, stdout=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        if process.returncode:
            raise SystemExit(process.returncode)
        return "".join(lines)

    def train_base(self, steps: int) -> str:
        rows = self.tokens_per_step // SEQUENCE_TOKENS
        batch = (f"--device-batch-size={rows}", f"--total-batch-size={self.tokens_per_step}")
        flags = (*SIZES.split(), *batch, *NO_EVALUATION, "--core-metric-every=-1", "--sample-every=-1")
        return self.run("-m", "scripts.base_train", *flags, f"--num-iterations={steps}")

    def train(self, seconds: float, vocab_size: int) -> dict[str, Any]:
        """Train tokenizer, base model and chat model within a time that includes compilation and measuring."""
        start = time.monotonic()
        self.run("-m", "scripts.tok_train", "--max-chars=2000000000", f"--vocab-size={vocab_size}")
        tokenizer_seconds = time.monotonic() - start
        times = step_seconds(self.train_base(NUM_MEASURED_STEPS))
        # The first step of a stage compiles. The second command finds most of it in the cache.
        pace = sum(times[1:]) / len(times[1:])
        setup = time.monotonic() - start - tokenizer_seconds - sum(times)
        steps = (seconds - (time.monotonic() - start) - 2 * setup) / pace
        base = max(2, int(steps * BASE_STEPS / (BASE_STEPS + SFT_STEPS)))
        # nanochat's chat stage takes the newest base model, whose name ends in its number of steps.
        shutil.rmtree(self.directory / "base_checkpoints")
        before = time.monotonic()
        times = step_seconds(self.train_base(base))
        setup = time.monotonic() - before - sum(times[1:])
        left = seconds - (time.monotonic() - start) - setup
        sft = max(2, int(left / (sum(times[1:]) / len(times[1:]))))
        flags = ("--mmlu-epochs=0", "--gsm8k-epochs=0", "--chatcore-every=-1", *NO_EVALUATION)
        # nanochat does not train on the last batch that it draws.
        sft = len(step_seconds(self.run("-m", "scripts.chat_sft", *flags, f"--num-iterations={sft + 1}")))
        return {
            "steps": [base, sft],
            "tokens": [base * self.tokens_per_step, sft * self.tokens_per_step],
            "seconds": round(time.monotonic() - start),
        }


def step_seconds(output: str) -> list[float]:
    """Return the seconds of the steps in the output of one of nanochat's training scripts."""
    return [float(text) / 1000 for text in re.findall(r"dt: ([\d.]+)ms", output)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, help="Checkout of nanochat.")
    parser.add_argument("--python", default=sys.executable, help="Python that has nanochat's packages.")
    parser.add_argument("--minutes", type=float, default=20, help="Time of each side.")
    parser.add_argument("--directory", type=Path, default=Path("out/from-scratch-nanochat"))
    parser.add_argument("--vocab_size", type=int, default=32768, help="Of nanochat; by default its script's.")
    parser.add_argument("--tokens_per_step", type=int, default=16384, help="Of nanochat; by default its script's.")
    args = parser.parse_args()
    directory, args.upstream = args.directory.resolve(), args.upstream.resolve()
    ours, theirs = directory / "ours", directory / "nanochat"
    command = [sys.executable, "hf_pretrain_cli.py", "from_scratch", "--minutes", str(args.minutes)]
    # Both sides start without caches.
    env = os.environ | {"HF_HOME": str(directory / "cache")}
    subprocess.run([*command, "--output_dir", str(ours)], cwd=ROOT, check=True, env=env)

    max_length = read_run(ours / "sft").arguments["max_length"]
    texts = load_documents(["embedded"])
    tokenizer = AutoTokenizer.from_pretrained(ours / "sft")
    train, validation = (
        cut(part, tokenizer, max_length) for part in load_documents(["embedded"], Reading(kind="conversation"))
    )
    shutil.rmtree(theirs, ignore_errors=True)
    # nanochat trains on all shards but the last one, in their order: its own shards are shuffled.
    shards = [part.shuffle(seed=42)["text"] for part in texts]
    write_shards(theirs / "base_data_climbmix", shards, "text")
    tasks = theirs / "task_data"
    write_shards(tasks / "HuggingFaceTB--smol-smoltalk/default/train", [train], "messages")
    write_shards(tasks / "HuggingFaceTB--smol-smoltalk/default/test", [validation], "messages")
    # nanochat opens these sets for its own evaluation, which is off.
    for name in ("cais--mmlu/all", "openai--gsm8k/main"):
        write_shards(tasks / name / "test", [[""]], "question")
    # Also data for `hf-pretrain evaluate`, which must measure the same bits for our model.
    scored = directory / "validation.jsonl"
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in validation]
    scored.write_text("\n".join(lines) + "\n", encoding="utf-8")

    side = Nanochat(args, theirs)
    found = {"nanochat": side.train(60 * args.minutes, args.vocab_size)}
    side.run(str(ROOT / "benchmarks/nanochat_bits.py"), str(scored), str(directory / "nanochat.json"))
    found["nanochat"] |= json.loads((directory / "nanochat.json").read_text(encoding="utf-8"))
    runs = [read_run(ours / stage) for stage in ("pretrain", "sft")]
    plan = json.loads((ours / PLAN_NAME).read_text(encoding="utf-8"))
    found["hf_pretrain"] = {
        "preset": plan["preset"],
        "steps": [plan["steps"][stage] for stage in ("pretrain", "sft")],
        "tokens": [run.last("num_input_tokens_seen") for run in runs],
        "seconds": round(plan["used_seconds"]),
    } | score_ours(ours / "sft", validation)

    answers = [message["content"] for messages in validation for message in messages if message["role"] == "assistant"]
    num_bits = math.log(2) * sum(len(answer.encode()) for answer in answers)
    print("| program | parameters | vocabulary | tokens: pretraining + fine-tuning | seconds | bits per byte |")
    print("|---|---|---|---|---|---|")
    for name, row in sorted(found.items()):
        row["bits_per_byte"] = row["nats"] / num_bits
        row["bits_per_byte_with_ends"] = (row["nats"] + row["end_nats"]) / num_bits
        tokens = " + ".join(f"{number:,}" for number in row["tokens"])
        cells = [f"{row['parameters']:,}", f"{row['vocabulary']:,}", tokens, row["seconds"]]
        print("|", " | ".join(map(str, [name, *cells, f"{row['bits_per_byte']:.3f}"])), "|")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=args.upstream, capture_output=True, text=True)
    setting = {
        "minutes": args.minutes,
        "nanochat_commit": commit.stdout.strip(),
        "conversations": len(validation),
        "answers": len(answers),
    }
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    RESULTS.write_text(json.dumps([*rows, setting | found | environment()], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
