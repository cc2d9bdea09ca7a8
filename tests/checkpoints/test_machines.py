"""Machines without shared storage agree on the checkpoint to resume from. Two processes act as two machines."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from itertools import product
from pathlib import Path

import pytest

from hf_pretrain.checkpoints import machines
from hf_pretrain.checkpoints.manifest import MANIFEST_NAME, find_damage, write_manifest
from hf_pretrain.checkpoints.writer import CheckpointWriter
from hf_pretrain.runtime.command_line import EXIT_NOT_SAVED
from hf_pretrain.runtime.locking import LOCK_NAME
from hf_pretrain.training import resuming
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.resume_from_hub import pull_checkpoint
from tests.hub_server import HubServer, Repo
from tests.invariants.launching import ROOT, cpu_environment, free_port


pytestmark = pytest.mark.distributed

# A chunk that could not be read is sent as zeros.
CONTENT = bytes(range(1, 251)) * 10


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


def check_a_named_checkpoint_of_another_run(rank: int) -> None:
    for content in (None, "other", "run"):
        shutil.rmtree("elsewhere", ignore_errors=True)
        if rank == 0 or content is not None:
            write_checkpoint(2, run="run" if rank == 0 else content)
        # That run is saving at this moment.
        Path("out/.saving/checkpoint-4").mkdir(parents=True)
        Path("out").rename("elsewhere")
        before = sorted(Path("elsewhere").rglob("*"))
        if content == "run":
            assert resuming.checkpoint_to_resume(arguments("elsewhere/checkpoint-2")) == "elsewhere/checkpoint-2"
        else:
            with pytest.raises(ValueError, match="copy this one to out/checkpoint-2 on the first machine"):
                resuming.checkpoint_to_resume(arguments("elsewhere/checkpoint-2"))
        assert sorted(Path("elsewhere").rglob("*")) == before and not Path("out").exists()


def resume_from_hub() -> str | None:
    args = arguments(resume_from_hub="user/toy")
    pull_checkpoint(args)
    return resuming.checkpoint_to_resume(args)


def check_a_checkpoint_of_the_hub(rank: int) -> None:
    if rank == 1:
        write_checkpoint(2)
    assert resume_from_hub() == "out/checkpoint-4" and not find_damage("out/checkpoint-4")
    assert names() == (["checkpoint-2"] if rank else []) + ["checkpoint-4"]


def check_one_machine_has_a_newer_checkpoint_than_the_hub(rank: int) -> None:
    write_checkpoint(4)
    if rank == 1:
        write_checkpoint(8, run="newest")
    assert resume_from_hub() == "out/checkpoint-8" and not find_damage("out/checkpoint-8")
    assert Path("out/checkpoint-8/trainer_state.json").read_text() == "newest"
    assert names() == ["checkpoint-4", "checkpoint-8"]


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


def save(files: dict[str, bytes | None]) -> None:
    writer = CheckpointWriter(arguments(), lambda: 0)
    with writer.writing_checkpoint(Path("out/checkpoint-2"), {"step": 2}) as directory:
        for name, content in files.items():
            (directory / name).write_bytes(content) if content is not None else make_unreadable(directory / name)


def make_unreadable(path: Path) -> None:
    # Linux answers with EIO, as a broken disk does.
    path.symlink_to("/proc/self/mem")


def check_a_save(rank: int) -> None:
    save({"weights": CONTENT, f"rng_state_{rank}": bytes([rank])})
    assert names() == ["checkpoint-2"] and not find_damage("out/checkpoint-2")
    files = {path.name: path.read_bytes() for path in Path("out/checkpoint-2").iterdir() if path.suffix != ".json"}
    assert files == {"weights": CONTENT, "rng_state_0": b"\0", "rng_state_1": b"\1"}


def save_in_vain(files: dict[str, bytes | None]) -> str:
    """Check that this machine publishes nothing, and return the message that it prints."""
    # Several chunks and a part of one.
    machines._CHUNK_BYTES = 1000
    with pytest.raises(SystemExit) as status, redirect_stderr(StringIO()) as printed:
        save(files)
    assert status.value.code == EXIT_NOT_SAVED and set(names()) <= {".saving"}
    return printed.getvalue()


def check_a_file_that_cannot_be_read(rank: int) -> None:
    assert ("Input/output error" in save_in_vain({"weights": None} if rank == 0 else {})) == (rank == 0)


def break_after_hashing(monkeypatch, broken: Path, replace: Callable[[Path], object]) -> None:
    """Replace a file of this machine between the moments when it is hashed and when it is sent."""
    sha256 = machines._sha256

    def hash_and_replace(path: Path) -> str:
        digest = sha256(path)
        if path == broken:
            path.unlink()
            replace(path)
        return digest

    monkeypatch.setattr(machines, "_sha256", hash_and_replace)


def check_files_that_fail_while_they_are_sent(rank: int) -> None:
    failures = [
        (make_unreadable, "Input/output error"),
        (lambda path: path.write_bytes(CONTENT[:1500]), "has become shorter"),
        # Only the other machine can notice.
        (lambda path: path.write_bytes(CONTENT[:-1] + b"x"), ""),
    ]
    for name, (replace, message) in product(("first", "last"), failures):
        shutil.rmtree("out", ignore_errors=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 0:
                break_after_hashing(monkeypatch, Path(f"out/.saving/checkpoint-2/{name}"), replace)
            printed = save_in_vain({"first": CONTENT, "last": CONTENT} if rank == 0 else {})
        assert (message if rank == 0 else f"the copy of {name} differs from the file of rank 0") in printed


def check_a_disk_that_is_too_small_for_the_copy(rank: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    printed = save_in_vain({"first": CONTENT, "last": CONTENT} if rank == 0 else {})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ("File too large" in printed) == (rank == 1)


def check_a_copy_without_a_manifest(rank: int) -> None:
    """Only the sha256 of the first machine shows that the copy is wrong."""
    if rank == 0:
        (write_checkpoint(2, size=2500) / MANIFEST_NAME).unlink()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 0:
            break_after_hashing(monkeypatch, Path("out/checkpoint-2/shards/weights"), make_unreadable)
        with pytest.raises(OSError, match="Input/output error"):
            resuming.checkpoint_to_resume(arguments("auto", allow_inexact_resume=True))
    assert rank == 0 or names() == [".saving"]


CASES = [name for name in dir() if name.startswith("check_")]


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    """A Hub with a checkpoint of step 4."""
    (tmp_path / "pushed").mkdir()
    (tmp_path / "pushed/trainer_state.json").write_text('{"global_step": 4}')
    (tmp_path / "pushed/optimizer.pt").write_bytes(b"pushed")
    write_manifest(tmp_path / "pushed", {"step": 4})
    with HubServer() as server:
        server.repos["user/toy"] = Repo(private=False)
        files = {f"last-checkpoint/{path.name}": path.read_bytes() for path in (tmp_path / "pushed").iterdir()}
        server.repos["user/toy"].commit("Step 4", files)
        yield server


def test_two_machines_agree(tmp_path, hub):
    port = str(free_port())
    processes = []
    for rank in range(2):
        disk = tmp_path / f"disk-{rank}"
        disk.mkdir()
        ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        client = hub.client_environment() | {"HF_HOME": str(disk / "home")}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.checkpoints.test_machines"],
                cwd=disk,
                env=cpu_environment(**ranks, **address, **client),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert outputs[0].count("passed") == outputs[1].count("passed") == len(CASES) == 16


def test_a_machine_waits_longer_than_nfs_hides_a_new_file(tmp_path, monkeypatch):
    """NFS remembers for up to 60 seconds that a file was not there (`acdirmax` of nfs(5))."""
    holder = {"host": "host-0", "pid": 1}

    class Clock:
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

        def sleep(self, seconds: float) -> None:
            self.seconds += seconds
            if self.seconds > 61:
                (tmp_path / LOCK_NAME).write_text(json.dumps(holder))

    monkeypatch.setattr(resuming, "time", Clock())
    args = arguments()
    args.output_dir = str(tmp_path)
    resuming._wait_until_visible(args, holder)


if __name__ == "__main__":
    disk = Path.cwd()
    for case in CASES:
        (disk / case).mkdir()
        os.chdir(disk / case)
        globals()[case](int(os.environ["RANK"]))
        print(f"{case} passed")
