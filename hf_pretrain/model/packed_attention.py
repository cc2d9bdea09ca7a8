"""
Attention over packed sequences: each document attends only to itself, at a cost that depends on its own length.

`packed_attention_forward` is registered with transformers as `attn_implementation="packed"`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface


# NOTE: before torch 2.12 `varlen_attn` could not share key heads between query heads.
SHARES_KEY_HEADS = torch.__version__ >= "2.12"
# The implementations that tests compare with the eager reference.
IMPLEMENTATIONS = ("packed", "sdpa", "eager", "flex_attention")
# The attention of these engines finds the tokens of each request by itself.
ENGINES = ("vllm", "sglang")
# Documents of at most this many tokens share one group: splitting them would cost more than their padding does.
SHORT_DOCUMENT = 32
# Empty documents fill up a group to a multiple of this part of the batch. NOTE: for each new shape of a matrix product
# in half precision, oneDNN compiles a primitive and keeps it, about 1 MB each, up to 1,024 of them.
PARTS_OF_BATCH = 8
# Number of queries per matrix product in `_attend_in_blocks`.
ATTENTION_BLOCK = 256
# NOTE: on Apple GPUs in half precision, `is_causal=True` let queries attend to later tokens without an error
# (https://github.com/pytorch/pytorch/issues/195910; torch 2.14 is known to be right). There, matrix products and
# explicit masks replace it.
LEAKY_DEVICES = {"mps"}


@dataclass(eq=False)
class PackedDocuments:
    """
    The documents of a batch of packed sequences. The model finds them once per forward pass; every layer uses them.

    Documents of similar length form a group. All documents of a group are padded to one length, so that one call
    computes attention for the whole group. Empty documents fill up a group, so that few shapes occur in a run. A slot
    is one position of a group, padding included.

    Args:
        groups (`list` of `(num_documents, length)`, *optional*): shape of each group; `None` for `varlen_attn`.
        gather (`torch.LongTensor` of shape `(num_slots,)`): index of the token in each slot. A padding slot repeats
            the first token of its document, and an empty document the first token of the batch.
        scatter (`torch.LongTensor` of shape `(batch_size * seq_len,)`): index of the slot of each token. `gather` and
            `scatter` are `None` where each row is one document.
        cu_seq_lens (`torch.IntTensor` of shape `(num_documents + 1,)`, *optional*): start of each document in the
            flattened batch, and its end; only for `varlen_attn`.
        max_length (`int`, *optional*): length of the longest document in tokens, or more; only for `varlen_attn`.
    """

    groups: list[tuple[int, int]] | None = None
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    cu_seq_lens: torch.Tensor | None = None
    max_length: int | None = None


def find_packed_documents(
    position_ids: torch.Tensor,
    *,
    in_groups: bool,
    cu_seq_lens: torch.Tensor | None = None,
    max_length: int | None = None,
) -> PackedDocuments:
    """
    Find the documents of packed sequences. A document begins wherever `position_ids` do not increase by one.

    Args:
        position_ids (`torch.LongTensor` of shape `(batch_size, seq_len)`)
        in_groups (`bool`): prepare attention in groups; otherwise prepare `varlen_attn`.
        cu_seq_lens (`torch.IntTensor` of shape `(num_documents + 1,)`, *optional*): from the collator. Without it, the
            CPU must wait for the GPU to learn the number of documents.
        max_length (`int`, *optional*): length of the longest document in tokens, or more.

    Returns:
        [`PackedDocuments`]

    Raises:
        `ValueError`: if `cu_seq_lens` does not end at the end of the batch. Checked only on a CPU, where reading it
            costs nothing.
    """
    if cu_seq_lens is None:
        is_start = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=True)
        cu_seq_lens = F.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=position_ids.numel())
    elif cu_seq_lens.device.type == "cpu" and cu_seq_lens[-1] != position_ids.numel():
        raise ValueError(
            f"cu_seq_lens_q end at {int(cu_seq_lens[-1])}, the batch has {position_ids.numel()} tokens: they belong "
            "to another batch. Pass those of this batch, or position_ids alone."
        )
    if not in_groups:
        cu_seq_lens = cu_seq_lens.int()
        # Each batch has another number of documents and another longest one. A compiled layer would be compiled again
        # for the first new number, and for the first new length; powers of two from 128 on, and the row length, change
        # rarely.
        torch._dynamo.maybe_mark_dynamic(cu_seq_lens, 0)
        # `varlen_attn` needs only an upper bound. To read the exact length, the CPU would wait for the GPU.
        seq_len = position_ids.shape[1]
        rounded = max(128, 1 << ((max_length or seq_len) - 1).bit_length())
        return PackedDocuments(cu_seq_lens=cu_seq_lens, max_length=min(rounded, seq_len))
    # With as many documents as rows, each row is one document, and the batch itself is the only group.
    if len(cu_seq_lens) - 1 == len(position_ids):
        return PackedDocuments([tuple(position_ids.shape)])
    # Compute on the host, which waits for the device once here instead of for each shape below.
    bounds = cu_seq_lens.cpu().long()
    starts, lengths, num_tokens = bounds[:-1].tolist(), bounds.diff().tolist(), position_ids.numel()
    members: dict[int, list[int]] = {}
    # Longest first; documents of equal length keep their order.
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        members.setdefault(min(_round_length(lengths[document]), position_ids.shape[1]), []).append(document)
    # Empty documents fill up the groups. The index of one is `len(lengths)`.
    for length, documents in members.items():
        documents += [len(lengths)] * (-len(documents) % max(1, num_tokens // PARTS_OF_BATCH // length))
    groups = [(len(documents), length) for length, documents in members.items()]
    order = torch.tensor(sum(members.values(), []))
    # (num_documents,): padded length of each document; then (num_slots,): offset of each slot in its document.
    padded = torch.tensor([length for count, length in groups for _ in range(count)])
    place = torch.arange(int(padded.sum()))
    place -= (padded.cumsum(0) - padded).repeat_interleave(padded)
    # False in padding slots, which repeat the document's first token in `gather`.
    is_token = place < torch.tensor([*lengths, 0])[order].repeat_interleave(padded)
    gather = torch.tensor([*starts, 0])[order].repeat_interleave(padded) + place * is_token
    filled = is_token.nonzero().flatten()
    scatter = bounds.new_empty(num_tokens).index_copy_(0, gather[filled], filled)
    device = position_ids.device
    return PackedDocuments(groups, gather.to(device), scatter.to(device))


def _round_length(length: int) -> int:
    """Return the padded length of a document: the next power of two, or three quarters of it."""
    power = max(SHORT_DOCUMENT, 1 << (length - 1).bit_length())
    return power * 3 // 4 if max(SHORT_DOCUMENT, length) <= power * 3 // 4 else power


def find_visible(
    config: PreTrainedConfig,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cache: Cache | None = None,
    *,
    is_training: bool = False,
    cu_seq_lens: torch.Tensor | None = None,
    max_length: int | None = None,
) -> tuple[torch.Tensor | None, PackedDocuments | None]:
    """
    Find the tokens that each token attends to.

    Args:
        config ([`MiniMindConfig`]): names the attention implementation.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, seq_len, hidden_size)`): only shape, device and dtype
            matter.
        position_ids (`torch.LongTensor` of shape `(batch_size or 1, seq_len)`)
        attention_mask, cache: as in the model's forward pass.
        is_training (`bool`): whether dropout applies.
        cu_seq_lens, max_length: as in [`find_packed_documents`].

    Returns:
        `tuple`: with `"packed"` and neither a mask nor a cache, `None` and the [`PackedDocuments`], prepared for
        `varlen_attn` where it can run and for attention in groups elsewhere. In all other cases, a mask in the format
        of the attention implementation, and `None`.

    Raises:
        `ValueError`: for an implementation that has not been tested with packed sequences, whose results could be
            wrong without an error.
    """
    name, device = config._attn_implementation, inputs_embeds.device
    if name in ENGINES:
        return None, None
    # NOTE: torch 2.13 compiles FlexAttention to wrong values on CPUs without AVX-512.
    if name not in IMPLEMENTATIONS or (name == "flex_attention" and device.type == "cpu"):
        raise ValueError(
            f'attn_implementation="{name}" may give wrong results on {device.type}. Use "packed", "sdpa" or "eager".'
        )
    if name != "packed" or attention_mask is not None or cache is not None:
        # By position: transformers 5.24 renamed the argument of the cache.
        mask = create_causal_mask(config, inputs_embeds, attention_mask, cache, position_ids)
        seq_len = inputs_embeds.shape[1]
        if mask is None and seq_len > 1 and device.type in LEAKY_DEVICES:
            # transformers leaves out the mask of a whole sequence, and passes `is_causal=True`.
            mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool, device=device).tril()
        return mask, None
    # `varlen_attn` needs an Ampere GPU or newer, half precision and a supported head_dim; it has no dropout.
    in_groups = (
        device.type != "cuda"
        or compute_dtype(inputs_embeds) not in (torch.bfloat16, torch.float16)
        or config.head_dim % 8 > 0
        or config.head_dim > 256
        or (config.dropout > 0 and is_training)
        or torch.cuda.get_device_capability(device) < (8, 0)
    )
    # The caller may pass one row of positions for all rows.
    position_ids = position_ids.expand(inputs_embeds.shape[:2])
    documents = find_packed_documents(
        position_ids, in_groups=in_groups, cu_seq_lens=cu_seq_lens, max_length=max_length
    )
    return None, documents


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
    Compute causal attention within each document.

    The cost grows with the lengths of the documents, not with the length of the rows. On a GPU in half precision,
    `varlen_attn` computes the result. Elsewhere, documents of similar length are padded on the right and computed
    together; causal attention hides that padding without a mask. Without `packed_documents`, this function computes
    scaled dot product attention with `attention_mask`.

    Args:
        module (`nn.Module`): an attention layer.
        query (`torch.Tensor` of shape `(batch_size, num_heads, seq_len, head_dim)`)
        key, value (`torch.Tensor` of shape `(batch_size, num_key_value_heads, seq_len, head_dim)`)
        attention_mask (`torch.Tensor`, *optional*): used without `packed_documents` only.
        scaling (`float`): factor of the scores.
        dropout (`float`): dropout probability of the attention weights.
        packed_documents ([`PackedDocuments`], *optional*): from [`find_visible`].

    Returns:
        `tuple`: output of shape `(batch_size, seq_len, num_heads, head_dim)`, and `None` in place of attention
        weights.
    """
    if packed_documents is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch_size, _, seq_len, _ = query.shape
    # (batch_size, num_heads, seq_len, head_dim) -> (batch_size * seq_len, num_heads, head_dim)
    # Kernels need one dtype, and a norm may have changed the dtype of query and key.
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(value.dtype) for states in (query, key, value))
    if packed_documents.groups is not None:
        output = _attend_in_groups(query, key, value, packed_documents, scaling, dropout)
    else:
        cu_seq_lens = packed_documents.cu_seq_lens
        lengths = (cu_seq_lens, cu_seq_lens, packed_documents.max_length, packed_documents.max_length)
        # The window (-1, 0) reaches any number of tokens back and none ahead: causal attention.
        options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
        if SHARES_KEY_HEADS:
            options["enable_gqa"] = module.num_key_value_groups > 1
        else:
            key, value = (states.repeat_interleave(module.num_key_value_groups, dim=1) for states in (key, value))
        output = varlen_attn(query, key, value, *lengths, **options)
    return output.unflatten(0, (batch_size, seq_len)), None


# NOTE: excluded from compiled graphs: the lengths differ in each batch, so each batch would compile a new graph.
@torch.compiler.disable
def _attend_in_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: PackedDocuments,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """
    Attend within each group of documents.

    Args:
        query, key, value (`torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`)

    Returns:
        `torch.Tensor` of shape `(num_tokens, num_heads, head_dim)`.
    """
    gather = documents.gather
    # (num_tokens, num_heads, head_dim) -> (num_slots, num_heads, head_dim), split into groups
    sizes = [count * length for count, length in documents.groups]
    split = [
        (states if gather is None else states.index_select(0, gather)).split(sizes) for states in (query, key, value)
    ]
    # NOTE: on a CPU in half precision, torch's kernel takes 1.5 to 4 times as long as plain matrix products.
    is_slow = value.device.type == "cpu" and value.dtype != torch.float32
    attend: Callable = _attend_in_blocks if is_slow or value.device.type in LEAKY_DEVICES else _attend
    outputs = []
    for shape, *states in zip(documents.groups, *split, strict=True):
        # (num_documents * length, num_heads, head_dim) -> (num_documents, num_heads, length, head_dim)
        output = attend(*(part.unflatten(0, shape).transpose(1, 2) for part in states), scaling, dropout)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if gather is None else torch.cat(outputs).index_select(0, documents.scatter)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float):
    """Attend causally; all tensors are of shape `(num_documents, num_heads, length, head_dim)`."""
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )


def _attend_in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float):
    """
    Attend as [`_attend`] does, by matrix products over blocks of queries.

    Each block multiplies its queries with the keys up to its last query, so most of the hidden half of the scores is
    never computed. Query heads that share a key head become rows of one matrix.
    """
    batch_size, num_heads, seq_len, head_dim = query.shape
    # (batch_size, num_key_value_heads, seq_len, head_dim) -> (batch_size * num_key_value_heads, seq_len, head_dim)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    num_groups = num_heads * batch_size // len(key)
    outputs = []
    for start in range(0, seq_len, ATTENTION_BLOCK):
        stop = min(start + ATTENTION_BLOCK, seq_len)
        # (num_groups * (stop - start), stop): minus infinity for keys after the query
        mask = torch.full((stop - start, stop), -torch.inf, dtype=query.dtype, device=query.device)
        mask = mask.triu_(start + 1).repeat(num_groups, 1)
        # (batch_size, num_heads, block, head_dim) -> (batch_size * num_key_value_heads, num_groups * block, head_dim)
        rows = query[:, :, start:stop].reshape(len(key), num_groups * (stop - start), head_dim)
        weights = torch.baddbmm(mask, rows, key[:, :stop].mT, alpha=scaling).softmax(dim=-1)
        output = F.dropout(weights, p=dropout) @ value[:, :stop]
        outputs.append(output.view(batch_size, num_heads, stop - start, head_dim))
    return torch.cat(outputs, dim=2)


# NOTE: transformers gives an implementation without a registered mask function no mask at all, without a warning.
AttentionInterface.register("packed", packed_attention_forward)
AttentionMaskInterface.register("packed", sdpa_mask)


def compute_dtype(states: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products with `states`: autocast's dtype where autocast is on."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
