"""
The MiniMind model: a decoder with grouped-query attention, rotary positions from a complex table, SwiGLU, RMSNorm, and
optionally a mixture of experts (https://github.com/jingyaogong/minimind).

The whole model is this file. It travels to the Hub with every checkpoint, beside `configuration_minimind.py` and
`loss.py`, and imports nothing else of the package. From a token to the loss:

    embed_tokens -> layers x (input_layernorm -> self_attn -> post_attention_layernorm -> mlp) -> norm -> lm_head
    -> masked cross-entropy + router_aux_loss_coef * router loss
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward, use_experts_implementation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, sdpa_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_minimind import MiniMindConfig
from .loss import (
    find_documents,
    linear_masked_cross_entropy,
    masked_cross_entropy,
    prediction_weights,
    router_loss,
)


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    HAS_VARLEN_ATTN = False
else:
    # Before torch 2.12, query heads could not share key heads.
    HAS_VARLEN_ATTN = "enable_gqa" in inspect.signature(varlen_attn).parameters
# Tokens; documents up to this length are padded to the longest of them.
SHORT_DOCUMENT = 32
# Queries at a time, where attention is matrix products.
ATTENTION_BLOCK = 256


def precompute_pos_cis(config: MiniMindConfig) -> torch.Tensor:
    """
    The rotary table: `pos_cis[p, i] = scale * exp(1j * p / theta ** (2 * i / head_dim))`, with the frequencies
    rescaled where `rope_parameters` ask for it (YaRN and the other static types), after
    https://huggingface.co/papers/2104.09864.

    Returns:
        `torch.Tensor` of shape `(max_position_embeddings, head_dim // 2)`, complex64, always computed on the CPU, so
        that every device holds the same bits.

    Raises:
        `ValueError`: for a `rope_type` whose frequencies change with the length of the input.
    """
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f'rope_type="{rope_type}" depends on the input\'s length; MiniMind keeps one table: use "yarn".'
        )
    # NOTE: from integer ranges, because DeepSpeed's zero.Init turns the constructors of float tensors to its own dtype.
    with torch.device("cpu"):
        if rope_type == "default":
            exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
            frequencies, scale = 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies.float())
        return torch.polar(torch.full_like(angles, scale), angles)


def apply_rotary_pos_emb(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """
    Turns neighbouring channels `(2i, 2i + 1)` of each head as one complex number, in float32.

    Args:
        states (`torch.Tensor` of shape `(batch_size, seq_len, num_heads, head_dim)`)
        rotation (`torch.FloatTensor` of shape `(batch_size, seq_len, 1, head_dim // 2, 2)`): the real view of rows of
            `pos_cis`.
    """
    pairs = states.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # NOTE: Inductor generates no code for complex numbers.
        (real, imaginary), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).type_as(states)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out; the reference for every other implementation. Returns output and attention weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(query)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@dataclass(eq=False)
class PackedDocuments:
    """
    Where the documents of packed rows are: found once a forward pass, used by each layer.

    Args:
        cu_seq_lens (`torch.IntTensor` of shape `(num_documents + 1,)`): where in the flattened batch each document
            begins, and its end.
        max_length (`int`): tokens of the longest document, or more.
        in_groups (`bool`): whether what follows is there.
        groups (`list` of `(num_documents, length)`): documents of similar lengths, padded to one.
        gather (`torch.LongTensor` of shape `(num_slots,)`): the token in each slot of all groups; padding repeats one.
        scatter (`torch.LongTensor` of shape `(batch_size * seq_len,)`): the slot of each token. Both are `None` where each
            row is one document.
    """

    cu_seq_lens: torch.Tensor
    max_length: int
    in_groups: bool = False
    groups: list[tuple[int, int]] | None = None
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None


def find_packed_documents(
    position_ids: torch.Tensor,
    *,
    in_groups: bool,
    cu_seq_lens: torch.Tensor | None = None,
    max_length: int | None = None,
) -> PackedDocuments:
    """
    The documents of rows whose `position_ids (batch_size, seq_len)` do not go on by one where one begins, `in_groups` or
    for `varlen_attn`. A collator that passes `cu_seq_lens` and `max_length` spares a GPU the wait for their number.

    Raises:
        `ValueError`: if `cu_seq_lens` do not end with the batch (on a CPU, where looking is free).
    """
    if cu_seq_lens is None:
        is_start = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=True)
        cu_seq_lens = F.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=position_ids.numel())
    elif cu_seq_lens.device.type == "cpu" and cu_seq_lens[-1] != position_ids.numel():
        raise ValueError(
            f"cu_seq_lens_q end at {int(cu_seq_lens[-1])}, the batch has {position_ids.numel()} tokens: they are of "
            "another batch. Pass those of this batch, or position_ids alone."
        )
    max_length = max_length or position_ids.shape[1]
    if not in_groups:
        return PackedDocuments(cu_seq_lens.int(), max_length)
    starts = cu_seq_lens[:-1].long()
    if len(starts) == len(position_ids):
        return PackedDocuments(cu_seq_lens.int(), max_length, True, [tuple(position_ids.shape)])
    lengths, order = cu_seq_lens.long().diff().sort(descending=True, stable=True)
    groups: list[tuple[int, int]] = []
    for length in lengths.tolist():
        # A new group where more than a third would be padding.
        if not groups or (length < groups[-1][1] * 2 // 3 and groups[-1][1] > SHORT_DOCUMENT):
            groups.append((0, length))
        groups[-1] = (groups[-1][0] + 1, groups[-1][1])
    # (num_slots,): the document of each slot, and the place in it
    padded = torch.tensor([length for count, length in groups for _ in range(count)], device=position_ids.device)
    place = torch.arange(int(padded.sum()), device=padded.device)
    place -= (padded.cumsum(0) - padded).repeat_interleave(padded)
    is_token = place < lengths.repeat_interleave(padded)
    gather = starts[order].repeat_interleave(padded) + place * is_token
    filled = is_token.nonzero().flatten()
    scatter = torch.empty_like(position_ids).flatten().index_copy_(0, gather[filled], filled)
    return PackedDocuments(cu_seq_lens.int(), max_length, True, groups, gather, scatter)


class _ToGroups(torch.autograd.Function):
    """From tokens to slots. A token takes the gradient of its own slot; that of padding is zero."""

    @staticmethod
    def forward(ctx, states, gather, scatter):
        ctx.save_for_backward(scatter)
        return states.index_select(0, gather)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _FromGroups(torch.autograd.Function):
    """From slots to tokens, with no gradient for padding."""

    @staticmethod
    def forward(ctx, states, scatter):
        ctx.save_for_backward(scatter)
        ctx.num_slots = len(states)
        return states.index_select(0, scatter)

    @staticmethod
    def backward(ctx, gradient):
        slots = gradient.new_zeros(ctx.num_slots, *gradient.shape[1:])
        return slots.index_copy_(0, *ctx.saved_tensors, gradient), None


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    packed_documents: PackedDocuments | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Causal attention within each document, whose cost grows with the documents' lengths and not with the rows': through
    `varlen_attn` on a GPU in half precision, else in groups of documents of similar length, which are padded on the right,
    where causal attention needs no mask for it. Without `packed_documents` it is scaled dot product attention with the mask.
    """
    if packed_documents is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch_size, _, seq_len, _ = query.shape
    # (batch_size, num_heads, seq_len, head_dim) -> (batch_size * seq_len, num_heads, head_dim)
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(value.dtype) for states in (query, key, value))
    if packed_documents.in_groups:
        output = _attend_in_groups(query, key, value, packed_documents, scaling, dropout)
    else:
        cu_seq_lens = packed_documents.cu_seq_lens
        lengths = (cu_seq_lens, cu_seq_lens, packed_documents.max_length, packed_documents.max_length)
        is_grouped_query = module.num_key_value_groups > 1
        output = varlen_attn(
            query, key, value, *lengths, scale=scaling, window_size=(-1, 0), enable_gqa=is_grouped_query
        )
    return output.unflatten(0, (batch_size, seq_len)), None


# NOTE: left out of compiled graphs, which would be compiled anew for each batch's lengths.
@torch.compiler.disable
def _attend_in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Of and to tokens, `(num_tokens, num_heads, head_dim)`."""
    gather, scatter = documents.gather, documents.scatter
    sizes = [count * length for count, length in documents.groups]
    split = [
        (states if gather is None else _ToGroups.apply(states, gather, scatter)).split(sizes)
        for states in (query, key, value)
    ]
    # NOTE: on a CPU in half precision, torch's kernel takes 1.5 to 4 times as long as plain matrix products do.
    attend: Callable = _attend_in_blocks if value.device.type == "cpu" and value.dtype != torch.float32 else _attend
    outputs = []
    for shape, *states in zip(documents.groups, *split, strict=True):
        # (num_documents * length, num_heads, head_dim) -> (num_documents, num_heads, length, head_dim)
        output = attend(*(part.unflatten(0, shape).transpose(1, 2) for part in states), scaling, dropout)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if gather is None else _FromGroups.apply(torch.cat(outputs), scatter)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float):
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )


def _attend_in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float):
    """
    The same by matrix products, for some queries at a time and the keys up to them. Query heads that share a key head are
    rows of one matrix.
    """
    batch_size, num_heads, seq_len, head_dim = query.shape
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    num_groups = num_heads * batch_size // len(key)
    outputs = []
    for start in range(0, seq_len, ATTENTION_BLOCK):
        stop = min(start + ATTENTION_BLOCK, seq_len)
        mask = torch.full((stop - start, stop), -torch.inf, dtype=query.dtype).triu_(start + 1).repeat(num_groups, 1)
        rows = query[:, :, start:stop].reshape(len(key), num_groups * (stop - start), head_dim)
        weights = torch.baddbmm(mask, rows, key[:, :stop].mT, alpha=scaling).softmax(dim=-1)
        output = F.dropout(weights, p=dropout) @ value[:, :stop]
        outputs.append(output.view(batch_size, num_heads, stop - start, head_dim))
    return torch.cat(outputs, dim=2)


# A name without a mask function of its own would get no mask at all.
AttentionInterface.register("packed", packed_attention_forward)
AttentionMaskInterface.register("packed", sdpa_mask)


def compute_dtype(states: torch.Tensor) -> torch.dtype:
    """The dtype that matrix products of `states` have: that of autocast where it is on."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


# Implementations that were found right in this process, with what they were tried on.
_CHECKED_ATTENTION: set[tuple] = set()


@torch.no_grad()
def check_attention(model: "MiniMindModel", device: torch.device, dtype: torch.dtype) -> None:
    """
    Compare the model's attention implementation with the reference on a small random packed batch, once for each kind
    of device, dtype and shape of heads.

    Raises:
        `ValueError`: where they differ, or for FlexAttention on a CPU.
    """
    config = model.config
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
    with torch.device("meta"):
        attention = MiniMindAttention(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    position_ids = torch.cat([torch.arange(length) for length in (11, 6, 7)]).repeat(2, 1).to(device)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    # (batch_size, num_heads, seq_len, head_dim)
    states = [torch.randn(2, n, 24, config.head_dim, generator=generator).to(device, dtype) for n in heads]
    embeds = torch.zeros(2, 24, config.hidden_size, device=device, dtype=dtype)
    mask, packed_documents = model._find_visible(embeds, None, position_ids, None)
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


class MiniMindRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x ** 2) + eps)`, computed in float32 (https://huggingface.co/papers/1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden_states.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        # Once, instead of once for each projection that takes it.
        return normed.to(compute_dtype(normed))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class MiniMindRotaryEmbedding(nn.Module):
    """
    Owns the complex rotary table.

    Buffers:
        pos_cis (`torch.Tensor` of shape `(max_position_embeddings, head_dim // 2)`, complex64): not saved; recomputed
            when a model is built or loaded, moved between devices but never cast.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.table_key = str((config.rope_parameters, config.head_dim, config.max_position_embeddings))
        self.register_buffer("pos_cis", precompute_pos_cis(config), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True):
        # NOTE: `module.to(torch.bfloat16)` would drop the imaginary part. Only the device is taken from `fn`.
        device = fn(torch.empty(0, device=self.pos_cis.device)).device
        table = precompute_pos_cis(self.config) if self.pos_cis.is_meta else self.pos_cis
        self.pos_cis = table.to(device)
        return self

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """
        Args:
            position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`)

        Returns:
            The real view of their rows, `torch.FloatTensor` of shape `(batch_size, seq_len, 1, head_dim // 2, 2)`.
        """
        return self._real_table(self.table_key)[position_ids].unsqueeze(2)

    # NOTE: Inductor generates no code for complex numbers. Taken as a constant, the real view of `pos_cis` (the same
    # memory) is made outside the graph; its key is compared on each call, so that no model runs on another one's table.
    @torch.compiler.assume_constant_result
    def _real_table(self, table_key: str) -> torch.Tensor:
        return torch.view_as_real(self.pos_cis)


class MiniMindAttention(nn.Module):
    """Causal grouped-query attention with rotary positions and, in v3, an RMSNorm on each query and key head."""

    def __init__(self, config: MiniMindConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.dropout
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = MiniMindRMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = MiniMindRMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(head_shape)
        key = self.k_proj(hidden_states).view(head_shape)
        value = self.v_proj(hidden_states).view(head_shape)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (apply_rotary_pos_emb(states, position_embeddings) for states in (query, key))
        # (batch_size, seq_len, num_heads, head_dim) -> (batch_size, num_heads, seq_len, head_dim)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights


class MiniMindMLP(nn.Module):
    """SwiGLU: `down(act(gate(x)) * up(x))` (https://huggingface.co/papers/2002.05202)."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class MiniMindTopKRouter(nn.Module):
    """Softmax scores over the experts, of which the top k are kept."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)

        Returns:
            logits `(num_tokens, num_experts)`, weights `(num_tokens, top_k)`, expert numbers `(num_tokens, top_k)`.
        """
        router_logits = F.linear(hidden_states, self.weight)
        weights, experts = router_logits.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return router_logits, weights.type_as(hidden_states), experts


def grouped_mm_in_autocast(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped products of experts, in the dtype of autocast where that is on."""
    if torch.is_autocast_enabled(hidden_states.device.type):
        # NOTE: autocast has no rule for grouped products, and transformers casts the tokens to the dtype of the weights:
        # float32, for which a compiled graph falls back to a loop that waits for the device.
        module = _CastExperts(module, compute_dtype(hidden_states))
    return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)


class _CastExperts:
    """What transformers reads of a module of experts, the weights in another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        self.gate_up_proj = experts.gate_up_proj.to(dtype)
        self.down_proj = experts.down_proj.to(dtype)
        self.num_experts = experts.num_experts
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self.is_transposed = False
        self._is_expert_parallel = experts._is_expert_parallel
        self._apply_gate = experts._apply_gate


EXPERTS_FUNCTIONS = ExpertsInterface()
EXPERTS_FUNCTIONS["grouped_mm"] = grouped_mm_in_autocast


@use_experts_implementation(experts_interface=EXPERTS_FUNCTIONS)
class MiniMindExperts(nn.Module):
    """
    The experts as two stacked parameters, so that no rank can disagree about which of them ran. transformers' experts
    interface replaces `forward` by grouped or batched matrix products; the loop here is the reference.

    Parameters:
        gate_up_proj of shape `(num_experts, 2 * moe_intermediate_size, hidden_size)`: gate above up.
        down_proj of shape `(num_experts, hidden_size, moe_intermediate_size)`.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(num_tokens, hidden_size)`)
            top_k_index, top_k_weights (`torch.Tensor` of shape `(num_tokens, top_k)`)
        """
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            # Every expert runs, on no token if need be: a rank that skipped one would hang the others under ZeRO-3.
            tokens, slots = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            expert_output = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            output = output.index_add(0, tokens, (expert_output * top_k_weights[tokens, slots, None]).type_as(output))
        return output


class MiniMindSparseMoeBlock(nn.Module):
    """Routed experts, plus shared ones that every token passes through: `n` of them are one SwiGLU of `n` widths."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.gate = MiniMindTopKRouter(config)
        self.experts = MiniMindExperts(config)
        self.shared_experts = (
            MiniMindMLP(config, config.num_shared_experts * config.moe_intermediate_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(tokens)
        output = self.experts(tokens, experts, weights)
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens)
        return output.reshape(hidden_states.shape)


class MiniMindDecoderLayer(GradientCheckpointingLayer):
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
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        attention_output, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attention_output)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class MiniMindPreTrainedModel(PreTrainedModel):
    config: MiniMindConfig
    config_class = MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MiniMindDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    # NOTE: transformers' flash attention keeps packed documents apart only in a batch of one row.
    _supports_flash_attn = False
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "router_logits": OutputRecorder(MiniMindTopKRouter, index=0),
        "hidden_states": MiniMindDecoderLayer,
        "attentions": MiniMindAttention,
    }
    # DDP need not broadcast a table that every rank computes alike; NCCL has refused complex ones (pytorch#71613).
    _ddp_params_and_buffers_to_ignore = {"rotary_emb.pos_cis", "model.rotary_emb.pos_cis"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, MiniMindExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, MiniMindTopKRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, MiniMindRotaryEmbedding):
            # NOTE: `from_pretrained` builds on the meta device and refills this buffer with uninitialised memory.
            init.copy_(module.pos_cis, precompute_pos_cis(self.config))

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict | None = None, **kwargs):
        """As in transformers; raises `ValueError` where the gradient of the router loss would be lost."""
        if self.config.num_experts and (activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True runs the layers without autograd and loses the gradient of the router loss: pass "
                '{"use_reentrant": False} (the default), or train a model without experts.'
            )
        super().activation_checkpointing_enable(activation_checkpointing_kwargs, **kwargs)


class MiniMindModel(MiniMindPreTrainedModel):
    """The decoder without a head. Takes ids or embeddings, returns the hidden states after the last norm."""

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = MiniMindRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MiniMindRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def _check_positions(self, position_ids: torch.Tensor, length: int):
        """
        Raises `ValueError` for positions past the rotary table. Reading positions back from a GPU would stall it, so
        there the length decides; an index past the table fails on the device itself.
        """
        limit = self.config.max_position_embeddings
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            length = int(position_ids.max()) + 1
        if length > limit:
            raise ValueError(
                f"Position {length - 1} lies past the rotary table of {limit} positions (max_position_embeddings). "
                "Shorten the input (--max_length), or build the model with a larger max_position_embeddings."
            )

    @staticmethod
    def _unmask_packed_rows(attention_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        """
        transformers keeps packed documents apart only where `attention_mask is None`. A mask of ones says nothing and
        is dropped; a mask with padding beside restarting positions is ambiguous and refused with a `ValueError`.
        A compiled graph cannot look into either, so packed rows take no mask there.
        """
        mask = attention_mask.bool()
        restarts = (position_ids[:, 1:] == 0) & mask[:, 1:] & mask[:, :-1]
        if not restarts.any():
            return attention_mask
        if mask.all():
            return None
        raise ValueError(
            "position_ids restart inside a row (packed documents) and attention_mask marks padding: pass one of them. "
            "Packed rows take attention_mask=None and count their padding as a last document."
        )

    def _find_visible(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        past_key_values: Cache | None,
        cu_seq_lens: torch.Tensor | None = None,
        max_length: int | None = None,
    ) -> tuple[torch.Tensor | None, PackedDocuments | None]:
        """
        What each token sees: a mask as the attention implementation takes it, or the documents for "packed", whose kernel
        `varlen_attn` needs a GPU since Ampere and half precision, and knows no dropout.
        """
        device = inputs_embeds.device
        if self.config._attn_implementation != "packed" or attention_mask is not None or past_key_values is not None:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            return mask, None
        in_groups = (
            device.type != "cuda"
            or not HAS_VARLEN_ATTN
            or compute_dtype(inputs_embeds) not in (torch.bfloat16, torch.float16)
            or self.config.head_dim % 8 > 0
            or self.config.head_dim > 256
            or (self.config.dropout > 0 and self.training)
            or torch.cuda.get_device_capability(device) < (8, 0)
        )
        position_ids = position_ids.expand(inputs_embeds.shape[:2])
        documents = find_packed_documents(
            position_ids, in_groups=in_groups, cu_seq_lens=cu_seq_lens, max_length=max_length
        )
        return None, documents

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`)
            attention_mask (`torch.Tensor` of shape `(batch_size, past_len + seq_len)`, *optional*): 0 for padding.
            position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`, *optional*): a restart at 0 begins a new
                document, which sees nothing of the one before.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, seq_len, hidden_size)`, *optional*): instead of
                `input_ids`.
            cu_seq_lens_q (`torch.IntTensor` of shape `(num_documents + 1,)`, *optional*): where in the flattened batch each
                document of packed rows begins, and its end; `max_length_q` is the length of the longest.

        Raises:
            `ValueError`: both or neither of `input_ids` and `inputs_embeds`; a position past the rotary table; packed
                positions together with padding in `attention_mask`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        seq_len = inputs_embeds.shape[1]
        past_len = past_key_values.get_seq_length() if past_key_values is not None else 0

        if position_ids is None:
            position_ids = (torch.arange(seq_len, device=inputs_embeds.device) + past_len).unsqueeze(0)
        elif attention_mask is not None and attention_mask.shape == position_ids.shape:
            if not torch.compiler.is_compiling():
                attention_mask = self._unmask_packed_rows(attention_mask, position_ids)
        self._check_positions(position_ids, seq_len)

        is_computed = not (
            torch.compiler.is_compiling() or inputs_embeds.is_meta or isinstance(inputs_embeds, FakeTensor)
        )
        # NOTE: while continuous batching runs, with a paged cache, transformers makes no masks, which the check needs.
        if is_computed and kwargs.get("cache") is None:
            check_attention(self, inputs_embeds.device, compute_dtype(inputs_embeds))
        # NOTE: made before the cache is: beside one, even an empty one, transformers does not look for packed rows.
        documents = (kwargs.pop("cu_seq_lens_q", None), kwargs.pop("max_length_q", None))
        causal_mask, packed_documents = self._find_visible(
            inputs_embeds, attention_mask, position_ids, past_key_values, *documents
        )
        if packed_documents is not None:
            kwargs["packed_documents"] = packed_documents
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        position_embeddings = self.rotary_emb(position_ids)
        hidden_states = self.dropout(inputs_embeds)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


@dataclass
class MiniMindCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """
    transformers' output for language models with experts, and one field more.

    Args:
        loss (`torch.FloatTensor`, scalar): `ce_loss + router_aux_loss_coef * aux_loss`, in nats.
        ce_loss (`torch.FloatTensor`, scalar): the masked cross-entropy alone.
        aux_loss (`torch.FloatTensor`, scalar): the router loss, not multiplied by its coefficient.
    """

    ce_loss: torch.FloatTensor | None = None


class MiniMindLMHead(nn.Linear):
    """From hidden states to logits or, given labels, to their masked cross-entropy without all logits in memory."""

    def forward(self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        """`kwargs` and the loss are those of [`~loss.linear_masked_cross_entropy`]."""
        if labels is None:
            return super().forward(hidden_states)
        return linear_masked_cross_entropy(hidden_states, self.weight, labels, **kwargs)


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """MiniMind with a language-modelling head, the masked loss and the router loss."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = MiniMindLMHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def gather_sharded_state_dict_for_save(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        # NOTE: what DeepSpeed or FSDP gathered are copies, in which nothing would recognise one matrix for both ends.
        state_dict = super().gather_sharded_state_dict_for_save(*args, **kwargs)
        if self.config.tie_word_embeddings:
            state_dict.pop("lm_head.weight", None)
        return state_dict

    def generate(self, *args, **kwargs):
        """As in transformers, without the graphs of layers that were compiled one by one."""
        # NOTE: each layer of a cache would take a graph of its own, until the compiler made no more for training.
        is_compiled = self.model.layers[0]._compiled_call_impl is not None
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            return super().generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        loss_mask: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        num_documents_in_batch: torch.Tensor | float | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MiniMindCausalLMOutputWithPast:
        """
        Args:
            labels (`torch.LongTensor` of shape `(batch_size, seq_len)`, *optional*): unshifted token ids, -100 where
                nothing is trained.
            loss_mask (`torch.Tensor` of shape `(batch_size, seq_len)`, *optional*): non-negative weight of predicting
                each label.
            num_items_in_batch (scalar, *optional*): divisor of the cross-entropy, the sum of the weights over all
                micro-batches of all ranks; by default over this call.
            num_documents_in_batch (scalar, *optional*): the same for the router loss, in documents. Without it, and
                with `num_items_in_batch`, the router loss is weighted by this call's share of the items.
            output_router_logits (`bool`, *optional*): return the router logits of every layer, and `aux_loss` even
                without `labels`.
            skip_logits (`bool`, *optional*, defaults to `False`): with `labels`, return a loss and no logits, which then
                are never in memory all at once.

        See [`MiniMindModel.forward`] for the rest.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        needs_router_loss = bool(self.config.num_experts) and (labels is not None or output_router_logits)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=needs_router_loss,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = ce_loss = aux_loss = logits = None
        weighting = {"loss_mask": loss_mask, "num_items_in_batch": num_items_in_batch}
        # An adapter or a plan for tensor parallelism may have put something else around the head.
        is_whole_head = isinstance(self.lm_head, MiniMindLMHead) and (self.tp_size or 1) == 1
        if skip_logits and labels is not None and is_whole_head:
            loss = ce_loss = self.lm_head(hidden_states, labels, **weighting)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
            if labels is not None:
                loss = ce_loss = masked_cross_entropy(logits, labels, **weighting)
        if needs_router_loss:
            documents = find_documents(
                hidden_states.shape[:2],
                device=hidden_states.device,
                position_ids=position_ids,
                attention_mask=attention_mask,
                labels=labels,
                loss_mask=loss_mask,
            )
            aux_loss = router_loss(
                outputs.router_logits,
                self.config.num_experts_per_tok,
                documents,
                level=self.config.router_aux_loss_level,
            )
            if num_documents_in_batch is not None:
                aux_loss = aux_loss * (documents.count / num_documents_in_batch)
            elif num_items_in_batch is not None and labels is not None:
                aux_loss = aux_loss * (prediction_weights(labels, loss_mask).sum() / num_items_in_batch)
            if labels is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss

        return MiniMindCausalLMOutputWithPast(
            loss=loss,
            ce_loss=ce_loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits if output_router_logits else None,
        )


class MiniMindForSequenceClassification(GenericForSequenceClassification, MiniMindPreTrainedModel):
    """MiniMind with a score for each sequence, as reward models have it; without a router loss."""

    def __init__(self, config: MiniMindConfig):
        # NOTE: not the generic one's, whose AutoModel would ask once more whether to run this code.
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = MiniMindModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["MiniMindForCausalLM", "MiniMindForSequenceClassification", "MiniMindModel", "MiniMindPreTrainedModel"]
