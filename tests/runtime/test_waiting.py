"""Ranks wait for the main process as long as it lives, and no longer."""

import os
import subprocess
import sys

import pytest

from tests.invariants.launching import free_port


RANK = """
import os, signal, time
from pathlib import Path
import torch
from hf_pretrain.runtime import waiting
from hf_pretrain.training.arguments import LMTrainingArguments

waiting.TELL_SECONDS = 1
# The timeout is for meeting, too, and one may take long to get here.
Path("here-" + os.environ["RANK"]).touch()
while len(list(Path().glob("here-*"))) < 2:
    time.sleep(0.01)
args = LMTrainingArguments(output_dir="unused", use_cpu=True, bf16=False, ddp_timeout=4)
try:
    with args.main_process_first(desc="preparing the data"):
        if args.process_index == 0:
            print("begun", flush=True)
            {work}
            print("done at", time.time(), flush=True)
except OSError:
    # The process lives on, and its store with it, until the other one has ended.
    while not Path("over").exists():
        time.sleep(0.01)
    raise
print("through at", time.time(), flush=True)
torch.distributed.barrier()
"""


def run_two(work: str, cwd) -> list[subprocess.Popen]:
    """Run two ranks without a launcher, which would end one rank when the other dies."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK.format(work=work)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.distributed
def test_waiting_outlasts_the_timeout_of_collectives(tmp_path):
    outputs = [rank.communicate(timeout=500)[0] for rank in run_two("time.sleep(9)", tmp_path)]
    assert all("through" in output for output in outputs), outputs
    assert "Waiting for rank 0, which has been preparing the data" in outputs[1]
    done, through = (
        float(output.split(f"{word} at ")[1].split()[0])
        for word, output in zip(("done", "through"), outputs, strict=True)
    )
    assert through > done


@pytest.mark.distributed
@pytest.mark.parametrize(
    "work",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise ValueError('bad data')",
    ],
)
def test_no_rank_waits_for_a_dead_process(tmp_path, work):
    ranks = run_two(work, tmp_path)
    ranks[0].wait(timeout=500)
    output = ranks[1].communicate(timeout=500)[0]
    assert ranks[1].returncode != 0 and "through" not in output
    assert any(part in output for part in ("Rank 0 died", "Rank 0 cannot be reached", "Rank 0 failed")), output


@pytest.mark.distributed
def test_no_rank_waits_for_work_that_failed(tmp_path):
    ranks = run_two("raise OSError('the disk is full')", tmp_path)
    try:
        output = ranks[1].communicate(timeout=300)[0]
    finally:
        (tmp_path / "over").touch()
        ranks[0].communicate(timeout=300)
        ranks[1].kill()
    assert ranks[1].returncode != 0 and "through" not in output
    assert "Rank 0 failed while it was preparing the data" in output
