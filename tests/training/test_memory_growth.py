"""The record of live bytes, and the growth of a step with the batch, against formulas and steps that really ran."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_pretrain.training import memory_growth
from hf_pretrain.training.efficiency import estimate_memory, peak_memory_bytes
from hf_pretrain.training.memory_growth import AllocationRecord, MemoryGrowth, MemoryProbe, repeat_rows
from tests.toys import toy_model
from tests.training.test_trainer import make_trainer


CPU = torch.device("cpu")


def recorded(step) -> torch.Tensor:
    record = AllocationRecord()
    record.begin()
    step()
    return record.end(CPU)


def test_the_record_counts_each_byte_while_it_lives(capfd):
    older = torch.ones(1 << 20)

    def step() -> None:
        nonlocal older
        first = torch.ones(250, dtype=torch.float64)
        view = first[:10]
        del first
        second = torch.ones(500)
        # FSDP frees and gets back its gathered weights in this way.
        second.untyped_storage().resize_(0)
        del view, older
        torch.ones(1500)

    # The older block is not counted, and torch does not warn about it.
    assert recorded(step).tolist() == [0, 2000, 4000, 2000, 0, 6000, 0]
    assert capfd.readouterr().err == ""


def test_the_record_sees_the_backward_pass():
    weight = torch.ones(1000, requires_grad=True)
    kept = recorded(lambda: weight.exp().sum().backward())[-1]
    assert kept == weight.grad.nbytes == 4000


def make_record(num_rows: int, *, num_chunks: int) -> torch.Tensor:
    """
    Return the live bytes of a step: 8 layers that keep 10 bytes per row each, a loss whose chunks take 50 bytes, and a
    backward pass that frees the activations and adds 40 bytes of gradients per layer.
    """
    changes = [0.0]
    for _ in range(8):
        # Temporary tensors make the layers of a real step as long.
        changes += [3 * num_rows, -3 * num_rows] * 10 + [10 * num_rows]
    changes += [20, 30, -20, -30] * num_chunks
    for _ in range(8):
        changes += [5 * num_rows, -5 * num_rows] * 10 + [40, -10 * num_rows]
    return torch.tensor([*changes, -8 * 40], dtype=torch.float64).cumsum(0)


@pytest.mark.parametrize(("once", "twice"), [(1, 1), (1, 2), (3, 4), (4, 8)])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_the_peak_of_a_larger_batch_is_the_one_of_its_record(num_rows, once, twice):
    records = make_record(num_rows, num_chunks=once), make_record(2 * num_rows, num_chunks=twice)
    growth = MemoryGrowth(num_rows, 1000.0, *records)
    for larger in (2 * num_rows, 8 * num_rows, 100 * num_rows):
        peak = 1000 + float(make_record(larger, num_chunks=twice).max())
        assert growth.total(larger) == pytest.approx(peak)
        # With few rows, the gradients are the peak, and more rows fit for free.
        assert growth.total(growth.largest_batch(peak)) <= peak < growth.total(growth.largest_batch(peak) + 1)


@pytest.mark.parametrize("lengths", [(50, 80), (80, 50), (200, 203), (300, 300)])
def test_no_peak_is_lost_even_if_the_steps_have_nothing_in_common(lengths):
    generator = torch.Generator().manual_seed(0)
    once, twice = (torch.rand(length, generator=generator, dtype=torch.float64) for length in lengths)
    growth = MemoryGrowth(4, 10.0, once, twice)
    assert growth.total(4) >= 10 + once.max() and growth.total(8) >= 10 + max(once.max(), twice.max())


def test_nothing_fits_into_too_little_and_everything_grows_without_a_second_record():
    record = make_record(4, num_chunks=1)
    assert MemoryGrowth(4, 1000.0, record, make_record(8, num_chunks=1)).largest_batch(900) == 0
    single = MemoryGrowth(4, 1000.0, record)
    assert single.total(8) == 1000 + 2 * record.max() and single.largest_batch(1000 + 2 * float(record.max())) == 8
    # A device without a record.
    nothing = torch.zeros(1, dtype=torch.float64)
    assert MemoryGrowth(4, 1000.0, nothing, nothing).largest_batch(1e9) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_repeat_their_rows(num_workers):
    loader = repeat_rows(DataLoader(torch.arange(6), batch_size=3, num_workers=num_workers), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2] * 2, [3, 4, 5] * 2]


def planned_growth(trainer) -> MemoryGrowth:
    """Return what the steps of a dry run measure, with nothing held between steps."""
    probe = MemoryProbe(trainer, after_step=1)
    trainer.add_callback(probe)
    trainer.train()
    assert len(probe.records) > 1
    probe.peak = float(probe.records[0].max())
    return probe.growth()


def make_larger_trainer(tmp_path, *, batch: int, accumulation: int = 1, **arguments):
    # Large enough that activations, not gradients, are the peak.
    model = toy_model(vocab_size=512, hidden_size=64, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 512, (64,), generator=generator).tolist()} for _ in range(64)]
    kwargs = {"max_steps": 12, "optim": "adamw_torch", "learning_rate": 1e-3, **arguments}
    return make_trainer(tmp_path, rows, model=model, batch=batch, arguments=kwargs, accumulation=accumulation)


KINDS = {"plain": {}, "recomputed": {"activation_checkpointing": True}, "accumulated": {"accumulation": 2}}


@pytest.mark.parametrize("arguments", KINDS.values(), ids=KINDS)
def test_the_peak_of_four_times_the_batch_is_foretold(tmp_path, arguments):
    foretold = planned_growth(make_larger_trainer(tmp_path / "planned", batch=4, **arguments)).total(16)

    real = make_larger_trainer(tmp_path / "real", batch=16, **arguments | {"max_steps": 2})
    # The first step also allocates the state of the optimizer.
    recorder = RecordCallback()
    real.add_callback(recorder)
    real.train()
    assert foretold == pytest.approx(float(recorder.records[-1].max()), rel=0.03)


class RecordCallback(TrainerCallback):
    """Record each step of a run."""

    def __init__(self):
        self.record, self.records = AllocationRecord(), []

    def on_step_begin(self, args, state, control, **kwargs):
        self.record.begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.records.append(self.record.end(args.device))


def test_the_growth_is_that_of_the_analytic_estimate(tmp_path):
    trainer = make_larger_trainer(tmp_path, batch=8)
    growth = planned_growth(trainer)
    estimate = estimate_memory(trainer.model, max_length=64, dtype=torch.float32)
    per_row = (growth.total(800) - growth.total(400)) / 400
    # The logits of so few rows are one chunk: the model's, and their log-probabilities.
    logits = 2 * 64 * 512 * 4
    assert per_row == pytest.approx(estimate.activations_per_row + logits, rel=0.05)


def test_the_smallest_of_all_ranks_decides(tmp_path):
    trainer = make_larger_trainer(tmp_path, batch=4)
    probe = MemoryProbe(trainer, after_step=1)
    trainer.add_callback(probe)
    trainer.train()
    alone = probe.largest_batch()
    # On a CPU, half of the memory is left for what the allocator keeps.
    assert alone == probe.growth().largest_batch(probe.free / 2) > 1000
    trainer.ranks.gather = lambda value: [value, value - 100]
    assert probe.largest_batch() == alone - 100
    trainer.ranks.gather = lambda value: [value, None]
    assert probe.largest_batch() is None


def test_a_step_that_would_not_fit_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_growth, "_usable_bytes", lambda device: peak_memory_bytes(device) + 1000)
    trainer = make_larger_trainer(tmp_path, batch=4)
    probe = MemoryProbe(trainer, after_step=1)
    trainer.add_callback(probe)
    trainer.train()
    # All that the step adds counts as growing: twice the batch takes twice as much.
    assert len(probe.records) == 1 and trainer.state.global_step == 2
    assert probe.growth().total(8) == probe.held + 2 * float(probe.records[0].max())
