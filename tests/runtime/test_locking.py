"""Only one run at a time writes into an output directory."""

import json
import os
import signal
import threading
import time

import pytest

from hf_pretrain.runtime import locking
from hf_pretrain.runtime.locking import LOCK_NAME, hold_output_dir, release_output_dir
from hf_pretrain.training.arguments import LMTrainingArguments
from hf_pretrain.training.resuming import checkpoint_to_resume
from hf_pretrain.training.running import begin_run
from tests.checkpoints.test_checkpointing import arguments
from tests.training.test_trainer import make_documents, make_trainer


@pytest.fixture(autouse=True)
def released(tmp_path):
    yield
    release_output_dir(tmp_path)


@pytest.fixture
def in_a_child():
    """Return a function that forks. The child calls a function, reports its return, and waits to be killed."""
    children = []

    def start(action) -> int:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                action()
                os.write(writing, b".")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        assert os.read(reading, 1) == b"."
        os.close(reading)
        os.close(writing)
        return child

    def kill(child: int) -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        children.remove(child)

    start.kill = kill
    yield start
    for child in list(children):
        kill(child)


def test_a_second_process_is_refused_with_the_name_of_the_holder(tmp_path, monkeypatch, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path} is in use by process {child} on .*, since 20.*stop it"):
        hold_output_dir(tmp_path)
    # The kernel frees the lock when its holder dies; the file stays.
    in_a_child.kill(child)
    monkeypatch.setattr(locking, "_stands_still", lambda *_: pytest.fail("it watched for the dead"))
    assert hold_output_dir(tmp_path) and not hold_output_dir(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    release_output_dir(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_waits_for_the_end_of_the_earlier_run(tmp_path, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    threading.Timer(0.5, in_a_child.kill, (child,)).start()
    assert hold_output_dir(tmp_path, patience_seconds=300)


def test_workers_of_a_killed_run_do_not_keep_the_lock(tmp_path, in_a_child):
    """The run forked them, and they survive it for some seconds."""
    hold_output_dir(tmp_path)
    worker = in_a_child(lambda: None)
    # Do what the kernel does when this process is killed. A heartbeat that continues would write into the next file
    # with this descriptor.
    _, lock = locking._held.popitem()
    lock._released.set()
    lock._thread.join()
    os.close(lock.descriptor)
    assert hold_output_dir(tmp_path)
    os.kill(worker, 0)


@pytest.mark.parametrize("has_kernel_locks", [True, False])
def test_another_machine_is_recognized_by_its_heartbeat(tmp_path, monkeypatch, has_kernel_locks):
    if not has_kernel_locks:
        monkeypatch.setattr(locking, "fcntl", None)

    def beat(count: int) -> None:
        holder = {"host": "elsewhere", "pid": 7, "started": "2026-01-01 00:00:00", "beat": count}
        (tmp_path / LOCK_NAME).write_text(json.dumps(holder))

    beat(0)
    # Watch long enough to see the heartbeat.
    monkeypatch.setattr(locking, "_SILENCE_SECONDS", 300)
    timer = threading.Timer(0.25, beat, (1,))
    timer.start()
    with pytest.raises(ValueError, match="in use by process 7 on elsewhere"):
        hold_output_dir(tmp_path)
    timer.join()
    # The heartbeat stopped.
    monkeypatch.setattr(locking, "_SILENCE_SECONDS", 0.5)
    assert hold_output_dir(tmp_path)


def test_the_heartbeat_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "_BEAT_SECONDS", 0.01)
    hold_output_dir(tmp_path)
    deadline = time.monotonic() + 300
    while json.loads((tmp_path / LOCK_NAME).read_text() or "{}").get("beat", 0) < 2:
        assert time.monotonic() < deadline


def test_a_lock_file_is_no_run(tmp_path):
    hold_output_dir(tmp_path)
    assert checkpoint_to_resume(arguments(tmp_path)) is None


def test_a_recipe_is_refused_before_it_writes(tmp_path, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    with pytest.raises(ValueError, match=f"in use by process {child}"):
        begin_run(LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_two_trainers_do_not_write_into_one_directory(tmp_path, in_a_child):
    """This also holds for trainers without a recipe."""
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    trainer = make_trainer(tmp_path, make_documents(), arguments=arguments)
    with pytest.raises(ValueError, match=f"in use by process {child}"):
        trainer.train()
    in_a_child.kill(child)
    trainer.train()
    # The lock is free again.
    in_a_child(lambda: hold_output_dir(tmp_path))
