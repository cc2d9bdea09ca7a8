"""
One layer of the decoder: RMSNorm, attention with rotary positions, and the residual connections. The feed-forward part
stands in `mlp.py`.
"""

from contextlib import nullcontext
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_minimind import MiniMindConfig
from .mlp import MiniMindMLP, MiniMindResidualProjection, MiniMindSparseMoeBlock, project_together
from .packed_attention import compute_dtype
from .rotary import apply_rotary_pos_emb


# NOTE: transformers 5.24 renamed the argument and the output field `past_key_values` to `cache`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(MoeModelOutputWithPast)} else "past_key_values"

# NOTE: all but cuDNN, which torch would prefer from capability 9.0 on. The cuDNN of torch 2.13 gave NaN gradients with
# a mask (pytorch#196678), and wrong samples on a B200 (pytorch#193893).
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class MiniMindRMSNorm(nn.Module):
    """RMSNorm: `weight * x / sqrt(mean(x ** 2) + eps)`, in float32 (https://huggingface.co/papers/1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; the result has the dtype that the next matrix product uses."""
        # Compute in the weight's dtype, which under autocast is float32.
        normed = F.rms_norm(hidden_states.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        # Cast once here. Autocast would cast again for each projection that reads the result.
        return normed.to(compute_dtype(normed))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class MiniMindAttention(nn.Module):
    """Causal grouped-query attention with rotary positions and, in v3, an RMSNorm on each query and key head."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        # transformers' attention functions read these attributes by name.
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.dropout
        self.is_causal = True
        width, key_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = MiniMindResidualProjection(width, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = MiniMindRMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = MiniMindRMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Attend within each row or packed document.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`)
            position_embeddings (`torch.FloatTensor` of shape `(batch_size, seq_len, 1, head_dim // 2, 2)`): rotations
                from [`MiniMindRotaryEmbedding`].
            attention_mask (`torch.Tensor`, *optional*): the mask in the format of the attention implementation.
            cache ([`Cache`], *optional*): keys and values of earlier tokens, updated in place.

        Returns:
            `tuple`: output of shape `(batch_size, seq_len, hidden_size)`, and attention weights of shape `(batch_size,
            num_heads, seq_len, key_len)` or `None`.
        """
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        projected = project_together(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (states.view(head_shape) for states in projected)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        else:
            # Backward keeps only the values. A view would keep the queries and keys of the joined product as well.
            value = value.contiguous()
        query, key = (apply_rotary_pos_emb(states, position_embeddings) for states in (query, key))
        # (batch_size, seq_len, num_heads, head_dim) -> (batch_size, num_heads, seq_len, head_dim)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

        if cache is not None:
            # (batch_size, num_heads, seq_len, head_dim) -> (batch_size, num_heads, past_len + seq_len, head_dim)
            key, value = cache.update(key, value, self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        kwargs |= {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        with nullcontext() if query.device.type == "cpu" else sdpa_kernel(SDPA_BACKENDS):
            output, weights = attend(self, query, key, value, attention_mask, **kwargs)
        # (batch_size, seq_len, num_heads, head_dim) -> (batch_size, seq_len, num_heads * head_dim)
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights


class MiniMindDecoderLayer(GradientCheckpointingLayer):
    """One decoder layer: attention and feed-forward part, each after an RMSNorm and with a residual connection."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.self_attn = MiniMindAttention(config, layer_idx)
        self.mlp = (
            MiniMindSparseMoeBlock(config) if config.num_experts else MiniMindMLP(config, config.intermediate_size)
        )
        self.input_layernorm = MiniMindRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MiniMindRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Map `(batch_size, seq_len, hidden_size)` to the same shape. Arguments: [`MiniMindAttention.forward`].

        Returns:
            `tuple`: the hidden states, and the router logits of shape `(batch_size * seq_len, num_experts)`, or `None`
            without experts. A hook that recorded these logits would split the compiled graph of the layer.
        """
        normed = self.input_layernorm(hidden_states)
        attention_output, _ = self.self_attn(normed, position_embeddings, attention_mask, cache, **kwargs)
        hidden_states = hidden_states + self.dropout(attention_output)
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        mlp_output, router_logits = mlp_output if isinstance(mlp_output, tuple) else (mlp_output, None)
        return hidden_states + self.dropout(mlp_output), router_logits
