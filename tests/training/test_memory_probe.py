"""The largest batch of a plan, against the peak of processes that really train with that batch."""

import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_pretrain.training import memory_probe
from hf_pretrain.training.efficiency import peak_memory_bytes
from hf_pretrain.training.memory_probe import MemoryProbe, repeat_rows
from tests.toys import toy_model
from tests.training.test_trainer import make_trainer


KINDS = {"plain": {}, "recomputed": {"activation_checkpointing": True}, "accumulated": {"accumulation": 2}}


def make_larger_trainer(directory: Path, *, batch: int, num_rows: int = 4096, accumulation: int = 1, **arguments):
    # Large enough that activations, not gradients, are the peak.
    model = toy_model(vocab_size=512, hidden_size=64, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 512, (64,), generator=generator).tolist()} for _ in range(num_rows)]
    kwargs = {"max_steps": 12, "optim": "adamw_torch", "learning_rate": 1e-3, **arguments}
    return make_trainer(directory, rows, model=model, batch=batch, arguments=kwargs, accumulation=accumulation)


def find_largest_batch(directory: Path, kind: str, room: float) -> tuple[int, float]:
    """Return the largest batch of a dry run for a process that may grow by `room` bytes, and the bytes in all."""
    probe = MemoryProbe(trainer := make_larger_trainer(directory, batch=16, **KINDS[kind]), after_step=2)
    # A plan leaves half of the memory to the allocator.
    memory_probe._usable_bytes = lambda device: 2 * (probe.held_bytes + room)
    trainer.add_callback(probe)
    trainer.train()
    return probe.largest_batch(), probe.held_bytes + room


def measure_peak(directory: Path, kind: str, batch: int) -> float:
    make_larger_trainer(directory, batch=batch, **KINDS[kind] | {"max_steps": 3}).train()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def in_new_process(function, *args):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_batch_fits(tmp_path, kind):
    largest, limit = in_new_process(find_largest_batch, tmp_path / "planned", kind, 700e6)
    peak = in_new_process(measure_peak, tmp_path / "real", kind, largest)
    assert 0.7 * limit < peak < 1.02 * limit
    twice = in_new_process(measure_peak, tmp_path / "twice", kind, 2 * largest)
    assert twice > 1.1 * limit


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_repeat_their_rows(num_workers):
    loader = repeat_rows(DataLoader(torch.arange(6), batch_size=3, num_workers=num_workers), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2] * 2, [3, 4, 5] * 2]


def probe_of(tmp_path, *, batch: int = 4, **arguments) -> MemoryProbe:
    trainer = make_larger_trainer(tmp_path, batch=batch, **arguments)
    probe = MemoryProbe(trainer, after_step=2)
    trainer.add_callback(probe)
    trainer.train()
    return probe


def test_four_further_steps_repeat_the_rows(tmp_path):
    probe = probe_of(tmp_path)
    assert (probe.num_rows, probe.trainer.state.global_step, probe.row_length) == (32, 6, 64)
    assert not probe.lengths_differ


def test_the_length_is_the_one_of_the_repeated_rows(tmp_path):
    trainer = make_larger_trainer(tmp_path, batch=2, train_sampling_strategy="sequential")
    # The first batch is shorter than the others. The further steps repeat it.
    rows = trainer.train_dataset
    trainer.train_dataset = [
        {"input_ids": row["input_ids"][: 20 if number < 2 else 64]} for number, row in enumerate(rows)
    ]
    probe = MemoryProbe(trainer, after_step=2)
    trainer.add_callback(probe)
    trainer.train()
    assert probe.row_length == 20 and probe.lengths_differ


def test_passes_without_gradients_do_not_count(tmp_path):
    """Continuous batching generates all completions in one row."""
    trainer = make_larger_trainer(tmp_path, batch=4)
    probe = MemoryProbe(trainer, after_step=2)
    trainer.add_callback(probe)
    trainer.add_callback(Generation())
    trainer.train()
    assert probe.row_length == 64 and probe.num_rows == 32


class Generation(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model(torch.ones(1, 100, dtype=torch.int64))


def test_a_batch_has_no_more_rows_than_the_data(tmp_path):
    probe = probe_of(tmp_path, batch=8, num_rows=3)
    assert probe.num_rows == 8 * 3


def test_a_short_run_is_not_exceeded(tmp_path):
    probe = probe_of(tmp_path, max_steps=2)
    assert (probe.num_rows, probe.trainer.state.global_step) == (4, 2)


def test_a_step_that_would_not_fit_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_probe, "_usable_bytes", lambda device: peak_memory_bytes(device) + 1000)
    probe = probe_of(tmp_path)
    assert (probe.num_rows, probe.trainer.state.global_step) == (4, 3)


def test_the_smallest_of_all_ranks_decides(tmp_path):
    probe = probe_of(tmp_path)
    alone = probe.largest_batch()
    probe.trainer.ranks.gather = lambda value: [value, value - 100]
    assert probe.largest_batch() == alone - 100
    probe.trainer.ranks.gather = lambda value: [value, -5]
    assert probe.largest_batch() == 0
