"""Full and read-only disks: the last good checkpoint stays, and the run prints how much space it needed."""

import os
import re
import subprocess
from contextlib import suppress

import pytest

from hf_pretrain.checkpoints.manifest import find_damage
from tests.faults.driving import command, run, start, wait_for, zero
from tests.training.test_masked_loss_trainer import make_documents, make_trainer


pytestmark = [pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a small file system. Without the permission, skip the test."""
    mounted = []

    def mount(mebibytes: int):
        path = tmp_path / "disk"
        path.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
        result = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
        if re.search("permission denied|superuser|only root", result.stderr):
            pytest.skip("mounting a file system takes more rights")
        assert result.returncode == 0, result.stderr
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def fill(path):
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def test_too_small_a_disk_is_noticed_before_the_first_step(small_disk, workspace):
    disk = small_disk(1)
    result = run(command(workspace, disk / "run"))
    survived = result.returncode == 74 and "the first checkpoint could not be saved" in result.stdout
    assert survived and "step 1/8" not in result.stdout, result.stdout[-3000:]


@pytest.mark.parametrize(
    ("launcher", "mebibytes", "arguments"),
    [
        ("python", 12, []),
        pytest.param("torchrun", 12, [], marks=pytest.mark.faults),
        pytest.param("deepspeed", 24, zero(2), marks=pytest.mark.faults),
    ],
)
def test_a_disk_that_fills_up(launcher, mebibytes, arguments, small_disk, workspace):
    disk = small_disk(mebibytes)
    long = ["--max_steps", "20000", "--save_steps", "20"]
    with start(command(workspace, disk / "run", *long, *arguments, launcher=launcher)) as process:
        wait_for(lambda: list((disk / "run").glob("checkpoint-*")), process)
        fill(disk / "other")
        output, _ = process.communicate(timeout=500)
    kept = list((disk / "run").glob("checkpoint-*"))
    status = process.returncode == 74 or "exitcode  : 74" in output
    survived = status and bool(kept) and not any(find_damage(path) for path in kept)
    assert survived, (process.returncode, kept, output[-3000:])
    assert "could not be saved" in output and "is intact: make room and resume" in output
    # The page of the run needs room, too. No part of it stays.
    page = disk / "run/report.html"
    assert page.is_file() or f"The page of {page.parent} could not be written: " in output
    assert not page.with_name(".report.html").exists()
    # Another rank's unfinished files may stay until the next start removes them.
    assert launcher != "python" or not (disk / "run/.saving").exists()


def test_a_disk_that_is_full_when_the_model_is_saved(small_disk):
    """The run saves no checkpoints. No part of the model may remain, or it would pass for a model."""
    disk = small_disk(1)
    trainer = make_trainer(disk / "run", make_documents())
    trainer.train()
    fill(disk / "other")
    with pytest.raises(OSError, match="could not be saved"):
        trainer.save_model()
    assert not list((disk / "run").iterdir())
    with pytest.raises(OSError, match="No space left"):
        trainer.save_state()


def test_a_read_only_output(small_disk, workspace):
    disk = small_disk(8)
    os.mkdir(disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    result = run(command(workspace, disk / "run"))
    # The run ends before it reads data.
    survived = result.returncode == 74 and "Read-only file system" in result.stdout
    assert survived, result.stdout[-3000:]


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_a_cache_that_cannot_be_written_to_is_one_line(is_full, small_disk, workspace, tmp_path):
    disk = small_disk(1)
    if is_full:
        fill(disk / "filling")
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    result = run(command(workspace, tmp_path / "run"), HF_HOME=str(disk))
    assert result.returncode == 74 and "Traceback" not in result.stdout, result.stdout[-3000:]
    assert f"caches are in HF_HOME={disk}" in result.stdout
