"""Presets: the published MiniMind models, a tiny one for a first run on a CPU, SmolLM2's shape, and two larger."""

from typing import Any


# FFN widths follow MiniMind: v1 and v2 round 8/3 of hidden_size up to a multiple of 64 (the default of the config), v3
# uses 64 * ceil(pi * hidden_size / 64).
_V2 = {"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "zero_init_residual": True}
_V3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 2432,
    "qk_norm": True,
    "zero_init_residual": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "zero_init_residual": True,
    },
    "minimind2-small": {"hidden_size": 512, "num_hidden_layers": 8, **_V2},
    "minimind2": {"hidden_size": 768, "num_hidden_layers": 16, **_V2},
    "minimind2-moe": {
        "hidden_size": 640,
        "num_hidden_layers": 8,
        **_V2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "router_aux_loss_coef": 0.1,
    },
    "minimind3": {"hidden_size": 768, "num_hidden_layers": 8, **_V3},
    "minimind3-moe": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        **_V3,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        # A top-1 weight divided by itself is always 1, so the cross-entropy would give the router no gradient.
        "norm_topk_prob": False,
        "router_aux_loss_coef": 5e-4,
    },
    "minimind-large": {"hidden_size": 1024, "num_hidden_layers": 32, **_V2},
    # The shape of SmolLM2-135M (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
    "smollm2": {
        **{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"intermediate_size": 1536, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "zero_init_residual": True},
    },
    # Shapes of Llama: heads of 64. With the vocabulary of 32,768 tokens in their YAML files, 0.49 and 1.04 billion
    # parameters.
    "0.5B": {
        **{"hidden_size": 1280, "num_hidden_layers": 26, "num_attention_heads": 20, "num_key_value_heads": 4},
        **{"intermediate_size": 3456, "zero_init_residual": True},
    },
    "1B": {
        **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 8192, "zero_init_residual": True},
    },
}
