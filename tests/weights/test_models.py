"""Models that the command-line arguments describe."""

import pytest
import torch

from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.models import ModelArguments, load_model


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"model_preset": "tiny"}, 192),
        ({"model_preset": "minimind2"}, 768),
        ({"model_preset": "tiny", "config_overrides": "hidden_size=96"}, 96),
        ({"model_preset": "tiny", "config_overrides": "dim=48"}, 48),
        ({"model_name_or_path": "somewhere"}, 512),
    ],
)
def test_the_width_of_the_model(arguments, expected):
    assert ModelArguments(**arguments).hidden_size == expected
