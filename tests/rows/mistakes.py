"""Mistakes in the rows of a data set."""

from hf_pretrain.rows.collators import DataCollatorForPackedRows
from tests.mistakes import Mistake


def collate(row, **settings):
    return lambda: DataCollatorForPackedRows(pad_token_id=0, **settings)([row])


MISTAKES = [
    Mistake(
        "3 tokens is longer than max_length=2",
        collate({"input_ids": [1, 8, 2], "seq_lengths": [3]}, max_length=2),
        ValueError,
    ),
    Mistake("do not sum to the row's 3 tokens", collate({"input_ids": [1, 8, 2], "seq_lengths": [2]}), ValueError),
]
