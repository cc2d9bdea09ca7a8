"""
Translate the config.json of each layout in `weights.layouts` into fields of `MiniMindConfig`, and back.

    merge_fields -> read_fields -> MiniMindConfig -> write_stock_fields | write_upstream_fields
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.utils import logging

from ..model.configuration_minimind import MiniMindConfig, check_fields
from ..runtime.errors import UserError
from .layouts import GENERATIONS, LAYOUTS


logger = logging.get_logger(__name__)

# Fields of MiniMind's own configs that our config expresses by other fields. Users may pass them all the same.
UPSTREAM_FIELDS = frozenset(
    ("rope_theta", "use_moe", "n_routed_experts", "n_shared_experts", "aux_loss_alpha", "seq_aux", "scoring_func")
    + ("inference_rope_scaling", "rope_scaling")
)
# Other programs' names of our fields.
_RENAMES = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
_RENAMES |= {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
# Fields that have the same name and meaning in every config but v1's, which `MiniMindConfig.attribute_map` translates.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHARED = (*_SIZES, "hidden_act", "bos_token_id", "eos_token_id")
_MODERN = (*_SHARED, "head_dim", "intermediate_size", "initializer_range", "tie_word_embeddings", "pad_token_id")
# Features of other programs that MiniMind lacks, with the value that leaves them out.
_LACKING = {"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1, "scoring_func": "softmax"}
_LACKING |= {"partial_rotary_factor": 1.0}
# The positions of MiniMind's rotary table.
_POSITIONS = 32768


def merge_fields(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the config fields of a file, overridden by `given`. An architecture of transformers also gets transformers'
    defaults.

    Raises:
        `UserError`: if a field has a wrong value.
    """
    if raw.get("model_type") == "mistral":
        # transformers' default is the window of Mistral 7B v0.1, and null means none.
        window, positions = raw.get("sliding_window", 4096), raw.get("max_position_embeddings", 131072)
        if window is not None and window < positions:
            raise UserError(f"MiniMind has no such feature: sliding_window={window} in the config of a Mistral.")
        # Without a window it is a Llama.
        raw = {**raw, "model_type": "llama"}
    fields = {**raw, **given}
    check_fields(fields)
    if fields.get("model_type") in LAYOUTS:
        # Copy, because transformers changes the dictionaries that it gets.
        fields = copy.deepcopy(_split_rope(raw) | _split_rope(given))
        # Python evaluates `pop` before it unpacks `**fields`, so `model_type` is passed only once.
        fields = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    return {name: value for name, value in fields.items() if value is not None}


def _split_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return `rope_parameters` of transformers 5 as the two fields of transformers 4, which a user can set separately.
    """
    rope = dict(fields.get("rope_parameters") or {})
    split = {"rope_theta": rope.pop("rope_theta")} if "rope_theta" in rope else {}
    if rope:
        split["rope_scaling"] = rope
    return {name: value for name, value in fields.items() if name != "rope_parameters"} | split


def read_fields(raw: dict[str, Any], layout: str, *, has_experts: bool) -> dict[str, Any]:
    """
    Translate the config fields of `layout` into ours, and add the constants of that program's code.

    Raises:
        `UserError`: if a field contradicts the weights or asks for something that MiniMind lacks; if a value is
            missing that the weights do not show, such as `num_experts_per_tok`.
    """
    # v1 has other names for the sizes, such as `dim`.
    renames = _RENAMES | (MiniMindConfig.attribute_map if layout == "v1" else {})
    raw = {renames.get(name, name): value for name, value in raw.items()}
    flat = raw | raw.get("rope_parameters", {})
    for name, plain in _LACKING.items():
        if flat.get(name, plain) != plain:
            raise UserError(f"MiniMind has no such feature: {name}={flat[name]} in the config.")
    # Our exports write it, too. Only training would differ.
    if raw.get("attention_dropout"):
        logger.warning(
            f"attention_dropout={raw['attention_dropout']} of the config is left out, because dropout also acts on "
            "embeddings and residuals here. To train with it, pass --config_overrides dropout=..."
        )

    given = {name: raw[name] for name in (*_MODERN, "dropout") if name in raw}
    given["rms_norm_eps"] = raw.get("rms_norm_eps", 1e-6 if LAYOUTS[layout].has_qk_norm else 1e-5)
    given["rope_parameters"] = _read_rope(raw, layout)
    # In v1, max_seq_len is the length of the training rows. The rotary table always has 32,768 positions.
    given["max_position_embeddings"] = _POSITIONS if layout == "v1" else raw.get("max_position_embeddings", _POSITIONS)
    if has_experts:
        given |= _read_router_fields(raw, layout)
    return {name: value for name, value in given.items() if value is not None}


def _read_router_fields(raw: dict[str, Any], layout: str) -> dict[str, Any]:
    """
    Translate the config fields of the experts' router.

    Our router loss divides by top-k; the losses of v3, Qwen3-MoE and Ernie4.5-MoE do not. The latter two also average
    over layers, and MiniMind sums. The translated coefficient compensates for both differences.
    """
    if "num_experts_per_tok" not in raw:
        defaults = "give num_experts_per_tok (by default 2 in MiniMind v1 and v2, 1 in v3)"
        raise UserError(f"The weights do not show how many experts a token is routed to: {defaults}.")
    top_k = raw["num_experts_per_tok"]
    given = {name: raw[name] for name in ("num_experts", "num_experts_per_tok") if name in raw}
    if layout in ("v1", "v2"):
        return given | {
            "moe_intermediate_size": raw.get("intermediate_size"),
            # v1 and v2 never normalise at top-1, whatever the config says.
            "norm_topk_prob": top_k > 1 and raw.get("norm_topk_prob", True),
            "router_aux_loss_coef": raw.get("aux_loss_alpha", 0.1),
            "router_aux_loss_level": "sequence" if raw.get("seq_aux", True) else "batch",
        }
    norm_topk_prob = raw.get("norm_topk_prob", True)
    if layout == "ernie4_5_moe":
        # Ernie divides by the sum of the top-k probabilities (at most 1), but never by less than this floor.
        if raw["moe_norm_min"] > 1e-6 and raw["moe_norm_min"] != 1.0:
            raise UserError(f"moe_norm_min={raw['moe_norm_min']}: MiniMind knows only up to 1e-6, or exactly 1.")
        norm_topk_prob = raw["moe_norm_min"] != 1.0
    # v3 sums over layers as we do; the others average.
    num_layers = 1 if layout == "v3" else raw["num_hidden_layers"]
    return given | {
        "moe_intermediate_size": raw.get("moe_intermediate_size"),
        "norm_topk_prob": norm_topk_prob,
        "router_aux_loss_coef": raw.get("router_aux_loss_coef", 5e-4) * top_k / num_layers,
        "router_aux_loss_level": "batch",
    }


def _read_rope(raw: dict[str, Any], layout: str) -> dict[str, Any]:
    """Translate the fields of the rotary table into `rope_parameters`."""
    rope = {name: value for name, value in raw.get("rope_parameters", {}).items() if value is not None}
    # The old name of `rope_type`, and vLLM's form of `attention_factor`.
    for name in ("type", "attn_factor"):
        rope.pop(name, None)
    if "rope_theta" in raw:
        rope["rope_theta"] = raw["rope_theta"]
    if layout == "v1" and "rope_theta" not in rope:
        known = "1e6 for MiniMind2 of 2025, 1e4 for MiniMind-V1 of 2024, whose config.json lacks it"
        raise UserError(f"The base of v1's rotary table is unknown: give rope_theta ({known}).")
    if layout not in GENERATIONS:
        return rope
    if raw.get("inference_rope_scaling"):
        flag = "pass --inference_rope_scaling to chat, serve or evaluate"
        raise UserError(f"Convert the trained model with --config inference_rope_scaling=false, and {flag}.")
    # 1e6 is the default of MiniMind's code from v2 on.
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e6)}


def write_stock_fields(config: MiniMindConfig, layout: str) -> dict[str, Any]:
    """Return the config fields of the transformers architecture `layout`."""
    ours = config.to_dict()
    fields = {name: ours[name] for name in (*_MODERN, "max_position_embeddings", "rms_norm_eps", "rope_parameters")}
    if layout != "ernie4_5_moe":
        # Ernie's config has no such field.
        fields["attention_dropout"] = config.dropout
    if layout in ("llama", "qwen3"):
        return fields
    fields["moe_intermediate_size"] = config.moe_intermediate_size
    # transformers averages the router loss over layers and does not divide by top-k; MiniMind sums and divides.
    factor = config.num_hidden_layers / config.num_experts_per_tok
    fields["router_aux_loss_coef"] = config.router_aux_loss_coef * factor
    if layout == "qwen3_moe":
        return fields | {name: ours[name] for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}
    return fields | {
        "moe_num_experts": config.num_experts,
        "moe_k": config.num_experts_per_tok,
        "moe_num_shared_experts": config.num_shared_experts,
        "moe_layer_start_index": 0,
        # A floor of 1 turns Ernie's normalisation off, see `_read_router_fields`.
        "moe_norm_min": 1e-12 if config.norm_topk_prob else 1.0,
    }


def write_upstream_fields(config: MiniMindConfig, generation: str) -> dict[str, Any]:
    """Return the fields of config.json that MiniMind's code of `generation` writes."""
    ours = config.to_dict()
    width = config.moe_intermediate_size if config.num_experts else config.intermediate_size
    fields = {name: ours[name] for name in (*_SHARED, "rms_norm_eps", "dropout", "max_position_embeddings")} | {
        "model_type": "minimind",
        "intermediate_size": width,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_moe": config.num_experts > 0,
        "num_experts_per_tok": config.num_experts_per_tok,
    }
    if generation == "v3":
        return fields | {
            "head_dim": config.head_dim,
            "tie_word_embeddings": config.tie_word_embeddings,
            # The config of a dense model holds the default of MiniMind's code.
            "num_experts": config.num_experts or 4,
            "moe_intermediate_size": width,
            "norm_topk_prob": config.norm_topk_prob,
            "router_aux_loss_coef": config.router_aux_loss_coef / config.num_experts_per_tok,
        }
    return fields | {
        # v2 never normalises at top-1, whatever this field says; True is its default.
        "norm_topk_prob": config.norm_topk_prob or config.num_experts_per_tok == 1,
        "n_routed_experts": config.num_experts or 4,
        "n_shared_experts": config.num_shared_experts,
        "scoring_func": "softmax",
        "aux_loss_alpha": config.router_aux_loss_coef,
        "seq_aux": config.router_aux_loss_level == "sequence",
    }
