"""The toy model of a chat, which several files talk with."""

import pytest

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer


@pytest.fixture(scope="session")
def model(talker):
    return MiniMindForCausalLM.from_pretrained(talker).eval()


@pytest.fixture
def tokenizer(talker):
    return load_tokenizer(talker)
