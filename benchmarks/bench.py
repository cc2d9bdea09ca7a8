"""
Speed of training programs, measured side by side: `make bench`, or

    python -m benchmarks.bench --sizes 26M --rounds 3 --steps 3
    python -m benchmarks.bench --sizes 26M 104M 145M-moe --max_length 512 2048

All programs train on the same documents, with the same tokenizer and in the same precision, and all but `ours, Muon`
with AdamW. They take turns: in each of several rounds, each program runs a few steps, so that a busy machine slows all
of them. The speeds are the tokens of all steps over their time; the step times are medians. The benchmark prints a
table, and writes it with versions and commit to `benchmarks/results/<machine>.json`. With another `--precision` than
the fastest one of the machine, the precision is added to the name of the file.
"""

import argparse
import importlib.metadata
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from benchmarks import programs
from benchmarks.profile_step import profile_step
from benchmarks.programs import Setting, Steps
from hf_pretrain import MiniMindConfig
from hf_pretrain.data.documents import load_documents
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.devices import has_bfloat16_units, keep_freed_blocks
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.measurements import num_active_parameters
from hf_pretrain.training.parsing import read_config


ROOT = Path(__file__).parents[1]
SIZES = {"26M": "minimind2-small", "104M": "minimind2", "145M-moe": "minimind2-moe"}
NUM_DOCUMENTS = 6000


def measure_gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several large square matrix products."""
    # Matrices must be large enough to keep all threads busy, and small enough to take milliseconds.
    size = 8192 if device.type == "cuda" else 1024 if torch.get_num_threads() <= 4 else 2048
    left, right, product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(10):
        programs.wait_for(device)
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        programs.wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def median_step(steps: Steps) -> tuple[float, float]:
    """Return the seconds of the median step, and the useful tokens per second of all steps."""
    return statistics.median(seconds for seconds, _ in steps), sum(n for _, n in steps) / sum(s for s, _ in steps)


def interleave(
    runs: dict[str, Callable[[int], Steps]],
    *,
    rounds: int,
    steps: int,
    before_each: Callable[[], object] = lambda: None,
) -> dict[str, Steps]:
    """
    Run all programs in turn, and return the steps of each.

    Args:
        runs (`dict[str, Callable]`): programs by name; each takes a number of steps and returns their measurements.
        rounds (`int`): turns of each program.
        steps (`int`): steps per turn.
        before_each (`Callable`): called before each turn.
    """
    found: dict[str, Steps] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            before_each()
            found[name] += run(steps)
    return found


def rows_of_documents(setting: Setting, *, num_documents: int) -> Dataset:
    """Return rows of random tokens, each with `num_documents` documents of equal length."""
    # Random tokens take as long as text, and each row is full.
    length = setting.max_length // num_documents
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, setting.config.vocab_size, (400, setting.max_length), generator=generator)
    return Dataset.from_dict({"input_ids": ids.tolist(), "seq_lengths": [[length] * num_documents] * len(ids)})


def loader_seconds(program: programs.TrainerProgram, *, num_batches: int = 20) -> float:
    """Return the seconds per batch that the data loader takes when nothing else runs."""
    batches = iter(program.trainer.get_train_dataloader())
    # The first batch also starts workers and draws the order of the rows.
    next(batches)
    start = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return (time.perf_counter() - start) / num_batches


def seconds_to_first_step() -> float:
    """Return the seconds from the start of the recipe to its first step, for the preset `tiny` with cached data."""
    with tempfile.TemporaryDirectory() as directory:
        # The first run fills the caches; only the time of the second run counts.
        for number in range(2):
            words = [
                sys.executable,
                "recipes/pretrain.py",
                "--config",
                "recipes/tiny/pretrain.yaml",
                "--eval_strategy",
            ]
            words += ["no", "--max_steps", "200", "--save_strategy", "no", "--output_dir", f"{directory}/{number}"]
            words += ["--disable_tqdm", "true", "--logging_steps", "1"]
            start = time.perf_counter()
            process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
            output = b""
            # With --logging_steps 1, the run prints a line at the end of its first step.
            while not re.search(rb"\b[1-9]\d*/200", output) and process.poll() is None:
                output += process.stdout.read(64)
            seconds = time.perf_counter() - start
            process.kill()
            process.wait()
            if b"/200" not in output:
                raise RuntimeError(f"The recipe failed: {output.decode()[-2000:]}")
    return seconds


def compare(setting: Setting, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return the speed of all programs for one model size, and each program's share of the limit by the GEMM rate."""
    # On a GPU, compiled layers are the default of the recipes.
    ours = programs.ours(setting, torch_compile=False)
    runs: dict[str, Callable[[int], Steps]] = {
        "ours": ours,
        "ours, Muon": programs.ours(setting, torch_compile=False, optim_preset="muon"),
        "bare loop": programs.bare_loop(setting),
    }
    # The other programs train a Llama or a dense copy of MiniMind and have no counterpart with experts.
    if not setting.config.num_experts:
        runs["ours, compiled"] = programs.ours(setting, torch_compile=True)
        runs["upstream style"] = programs.upstream_style(setting)
        runs["stock Trainer"] = programs.stock_trainer(setting)
        runs["stock Trainer, compiled"] = programs.stock_trainer(setting, torch_compile=True)
        runs["TRL SFTTrainer"] = programs.trl_sft(setting)
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    # Measure often: a single measurement may fall into a moment when other processes are busy.
    rates: list[float] = []
    steps_of = interleave(
        runs,
        rounds=rounds,
        steps=steps,
        before_each=lambda: rates.append(measure_gemm_rate(setting.device, dtype)),
    )
    parameters = num_active_parameters(ours.trainer.model)
    # If a program is faster than the measured rate, other processes disturbed the measurement. Then use the program's
    # rate (6 FLOPs per parameter and token), so that no share of the limit exceeds 100 %.
    rate = max(*rates, *(median_step(found)[1] * 6 * parameters for found in steps_of.values()))
    table = {}
    for name, found in steps_of.items():
        seconds, speed = median_step(found)
        table[name] = {
            "step_seconds": seconds,
            "tokens_per_second": speed,
            "share_of_limit": speed * 6 * parameters / rate,
        }
    mine = table["ours"]
    for figures in table.values():
        figures["ours_is_times_as_fast"] = mine["tokens_per_second"] / figures["tokens_per_second"]
    return {
        "programs": table,
        "gemm_flops_per_second": rate,
        "limit_tokens_per_second": rate / (6 * parameters),
        "overhead_over_bare_loop": mine["step_seconds"] / table["bare loop"]["step_seconds"] - 1,
        "loader_share": loader_seconds(ours) / mine["step_seconds"],
    }


def growth_with_documents(setting: Setting, *, rounds: int, steps: int) -> float:
    """Return the relative increase of the step time from 1 to 8 documents per row, at equal tokens."""
    runs: dict[str, Callable[[int], Steps]] = {
        str(number): programs.ours(setting, rows_of_documents(setting, num_documents=number)) for number in (1, 8)
    }
    seconds = {name: median_step(found)[0] for name, found in interleave(runs, rounds=rounds, steps=steps).items()}
    return seconds["8"] / seconds["1"] - 1


def cost_of_experts(setting: Setting, *, rounds: int, steps: int) -> float:
    """Return the time of a step of `minimind2-moe`, relative to a dense model with equal active parameters."""
    sparse = MiniMindConfig(**PRESETS["minimind2-moe"])
    # For equal active parameters, the dense MLP is as wide as all experts of a token together.
    width = (sparse.num_experts_per_tok + sparse.num_shared_experts) * sparse.moe_intermediate_size
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    dense = MiniMindConfig(**{name: getattr(sparse, name) for name in names}, intermediate_size=width)
    runs: dict[str, Callable[[int], Steps]] = {
        name: programs.ours(replace(setting, config=config)) for name, config in (("sparse", sparse), ("dense", dense))
    }
    seconds = {name: median_step(found)[0] for name, found in interleave(runs, rounds=rounds, steps=steps).items()}
    return seconds["sparse"] / seconds["dense"]


def preset_tokens(preset: str) -> int:
    """Return the number of tokens per step and process of `recipes/<preset>/pretrain.yaml`."""
    recipe = read_config(ROOT / f"recipes/{preset}/pretrain.yaml")
    rows = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    return rows * recipe["max_length"]


def cost_of_muon(setting: Setting, *, most_tokens: int, rounds: int, steps: int) -> dict[int, float]:
    """
    Return the step time with Muon over the step time with AdamW, for steps of one batch and of `most_tokens` tokens.

    Measure a step with AdamW, and the updates of both optimizers alone: in whole steps of many tokens, noise would
    hide the difference. Scale the time of the forward and backward passes with the tokens.
    """

    def updates(optim_preset: str) -> Callable[[int], Steps]:
        trainer = programs.ours(setting, optim_preset=optim_preset).trainer
        for parameter in trainer.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer = trainer.create_optimizer()

        def run(num_steps: int) -> Steps:
            times = []
            for _ in range(num_steps + 1):
                optimizer.step()
                programs.wait_for(setting.device)
                times.append(time.perf_counter())
            return [(end - start, 0) for start, end in zip(times, times[1:], strict=False)]

        return run

    runs: dict[str, Callable[[int], Steps]] = {name: updates(name) for name in ("muon", "adamw")}
    runs["step"] = programs.ours(setting)
    seconds = {name: median_step(found)[0] for name, found in interleave(runs, rounds=rounds, steps=steps).items()}
    tokens = setting.batch_size * setting.max_length
    passes = seconds["step"] - seconds["adamw"]
    return {
        number * tokens: (number * passes + seconds["muon"]) / (number * passes + seconds["adamw"])
        for number in sorted({1, max(1, most_tokens // tokens)})
    }


def machine() -> str:
    """Return the name of the GPU, or the number of cores and the name of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    cores = torch.get_num_threads()
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{cores} core{'s' if cores > 1 else ''} of {name}"


def git_commit(checkout: Path = ROOT) -> str:
    """Return the commit of a checkout, with `-dirty` after it if any file but results and pictures was changed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs/*.png")
    return git("describe", "--always") + ("-dirty" if changed else "")


def environment() -> dict[str, Any]:
    """Return machine, commit, date and versions, for the record of a measurement."""
    names = ("torch", "transformers", "accelerate", "trl")
    return {
        "machine": machine(),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def fastest_precision() -> str:
    """Return `bf16` where the device has units for it, else `float32`: emulation takes several times as long."""
    return "bf16" if has_bfloat16_units("cuda" if torch.cuda.is_available() else "cpu") else "float32"


def file_name(machine: str, precision: str) -> str:
    """Return the name of the file of results. It names the precision if this machine has a faster one."""
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return f"{name}.json" if precision == fastest_precision() else f"{name}-{precision}.json"


def print_table(results: dict[str, Any]) -> None:
    for name, result in results["sizes"].items():
        print(f"\n{name} in {results['settings']['precision']} on {results['machine']}: useful tokens per second")
        print(f"  {'program':26}{'tokens/s':>12}{'ms/step':>11}{'of limit':>10}{'ours is':>9}")
        for program, row in result["programs"].items():
            print(
                f"  {program:26}{row['tokens_per_second']:12,.0f}{1000 * row['step_seconds']:11,.0f}"
                f"{row['share_of_limit']:10.0%}{row['ours_is_times_as_fast']:8.2f}x"
            )
        print(f"  {'6N at the GEMM rate':26}{result['limit_tokens_per_second']:12,.0f}")
        print(
            f"  overhead over the bare loop {result['overhead_over_bare_loop']:.1%}, share of the loader "
            f"{result['loader_share']:.2%}"
        )
        print(f"  step time with 8 documents per row instead of 1: {result['growth_with_documents']:+.1%}")
    for precision, shares in results.get("profile", {}).items():
        print(f"\nWhere a step of {next(iter(results['sizes']))} spends its time in {precision}")
        for part, share in shares.items():
            print(f"  {part:34}{share:6.1%}")
    print(f"\nStep time with experts over a dense model of equal active parameters: {results['cost_of_experts']:.2f}x")
    for tokens, ratio in results["cost_of_muon"].items():
        print(f"Step time with Muon over AdamW, {int(tokens):,} tokens per step: {ratio:.2f}x")
    if "seconds_to_first_step" in results:
        print(f"Start of the recipe to its first step (tiny, cached data): {results['seconds_to_first_step']:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["26M"], choices=[*SIZES, "all"], help="Model sizes.")
    parser.add_argument("--max_length", nargs="+", type=int, default=[512], help="Tokens per row.")
    parser.add_argument(
        "--tokens_a_step",
        type=int,
        default=65536 if torch.cuda.is_available() else 4096,
        help="Tokens per step. The batch size follows from it.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="Turns of each program.")
    parser.add_argument(
        "--steps", type=int, default=100 if torch.cuda.is_available() else 4, help="Steps of a program per turn."
    )
    parser.add_argument(
        "--precision",
        choices=["bf16", "float32"],
        default=fastest_precision(),
        help="Precision of all programs. By default, bf16 where the device has units for it, else float32.",
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    sizes, lengths = args.sizes, args.max_length
    if sizes == ["all"]:
        sizes, lengths = list(SIZES), [512, 2048]

    documents, _ = load_documents(["embedded"], Reading(validation_fraction=0.01))
    # Shuffle first: a sample of all corpora keeps their distribution of lengths.
    documents = documents.shuffle(seed=0).select(range(NUM_DOCUMENTS))
    tokenizer = train_tokenizer(documents["text"][:])
    results: dict[str, Any] = {
        **environment(),
        "settings": {name: getattr(args, name) for name in ("rounds", "steps", "tokens_a_step", "precision")},
        "sizes": {},
    }
    bf16 = args.precision == "bf16"
    if not torch.cuda.is_available():
        # Our trainer does so. It is a setting of the process, so all programs have it from the first step on.
        keep_freed_blocks()
    with tempfile.TemporaryDirectory() as directory:
        for size in sizes:
            for max_length in lengths:
                config = MiniMindConfig(**PRESETS[SIZES[size]])
                batch_size = args.tokens_a_step // max_length
                setting = Setting(documents, tokenizer, config, max_length, batch_size, Path(directory), bf16)
                result = compare(setting, rounds=args.rounds, steps=args.steps)
                result["growth_with_documents"] = growth_with_documents(setting, rounds=args.rounds, steps=args.steps)
                results["sizes"][f"{size}, rows of {max_length}"] = result
        batch_size = args.tokens_a_step // lengths[0]
        config = MiniMindConfig(**PRESETS[SIZES[sizes[0]]])
        setting = Setting(documents, tokenizer, config, lengths[0], batch_size, Path(directory), bf16)
        # The profile counts the time of the CPU, which on a GPU only launches kernels.
        if not torch.cuda.is_available():
            # A CPU without bf16 units has one precision.
            results["profile"] = {
                precision: profile_step(replace(setting, bf16=precision == "bf16"), steps=args.steps)
                for precision in dict.fromkeys((fastest_precision(), "float32"))
            }
        results["cost_of_experts"] = cost_of_experts(setting, rounds=args.rounds, steps=args.steps)
        results["cost_of_muon"] = cost_of_muon(
            setting, most_tokens=preset_tokens(SIZES[sizes[0]]), rounds=args.rounds, steps=args.steps
        )
    # On a GPU, the recipe's first step includes compilation.
    if not torch.cuda.is_available():
        results["seconds_to_first_step"] = seconds_to_first_step()
    print_table(results)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / file_name(results["machine"], args.precision)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
