"""Reference runs for every fault test. `N=300` sets the number of kills at random moments."""

import hashlib
from pathlib import Path

import pytest
from filelock import FileLock

from tests.faults.driving import STEPS, command, final_bits, make_workspace, run


@pytest.fixture(scope="session")
def workspace(tmp_path_factory, worker_id):
    """Return one directory for all workers of pytest-xdist, so that each reference run trains only once."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "faults"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.mkdir()
            make_workspace(path)
    return path


@pytest.fixture(scope="session")
def reference(workspace):
    """Return a function from a launcher and arguments to the output directory of an undisturbed run."""

    def get(launcher: str = "python", *arguments: str) -> Path:
        key = hashlib.sha256(repr((launcher, *arguments)).encode()).hexdigest()[:16]
        output_dir = workspace / f"reference-{key}"
        with FileLock(f"{output_dir}.lock"):
            if not output_dir.exists():
                words = command(workspace, output_dir, "--save_total_limit", "9", *arguments, launcher=launcher)
                result = run(words)
                assert result.returncode == 0, result.stdout[-4000:]
        return output_dir

    return get


@pytest.fixture
def ends_like(workspace, reference):
    """
    Return a function that resumes the run in a directory, checks that it ends with the same bits as the reference
    run, including checkpoint and log, and returns the output of the run.
    """

    def check(output_dir: Path, launcher: str = "python", *arguments: str) -> str:
        words = command(workspace, output_dir, "--save_total_limit", "9", *arguments, launcher=launcher)
        result = run([*words, "--resume_from_checkpoint", "auto"])
        assert result.returncode == 0, result.stdout[-4000:]
        assert final_bits(output_dir) == final_bits(reference(launcher, *arguments))
        assert max(path.name for path in output_dir.glob("checkpoint-*")) == f"checkpoint-{STEPS}"
        assert not list(output_dir.glob(".saving*"))
        return result.stdout

    return check
