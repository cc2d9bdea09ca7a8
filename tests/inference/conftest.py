"""The toy model of a chat, which several files talk with."""

import pytest

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.talking import save_speaker


@pytest.fixture(scope="session")
def model(talker):
    return MiniMindForCausalLM.from_pretrained(talker).eval()


@pytest.fixture
def tokenizer(talker):
    return load_tokenizer(talker)


@pytest.fixture(scope="session")
def endless(talker, tmp_path_factory):
    """Return the directory of a model that needs many seconds for its positions, and never ends its answer."""
    path, sizes = tmp_path_factory.mktemp("endless"), {"hidden_size": 384, "num_hidden_layers": 16}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 8192}
    line_break = load_tokenizer(talker)("\n")["input_ids"][-1]
    save_speaker(path, talker, line_break, "so it is,", is_endless=True, **sizes)
    return path
