"""
Speed and memory of preparing text, from a raw JSONL file to packed rows of token ids, measured side by side:

    python -m benchmarks.preparation --megabytes 20 --rounds 3
    python -m benchmarks.preparation --rounds 0 --gigabytes 0.1 1

All programs read the same file of shuffled embedded documents with the same tokenizer, each on one core, in a new
process and with an empty cache. They take turns. The speed is the text per second of CPU time: on a busy machine, the
seconds on the clock also count the time in which other programs hold the core.

With `--gigabytes`, our own program prepares files of several sizes on all cores, in which the documents repeat. The
peak memory of the largest process shows whether memory grows with the data. The resident memory includes files of the
cache that are mapped into memory, which the system can drop. The private memory does not.

The script prints the results, and writes them to `benchmarks/results/preparation.json`. A run without one of the two
measurements keeps the earlier record of that measurement.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.bench import ROOT, environment
from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.training import train_tokenizer


MAX_LENGTH = 512


def ours(path: str, tokenizer: PreTrainedTokenizerFast, num_proc: int) -> Dataset:
    """Return the rows of this package."""
    documents, _ = load_documents([path], Reading(validation_fraction=0, num_proc=num_proc))
    return prepare_rows(documents, tokenizer, max_length=MAX_LENGTH, num_proc=num_proc)[0]


def trl_sft(path: str, tokenizer: PreTrainedTokenizerFast, num_proc: int) -> Dataset:
    """Return the rows of TRL's `SFTTrainer`, with the packing that loses no token, as ours."""
    from trl import SFTConfig, SFTTrainer

    # The trainer prepares its data set when it is made, and needs a model for that. One as small as possible.
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with tempfile.TemporaryDirectory() as directory:
        args = SFTConfig(
            output_dir=directory,
            packing=True,
            packing_strategy="bfd_split",
            max_length=MAX_LENGTH,
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        documents = load_dataset("json", data_files=path, split="train")
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config), args=args, train_dataset=documents, processing_class=tokenizer
        )
        return trainer.train_dataset


def run_clm(path: str, tokenizer: PreTrainedTokenizerFast, num_proc: int) -> Dataset:
    """Return the rows of transformers' `run_clm.py`: tokenize, join batches of texts, and cut them into rows."""

    def group(examples: dict[str, list]) -> dict[str, list]:
        joined = {name: list(itertools.chain(*values)) for name, values in examples.items()}
        total = len(joined["input_ids"]) // MAX_LENGTH * MAX_LENGTH
        rows = {
            name: [values[i : i + MAX_LENGTH] for i in range(0, total, MAX_LENGTH)] for name, values in joined.items()
        }
        return rows | {"labels": rows["input_ids"].copy()}

    documents = load_dataset("json", data_files=path, split="train")
    tokens = documents.map(lambda examples: tokenizer(examples["text"]), batched=True, remove_columns=["text"])
    return tokens.map(group, batched=True)


PROGRAMS: dict[str, Callable[[str, PreTrainedTokenizerFast, int], Dataset]] = {
    "ours": ours,
    "TRL SFTTrainer": trl_sft,
    "run_clm.py": run_clm,
}


def peak_rss_bytes() -> int:
    """Return the peak memory of this process or of its largest worker process, whichever is larger."""
    # Windows has no such module.
    import resource

    # Linux counts KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    own, workers = (
        resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    status = Path("/proc/self/status")
    if status.is_file():
        # NOTE: on Linux, `ru_maxrss` also counts the parent's memory that the process had between fork and exec.
        own = int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024
    return max(own, workers)


def private_bytes(pid: int) -> int:
    """Return the memory of a process, or of its largest worker, without mapped files and shared memory (Linux)."""
    found = 0
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                memory = process.memory_info()
                found = max(found, memory.rss - getattr(memory, "shared", 0))
    return found


def measure(name: str, path: str, tokenizer_path: str, num_proc: int) -> dict[str, Any]:
    """Prepare a file in this process, and return time and memory."""
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    # A first run on a few documents imports everything. The clock starts after it.
    with tempfile.TemporaryDirectory() as directory, open(path, encoding="utf-8") as file:
        few = Path(directory, "few.jsonl")
        few.write_text("".join(itertools.islice(file, 100)), encoding="utf-8")
        PROGRAMS[name](str(few), tokenizer, 1)
    imported = peak_rss_bytes()
    start, before = time.perf_counter(), os.times()
    rows = PROGRAMS[name](path, tokenizer, num_proc)
    seconds, after = time.perf_counter() - start, os.times()
    # The first four fields are user and system time of this process and of its finished workers.
    return {
        "megabytes": os.path.getsize(path) / 1e6,
        "num_rows": len(rows),
        "seconds": seconds,
        "cpu_seconds": sum(after[:4]) - sum(before[:4]),
        "peak_rss_bytes": peak_rss_bytes(),
        "imported_rss_bytes": imported,
    }


def measure_apart(name: str, path: Path, tokenizer_path: Path, *, num_proc: int = 1) -> dict[str, Any]:
    """Measure a program in a new process, with an empty cache; on a single core if it uses one process."""
    words = [sys.executable, "-m", "benchmarks.preparation", "--measure", name, str(path), str(tokenizer_path)]
    core = min(os.sched_getaffinity(0)) if sys.platform == "linux" and num_proc == 1 else None
    peak_private = 0
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        own = {"HF_DATASETS_CACHE": directory, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        program = subprocess.Popen(
            [*words, str(num_proc)],
            cwd=ROOT,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        while True:
            with suppress(subprocess.TimeoutExpired):
                output, errors = program.communicate(timeout=0.5)
                break
            peak_private = max(peak_private, private_bytes(program.pid))
    if program.returncode:
        raise RuntimeError(f"{name} failed: {errors[-2000:]}")
    return json.loads(output.splitlines()[-1]) | {"peak_private_bytes": peak_private}


def write_documents(texts: list[str], path: Path, num_bytes: float) -> int:
    """Write texts to a JSONL file, again and again up to its size, and return their number."""
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts]
    num_written = 0
    with path.open("wb") as file:
        for number, line in enumerate(itertools.cycle(lines), start=1):
            num_written += file.write(line)
            if num_written >= num_bytes:
                return number
    return 0


def compare(path: Path, tokenizer_path: Path, *, rounds: int) -> dict[str, Any]:
    """Let all programs prepare a file in turn, and return the medians of their figures."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PROGRAMS}
    for number in range(rounds):
        for name in PROGRAMS:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(measure_apart(name, path, tokenizer_path))
    table = {}
    for name, runs in found.items():
        figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        ratios = [run["cpu_seconds"] / mine["cpu_seconds"] for run, mine in zip(runs, found["ours"], strict=True)]
        table[name] = figures | {
            "megabytes_per_cpu_second": figures["megabytes"] / figures["cpu_seconds"],
            # The programs of one round ran close to each other, so compare within rounds.
            "ours_is_times_as_fast": statistics.median(ratios),
        }
    return table


def measure_growth(texts: list[str], directory: Path, tokenizer_path: Path, gigabytes: list[float]) -> dict[str, Any]:
    """Prepare files of several sizes, and return the peak memory of each and the lines through the outer two."""
    path, runs = directory / "large.jsonl", []
    for size in gigabytes:
        print(f"{size} GB", file=sys.stderr, flush=True)
        num_documents = write_documents(texts, path, size * 1e9)
        run = measure_apart("ours", path, tokenizer_path, num_proc=os.cpu_count() or 1)
        runs.append({"num_documents": num_documents, **run})
    first, last = runs[0], runs[-1]
    result: dict[str, Any] = {"num_proc": os.cpu_count(), "runs": runs}
    if len(runs) > 1:
        for kind in ("rss", "private"):
            peak = f"peak_{kind}_bytes"
            slope = (last[peak] - first[peak]) / (last["megabytes"] - first["megabytes"])
            result[f"extrapolated_{kind}_bytes_at_10_gigabytes"] = last[peak] + slope * (10_000 - last["megabytes"])
    return result


def print_results(results: dict[str, Any]) -> None:
    print(f"{'program':18}{'MB/CPU s':>10}{'ours is':>9}{'peak MB':>9}")
    for name, row in results.get("programs", {}).items():
        print(
            f"{name:18}{row['megabytes_per_cpu_second']:10.2f}{row['ours_is_times_as_fast']:8.2f}x"
            f"{row['peak_rss_bytes'] / 1e6:9,.0f}"
        )
    for run in results.get("growth", {}).get("runs", []):
        print(
            f"{run['megabytes']:,.0f} MB: {run['seconds']:,.0f} s, {run['cpu_seconds']:,.0f} s of CPU time, "
            f"peak {run['peak_rss_bytes'] / 1e6:,.0f} MB, of which {run['peak_private_bytes'] / 1e6:,.0f} MB private"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20, help="Size of the file that the programs prepare.")
    parser.add_argument("--rounds", type=int, default=3, help="Turns of each program; 0 for none.")
    parser.add_argument(
        "--gigabytes", nargs="+", type=float, default=[], help="Sizes of files to measure memory with."
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks/results")
    # A measurement in a process of its own: program, file, tokenizer and number of processes.
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, path, tokenizer_path, num_proc = args.measure
        print(json.dumps(measure(name, path, tokenizer_path, int(num_proc))))
        return

    made_by = environment()
    made_by["versions"] |= {name: version(name) for name in ("datasets", "tokenizers")}
    documents, _ = load_documents(["embedded"], Reading(validation_fraction=0))
    texts = documents.shuffle(seed=0)["text"][:]
    record = args.output_dir / "preparation.json"
    results: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer_path, file = Path(directory, "tokenizer"), Path(directory, "documents.jsonl")
        train_tokenizer(texts).save_pretrained(tokenizer_path)
        if args.rounds:
            write_documents(texts, file, args.megabytes * 1e6)
            results["programs"] = compare(file, tokenizer_path, rounds=args.rounds)
            results["programs_made_by"] = made_by | {"rounds": args.rounds, "max_length": MAX_LENGTH}
        if args.gigabytes:
            results["growth"] = measure_growth(texts, Path(directory), tokenizer_path, args.gigabytes)
            results["growth_made_by"] = made_by
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_results(results)


if __name__ == "__main__":
    main()
