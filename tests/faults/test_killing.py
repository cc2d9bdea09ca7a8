"""kill -9 at any moment: what is there verifies, and the run that goes on ends in the same bits."""

import itertools
import os
import random
import signal
import time

import pytest

from hf_pretrain.manifest import MANIFEST_NAME, find_damage
from tests.faults.driving import command, ranks, start, wait_for


NUM_RANDOM_KILLS = int(os.environ.get("N", 30))
# Of the second save: no file yet, each of its files, its manifest, and its name.
NUM_FILES = {"python": 14, "torchrun": 15}

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def kill(process, launcher: str, rank: int) -> None:
    """The only process, or one rank; the launcher sees to the other, as it would."""
    found = ranks(process)
    if found:
        found[min(rank, len(found) - 1)].send_signal(signal.SIGKILL)
    process.communicate(timeout=120)


def check_checkpoints(output_dir):
    for path in output_dir.glob("checkpoint-*"):
        assert find_damage(path) == []


def kill_at(number: int, launcher: str, workspace, output_dir) -> None:
    def written() -> int:
        saving = output_dir / ".saving/checkpoint-4"
        try:
            return sum(path.is_file() for path in saving.rglob("*")) + (saving / MANIFEST_NAME).exists()
        except FileNotFoundError:
            return 0

    def is_time() -> bool:
        return (output_dir / ".saving/checkpoint-4").is_dir() and written() >= number or is_named()

    def is_named() -> bool:
        return (output_dir / "checkpoint-4").is_dir()

    with start(command(workspace, output_dir, "--save_total_limit", "9", launcher=launcher)) as process:
        wait_for(is_time, process)
        kill(process, launcher, number % 2)
    assert process.returncode != 0, "the run ended before it was killed"


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        pytest.param(launcher, number, marks=() if number in (0, 9) and launcher == "python" else pytest.mark.faults)
        for launcher, num_files in NUM_FILES.items()
        for number in range(num_files + 2)
    ],
)
def test_after_each_file_of_a_save(launcher, number, workspace, tmp_path, ends_like):
    kill_at(number, launcher, workspace, tmp_path / "run")
    check_checkpoints(tmp_path / "run")
    ends_like(f"kill -9 within a save: {launcher}", tmp_path / "run", launcher)


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(NUM_RANDOM_KILLS))
def test_at_random_moments(trial, workspace, tmp_path, ends_like):
    """Some time after the run began or saved. A run that had ended by then was not killed and does not count."""
    launcher = ("python", "torchrun")[trial % 2]
    chance = random.Random(trial)
    for attempt in itertools.count():
        output_dir = tmp_path / str(attempt)
        last = output_dir / chance.choice(["", "checkpoint-2", "checkpoint-4", "checkpoint-6"])
        with start(command(workspace, output_dir, "--save_total_limit", "9", launcher=launcher)) as process:
            wait_for(last.is_dir, process)
            time.sleep(chance.uniform(0, 0.2))
            kill(process, launcher, trial // 2 % 2)
        if process.returncode != 0:
            break
    check_checkpoints(output_dir)
    ends_like(f"kill -9 at a random moment: {launcher}", output_dir, launcher)
