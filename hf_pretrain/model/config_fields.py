"""
Check the types and ranges of the fields of configs.

`MiniMindConfig` and the importers of other checkpoints run this check first. Without it, a wrong value would fail deep
inside torch, with a message that does not name the field. This file travels to the Hub with every checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any


def _is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that a tensor can hold."""
    # `bool` is a subclass of `int`. The bound excludes infinity and, since comparisons with NaN are false, NaN too.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any, *, least: int = 1) -> bool:
    """Return whether `value` is an integer of at least `least` that fits into 32 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


# (expected value in words, predicate, names of the fields in MiniMind's and transformers' configs)
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "a whole number of at least 1",
        _is_count,
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size "
        "moe_intermediate_size max_position_embeddings num_experts_per_tok moe_k dim n_heads n_kv_heads "
        "hidden_dim max_seq_len original_max_position_embeddings",
    ),
    (
        # Python builds each layer, so a typing error would keep it busy until the memory is full.
        "a whole number from 1 to 10,000",
        lambda value: _is_count(value) and value <= 10_000,
        "num_hidden_layers n_layers",
    ),
    (
        "a whole number of at least 0",
        lambda value: _is_count(value, least=0),
        "num_experts num_shared_experts num_local_experts n_routed_experts moe_num_experts",
    ),
    (
        "a number above 0",
        lambda value: _is_number(value) and value > 0,
        "rms_norm_eps norm_eps rope_theta factor beta_fast beta_slow",
    ),
    ("a number of at least 0", lambda value: _is_number(value) and value >= 0, "initializer_range"),
    (
        "a number",
        _is_number,
        "router_aux_loss_coef aux_loss_alpha moe_norm_min attention_factor partial_rotary_factor",
    ),
    ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1, "dropout"),
    (
        "true or false",
        # `True == 1` and `False == 0`, so both spellings pass.
        lambda value: value in (0, 1),
        "use_moe seq_aux norm_topk_prob tie_word_embeddings inference_rope_scaling use_sliding_window "
        "zero_init_residual",
    ),
    ("a text", lambda value: isinstance(value, str), "model_type hidden_act scoring_func rope_type"),
    ("an object", lambda value: isinstance(value, Mapping), "rope_parameters rope_scaling"),
)
_BY_FIELD = {name: (what, is_right) for what, is_right, names in _KINDS for name in names.split()}


def check_fields(fields: Mapping[str, Any]) -> None:
    """
    Check every known field of a config, also within nested objects such as `rope_parameters`.

    Args:
        fields (`Mapping`): names and values. A value of `None` counts as absent; unknown names are not checked.

    Raises:
        `ValueError`: for the first field with a value of the wrong type or range.
    """
    for name, value in fields.items():
        what, is_right = _BY_FIELD.get(name, ("", lambda value: True))
        if value is not None and not is_right(value):
            raise ValueError(f"The config says {name}={value!r}; it must be {what}. Correct the config.")
        # `rope_parameters` and `rope_scaling` are objects with further fields.
        if isinstance(value, Mapping):
            check_fields(value)


__all__ = ["check_fields"]
