"""
Exports against what vLLM's loaders read, recorded from its source: `llama.py`, `qwen2.py`, `qwen3.py` and
`qwen3_moe.py` in `vllm/model_executor/models` at 0035bdf2 and 002456df, and `make_expert_params_mapping`.

This proves names, and the fields of the config. It proves neither numbers nor kernels.
"""

import json
import math

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.toys import toy_model


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Fields without which vLLM takes another default or fails; it reads theta from either of two places, by version.
FIELDS = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
FIELDS |= {"head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size"}
MOE_FIELDS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}
YARN = {"rope_type": "yarn", "rope_theta": 3e4, "factor": 4.0, "original_max_position_embeddings": 64}
OVERRIDES = {
    "llama": {"num_key_value_heads": 2, "rope_parameters": YARN | {"attention_factor": 1.2}},
    "qwen3": {"num_key_value_heads": 2, "qk_norm": True, "tie_word_embeddings": False},
    "qwen3_moe": {"num_key_value_heads": 2, "qk_norm": True, "num_experts": 3, "moe_intermediate_size": 24},
}


def names(config: dict, architecture: str) -> set[str]:
    """Return the names of the tensors that vLLM's loaders put into the parameters of a model."""
    layer = {"input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")}
    if architecture != "llama":
        layer |= {"self_attn.q_norm", "self_attn.k_norm"}
    parts = ["mlp"]
    if architecture == "qwen3_moe":
        layer, parts = layer | {"mlp.gate"}, [f"mlp.experts.{expert}" for expert in range(config["num_experts"])]
    layer |= {f"{part}.{name}_proj" for part in parts for name in ("gate", "up", "down")}
    found = {f"model.layers.{number}.{name}" for number in range(config["num_hidden_layers"]) for name in layer}
    found |= {"model.embed_tokens", "model.norm"} | (set() if config["tie_word_embeddings"] else {"lm_head"})
    return {f"{name}.weight" for name in found}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vllm_finds_every_parameter_and_field(architecture, tmp_path):
    tokenizer = train_tokenizer(["the river walks"] * 4, vocab_size=300)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    model = toy_model(vocab_size=300, **rope | OVERRIDES[architecture])
    export(model, tmp_path / "out", architecture, tokenizer=tokenizer)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[architecture]] and config["model_type"] == architecture
    assert config.keys() >= FIELDS | (MOE_FIELDS if architecture == "qwen3_moe" else set())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 3e4
    # vLLM multiplies `attn_factor` by what YaRN's paper gives.
    if architecture == "llama":
        for name in ("rope_parameters", "rope_scaling"):
            assert config[name]["attn_factor"] * (0.1 * math.log(4) + 1) == pytest.approx(1.2)
    # vLLM has no other activation, and reads a bias that these layers do not have.
    assert config["hidden_act"] == "silu" and not config.get("attention_bias") and not config.get("mlp_bias")
    assert not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
    assert load_file(tmp_path / "out/model.safetensors").keys() == names(config, architecture)
    # vLLM loads the tokenizer with AutoTokenizer, and chats with the template beside it.
    served = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert served.eos_token_id == config["eos_token_id"] and served.chat_template == tokenizer.chat_template
    assert served("the river").input_ids == tokenizer("the river").input_ids
