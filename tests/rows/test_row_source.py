import pytest
from torch.utils.data import RandomSampler, SequentialSampler

from hf_pretrain.rows.row_source import PADDING_ROW_COLUMN, EvaluationBatches, PaddedDataset, pad_rows


def order(sampler_class: type, num_rows: int = 40, *, seed: int = 0, epoch: int = 0, **how) -> list[int]:
    """Return the indices of an epoch."""
    padded, sampler_fn = pad_rows(range(num_rows), sampler_class, seed=seed, is_training=True, **how)
    sampler = sampler_fn(None)
    padded.set_epoch(epoch)
    indices = list(sampler)
    assert len(sampler) == len(indices)
    return indices


def test_the_order_depends_on_seed_and_epoch():
    orders = [order(RandomSampler, seed=seed, epoch=epoch, multiple=1) for seed, epoch in ((0, 0), (0, 1), (7, 0))]
    assert order(RandomSampler, epoch=1, multiple=1) == orders[1]
    assert all(sorted(numbers) == list(range(40)) for numbers in orders)
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


@pytest.mark.parametrize(
    ("num_rows", "pads", "expected"),
    [(6, True, 8), (6, False, 4), (8, True, 8), (8, False, 8), (3, False, 0), (1, True, 4)],
)
def test_epochs_have_whole_global_batches(num_rows, pads, expected):
    assert order(SequentialSampler, num_rows, multiple=4, pads=pads) == list(range(expected))


def test_an_index_past_the_end_gives_a_padding_row():
    rows = [{"input_ids": [number]} for number in range(3)]
    assert PaddedDataset(rows).__getitems__([2, 3]) == [rows[2], rows[0] | {PADDING_ROW_COLUMN: True}]


@pytest.mark.parametrize("num_items", [1, 4, 11])
@pytest.mark.parametrize(
    ("batch_size", "num_ranks", "copies"), [(4, 1, 1), (4, 3, 1), (3, 2, 2), (4, 3, 2), (1, 4, 6)]
)
def test_evaluations_contain_each_item_once(num_items, batch_size, num_ranks, copies):
    batches = EvaluationBatches(list(range(num_items)), list, batch_size, num_ranks=num_ranks, copies=copies)
    assert sum(batches.num_items) == num_items and len(batches) == num_ranks * len(batches.num_items)
    counts = [0.0] * num_items
    for step, weight in enumerate(batches.num_items):
        shards = [batches[step * num_ranks + rank] for rank in range(num_ranks)]
        assert len({len(shard) for shard in shards}) == 1
        rows = sum(shards, [])
        # The copies of an item stand together, for rewards that are compared within a group.
        assert all(len(set(rows[start : start + copies])) == 1 for start in range(0, len(rows), copies))
        for item in rows:
            counts[item] += weight / len(rows)
    assert counts == pytest.approx([1.0] * num_items)
