"""
Compare the model's attention with a plain reference, on the device at hand.

A kernel that is wrong on some device returns finite values, so no other check would notice it.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..runtime.devices import default_device_type, has_bfloat16_units
from ..runtime.machine_checks import BAD, OK, Finding
from .configuration_minimind import MiniMindConfig
from .decoder_layer import MiniMindAttention
from .packed_attention import find_visible
from .presets import PRESETS


# Documents longer than the blocks of attention kernels, shorter, and of a single token.
LENGTHS = (300, 130, 81, 1)
# Largest difference of a token, relative to its size. On a CPU, rounding causes 1.4 % in bfloat16 and 0.13 % in
# float16; the wrong results seen so far were off by 17 % or more.
LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.05, torch.float16: 0.02}


def check_attention() -> Iterator[Finding]:
    """Compare the attention of all presets, on the CPU and on the accelerator, in the dtypes of a run."""
    for device_type in sorted({"cpu", default_device_type(use_cpu=False)}):
        half = torch.float16 if device_type == "cuda" and not has_bfloat16_units("cuda") else torch.bfloat16
        for dtype in (torch.float32, half):
            worst = max(_errors_of_presets(torch.device(device_type), dtype))
            status = BAD if worst[0] > LIMITS[dtype] else OK
            message = f"{worst[0]:.2%} off the reference at most ({worst[1]})"
            advice = "Results on this device would be wrong. Install another version of torch, and report this one."
            yield Finding(
                status, f"attention, {device_type}", f"{str(dtype).removeprefix('torch.')}: {message}", advice
            )


def _errors_of_presets(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    """Yield the error of each layout of a batch, for each shape of heads that a preset has, and describe it."""
    configs = [MiniMindConfig(**preset) for preset in PRESETS.values()]
    for config in {(c.num_attention_heads, c.num_key_value_heads, c.head_dim): c for c in configs}.values():
        shape = f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}"
        for layout, error in attention_errors(config, device, dtype).items():
            yield error, f"{layout}, {shape}"


def attention_errors(
    config: MiniMindConfig, device: torch.device, dtype: torch.dtype, *, implementation: str = "packed"
) -> dict[str, float]:
    """
    Return, for each layout of a batch, how far attention is from the reference: the largest difference of a token,
    relative to its size, over outputs and gradients. A result that is not finite is infinitely far.

    The layouts are those of training on packed documents, training on padded rows (preferences, reinforcement
    learning), and generation with a cache.
    """
    config._attn_implementation = implementation
    module = MiniMindAttention(config, layer_idx=0)
    generator = torch.Generator().manual_seed(0)
    num_heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    # (num_tokens, num_heads, head_dim), rounded to `dtype`, so that both sides see the same numbers
    tokens = [torch.randn(sum(LENGTHS), n, config.head_dim, generator=generator).to(dtype) for n in num_heads]
    gradient = torch.randn(tokens[0].shape, generator=generator).to(dtype)
    inputs = [states.float().requires_grad_() for states in tokens]
    documents = zip(*(states.split(LENGTHS) for states in inputs), strict=True)
    expected = torch.cat([_reference(*states, scaling=module.scaling) for states in documents])
    expected = [expected, *torch.autograd.grad(expected, inputs, gradient.float())]

    errors = {}
    numbers = torch.arange(sum(LENGTHS)).split(LENGTHS)
    left = torch.stack([F.pad(part, (max(LENGTHS) - len(part), 0), value=-1) for part in numbers])
    right = torch.stack([F.pad(part, (0, max(LENGTHS) - len(part)), value=-1) for part in numbers])
    layouts = {"packed documents": torch.cat(numbers)[None], "left padding": left, "right padding": right}
    for name, layout in layouts.items():
        inputs = [states.to(device).requires_grad_() for states in tokens]
        output = _attend(module, inputs, layout)
        # Padding is not compared, as in a loss.
        output = output[layout.flatten() >= 0][layout[layout >= 0].argsort()]
        found = [output, *torch.autograd.grad(output, inputs, gradient.to(device))]
        errors[name] = max(map(_distance, found, expected))
    for name, layout in {"one token, left padding": left, "one token": left[:1]}.items():
        with torch.no_grad():
            output = _attend(module, [states.to(device) for states in tokens], layout, num_queries=1)
        errors[name] = _distance(output, expected[0][layout[:, -1]])
    return errors


def _reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Return causal attention over one document, written out; all tensors are `(length, num_heads, head_dim)`."""
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(-1), value)


def _attend(
    module: MiniMindAttention, tokens: list[torch.Tensor], layout: torch.Tensor, *, num_queries: int | None = None
) -> torch.Tensor:
    """
    Attend as the model does for a batch of this layout.

    Args:
        module ([`MiniMindAttention`]): its config names the implementation. Its weights are not used.
        tokens (`list[torch.Tensor]`): queries, keys and values of shape `(num_tokens, num_heads, head_dim)`.
        layout (`torch.LongTensor` of shape `(batch_size, seq_len)`): number of the token in each place; -1: padding.
        num_queries (`int`, *optional*): attend from the last tokens of each row only. A cache holds those before them.

    Returns:
        `torch.Tensor` of shape `(batch_size * num_queries, num_heads, head_dim)`.
    """
    device = tokens[0].device
    # (num_tokens, num_heads, head_dim) -> (batch_size, num_heads, seq_len, head_dim)
    query, key, value = (states[layout.clamp(min=0).to(device)].transpose(1, 2) for states in tokens)
    mask = None if (layout >= 0).all() else (layout >= 0).long().to(device)
    # Start of each document, and the end of the last one; the collator passes the same.
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    position_ids = (layout - bounds[torch.bucketize(layout, bounds, right=True) - 1]).clamp(min=0).to(device)
    cache = None
    if num_queries is not None:
        cache = DynamicCache()
        cache.update(key[:, :, :-num_queries], value[:, :, :-num_queries], 0)
        query, position_ids = query[:, :, -num_queries:], position_ids[:, -num_queries:]
    embeds = torch.empty(*position_ids.shape, module.config.hidden_size, device=device, dtype=query.dtype)
    causal_mask, documents = find_visible(
        module.config,
        embeds,
        position_ids,
        attention_mask=mask,
        cache=cache,
        is_training=num_queries is None,
        cu_seq_lens=bounds.int().to(device),
    )
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    output, _ = attend(module, query, key, value, causal_mask, scaling=module.scaling, packed_documents=documents)
    return output.flatten(0, 1)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of a token, relative to its size; infinity for NaN."""
    difference, size = (states.flatten(1).norm(dim=1) for states in (found.float().cpu() - expected, expected))
    # The gradient of some tokens is zero: a token's size counts as a tenth of the mean at least.
    return torch.nan_to_num((difference / size.clamp(min=size.mean() / 10)).max(), nan=torch.inf).item()
