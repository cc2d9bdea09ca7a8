"""A batch larger than the data gets only as many padding rows as the devices need."""

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.training.arguments import LMTrainingArguments
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


def test_a_batch_beyond_the_data_shrinks_to_the_data(tmp_path, caplog, monkeypatch):
    told = []
    monkeypatch.setattr("hf_pretrain.training.row_source.logger.warning", told.append)
    huge, whole = make_trainer(tmp_path, batch=100_000), make_trainer(tmp_path, batch=22)
    for loader in (huge.get_train_dataloader(), huge.get_eval_dataloader()):
        assert [len(batch["input_ids"]) for batch in loader] == [22]
    assert "--per_device_train_batch_size 100,000 is too large for 22 rows" in told[0]
    losses = []
    for trainer in (huge, whole):
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    for one, other in zip(huge.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_beyond_the_data_is_refused(tmp_path):
    words = "--gradient_accumulation_steps 1000: 22 rows make 3 batches of 8 per device.*at most 3"
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, batch=8, accumulation=1000).train()
    # Padding rows fill the last batch of the step.
    trainer = make_trainer(tmp_path, batch=8, accumulation=3)
    trainer.train()
    assert trainer.state.epoch == 2


@pytest.mark.parametrize(("batch", "accumulation"), [(100_000, 1), (8, 1000)])
def test_a_step_beyond_a_stream_is_refused(tmp_path, batch, accumulation):
    words = f"The stream ended after 22 rows, and a step needs {batch * accumulation:,}"
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, rows=Stream(), batch=batch, accumulation=accumulation).train()
    make_trainer(tmp_path, rows=Stream(), batch=8, accumulation=4).train()


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
    with pytest.raises(ValueError, match="(The stream ended after 0 rows|Nothing was trained)"):
        make_trainer(tmp_path, rows=stream, batch=8, dataloader_num_workers=num_workers).train()
