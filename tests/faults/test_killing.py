"""kill -9 at any moment: the checkpoints verify, and the resumed run ends with the same bits."""

import itertools
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from hf_pretrain.checkpoints.manifest import MANIFEST_NAME, find_damage
from tests.faults.driving import STEPS, command, kill_all, mostly_faults, ranks, start, steps_of, wait_for


# The test kills a run in every save but the last one.
SAVES = range(2, STEPS, 2)
NUM_RANDOM_RUNS = -(-int(os.environ.get("N", 30)) // len(SAVES))
# Moments of a save: before its first file, after each file, after the manifest, and after the rename.
NUM_MOMENTS = {"python": 16, "torchrun": 17}

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def killable(workspace: Path, output_dir: Path, launcher: str) -> list[str]:
    words = command(workspace, output_dir, "--save_total_limit", "9", launcher=launcher)
    return [*words, "--resume_from_checkpoint", "auto"]


def kill(process, rank: int, *, whole_machine: bool = False) -> None:
    """Kill the only process, or one rank. The launcher ends the other rank, unless the whole machine dies."""
    found = ranks(process)
    if not found:
        # It ended before the kill. A run that failed would pass for a killed one.
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output[-3000:]
        return
    kill_all(found[min(rank, len(found) - 1) :][:1])
    if whole_machine:
        # The others run on for a moment, and may write.
        time.sleep(0.2)
        kill_all([process, *found])
    process.communicate(timeout=500)


def check_checkpoints(output_dir: Path) -> None:
    for path in output_dir.glob("checkpoint-*"):
        assert find_damage(path) == []


def kill_within_save(step: int, number: int, words: list[str], output_dir: Path) -> None:
    """Try again if, on a busy machine, the run continued before the kill reached it."""
    before = output_dir.with_name("before")
    if output_dir.exists():
        shutil.copytree(output_dir, before)
    for _ in range(5):
        if _kill_within_save(step, number, words, output_dir):
            break
        shutil.rmtree(output_dir)
        if before.exists():
            shutil.copytree(before, output_dir)
    else:
        pytest.fail("it went on before it was killed")
    shutil.rmtree(before, ignore_errors=True)


def _kill_within_save(step: int, number: int, words: list[str], output_dir: Path) -> bool:
    saving, named = output_dir / f".saving/checkpoint-{step}", output_dir / f"checkpoint-{step}"

    def is_time() -> bool:
        try:
            written = sum(path.is_file() for path in saving.rglob("*")) + (saving / MANIFEST_NAME).exists()
        except FileNotFoundError:
            written = 0
        return (saving.is_dir() and written >= number) or named.is_dir()

    with start(words) as process:
        wait_for(is_time, process)
        kill(process, number % 2, whole_machine=True)
    return process.returncode != 0 and max(steps_of(output_dir), default=0) <= step


FIRST_MOMENTS = [(launcher, n) for launcher, num in NUM_MOMENTS.items() for n in range(-(-num // len(SAVES)))]


@pytest.mark.parametrize("case", mostly_faults(FIRST_MOMENTS, ("python", 0)))
def test_after_each_file_of_a_save(case, workspace, tmp_path, ends_like):
    launcher, first = case
    moments = range(first, NUM_MOMENTS[launcher], -(-NUM_MOMENTS[launcher] // len(SAVES)))
    for step, number in zip(SAVES, moments, strict=False):
        kill_within_save(step, number, killable(workspace, tmp_path / "run", launcher), tmp_path / "run")
        check_checkpoints(tmp_path / "run")
    ends_like(tmp_path / "run", launcher)


@pytest.mark.faults
@pytest.mark.parametrize("trial", range(NUM_RANDOM_RUNS))
def test_at_random_moments(trial, workspace, tmp_path, ends_like):
    """Kill three times, some time after a save. A run that ends first counts with the kills that it survived."""
    launcher = ("python", "torchrun")[trial % 2]
    chance = random.Random(trial)
    num_kills = 0
    for attempt in itertools.count():
        output_dir = tmp_path / str(attempt)
        while num_kills < len(SAVES):
            following = output_dir / f"checkpoint-{max(steps_of(output_dir), default=0) + 2}"
            with start(killable(workspace, output_dir, launcher)) as process:
                wait_for(following.is_dir, process)
                time.sleep(chance.uniform(0, 0.2))
                kill(process, chance.randrange(2))
            check_checkpoints(output_dir)
            if process.returncode == 0 or STEPS in steps_of(output_dir):
                num_kills += process.returncode != 0
                break
            num_kills += 1
        ends_like(output_dir, launcher)
        if num_kills == len(SAVES):
            break
