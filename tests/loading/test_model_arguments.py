"""Models that the command-line arguments describe."""

import math

import pytest
import torch

from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.tokenizer.training import train_tokenizer


TOP_1 = "num_experts=4,num_experts_per_tok=1,hidden_size=32,num_hidden_layers=1,num_attention_heads=2"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words for a tokenizer"] * 20, vocab_size=300)


@pytest.mark.parametrize(("level", "warns"), [("batch", True), ("sequence", False)])
def test_a_router_loss_that_depends_on_the_micro_batch_is_reported(tokenizer, caplog, tmp_path, level, warns):
    args = ModelArguments(vocab_size=300, config_overrides=f"{TOP_1},num_key_value_heads=2,norm_topk_prob=False")
    model = load_model(args, tokenizer)
    model.config.router_aux_loss_level = level
    model.save_pretrained(tmp_path)
    assert "micro-batch" not in caplog.text
    args = ModelArguments(model_name_or_path=str(tmp_path), config_overrides="dropout=0.1")
    load_model(args, tokenizer)
    assert ("router_aux_loss_level=sequence to --config_overrides" in caplog.text) == warns
    caplog.clear()
    args.config_overrides = "router_aux_loss_level=sequence"
    assert load_model(args, tokenizer).config.router_aux_loss_level == "sequence" and "micro-batch" not in caplog.text


@pytest.mark.parametrize(("kind", "expected"), [(None, "eager"), ("mps", "eager"), ("cuda", "grouped_mm")])
def test_experts_run_in_a_loop_where_grouped_products_are_slow(tokenizer, monkeypatch, kind, expected):
    accelerator = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    model = load_model(ModelArguments(vocab_size=300, config_overrides=TOP_1), tokenizer)
    assert model.config._experts_implementation == expected


def upstream_frequencies(dim: int, *, theta: float, length: int, factor: float) -> torch.Tensor:
    """YaRN as MiniMind's `precompute_freqs_cis` computes it."""
    low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim // 2 - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return theta ** -(torch.arange(0, dim, 2) / dim) * (1 - ramp + ramp / factor)


@pytest.mark.parametrize(("text", "length", "factor"), [("2048:16", 2048, 16), ("512:4.5", 512, 4.5)])
@pytest.mark.parametrize("theta", [1e6, 1e4])
def test_positions_extend_as_minimind_extends_them(tokenizer, tmp_path, text, length, factor, theta):
    """Also for a native checkpoint with another theta, and with fewer positions than the extended ones."""
    fields = f"hidden_size=128,num_hidden_layers=1,num_attention_heads=4,max_position_embeddings={length}"
    fields += f",rope_parameters={{rope_type: default, rope_theta: {theta}}}"
    load_model(ModelArguments(vocab_size=300, config_overrides=fields), tokenizer).save_pretrained(tmp_path)
    model = load_model(ModelArguments(model_name_or_path=str(tmp_path), inference_rope_scaling=text), tokenizer)
    table = model.model.rotary_emb.pos_cis
    assert model.config.max_position_embeddings == len(table) == length * factor
    frequencies = upstream_frequencies(32, theta=theta, length=length, factor=factor)
    # One position turns by the frequency; the angle of the fastest one stays below pi.
    torch.testing.assert_close(table[1].angle(), frequencies, rtol=1e-5, atol=0)
    assert torch.allclose(table.abs(), torch.ones(()))
