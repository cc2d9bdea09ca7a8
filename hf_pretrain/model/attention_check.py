"""
Compare an attention implementation with the eager reference before its first use.

An implementation that is wrong on some device still returns finite logits, so no other check would notice.
"""

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .packed_attention import eager_attention_forward, find_visible


# Combinations that passed in this process: (implementation, device type, dtype, head shape, training).
_CHECKED_ATTENTION: set[tuple] = set()


@torch.no_grad()
def check_attention(attention: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """
    Compare the configured attention implementation with the reference on a small random packed batch.

    The comparison runs once per process for each combination of implementation, device type, dtype, head shape and
    mode (training or evaluation).

    Args:
        attention (`nn.Module`): an attention layer of the model. Its weights are not used.
        device (`torch.device`): the device to compare on.
        dtype (`torch.dtype`): dtype of queries, keys and values.

    Raises:
        `ValueError`: if the outputs differ by more than 3 % in the L2 norm, or for FlexAttention on a CPU.
    """
    config = attention.config
    name = config._attn_implementation
    shape = (config.head_dim, config.num_attention_heads, config.num_key_value_heads)
    # With dropout, the packed implementation takes another path in training.
    combination = (name, device.type, dtype, shape, attention.training)
    if combination in _CHECKED_ATTENTION:
        return
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    instead = 'Use attn_implementation="packed", "sdpa" or "eager".'
    if name == "flex_attention" and device.type == "cpu":
        # NOTE: torch 2.13 compiles FlexAttention to wrong values on CPUs without AVX-512, but only for some shapes.
        # The comparison below could pass, and the model could still be wrong at another length.
        raise ValueError(
            f"flex_attention does not run on a CPU: torch compiles it to wrong values on some of them, and it has no "
            f"backward pass there ({versions}). {instead}"
        )
    generator = torch.Generator().manual_seed(0)
    # Three documents of uneven length per row (24 tokens): a mask that leaks across documents changes the output.
    position_ids = torch.cat([torch.arange(length) for length in (11, 6, 7)]).repeat(2, 1).to(device)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    # (batch_size, num_heads, seq_len, head_dim)
    states = [torch.randn(2, n, 24, config.head_dim, generator=generator).to(device, dtype) for n in heads]
    embeds = torch.zeros(2, 24, config.hidden_size, device=device, dtype=dtype)
    mask, packed_documents = find_visible(config, embeds, position_ids, is_training=attention.training)
    document = (position_ids == 0).cumsum(1)
    # (batch_size, 1, seq_len, seq_len): true for keys of other documents and of later tokens, which get -inf.
    is_other = (document[:, None, :, None] != document[:, None, None, :]) | position_ids.new_ones(24, 24).triu(
        1
    ).bool()
    bias = torch.zeros(is_other.shape, device=device).masked_fill(is_other, -torch.inf)
    # Autocast would change the dtype of the products on one side of the comparison only.
    with torch.autocast(device.type, enabled=False):
        scaling, attend = attention.scaling, ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        output, _ = attend(attention, *states, mask, dropout=0.0, scaling=scaling, packed_documents=packed_documents)
        query, key, value = (part.float() for part in states)
        expected, _ = eager_attention_forward(attention, query, key, value, bias, scaling)
    difference = ((output.float() - expected).norm() / expected.norm()).item()
    # Half precision alone causes about 0.4 %; the wrong results seen so far were off by 17 % or more. `not ... <` is
    # also true for NaN.
    if not difference < 0.03:
        raise ValueError(
            f'attn_implementation="{name}" is {difference:.0%} off the reference on {device.type} in {dtype} '
            f"(head_dim {config.head_dim}, {versions}). {instead}"
        )
    _CHECKED_ATTENTION.add(combination)


__all__ = ["check_attention"]
