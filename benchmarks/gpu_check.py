"""
Check one GPU in at most eight minutes: `make gpu-check`, or

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --device cpu

The checks compare kernels with plain references, runs of the recipe in several precisions and under several launchers
with each other and with losses that a CPU recorded, and measure speed and memory. `gpu-check.json` and `gpu-check.md`
in the working directory hold the results, to attach to an issue. With `--device cpu`, the script rehearses the checks.
`--record` writes the losses that other devices are compared with.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import programs
from benchmarks.bench import NUM_DOCUMENTS, ROOT, SIZES, environment, median_step
from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.data.documents import load_documents
from hf_pretrain.doctor.machine_checks import BAD
from hf_pretrain.doctor.step_check import EXPERTS, check_steps, compute_step
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.devices import has_bfloat16_units
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.measurements import flops_per_token, known_peak


RECORD = ROOT / "benchmarks/results/gpu-check-losses.json"
NUM_STEPS = 20
# A short run in float32 with AdamW, whose update, unlike Muon's, has no product in bfloat16.
FLAGS = ["--config", "recipes/tiny/pretrain.yaml", "--max_length", "128", "--per_device_train_batch_size", "2"]
FLAGS += ["--optim_preset", "adamw", "--learning_rate", "1e-3", "--max_steps", str(NUM_STEPS), "--logging_steps", "1"]
FLAGS += ["--eval_strategy", "no", "--validation_fraction", "0", "--report_to", "none"]
NO_SAVE, FLOAT32 = ["--save_strategy", "no"], ["--bf16", "false"]
# Largest relative differences. Kernels in bfloat16 are off by 0.1 % on a CPU, and wrong ones by 3 % or more.
KERNEL_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.02}
RECORD_LIMIT, LAUNCHER_LIMIT, PRECISION_LIMIT = 1e-4, 1e-4, 0.02


class Skipped(Exception):
    """The device cannot do what the check needs."""


@dataclass
class Row:
    """The result of a check; `passed` is `None` if it was skipped."""

    name: str
    passed: bool | None
    figure: str
    seconds: float


@dataclass
class Bench:
    """The device, a scratch directory, and the run in float32 that several checks compare with."""

    device: str
    directory: Path

    @property
    def half(self) -> torch.dtype:
        if not has_bfloat16_units(self.device) and self.device == "cuda":
            raise Skipped("the GPU has no bfloat16 units")
        return torch.bfloat16

    @cached_property
    def losses(self) -> list[float]:
        return self.train("float32", *FLOAT32, *NO_SAVE)

    def command(self, name: str, *flags: str) -> list[str]:
        """Return the command of a run; `flags` go to the recipe and to the command that launches it."""
        words = [sys.executable, "hf_pretrain_cli.py", "pretrain", "--nproc", "1", *FLAGS]
        words += [*flags, "--output_dir", str(self.directory / name)]
        return words + (["--use_cpu"] if self.device == "cpu" else [])

    def run(self, name: str, *flags: str) -> str:
        """Run the recipe, and return its output."""
        # On CPUs, DeepSpeed takes the number of devices from LOCAL_SIZE.
        variables = os.environ | ({"LOCAL_SIZE": "1"} if self.device == "cpu" else {})
        found = subprocess.run(self.command(name, *flags), cwd=ROOT, env=variables, capture_output=True, text=True)
        if found.returncode != 0:
            raise RuntimeError(f"the run failed: {' '.join((found.stdout + found.stderr).split())[-500:]}")
        return found.stdout

    def logs(self, name: str, key: str) -> list[float]:
        state = json.loads((self.directory / name / "trainer_state.json").read_text())
        return [entry[key] for entry in state["log_history"] if key in entry]

    def train(self, name: str, *flags: str) -> list[float]:
        """Run the recipe, and return the loss of each step."""
        self.run(name, *flags)
        return self.logs(name, "loss")


def compare(found: Iterable[float], expected: Iterable[float], limit: float) -> tuple[bool, str]:
    """Return whether all losses are within a relative limit, and the largest difference. NaN is not within."""
    pairs = list(zip(found, expected, strict=True))
    errors = torch.tensor([abs(a - b) / max(abs(b), 1e-9) for a, b in pairs], dtype=torch.float64)
    return bool(pairs) and bool(
        (errors <= limit).all()
    ), f"losses differ by {errors.max().item():.2g}, limit {limit:g}"


def compare_gradients(
    device: str, dtype: torch.dtype, changed: dict[str, Any], reference: dict[str, Any], **fields: Any
) -> tuple[bool, str]:
    """Compare the loss and the gradients of two ways to compute a step."""
    found = compute_step(device, dtype=dtype, **changed, **fields)
    expected = compute_step(device, dtype=dtype, **reference, **fields)
    error = (torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)).item()
    return error <= KERNEL_LIMITS[dtype], f"gradients differ by {error:.2g}, limit {KERNEL_LIMITS[dtype]:g}"


def check_doctor(bench: Bench) -> tuple[bool, str]:
    """Run the doctor's comparison of each device with the CPU."""
    findings = list(check_steps())
    return all(finding.status != BAD for finding in findings), "; ".join(
        f"{finding.name}: {finding.message}" for finding in findings
    )


def check_compiled(bench: Bench, **fields: Any) -> tuple[bool, str]:
    return compare_gradients(bench.device, torch.float32, {"compiles": True}, {}, experts="grouped_mm", **fields)


def check_packed(bench: Bench) -> tuple[bool, str]:
    """Compare attention on packed documents, which on a GPU in bfloat16 is `varlen_attn`, with eager attention."""
    return compare_gradients(bench.device, bench.half, {}, {"attention": "eager"})


def check_experts(bench: Bench, implementation: str, dtype: torch.dtype) -> tuple[bool, str]:
    dtype = dtype if dtype == torch.float32 else bench.half
    return compare_gradients(bench.device, dtype, {"experts": implementation}, {}, **EXPERTS)


def check_generation(bench: Bench) -> tuple[bool, str]:
    """Compare greedy tokens with and without a cache, for rows with left padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MiniMindForCausalLM(MiniMindConfig(**sizes, vocab_size=256, initializer_range=0.1))
    ids, mask = torch.randint(3, 256, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    model, ids, mask = model.to(bench.device).eval(), ids.to(bench.device), mask.to(bench.device)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    differ = int((cached != plain).sum())
    return differ == 0, f"{differ} of {cached.numel()} tokens differ"


def check_record(bench: Bench) -> tuple[bool, str]:
    return compare(bench.losses, json.loads(RECORD.read_text())["losses"], RECORD_LIMIT)


def check_precision(bench: Bench, precision: str) -> tuple[bool, str]:
    if precision == "fp16" and bench.device == "cpu":
        raise Skipped("fp16 needs a GPU")
    flags = ["--bf16", "true"] if bench.half and precision == "bf16" else ["--bf16", "false", "--fp16", "true"]
    return compare(bench.train(precision, *flags, *NO_SAVE), bench.losses, PRECISION_LIMIT)


def check_launcher(bench: Bench, flags: list[str]) -> tuple[bool, str]:
    """Compare a run under a launcher, with one process, with a run of plain Python."""
    if "fsdp2" in flags and bench.device == "cpu":
        raise Skipped("accelerate has no FSDP on a CPU")
    name = "-".join(flags).replace("--", "")
    return compare(bench.train(name, *flags, *FLOAT32, *NO_SAVE), bench.losses, LAUNCHER_LIMIT)


def check_qlora(bench: Bench) -> tuple[bool, str]:
    """Train an adapter on the weights of the run in float32, with and without rounding them to 4 bits."""
    if bench.device == "cpu" or importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped("it needs CUDA and bitsandbytes")
    assert bench.losses
    flags = ["--model_name_or_path", str(bench.directory / "float32"), "--use_peft", *NO_SAVE]
    return compare(bench.train("qlora", *flags, "--load_in_4bit"), bench.train("lora", *flags), PRECISION_LIMIT)


def check_memory(bench: Bench) -> tuple[bool, str]:
    """Compare the memory that `--dry_run` prints with the peak of the run."""
    plan = bench.run("plan", *FLOAT32, *NO_SAVE, "--dry_run")
    found = re.search(r"([\d.]+) GiB", plan)
    if found is None:
        raise RuntimeError(f"the plan names no memory: {plan[-500:]}")
    assert bench.losses
    planned, peak = float(found[1]), max(bench.logs("float32", "peak_memory_gib"))
    # The plan has two decimals. On a CPU, the process also holds freed blocks.
    limit = 0.1 * peak + 0.01 if bench.device == "cuda" else peak
    return abs(planned - peak) <= limit, f"plan {planned:.2f} GiB, peak {peak:.2f} GiB"


def check_resume(bench: Bench) -> tuple[bool, str]:
    """Kill a run after its first checkpoint, resume it, and compare its weights with those of a whole run."""
    assert bench.losses
    flags = [*FLOAT32, "--save_steps", "5"]
    directory = bench.directory / "killed"
    process = subprocess.Popen(
        bench.command("killed", *flags), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    # The command replaces itself by the recipe, so this is the process that trains.
    while process.poll() is None and not (directory / "checkpoint-5").exists():
        time.sleep(0.01)
    process.kill()
    if process.wait() == 0 or (directory / "model.safetensors").exists():
        raise RuntimeError("the run ended before it was killed")
    bench.run("killed", *flags, "--resume_from_checkpoint", "auto")
    expected, found = (
        (path / "model.safetensors").read_bytes() for path in (bench.directory / "float32", bench.directory / "killed")
    )
    return found == expected, "the weights are " + ("equal" if found == expected else "different")


def check_speed(bench: Bench, size: str) -> tuple[bool, str]:
    """Measure tokens/s and MFU. On a CPU, the preset `tiny` rehearses it."""
    on_gpu = bench.device == "cuda"
    documents, _ = load_documents(["embedded"], Reading(validation_fraction=0.01))
    documents = documents.shuffle(seed=0).select(range(NUM_DOCUMENTS if on_gpu else 200))
    config = MiniMindConfig(**PRESETS[SIZES[size] if on_gpu else "tiny"])
    bf16 = has_bfloat16_units(bench.device)
    tokenizer = train_tokenizer(documents["text"][:])
    batch_size, length = (64, 512) if on_gpu else (2, 64)
    setting = programs.Setting(documents, tokenizer, config, length, batch_size, bench.directory / "speed", bf16)
    run = programs.ours(setting, torch_compile=on_gpu)
    _, tokens = median_step(run(40 if on_gpu else 2))
    dtype = torch.bfloat16 if bf16 else torch.float32
    flops, peak = tokens * flops_per_token(run.trainer.model), known_peak(setting.device, dtype)
    mfu = f"MFU {flops / peak:.1%}" if peak else "the peak of the device is unknown"
    rehearsal = "" if on_gpu else "rehearsed with the preset tiny: "
    return tokens > 0, f"{rehearsal}{tokens:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s, {mfu}"


Check = Callable[[Bench], tuple[bool, str]]
CHECKS: dict[str, Check] = {
    "training step": check_doctor,
    "compiled layers": check_compiled,
    "compiled layers with experts": partial(check_compiled, **EXPERTS),
    "packed attention": check_packed,
    **{
        f"experts, {implementation}, {str(dtype).removeprefix('torch.')}": partial(
            check_experts, implementation=implementation, dtype=dtype
        )
        for implementation in ("grouped_mm", "batched_mm")
        for dtype in (torch.float32, torch.bfloat16)
    },
    "generation with a cache": check_generation,
    "losses of a CPU": check_record,
    "bf16": partial(check_precision, precision="bf16"),
    "fp16": partial(check_precision, precision="fp16"),
    "FSDP2": partial(check_launcher, flags=["--launcher", "accelerate", "--accelerate", "fsdp2"]),
    **{
        f"ZeRO-{stage}": partial(check_launcher, flags=["--launcher", "deepspeed", "--ds", f"zero{stage}"])
        for stage in (1, 2, 3)
    },
    "QLoRA": check_qlora,
    "memory of the plan": check_memory,
    "kill -9 and resume": check_resume,
    **{f"speed of {size}": partial(check_speed, size=size) for size in ("26M", "104M")},
}


def run_check(name: str, check: Check, bench: Bench) -> Row:
    """Run a check. An exception is a failed check."""
    start = time.perf_counter()
    try:
        passed, figure = check(bench)
    except Skipped as reason:
        return Row(name, None, f"skipped: {reason}", time.perf_counter() - start)
    except Exception as error:
        # Any error is a result: the other checks go on.
        passed, figure = False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return Row(name, passed, figure, time.perf_counter() - start)


def format_table(rows: Iterable[Row], facts: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['machine']}, commit {facts['commit']}, {facts['date']}, {versions}", ""]
    lines += ["| check | result | figure | seconds |", "|---|---|---|---|"]
    words = {True: "passed", False: "**failed**", None: "skipped"}
    for row in rows:
        # A bar would end the cell.
        figure = row.figure.replace("|", "\\|")
        lines.append(f"| {row.name} | {words[row.passed]} | {figure} | {row.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--record", action="store_true", help="Record the losses of this device, and check nothing.")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU. `hf-pretrain doctor` says why; --device cpu rehearses the checks.")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        bench = Bench(args.device, Path(directory))
        if args.record:
            RECORD.write_text(json.dumps({**environment(), "losses": bench.losses}, indent=1) + "\n")
            return
        rows = []
        for name in args.only:
            row = run_check(name, CHECKS[name], bench)
            rows.append(row)
            print(f"{row.name}: {row.passed} ({row.figure}, {row.seconds:.1f} s)", flush=True)
    facts = {"device": args.device, **environment()}
    results = {**facts, "checks": [asdict(row) for row in rows]}
    Path("gpu-check.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = format_table(rows, facts)
    Path("gpu-check.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\n{sum(row.seconds for row in rows):.0f} s. Attach gpu-check.md and gpu-check.json to the issue.")
    raise SystemExit(any(row.passed is False for row in rows))


if __name__ == "__main__":
    main()
