import pytest
from torch.utils.data import RandomSampler, SequentialSampler

from hf_pretrain.data.padding_rows import EpochSampler


def order(seed: int, epoch: int) -> list[int]:
    sampler = EpochSampler(RandomSampler(range(40)), seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_depends_on_seed_and_epoch():
    orders = [order(seed, epoch) for seed, epoch in ((0, 0), (0, 1), (7, 0))]
    assert order(0, 1) == orders[1]
    assert all(sorted(numbers) == list(range(40)) for numbers in orders)
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


@pytest.mark.parametrize(
    ("num_rows", "pads", "expected"),
    [(6, True, 8), (6, False, 4), (8, True, 8), (8, False, 8), (3, False, 0), (1, True, 4)],
)
def test_epochs_have_whole_global_batches(num_rows, pads, expected):
    sampler = EpochSampler(SequentialSampler(range(num_rows)), seed=0, multiple=4, pads=pads)
    assert list(sampler) == list(range(expected)) and len(sampler) == expected
