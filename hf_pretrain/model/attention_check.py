"""The check that an attention implementation computes what the reference computes, before its first use."""

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .packed_attention import eager_attention_forward, find_visible


# Implementations that were found right in this process, with what they were tried on.
_CHECKED_ATTENTION: set[tuple] = set()


@torch.no_grad()
def check_attention(attention: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """
    Compare the attention implementation of the config with the reference on a small random packed batch, once for each
    kind of device, dtype and shape of heads.

    Args:
        attention (`nn.Module`): an attention layer of the model; its weights are not used.
        device (`torch.device`): where to compare.
        dtype (`torch.dtype`): the dtype of queries, keys and values.

    Raises:
        `ValueError`: if they differ by more than 3 %, or for FlexAttention on a CPU.
    """
    config = attention.config
    name = config._attn_implementation
    shape = (config.head_dim, config.num_attention_heads, config.num_key_value_heads)
    if (name, device.type, dtype, shape) in _CHECKED_ATTENTION:
        return
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    instead = 'Use attn_implementation="packed", "sdpa" or "eager".'
    if name == "flex_attention" and device.type == "cpu":
        # NOTE: torch 2.13 compiles it to wrong values on CPUs without AVX-512, and for some shapes only.
        raise ValueError(
            f"flex_attention does not run on a CPU: torch compiles it to wrong values on some of them, and it has no "
            f"backward pass there ({versions}). {instead}"
        )
    generator = torch.Generator().manual_seed(0)
    position_ids = torch.cat([torch.arange(length) for length in (11, 6, 7)]).repeat(2, 1).to(device)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    # (batch_size, num_heads, seq_len, head_dim)
    states = [torch.randn(2, n, 24, config.head_dim, generator=generator).to(device, dtype) for n in heads]
    embeds = torch.zeros(2, 24, config.hidden_size, device=device, dtype=dtype)
    mask, packed_documents = find_visible(config, embeds, position_ids)
    document = (position_ids == 0).cumsum(1)
    # (batch_size, 1, seq_len, seq_len): minus infinity for keys of other documents and of later tokens
    is_other = (document[:, None, :, None] != document[:, None, None, :]) | position_ids.new_ones(24, 24).triu(
        1
    ).bool()
    bias = torch.zeros(is_other.shape, device=device).masked_fill(is_other, -torch.inf)
    with torch.autocast(device.type, enabled=False):
        scaling, attend = attention.scaling, ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        output, _ = attend(attention, *states, mask, dropout=0.0, scaling=scaling, packed_documents=packed_documents)
        query, key, value = (part.float() for part in states)
        expected, _ = eager_attention_forward(attention, query, key, value, bias, scaling)
    difference = ((output.float() - expected).norm() / expected.norm()).item()
    # Half precision rounds to 0.4 %; what was seen wrong was off by 17 % and more.
    if not difference < 0.03:
        raise ValueError(
            f'attn_implementation="{name}" is {difference:.0%} off the reference on {device.type} in {dtype} '
            f"(head_dim {config.head_dim}, {versions}). {instead}"
        )
    _CHECKED_ATTENTION.add((name, device.type, dtype, shape))


__all__ = ["check_attention"]
