"""A step larger than the data, and streams without rows."""

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from tests.training.test_masked_loss_trainer import make_trainer


ROWS = [{"input_ids": [1, 5 + number, 9, 2], "seq_lengths": [4]} for number in range(22)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("rows", [ROWS, Stream()], ids=["rows", "stream"])
def test_a_step_beyond_the_data_is_one_pass(tmp_path, rows):
    """Padding rows fill the step, and change nothing."""
    losses, models = [], []
    for batch, accumulation in ((22, 1), (100, 1), (8, 6)):
        arguments = {"max_steps": 2}
        trainer = make_trainer(tmp_path, rows, batch=batch, accumulation=accumulation, arguments=arguments)
        trainer.train()
        assert trainer.state.num_input_tokens_seen == 2 * 22 * 4
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        models.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    for loss, model in zip(losses[1:], models[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-5)
        torch.testing.assert_close(model, models[0], rtol=1e-5, atol=1e-6)


def test_a_worker_of_the_loader_may_have_no_share_of_a_stream(tmp_path):
    """A stream of one file has one shard, so only one of two workers reads it."""
    stream = datasets.IterableDataset.from_generator(lambda: iter(Stream()))
    trainer = make_trainer(tmp_path, stream, arguments={"dataloader_num_workers": 2})
    trainer.train()
    # Six steps are two passes. Tokens of padding rows do not count.
    assert trainer.state.global_step == 6 and trainer.state.num_input_tokens_seen == 2 * 22 * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_empty_stream_is_refused(tmp_path, num_workers):
    stream = datasets.IterableDataset.from_generator(lambda: iter([]))
    with pytest.raises(ValueError, match="Nothing was trained"):
        make_trainer(tmp_path, stream, arguments={"dataloader_num_workers": num_workers}).train()
