"""The parts that `RunTrainer` connects, each tested without a Trainer."""

import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments

from hf_pretrain.checkpoints.directory import checkpoint_path
from hf_pretrain.checkpoints.manifest import find_damage, read_manifest
from hf_pretrain.checkpoints.writer import CheckpointWriter
from hf_pretrain.hub.pushing import HubPusher, create_repository
from hf_pretrain.runtime.signals import SignalListener
from hf_pretrain.runtime.writing import ASIDE
from hf_pretrain.training.launch import announce_first_message, complete_fsdp_args
from hf_pretrain.training.measurements import Throughput
from tests.hub_server import TOKEN, HubServer, connect
from tests.invariants.launching import start


# Checkpoints


@pytest.fixture
def writer(tmp_path) -> CheckpointWriter:
    args = TrainingArguments(str(tmp_path), use_cpu=True, save_total_limit=2, save_steps=5, max_steps=100)
    return CheckpointWriter(args, lambda: 1000)


def write_checkpoint(writer, tmp_path, step: int, value: float):
    target = checkpoint_path(tmp_path, step)
    with writer.writing_checkpoint(target, {"step": step}) as source:
        assert source == tmp_path / ASIDE / target.name and writer.directory == source.parent
        save_file({"weight": torch.full((4,), value)}, source / "model.safetensors")
    assert writer.directory is None
    return target


def test_a_complete_checkpoint_gets_its_final_name(writer, tmp_path):
    target = write_checkpoint(writer, tmp_path, 3, 1.0)
    assert find_damage(target) == [] and read_manifest(target)["run"] == {"step": 3}
    assert not (tmp_path / ASIDE).exists()
    (tmp_path / ASIDE / "checkpoint-9").mkdir(parents=True)
    again = write_checkpoint(writer, tmp_path, 3, 2.0)
    assert again == target and find_damage(target) == [] and not (tmp_path / ASIDE).exists()


def test_a_checkpoint_that_reads_back_differently_is_renamed(writer, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pretrain.checkpoints.writer.find_damage", lambda path: ["a file has another sha256"])
    with pytest.raises(OSError):
        write_checkpoint(writer, tmp_path, 3, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-checkpoint-3"]


def test_a_save_that_fails_publishes_nothing(writer, tmp_path):
    with pytest.raises(RuntimeError), writer.writing_checkpoint(checkpoint_path(tmp_path, 3), {"step": 3}):
        raise RuntimeError("a hook of the trainer failed")
    assert writer.directory is None and not checkpoint_path(tmp_path, 3).exists()


def test_the_disk_must_hold_a_checkpoint(writer, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    writer.check_space()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=999))
    with pytest.raises(OSError):
        writer.check_space()


def test_config_comes_last(writer, tmp_path, monkeypatch):
    target = tmp_path / "run"
    target.mkdir()
    (target / "notes.txt").touch()
    order = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(b.name), replace(a, b)))
    with writer.writing_model(target) as source:
        for name in ("config.json", "a.py", "model.safetensors"):
            (source / name).write_text(name)
    assert order[-1] == "config.json"
    assert {path.name for path in target.iterdir()} == {"a.py", "config.json", "model.safetensors", "notes.txt"}


# Signals and ranks


def test_the_first_signal_is_recorded_and_a_late_second_one_means_impatience(monkeypatch):
    listener, before = SignalListener(), signal.getsignal(signal.SIGTERM)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with listener.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        # The launcher forwards a copy of the same signal.
        os.kill(os.getpid(), signal.SIGINT)
        assert listener.number == signal.SIGTERM and not listener.is_impatient
        now[0] += 3
        os.kill(os.getpid(), signal.SIGTERM)
        assert listener.is_impatient
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before


# Steps


def test_the_throughput_excludes_pauses_and_waits_for_tokens(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    throughput = Throughput(100)
    # An evaluation before the first step, and the rows that a resumed run skips.
    with throughput.paused():
        now[0] += 10.0
    throughput.begin()
    now[0] += 2.0
    throughput.begin()
    with throughput.paused(), throughput.paused():
        now[0] += 40.0
    with pytest.raises(OSError), throughput.paused():
        now[0] += 5.0
        raise OSError
    assert throughput.measure(190) == {"training_seconds": 2.0, "tokens_per_second": 45.0}
    now[0] += 3.0
    assert throughput.measure(190) == {"training_seconds": 3.0}
    now[0] += 1.0
    # The time of the interval without tokens counts for the next speed.
    assert throughput.measure(210) == {"training_seconds": 1.0, "tokens_per_second": 5.0}


# Set-up


def test_accelerates_fsdp_gets_a_policy_that_casts_nothing():
    assert complete_fsdp_args(None) is None
    given = {"fsdp_version": 2, "reshard_after_forward": True}
    completed = complete_fsdp_args(given)
    assert completed == given | {"mixed_precision_policy": MixedPrecisionPolicy()} and completed is not given


BUSY_WORKER = """
import hashlib
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from hf_pretrain.runtime.signals import let_workers_survive_one_sigterm

class Rows(IterableDataset):
    def __iter__(self):
        if get_worker_info().id == 0:
            yield 1
        # Python handles no signal within this call.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000_000 if get_worker_info().id == 1 else 1)

loader = DataLoader(Rows(), batch_size=1, num_workers=2)
let_workers_survive_one_sigterm(loader)
for _ in loader:
    raise SystemError("a fault")
"""


@pytest.mark.slow
def test_a_busy_worker_does_not_keep_a_failed_run_from_ending():
    words = [sys.executable, "-c", BUSY_WORKER]
    result = start(words, timeout=60)
    assert result.returncode == 1 and result.stdout.rstrip().endswith("SystemError: a fault"), result.stdout


# The Hub


def test_the_pusher_waits_for_the_push_in_progress_and_pushes_the_newest(tmp_path, monkeypatch, writer):
    def write_card():
        (tmp_path / "README.md").write_text("card")

    with HubServer() as server:
        connect(monkeypatch, server.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        pusher = HubPusher(tmp_path, strategy="checkpoint", write_card=write_card)
        pusher.repo_id = create_repository("toy")
        assert pusher.repo_id == "user/toy"
        checkpoints = [write_checkpoint(writer, tmp_path, step, step) for step in (1, 2, 3)]
        server.preupload_seconds = 1
        for checkpoint in checkpoints:
            pusher.push_checkpoint(checkpoint)
        pusher.finish()
        (repo,) = server.repos.values()
        assert [message for _, message in repo.commits][-2:] == ["Step 1", "Step 3"]
        assert "checkpoint-3/manifest.json" in repo.files


@pytest.mark.parametrize(("size", "device", "says"), [(2, "cuda", True), (1, "cuda", False), (2, "cpu", False)])
def test_several_gpus_say_what_to_do_if_they_hang(capsys, size, device, says):
    announce_first_message(SimpleNamespace(world_size=size, device=torch.device(device)))
    assert ("NCCL_P2P_DISABLE=1" in capsys.readouterr().err) is says
