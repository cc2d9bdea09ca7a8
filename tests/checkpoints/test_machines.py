"""Machines without shared storage agree on the checkpoint to resume from. Two processes act as two machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pretrain.checkpoints import machines
from hf_pretrain.checkpoints.manifest import find_damage, write_manifest
from hf_pretrain.training import resuming
from hf_pretrain.training.arguments import LMTrainingArguments
from tests.invariants.launching import ROOT, cpu_environment, free_port


pytestmark = pytest.mark.distributed


def write_checkpoint(step: int, run: str = "run", size: int = 10) -> Path:
    """Write a checkpoint below the current directory, which is the disk of a machine."""
    path = Path(f"out/checkpoint-{step}")
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(run)
    (path / "shards").mkdir()
    (path / "shards/weights").write_bytes(os.urandom(1) * size if run == "other" else bytes(size))
    write_manifest(path, {"step": step})
    return path


def arguments(resume: str | None = None, **given) -> LMTrainingArguments:
    given = {"save_on_each_node": True, "save_strategy": "steps"} | given
    return LMTrainingArguments(output_dir="out", resume_from_checkpoint=resume, use_cpu=True, bf16=False, **given)


def names() -> list[str]:
    return sorted(path.name for path in Path("out").iterdir())


def check_nothing(rank: int) -> None:
    assert resuming.checkpoint_to_resume(arguments("auto")) is None


def check_copy_of_the_newest(rank: int) -> None:
    # Several chunks and a part of one.
    machines._CHUNK_BYTES = 1000
    write_checkpoint(2)
    if rank == 1:
        write_checkpoint(4, size=2500)
    elif rank == 0:
        (write_checkpoint(4, size=2500) / "shards/weights").write_bytes(b"damage")
    assert resuming.checkpoint_to_resume(arguments("auto")) == "out/checkpoint-4"
    assert find_damage("out/checkpoint-4") == [] and Path("out/checkpoint-4/shards/weights").stat().st_size == 2500
    assert names() == ["checkpoint-2", "checkpoint-4"] + (["damaged-checkpoint-4"] if rank == 0 else [])


def check_checkpoints_of_two_runs(rank: int) -> None:
    write_checkpoint(4, run="run" if rank == 0 else "other")
    assert resuming.checkpoint_to_resume(arguments("auto")) == "out/checkpoint-4"
    assert Path("out/checkpoint-4/trainer_state.json").read_text() == "run" and not find_damage("out/checkpoint-4")
    assert names() == (["abandoned-checkpoint-4"] if rank else []) + ["checkpoint-4"]


def check_a_named_checkpoint(rank: int) -> None:
    if rank == 0:
        write_checkpoint(2)
    write_checkpoint(6)
    assert resuming.checkpoint_to_resume(arguments("out/checkpoint-2")) == "out/checkpoint-2"
    assert names() == ["abandoned-checkpoint-6", "checkpoint-2"] and not find_damage("out/checkpoint-2")


def check_a_new_run_needs_empty_directories_everywhere(rank: int) -> None:
    if rank == 1:
        write_checkpoint(2)
    with pytest.raises(ValueError, match="out is not empty"):
        resuming.checkpoint_to_resume(arguments())


def check_restarts_of_one_machine_count_for_all(rank: int) -> None:
    write_checkpoint(2)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    assert resuming.checkpoint_to_resume(arguments()) == "out/checkpoint-2"


def check_directories_that_are_not_shared(rank: int) -> None:
    resuming._VISIBLE_SECONDS = 0.5
    with pytest.raises(ValueError, match="Pass --save_on_each_node, or use a directory that all machines share"):
        resuming.occupy_output_dir(arguments(save_on_each_node=False))
    # Nothing is saved, or each machine saves for itself.
    resuming.occupy_output_dir(arguments(save_on_each_node=False, save_strategy="no"))
    resuming.occupy_output_dir(arguments())
    assert names() == [".lock"]


def check_a_directory_that_is_shared(rank: int) -> None:
    args = arguments()
    # Both processes see the same directory.
    args.output_dir = str(Path.cwd().parents[1] / "shared")
    with pytest.raises(ValueError, match="is in use by"):
        resuming.occupy_output_dir(args)


CASES = [name for name in dir() if name.startswith("check_")]


def test_two_machines_agree(tmp_path):
    port = str(free_port())
    processes = []
    for rank in range(2):
        (tmp_path / f"disk-{rank}").mkdir()
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoints.test_machines"],
                cwd=tmp_path / f"disk-{rank}",
                env=cpu_environment(**ranks, **address),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert outputs[0].count("passed") == outputs[1].count("passed") == len(CASES) == 8


if __name__ == "__main__":
    disk = Path.cwd()
    for case in CASES:
        (disk / case).mkdir()
        os.chdir(disk / case)
        globals()[case](int(os.environ["RANK"]))
        print(f"{case} passed")
