"""
Exports against what vLLM's loaders read, recorded from its source: `llama.py`, `qwen2.py`, `qwen3.py` and
`qwen3_moe.py` in `vllm/model_executor/models` at 0035bdf2 and 002456df, and `make_expert_params_mapping`.

This proves names, shapes, and the fields of the config. It proves neither numbers nor kernels.
"""

import json
import math

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.weights.exporting import export
from tests.toys import toy_model


# vLLM's fused parameter, the name in the checkpoint that it replaces, and the part that it fills.
STACKED = [
    *(("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v")),
    *(("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1)),
]
EXPERT_SHARDS = {"gate_proj": ("w13_weight", "w1"), "up_proj": ("w13_weight", "w3"), "down_proj": ("w2_weight", "w2")}
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


def parameters(config: dict, architecture: str) -> dict[str, dict]:
    """Return the shape of each part of each parameter that vLLM builds from a config."""
    hidden, width, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {
        "model.embed_tokens.weight": {None: (config["vocab_size"], hidden)},
        "model.norm.weight": {None: (hidden,)},
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = {None: (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = {name: {None: (hidden,)} for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        layer["self_attn.qkv_proj.weight"] = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
        layer["self_attn.o_proj.weight"] = {None: (hidden, queries)}
        if architecture != "llama":
            layer |= {f"self_attn.{name}_norm.weight": {None: (head,)} for name in "qk"}
        if architecture == "qwen3_moe":
            count, width = config["num_experts"], config["moe_intermediate_size"]
            layer["mlp.gate.weight"] = {None: (count, hidden)}
            up = {(expert, shard): (width, hidden) for expert in range(count) for shard in ("w1", "w3")}
            layer["mlp.experts.w13_weight"] = up
            layer["mlp.experts.w2_weight"] = {(expert, "w2"): (hidden, width) for expert in range(count)}
        else:
            layer["mlp.gate_up_proj.weight"] = {0: (width, hidden), 1: (width, hidden)}
            layer["mlp.down_proj.weight"] = {None: (hidden, width)}
        found |= {f"model.layers.{number}.{name}": shards for name, shards in layer.items()}
    return found


def target(name: str) -> tuple[str, object]:
    """Return the parameter of vLLM, and its part, that its loader fills with a tensor of the checkpoint."""
    if ".mlp.experts." in name:
        start, expert, matrix, _ = name.rsplit(".", 3)
        parameter, shard = EXPERT_SHARDS[matrix]
        return f"{start}.{parameter}", (int(expert), shard)
    for fused, own, shard in STACKED:
        if f".{own}." in name:
            return name.replace(own, fused), shard
    return name, None


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
    loaded: dict[str, dict] = {}
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        parameter, shard = target(name)
        loaded.setdefault(parameter, {})[shard] = tuple(tensor.shape)
    assert loaded == parameters(config, architecture)
    # vLLM loads the tokenizer with AutoTokenizer, and chats with the template beside it.
    served = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert served.eos_token_id == config["eos_token_id"] and served.chat_template == tokenizer.chat_template
    assert served("the river").input_ids == tokenizer("the river").input_ids
