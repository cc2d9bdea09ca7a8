import json
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pretrain import PRESETS, MiniMindConfig, MiniMindForCausalLM
from tests.model.mistakes import load_travelling_code


PARAMETERS = {
    "tiny": 2_803_392,
    "minimind2-small": 25_829_888,
    "minimind2": 104_030_976,
    "minimind2-moe": 145_029_760,
    "minimind3": 63_912_192,
    "minimind3-moe": 198_416_640,
    "minimind-large": 361_038_848,
    # With MiniMind's vocabulary. Published models and the YAML files have a larger one.
    "smollm2": 109_889_856,
    "0.5B": 455_543_040,
    "1B": 986_253_312,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_parameter_count(name):
    with torch.device("meta"):
        model = MiniMindForCausalLM(MiniMindConfig(**PRESETS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name, fields in PRESETS.items() if "num_experts" in fields])
def test_cross_entropy_trains_the_router_of_every_preset(build_model, input_ids, name):
    routing = {
        key: value for key, value in PRESETS[name].items() if "expert" in key or key in ("norm_topk_prob", "qk_norm")
    }
    model = build_model(**routing)
    model(input_ids, labels=input_ids).ce_loss.backward()
    for layer in model.model.layers:
        # Rounding leaves 1e-8 where the routing weight is constant.
        assert layer.mlp.gate.weight.grad.abs().max() > 1e-4


def test_v1_names(tmp_path):
    values = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "norm_eps": 1e-6}
    config = MiniMindConfig(**values, max_seq_len=512)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    loaded = AutoConfig.from_pretrained(tmp_path)
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
    names += ["rms_norm_eps", "max_position_embeddings"]
    for (alias, value), name in zip((values | {"max_seq_len": 512}).items(), names, strict=True):
        assert getattr(config, name) == getattr(config, alias) == getattr(loaded, name) == value
        assert getattr(loaded, alias) == saved[name] == value and alias not in saved
    config.n_layers = 5
    assert config.num_hidden_layers == 5
    assert config.head_dim == 16


@pytest.mark.parametrize("loader", [AutoConfig, MiniMindConfig, AutoModelForCausalLM, MiniMindForCausalLM])
def test_a_checkpoint_of_minimind_itself_is_refused(build_model, tmp_path, loader):
    """MiniMind2 has our `model_type`, names and shapes, but another layout of the rotary dimensions."""
    build_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["format_version"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError):
        loader.from_pretrained(tmp_path)


def test_travelling_code_loads_beside_the_versions_of_transformers_that_it_needs(monkeypatch):
    for version in ("5.19.0", "5.25.0"):
        load_travelling_code(monkeypatch, version)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "transformers>=5.23,<5.25" in project["project"]["dependencies"]
