"""A step larger than the data, and streams without rows."""

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import toy_model


ROWS = [{"input_ids": [1, 5 + number, 9, 2], "seq_lengths": [4]} for number in range(22)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def make_trainer(tmp_path, *, rows=ROWS, batch: int, accumulation: int = 1, **arguments) -> MaskedLossTrainer:
    return MaskedLossTrainer(
        model=toy_model(vocab_size=64),
        args=LMTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            eval_strategy="no",
            save_strategy="no",
            logging_steps=1,
            **{"bf16": False, "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
            **{"max_steps": 2} | arguments,
        ),
        data_collator=DataCollatorForPackedRows(0),
        train_dataset=rows,
        eval_dataset=ROWS,
    )


@pytest.mark.parametrize("rows", [ROWS, Stream()], ids=["rows", "stream"])
def test_a_step_beyond_the_data_is_one_pass(tmp_path, rows):
    """Padding rows fill the step, and change nothing."""
    losses, models = [], []
    for batch, accumulation in ((22, 1), (100, 1), (8, 6)):
        # Other optimizers enlarge the rounding of gradients near zero.
        how = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
        trainer = make_trainer(tmp_path, rows=rows, batch=batch, accumulation=accumulation, **how)
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
    trainer = make_trainer(tmp_path, rows=stream, batch=8, dataloader_num_workers=2, max_steps=6)
    trainer.train()
    # Six steps are two passes. Tokens of padding rows do not count.
    assert trainer.state.global_step == 6 and trainer.state.num_input_tokens_seen == 2 * 22 * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_empty_stream_is_refused(tmp_path, num_workers):
    stream = datasets.IterableDataset.from_generator(lambda: iter([]))
    with pytest.raises(ValueError, match="Nothing was trained"):
        make_trainer(tmp_path, rows=stream, batch=8, dataloader_num_workers=num_workers).train()
