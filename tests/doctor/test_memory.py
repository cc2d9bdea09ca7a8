"""A run whose memory does not suffice, with an allocator that refuses tensors above a size."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.invariants.launching import ROOT, launcher_command, process_options
from tests.matrix import make_workspace
from tests.toys import write_jsonl


pytestmark = pytest.mark.slow
# Limit, phase and words of a run. `phase` names a hook after which nothing above a kilobyte is allocated any more.
DRIVER = """
import ctypes, json, os, runpy, sys
import torch
import hf_pretrain.training.run, trl

allocator = ctypes.CDLL(None)
allocator.limit_to.argtypes, allocator.largest_seen.restype = [ctypes.c_size_t], ctypes.c_size_t
limit, phase, report, words = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
allocator.limit_to(limit or 2**62)
stop = lambda *args: allocator.limit_to(1024)
if phase == "backward":
    torch.nn.modules.module.register_module_full_backward_pre_hook(stop)
elif phase == "update":
    torch.optim.optimizer.register_optimizer_step_pre_hook(stop)
sys.argv = words
try:
    runpy.run_path(words[0], run_name="__main__")
finally:
    if int(os.environ.get("RANK", 0)) == 0:
        open(report, "w").write(str(allocator.largest_seen()))
"""
COMMON = "--use_cpu --bf16 false --max_steps 4 --logging_steps 1 --save_steps 2 --report_to none --eval_strategy no"
COMMON += " --optim_preset adamw --per_device_train_batch_size 16 --gradient_accumulation_steps 1"
STAGES = {
    "pretrain": "--dataset_name long.jsonl --max_length 128 --model_name_or_path dense --validation_fraction 0",
    "sft": "--dataset_name talks.jsonl --max_length 128 --model_name_or_path dense --validation_fraction 0",
    "dpo": "--dataset_name pairs.jsonl --max_length 64 --model_name_or_path dense --validation_fraction 0",
    "reward": "--dataset_name pairs.jsonl --max_length 64 --model_name_or_path dense --validation_fraction 0",
    "distill": "--dataset_name talks.jsonl --max_length 128 --model_name_or_path dense --teacher_name_or_path moe "
    "--validation_fraction 0",
    "grpo": "--dataset_name tasks.jsonl --rewards length --num_generations 2 --max_completion_length 32 "
    "--model_name_or_path dense --validation_fraction 0",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable:
    """Return a function that runs a stage, and returns its status, its output and its largest allocation."""
    path = tmp_path_factory.mktemp("memory")
    make_workspace(path)
    texts = [f"{n} rivers walk under {n + 1} green stones, and seven quiet lights" for n in range(400)]
    write_jsonl(path / "long.jsonl", texts)
    write_jsonl(path / "talks.jsonl", [{"prompt": f"{text}?", "completion": text * 2} for text in texts])
    (path / "driver.py").write_text(DRIVER)
    source, library = ROOT / "tests/fixtures/refusing_allocator.c", path / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    def start(stage: str, flags: str, *, limit: int = 0, phase: str = "", launcher: str = "python"):
        words = [*launcher_command(launcher), "driver.py", str(limit), phase, "largest", f"{ROOT}/recipes/{stage}.py"]
        options = process_options(LD_PRELOAD=str(library)) | {"cwd": path, "timeout": 300}
        done = subprocess.run([*words, *COMMON.split(), *STAGES[stage].split(), *flags.split()], **options)
        return done.returncode, done.stdout, int((path / "largest").read_text())

    return start


def lines_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("stage", STAGES)
def test_the_flags_of_the_message_fit(run, stage):
    status, output, largest = run(stage, f"--output_dir {stage}")
    assert status == 0, output
    limit = largest // 2
    status, output, _ = run(stage, f"--output_dir {stage}-small", limit=limit)
    (line,) = lines_of(output)
    assert status == 71 and "Traceback" not in output, output
    assert re.match(r"error: In step 1: The memory does not suffice: [\d.]+ MiB were refused; .* MiB are free", line)
    flags = re.search("Each of these fits, the cheapest first: (.*?)[;.] ", line)[1]
    assert flags.startswith("--per_device_train_batch_size ") and "--gradient_accumulation_steps" in flags
    status, output, _ = run(stage, f"--output_dir {stage}-small {flags} --resume_from_checkpoint auto", limit=limit)
    assert status == 0, output
