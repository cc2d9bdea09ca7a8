"""One run for each output directory, whoever else is there."""

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
    """A function that forks: the child calls a function, tells that it has, and waits to be killed."""
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


def test_a_second_process_is_told_who_holds_it(tmp_path, monkeypatch, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path} is in use by process {child} on .*, since 20.*stop it"):
        hold_output_dir(tmp_path)
    # The kernel frees it with its holder, whose file is still there.
    in_a_child.kill(child)
    monkeypatch.setattr(locking, "_stands_still", lambda *_: pytest.fail("it watched for the dead"))
    assert hold_output_dir(tmp_path) and not hold_output_dir(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    release_output_dir(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_waits_for_the_end_of_the_other(tmp_path, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    threading.Timer(0.5, in_a_child.kill, (child,)).start()
    assert hold_output_dir(tmp_path, patience_seconds=300)


def test_workers_of_a_killed_run_do_not_keep_it(tmp_path, in_a_child):
    """They were forked and live on for some seconds."""
    hold_output_dir(tmp_path)
    worker = in_a_child(lambda: None)
    # As the kernel does when this process is killed. A heartbeat that went on would write into whatever file gets this
    # descriptor next.
    _, lock = locking._held.popitem()
    lock._released.set()
    lock._thread.join()
    os.close(lock.descriptor)
    assert hold_output_dir(tmp_path)
    os.kill(worker, 0)


@pytest.mark.parametrize("has_kernel_locks", [True, False])
def test_another_machine_is_known_by_its_heartbeat(tmp_path, monkeypatch, has_kernel_locks):
    if not has_kernel_locks:
        monkeypatch.setattr(locking, "fcntl", None)

    def beat(count: int) -> None:
        holder = {"host": "elsewhere", "pid": 7, "started": "2026-01-01 00:00:00", "beat": count}
        (tmp_path / LOCK_NAME).write_text(json.dumps(holder))

    beat(0)
    # It is waited for as long as need be.
    monkeypatch.setattr(locking, "_SILENCE_SECONDS", 300)
    timer = threading.Timer(0.25, beat, (1,))
    timer.start()
    with pytest.raises(ValueError, match="in use by process 7 on elsewhere"):
        hold_output_dir(tmp_path)
    timer.join()
    # It stopped.
    monkeypatch.setattr(locking, "_SILENCE_SECONDS", 0.5)
    assert hold_output_dir(tmp_path)


def test_the_heartbeat_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "_BEAT_SECONDS", 0.01)
    hold_output_dir(tmp_path)
    deadline = time.monotonic() + 300
    while json.loads((tmp_path / LOCK_NAME).read_text() or "{}").get("beat", 0) < 2:
        assert time.monotonic() < deadline


def test_a_lock_is_no_run(tmp_path):
    hold_output_dir(tmp_path)
    assert checkpoint_to_resume(arguments(tmp_path)) is None


def test_a_recipe_is_refused_before_it_writes(tmp_path, in_a_child):
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    with pytest.raises(ValueError, match=f"in use by process {child}"):
        begin_run(LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_two_trainers_do_not_write_into_one_directory(tmp_path, in_a_child):
    """Trainers without a recipe, too."""
    arguments = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    child = in_a_child(lambda: hold_output_dir(tmp_path))
    trainer = make_trainer(tmp_path, make_documents(), arguments=arguments)
    with pytest.raises(ValueError, match=f"in use by process {child}"):
        trainer.train()
    in_a_child.kill(child)
    trainer.train()
    # It is free again.
    in_a_child(lambda: hold_output_dir(tmp_path))
