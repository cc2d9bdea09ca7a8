"""
Prompts that are computed once for all completions of their group: in each turn of a rollout, and where its
log-probabilities are computed.

Rows that begin alike share the keys and values of their beginning, which are computed in one row and copied. The rest
of each row follows behind a gap, which the attention mask hides, so positions stay those of the row.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from ..loading.adapters import base_model_of
from ..model.decoder_layer import CACHE_NAME


def share_prompts(model: PreTrainedModel, args: Any) -> None:
    """Replace `generate` of a model, and `forward` of its decoder, for the run with these `GRPOTrainingArguments`."""
    # With sharded weights, all ranks would have to share, or none.
    if args.shards_weights:
        return
    # A cache of another kind, or none, cannot be filled before, beams would multiply the rows, and a penalty would
    # count the padding.
    has_cache = args.cache_implementation is None and model.generation_config.use_cache is not False
    if has_cache and not args.use_vllm and not args.generation_kwargs and args.repetition_penalty == 1:
        model.generate = partial(generate_sharing, model, model.generate)
    # Each layer of a cache would compile a separate graph.
    if not args.compiles_layers:
        decoder = model.get_decoder()
        decoder.forward = partial(forward_sharing, decoder, decoder.forward)


@torch.no_grad()
def generate_sharing(
    model: PreTrainedModel,
    generate: Callable[..., torch.Tensor],
    *args: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """
    Continue rows as `generate` does with the same arguments, up to rounding. A call with other arguments is passed on.

    Args:
        model ([`PreTrainedModel`]): the model.
        generate (`Callable`): its method `generate`.
        input_ids, attention_mask (`torch.LongTensor` of shape `(batch_size, seq_len)`): the rows, padded on the left.
        args, options: other arguments of `generate`.

    Returns:
        `torch.LongTensor` of shape `(batch_size, seq_len + num_new_tokens)`.
    """
    shared = None
    if not args and input_ids is not None and attention_mask is not None and CACHE_NAME not in options:
        # As in `generate`, no layer is compiled, and an adapter computes without the autocast around its wrapper.
        with torch.compiler.set_stance("force_eager"):
            shared = _share(base_model_of(model), model.config, input_ids, attention_mask)
    if shared is None:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return generate(*args, **{name: value for name, value in inputs.items() if value is not None}, **options)
    output = generate(input_ids=shared.ids, attention_mask=shared.mask, **{CACHE_NAME: shared.cache}, **options)
    return torch.cat([input_ids, output[:, shared.ids.shape[1] :]], 1)


def forward_sharing(
    decoder: PreTrainedModel,
    forward: Callable[..., Any],
    *args: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """
    Compute hidden states as a decoder does, up to rounding, but zeros at padding. Without dropout, their gradients are
    those of the rows alone. A call with other arguments, such as a cache, is passed on.

    Args:
        decoder ([`PreTrainedModel`]): the decoder.
        forward (`Callable`): its method `forward`.
        input_ids, attention_mask (`torch.LongTensor` of shape `(batch_size, seq_len)`): the rows.
        args, options: other arguments of `forward`.
    """
    shared = None
    # peft passes on what its caller leaves out.
    given = {name: value for name, value in options.items() if value is not None}
    is_plain = not args and given == {"use_cache": False} and input_ids is not None and attention_mask is not None
    # Layers that compute their activations again take no cache.
    if is_plain and not (decoder.gradient_checkpointing and decoder.training and torch.is_grad_enabled()):
        shared = _share(forward, decoder.config, input_ids, attention_mask)
    if shared is None:
        return forward(*args, input_ids=input_ids, attention_mask=attention_mask, **options)
    num_begun = shared.begin.last_hidden_state.shape[1]
    positions = (shared.mask.cumsum(-1) - 1).clamp(min=0)
    rest = {"input_ids": shared.ids[:, num_begun:], "position_ids": positions[:, num_begun:]}
    outputs = forward(**rest, attention_mask=shared.mask, use_cache=True, **{CACHE_NAME: shared.cache})
    hidden_states = torch.cat([shared.begin.last_hidden_state[shared.group], outputs.last_hidden_state], 1)
    rows = hidden_states.new_zeros(*input_ids.shape, hidden_states.shape[-1])
    rows[attention_mask.bool()] = hidden_states[shared.mask.bool()]
    return type(outputs)(last_hidden_state=rows)


@dataclass
class _Shared:
    """
    Rows whose beginnings have been computed.

    Args:
        ids, mask (`torch.LongTensor` of shape `(batch_size, begin_len + rest_len)`): the rows, with padding before the
            beginning and before the rest.
        group (`torch.LongTensor` of shape `(batch_size,)`): for each row, the index of its beginning.
        begin (`Any`): output of the model for the beginnings, `begin_len` tokens each.
        cache ([`Cache`]): the keys and values of the beginning of each row.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    group: torch.Tensor
    begin: Any
    cache: Cache


def _share(
    model: Callable[..., Any], config: PreTrainedConfig, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> _Shared | None:
    """Compute the common beginnings of rows. Return `None` if all rows differ, or a row has fewer than two tokens."""
    device = input_ids.device
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids.cpu(), attention_mask.cpu(), strict=True)]
    groups = _group(rows)
    if len(groups) == len(rows) or min(map(len, rows)) < 2:
        return None
    begins = [rows[members[0]][:start] for start, members in groups]
    group_of = {row: group for group, (_, members) in enumerate(groups) for row in members}
    rests = [row[len(begins[group_of[index]]) :] for index, row in enumerate(rows)]
    begin_ids, begin_mask = _padded(begins, device), _padded(([1] * len(row) for row in begins), device)
    cache, positions = DynamicCache(config=config), (begin_mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": begin_ids, "attention_mask": begin_mask, "position_ids": positions, CACHE_NAME: cache}
    begin = model(**inputs, use_cache=True, logits_to_keep=1)
    group = torch.tensor([group_of[index] for index in range(len(rows))], device=device)
    cache.batch_select_indices(group)
    ids = torch.cat([begin_ids[group], _padded(rests, device)], 1)
    mask = torch.cat([begin_mask[group], _padded(([1] * len(row) for row in rests), device)], 1)
    return _Shared(ids, mask, group, begin, cache)


def _group(rows: list[list[int]]) -> list[tuple[int, list[int]]]:
    """
    Group rows: a row joins a group if what it shares with the group's beginning is at least half of both. Return the
    length of the beginning that all rows of a group have in common, at least one token less than each row, and the
    indices of the rows.
    """
    groups: list[tuple[int, list[int]]] = []
    for index, row in enumerate(rows):
        for group, (start, members) in enumerate(groups):
            pairs = enumerate(zip(row[:-1], rows[members[0]][:start], strict=False))
            common = next((place for place, (one, other) in pairs if one != other), min(len(row) - 1, start))
            if 2 * common >= max(len(row), start):
                groups[group] = common, [*members, index]
                break
        else:
            groups.append((len(row) - 1, [index]))
    return groups


def _padded(rows: Iterable[list[int]], device: torch.device) -> torch.Tensor:
    """Return rows as one tensor, padded with zeros on the left."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side="left").to(device)
