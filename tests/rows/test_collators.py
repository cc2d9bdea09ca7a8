import torch

from hf_pretrain.rows.collators import DataCollatorForPackedRows


ROWS = [{"input_ids": [1, 5, 6, 2, 1, 7, 2], "seq_lengths": [4, 3]}, {"input_ids": [1, 8, 2], "seq_lengths": [3]}]


def test_batch_equals_one_written_by_hand():
    batch = DataCollatorForPackedRows(pad_token_id=0)(ROWS)
    # The starts of the documents (padding counts as one), and then the longest length.
    assert batch.pop("cu_seq_lens_q").tolist() == [0, 4, 7, 10, 14]
    assert batch.pop("max_length_q") == 4
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 5, 6, 2, 1, 7, 2], [1, 8, 2, 0, 0, 0, 0]],
        "labels": [[-100, 5, 6, 2, -100, 7, 2], [-100, 8, 2, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_max_length_sets_the_width():
    batch = DataCollatorForPackedRows(pad_token_id=9, max_length=9)(ROWS)
    assert batch["input_ids"].shape == (2, 9)
    assert batch["input_ids"][0, 7:].tolist() == [9, 9]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert batch["labels"][0, 7:].tolist() == [-100, -100]


def test_loss_mask_and_labels_agree():
    masks = [[1.0, 0.5, 0.0, 2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.25]]
    rows = [row | {"loss_mask": mask} for row, mask in zip(ROWS, masks, strict=True)]
    batch = DataCollatorForPackedRows(pad_token_id=0)(rows)
    assert batch["labels"].tolist() == [[-100, 5, -100, 2, -100, -100, 2], [-100, 8, 2, -100, -100, -100, -100]]
    assert batch["loss_mask"].tolist() == [[0.0, 0.5, 0.0, 2.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]]
    assert batch["loss_mask"].dtype == torch.float32


def test_rows_of_other_programs():
    collate = DataCollatorForPackedRows(pad_token_id=0)
    plain = collate([{"input_ids": [1, 8, 2], "text": "x"}, {"input_ids": torch.tensor([1, 5, 6, 2])}])
    assert plain["labels"].tolist() == [[-100, 8, 2, -100], [-100, 5, 6, 2]]
    assert plain["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    # A row that a tokenizer padded on either side gives the same batch. The labels of the row stay.
    padded = [
        {"input_ids": [1, 8, 2, 9, 9], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [9, 1, 5, 6, 2], "attention_mask": [0, 1, 1, 1, 1], "labels": [-100, 1, 5, 6, 2]},
    ]
    again = collate(padded)
    assert plain.keys() == again.keys()
    assert all(torch.equal(torch.as_tensor(plain[name]), torch.as_tensor(again[name])) for name in plain)
    chosen = collate([{"input_ids": [1, 8, 2], "labels": [1, -100, 2]}])
    assert chosen["labels"].tolist() == [[-100, -100, 2]]
