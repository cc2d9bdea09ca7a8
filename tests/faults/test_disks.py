"""Full and read-only disks: the last good checkpoint stays, and the run prints how much space it needed."""

import errno
import os
import re
import subprocess
from contextlib import suppress

import pytest

from hf_pretrain.checkpoints.manifest import find_damage
from tests.faults.driving import command, mostly_faults, run, start, wait_for, zero
from tests.trainers import make_documents, make_trainer


pytestmark = [pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a small file system. Without the permission, skip the test."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(mebibytes: int):
        words = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
        result = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
        if re.search("permission denied|superuser|only root", result.stderr):
            pytest.skip("mounting a file system takes more rights")
        assert result.returncode == 0, result.stderr
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", str(path)], check=True)


def make_read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk):
    with open(disk / "other", "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def test_too_small_a_disk_is_noticed_before_the_first_step(small_disk, workspace):
    disk = small_disk(1)
    result = run(command(workspace, disk / "run"))
    assert result.returncode == 74 and "the first checkpoint could not be saved" in result.stdout, result.stdout
    assert "step 1/8" not in result.stdout


@pytest.mark.parametrize("launcher", mostly_faults(["python", "torchrun", "deepspeed"], "python"))
def test_a_disk_that_fills_up(launcher, small_disk, workspace):
    mebibytes, arguments = (24, zero(2)) if launcher == "deepspeed" else (12, [])
    disk = small_disk(mebibytes)
    long = ["--max_steps", "20000", "--save_steps", "20"]
    with start(command(workspace, disk / "run", *long, *arguments, launcher=launcher)) as process:
        wait_for(lambda: list((disk / "run").glob("checkpoint-*")), process)
        fill(disk)
        output, _ = process.communicate(timeout=500)
    kept = list((disk / "run").glob("checkpoint-*"))
    status = process.returncode == 74 or "exitcode  : 74" in output
    assert status and kept and not any(map(find_damage, kept)), (process.returncode, kept, output[-3000:])
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
    fill(disk)
    with pytest.raises(OSError):
        trainer.save_model()
    assert not list((disk / "run").iterdir())
    with pytest.raises(OSError) as raised:
        trainer.save_state()
    assert raised.value.errno == errno.ENOSPC


def test_a_read_only_output(small_disk, workspace):
    disk = small_disk(8)
    os.mkdir(disk / "run")
    make_read_only(disk)
    result = run(command(workspace, disk / "run"))
    # The run ends before it reads data.
    assert result.returncode == 74 and "Read-only file system" in result.stdout, result.stdout[-3000:]


@pytest.mark.parametrize("spoil", [fill, make_read_only])
def test_a_cache_that_cannot_be_written_to_is_one_line(spoil, small_disk, workspace, tmp_path):
    disk = small_disk(1)
    spoil(disk)
    result = run(command(workspace, tmp_path / "run"), HF_HOME=str(disk))
    assert result.returncode == 74 and "Traceback" not in result.stdout, result.stdout[-3000:]
    assert f"caches are in HF_HOME={disk}" in result.stdout
