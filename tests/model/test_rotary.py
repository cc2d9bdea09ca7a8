"""The complex rotary table stays exact through casts, moves, saving and loading."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_pretrain import MiniMindForCausalLM
from tests.models import stock_model


THETA, LENGTH, HEAD_DIM = 1e6, 256, 8


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Return the result of MiniMind v1's `precompute_pos_cis`, written out."""
    frequencies = 1.0 / (THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    angles = torch.outer(torch.arange(LENGTH).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def train_with_checkpointing(model: MiniMindForCausalLM) -> MiniMindForCausalLM:
    model.train().activation_checkpointing_enable()
    ids = torch.arange(3, 20)[None]
    model(ids, labels=ids).loss.backward()
    return model


def build_on_meta(model: MiniMindForCausalLM) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(model.config).to_empty(device="cpu")


def reload(model: MiniMindForCausalLM, *, auto_class: type = AutoModelForCausalLM, **arguments) -> MiniMindForCausalLM:
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        # Overwrite the freed memory of the old table, which an unfilled allocation would get.
        torch.empty(LENGTH, HEAD_DIM // 2, dtype=torch.complex64).fill_(7)
        return auto_class.from_pretrained(directory, **arguments)


OPERATIONS: dict[str, Callable[[MiniMindForCausalLM], MiniMindForCausalLM]] = {
    "construction": lambda model: model,
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "half().float()": lambda model: model.half().float(),
    "double()": lambda model: model.double(),
    "to(meta).to_empty(cpu)": lambda model: model.to("meta").to_empty(device="cpu"),
    "built on meta": build_on_meta,
    "deepcopy of bfloat16": lambda model: copy.deepcopy(model.to(torch.bfloat16)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "activation checkpointing": train_with_checkpointing,
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(170) and model,
    "from_pretrained": partial(reload, auto_class=MiniMindForCausalLM),
    "from_pretrained of the Auto class": reload,
    "from_pretrained in bfloat16": partial(reload, dtype="bfloat16"),
    "from_pretrained in float16": partial(reload, dtype=torch.float16),
    "low_cpu_mem_usage": partial(reload, low_cpu_mem_usage=True),
    "device_map": partial(reload, device_map="cpu"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_table_is_exact_after(operation, build_model, expected):
    model = operation(build_model())
    table = model.model.rotary_emb.pos_cis
    assert table.dtype == torch.complex64 and table.device == expected.device
    assert torch.equal(table, expected)
    assert dict(model.named_buffers())["model.rotary_emb.pos_cis"] is table


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
        | {"beta_fast": 16.0, "beta_slow": 1.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5},
    ],
    ids=["default", "linear", "yarn", "yarn-attention-factor"],
)
def test_scaling_matches_llama(rope_parameters, build_model, tmp_path):
    model = build_model(rope_parameters=dict(rope_parameters))
    model.save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    config = LlamaConfig(**sizes, rope_parameters=dict(rope_parameters))
    length = LENGTH * 4 if rope_parameters.get("attention_factor") else LENGTH
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    for table in (model, MiniMindForCausalLM.from_pretrained(tmp_path)):
        table = table.model.rotary_emb.pos_cis
        torch.testing.assert_close(table.real, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=3e-7)
        torch.testing.assert_close(table.imag, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=3e-7)


def test_yarn_extends_the_table(build_model, tmp_path):
    """The usual recipe names the scaling and leaves `max_position_embeddings` alone."""
    build_model().save_pretrained(tmp_path / "short")
    ids = torch.arange(3, 150).repeat(1, 8)[:, : 4 * LENGTH]
    for parameters in (
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    ):
        model = MiniMindForCausalLM.from_pretrained(tmp_path / "short", rope_parameters=dict(parameters))
        model.save_pretrained(tmp_path / "long")
        for loaded in (model, MiniMindForCausalLM.from_pretrained(tmp_path / "long")):
            assert loaded.config.max_position_embeddings == 4 * LENGTH
            with pytest.raises(ValueError):
                loaded(torch.full((1, 4 * LENGTH + 1), 5))
            other = stock_model(loaded, LlamaForCausalLM)
            torch.testing.assert_close(loaded(ids).logits, other(ids).logits, rtol=0, atol=2e-4)
