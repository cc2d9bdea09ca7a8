"""Mistakes with a model: sizes that do not fit together, arguments of `forward`, and positions past the table."""

import importlib.util
from pathlib import Path

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import hf_pretrain
from hf_pretrain import MiniMindConfig
from hf_pretrain.model.configuration_minimind import TESTED_VERSIONS
from tests.mistakes import Mistake
from tests.models import packed_positions
from tests.toys import toy_model


IDS, ONES = torch.full((2, 24), 5), torch.ones(2, 24)


def sizes(says, **fields):
    return Mistake(says, lambda: MiniMindConfig(**fields), ValueError)


def scaled(rope_type, **more):
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **more}
    return lambda: toy_model(rope_parameters=parameters)


def forward(says, ids=IDS, error=ValueError, attention="packed", **arguments):
    def make():
        model = toy_model()
        model.set_attn_implementation(attention)
        model(ids, **arguments)

    return Mistake(says, make, error)


def pass_the_cache_twice():
    model = toy_model()
    cache = model(IDS, use_cache=True).past_key_values
    model(IDS, past_key_values=cache, cache=cache)


def load_travelling_code(monkeypatch, version):
    """Load the module of the config as a checkpoint does, beside a version of transformers."""
    monkeypatch.setattr(transformers, "__version__", version)
    path = Path(hf_pretrain.__file__).parent / "model/configuration_minimind.py"
    spec = importlib.util.spec_from_file_location("hf_pretrain.model.copy", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def attend_with(name):
    AttentionInterface.register("of_another", sdpa_attention_forward)
    return forward(f'"{name}" may give wrong results on cpu', attention=name)


MISTAKES = [
    sizes("hidden_size=36 is not a multiple of num_attention_heads=8", hidden_size=36, num_attention_heads=8),
    sizes("multiple of num_key_value_heads=3; change one", num_attention_heads=8, num_key_value_heads=3),
    sizes("num_attention_heads=0", num_attention_heads=0),
    sizes("head_dim=7 is odd", head_dim=7),
    sizes("head_dim=9 is odd", hidden_size=36, num_attention_heads=4),
    sizes("num_experts_per_tok=5 must lie between 1 and num_experts=4", num_experts=4, num_experts_per_tok=5),
    sizes("num_experts_per_tok=0", num_experts=4, num_experts_per_tok=0),
    sizes('router_aux_loss_level="token" is unknown; use "sequence"', router_aux_loss_level="token"),
    *(
        Mistake(f'rope_type="{kind}" depends on .* Use "yarn"', scaled(kind, **more), ValueError)
        for kind, more in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}))
    ),
    # Configs of others
    Mistake(
        "no `format_version`.*load_upstream.*hf-pretrain convert",
        lambda: MiniMindConfig.from_dict({"model_type": "minimind"}),
        ValueError,
    ),
    Mistake(
        "has format_version=99, .* Install a newer version",
        lambda: MiniMindConfig.from_dict({"model_type": "minimind", "format_version": 99}),
        ValueError,
    ),
    Mistake(
        "tested: 5.19 to 5.24.* 5.18.1 is installed",
        lambda monkeypatch: load_travelling_code(monkeypatch, "5.18.1"),
        ImportError,
    ),
    # Arguments of `forward`
    Mistake("Pass the cache once", pass_the_cache_twice, ValueError),
    *(forward(f"{name} needs position_ids", **{name: IDS}) for name in ("cu_seq_lens_q", "seq_idx")),
    *(
        forward(f"argument {name}, .*tested with transformers {TESTED_VERSIONS}", error=TypeError, **{name: ONES})
        for name in ("kv_cache", "cache_position", "is_causal", "attention_masks", "target_ids")
    ),
    forward("Position 128 lies past .* 128 positions .*Shorten the input", torch.full((1, 129), 5)),
    forward("Position 128 lies past", IDS[:1, :2], position_ids=torch.tensor([[0, 128]])),
    forward(
        "position_ids restart .*attention_mask marks padding",
        position_ids=packed_positions(2),
        attention_mask=ONES.tril(22),
    ),
    forward(
        "end at 24, the batch has 48",
        position_ids=packed_positions(2),
        use_cache=False,
        cu_seq_lens_q=torch.tensor([0, 10, 24]),
    ),
    *map(attend_with, ("flex_attention", "of_another")),
    Mistake(
        "router loss",
        lambda: toy_model(num_experts=4).activation_checkpointing_enable({"use_reentrant": True}),
        ValueError,
    ),
]
