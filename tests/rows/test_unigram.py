"""The unigram baseline."""

import math

import pytest
from datasets import Dataset

from hf_pretrain.rows.unigram import unigram_loss


def test_unigram_loss_is_the_formula():
    train = Dataset.from_dict({"input_ids": [[1, 5, 5, 2, 1, 6, 2]], "seq_lengths": [[4, 3]]})
    held_out = Dataset.from_dict({"input_ids": [[1, 5, 2], [1, 7, 2]], "seq_lengths": [[3], [3]]})
    # Training predicts 5 5 2 6 2. Add-one smoothing counts each of the 8 entries once more.
    probability = {2: 3 / 13, 5: 3 / 13, 6: 2 / 13, 7: 1 / 13}
    expected = -sum(math.log(probability[token]) for token in (5, 2, 7, 2)) / 4
    assert unigram_loss(train, held_out, vocab_size=8) == pytest.approx(expected)
