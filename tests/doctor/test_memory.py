"""A run whose memory does not suffice, with an allocator that refuses tensors above a size."""

import re
import subprocess
from collections.abc import Callable

import pytest
import torch

from hf_pretrain.doctor.memory import explain
from tests.invariants.launching import ROOT, launcher_command, process_options
from tests.matrix import make_workspace
from tests.toys import write_jsonl
from tests.trainers import make_run_trainer


pytestmark = pytest.mark.slow
# Limit, phase and words of a run. `phase` names a hook after which nothing above a kilobyte is allocated any more.
DRIVER = """
import ctypes, json, os, runpy, sys
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
import hf_pretrain.training.run

allocator = ctypes.CDLL(None)
allocator.limit_to.argtypes, allocator.limit_to.restype = [ctypes.c_size_t], None
allocator.largest_seen.restype = ctypes.c_size_t
limit, phase, report, words = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
allocator.limit_to(limit or 2**62)
stop = lambda *args: allocator.limit_to(1024)
if phase == "backward":
    torch.nn.modules.module.register_module_full_backward_pre_hook(stop)
elif phase == "update":
    register_optimizer_step_pre_hook(stop)
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


def line_of(status: int, output: str) -> str:
    """Check how the run has ended, and return its error."""
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output and status == 71, output
    refused = r"The memory does not suffice: [\d.,]+ MiB were refused; [\d,]+ of [\d,]+ MiB are free\."
    assert re.search(refused, line), line
    return line


def fitting(line: str) -> list[str]:
    """Return the flags of a line that fit."""
    return re.search(r"Each of these fits, the cheapest first: (.*?)\. Then ", line)[1].split("; ")


@pytest.mark.parametrize("stage", STAGES)
def test_the_flags_of_the_message_fit(run, stage):
    status, output, largest = run(stage, f"--output_dir {stage}")
    assert status == 0, output
    status, output, _ = run(stage, f"--output_dir {stage}-small", limit=largest // 2)
    line = line_of(status, output)
    assert line.startswith("error: In step 1: ")
    rows = re.fullmatch(r"--per_device_train_batch_size (\d+) --gradient_accumulation_steps (\d+)", fitting(line)[0])
    assert int(rows[1]) * int(rows[2]) == 16 > int(rows[1])
    status, output, _ = run(stage, f"--output_dir {stage}-fitting {fitting(line)[0]}", limit=largest // 2)
    assert status == 0, output


def test_recomputed_activations_and_shorter_rows_are_tried(run):
    *_, largest = run("pretrain", "--output_dir all")
    status, output, _ = run("pretrain", "--output_dir few --per_device_train_batch_size 1", limit=largest // 24)
    # A single row: only its length is left.
    line = line_of(status, output)
    (flags,) = fitting(line)
    rows = "--per_device_train_batch_size 1 --gradient_accumulation_steps 1"
    assert flags == f"--max_length 64 {rows}, in a new run"
    assert "These do not fit either: --activation_checkpointing. Each" in line
    status, output, _ = run(
        "pretrain", "--output_dir short --per_device_train_batch_size 1 --max_length 64", limit=largest // 24
    )
    assert status == 0, output


def test_a_batch_that_cannot_be_cut_leaves_the_untried_advice(tmp_path):
    trainer = make_run_trainer(tmp_path, optim_preset="adamw")

    def training_step(inputs):
        raise MemoryError

    try:
        training_step({"texts": ["one of a user's own collator"]})
    except MemoryError as error:
        found = str(explain(trainer, error))
    assert found.startswith("In step 1: The memory does not suffice: MemoryError; ") and "Try one of these" in found


def test_what_was_tried_in_vain_is_not_advised_again(tmp_path):
    trainer = make_run_trainer(tmp_path, optim_preset="adamw", per_device_train_batch_size=4)

    def training_step(inputs):
        raise MemoryError

    trainer.compute_loss = lambda *_: training_step({})
    try:
        training_step({"input_ids": torch.zeros(4, 8, dtype=torch.long)})
    except MemoryError as error:
        found = str(explain(trainer, error))
    rows = "--per_device_train_batch_size 1 --gradient_accumulation_steps 4"
    tried = f"These do not fit either: {rows}; --activation_checkpointing. "
    assert f"{tried}Try one of these, the cheapest first: --ds" in found


@pytest.mark.parametrize("phase", ["backward", "update"])
def test_the_first_gradients_and_moments_are_refused(run, phase):
    """Nothing fits any more, so the message names what is not tried: in an update, there is no micro-batch to try."""
    line = line_of(*run("pretrain", f"--output_dir {phase}", phase=phase)[:2])
    remedies = re.search(r"Try one of these, the cheapest first: (.*?)\. Then start again ", line)[1].split("; ")
    first = [
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 2",
        "--activation_checkpointing",
        "--max_length 64, in a new run",
    ]
    assert remedies == [
        *(first if phase == "update" else []),
        "--use_peft, in a new run",
        "--ds zero3_offload of hf-pretrain",
    ]
    tried = "These do not fit either: --per_device_train_batch_size 1 --gradient_accumulation_steps 16; " in line
    assert tried == (phase == "backward")


def test_an_evaluation_that_is_too_large_keeps_the_checkpoint_and_the_run_resumes(run):
    flags = "--output_dir evaluated --validation_fraction 0.5 --eval_strategy steps --eval_steps 3 --save_steps 2"
    *_, largest = run("pretrain", "--output_dir trained")
    wide = f"{flags} --per_device_eval_batch_size 64"
    status, output, _ = run("pretrain", wide, limit=largest + 1)
    line = line_of(status, output)
    assert line.startswith("error: In an evaluation: ") and "evaluated/checkpoint-2 is intact" in line
    (found,) = fitting(line)
    assert found.startswith("--per_device_eval_batch_size ")
    resumed = f"{wide} {found} --resume_from_checkpoint auto"
    status, output, _ = run("pretrain", resumed, limit=largest + 1)
    assert status == 0 and "checkpoint-2" in output, output


@pytest.mark.distributed
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_rank_tries_flags_while_the_other_one_waits(run, stage):
    status, output, largest = run(stage, f"--output_dir {stage}-two", launcher="torchrun")
    assert status == 0, output
    status, output, _ = run(stage, f"--output_dir {stage}-two-small", launcher="torchrun", limit=largest // 2)
    # torchrun has a status of its own.
    assert status == 1
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    flags = fitting(lines[0])[0]
    status, output, _ = run(
        stage, f"--output_dir {stage}-two-fitting {flags}", launcher="torchrun", limit=largest // 2
    )
    assert status == 0, output
