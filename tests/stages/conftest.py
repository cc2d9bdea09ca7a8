"""The tokenizer of the toy trainers of reinforcement learning."""

import pytest

from hf_pretrain.tokenizer.training import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    call = '{"name": "calculator", "arguments": {"expression": "2 + 3"}}'
    return train_tokenizer(["What is 12 + 30? Blue sky. Green tree.", call] * 9, vocab_size=360)
