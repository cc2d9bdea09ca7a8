"""Encode documents, prompts and rendered conversations."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


# Stands inside the spelling of a control token that is only text, until the text is encoded.
_GUARD = "\ue000"


_UNGUARDED = re.compile(f"{_GUARD}{_GUARD}|[^{_GUARD}]")


def encode_documents(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """
    Ids of each document: bos, the text, eos.

    Text is only text here: where it contains the spelling of a control token, such as `<|im_end|>` or `<think>`, it is
    encoded letter by letter like any other text and still decodes to itself. Control tokens come from the chat
    template alone, so that no document can end itself early or speak as the assistant.

    Args:
        texts (`list[str]`): the documents.
        tokenizer ([`PreTrainedTokenizerFast`]): with bos and eos.
    """
    encodings = _plain_backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [[bos, *encoding.ids, eos] for encoding in encodings]


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """
    Ids of a conversation up to where the assistant answers: those of `apply_chat_template`, except that no message can
    bring in a control token by spelling it.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        messages (`list[dict]`): the conversation so far.
        tools (`list[dict]`, *optional*): JSON schemas of the tools on offer.
        enable_thinking (`bool`, *optional*): with or without reasoning; by default as the template has it.
    """
    # MiniMind-3's own template has another name for it.
    thinking = {} if enable_thinking is None else dict.fromkeys(("enable_thinking", "open_thinking"), enable_thinking)
    rendered = tokenizer.apply_chat_template(
        guard_control_tokens(tokenizer, messages),
        tools=guard_control_tokens(tokenizer, tools),
        add_generation_prompt=True,
        tokenize=False,
        **thinking,
    )
    return encode_rendered(tokenizer, rendered)[0]


def guard_control_tokens(tokenizer: PreTrainedTokenizerFast, value: Any) -> Any:
    """
    A copy of messages or tools whose texts do not spell control tokens, to be rendered by a chat template and then
    encoded by [`encode_rendered`], which takes the guards out again.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): its added tokens are the control tokens, special or not.
        value (JSON): any nesting of dictionaries, lists and texts.
    """
    if isinstance(value, str):
        _, beginning = _control_patterns(tokenizer)
        return beginning.sub(rf"\g<0>{_GUARD}", value.replace(_GUARD, 2 * _GUARD))
    if isinstance(value, dict):
        return {guard_control_tokens(tokenizer, k): guard_control_tokens(tokenizer, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard_control_tokens(tokenizer, item) for item in value]
    return value


def encode_rendered(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """
    Encodes what a chat template made of guarded messages ([`guard_control_tokens`]): the control tokens in it are the
    template's, and what is guarded is plain text.

    Returns:
        `tuple[list[int], list[tuple[int, int]]]`: ids, and for each the characters `[start, end)` of `text`, guards
        counted, that it stands for.
    """
    control, _ = _control_patterns(tokenizer)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for match in [*control.finditer(text), None]:
        end = match.start() if match else len(text)
        plain = text[position:end]
        kept: Sequence[int] = range(position, end)
        if _GUARD in plain:
            # Of two guards the first is the text's own.
            kept = [found.start() for found in _UNGUARDED.finditer(text, position, end)]
            plain = "".join(text[i] for i in kept)
        if plain:
            encoding = _plain_backend(tokenizer).encode(plain, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(kept[first], kept[last - 1] + 1) for first, last in encoding.offsets]
        if match:
            ids.append(tokenizer.convert_tokens_to_ids(match[0]))
            offsets.append(match.span())
            position = match.end()
    return ids, offsets


@lru_cache(maxsize=4)
def _control_patterns(tokenizer: PreTrainedTokenizerFast) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds the control tokens in a text, and what finds the first character of each."""
    spellings = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    beginnings = (f"{re.escape(spelling[0])}(?={re.escape(spelling[1:])})" for spelling in spellings)
    return re.compile("|".join(map(re.escape, spellings))), re.compile("|".join(beginnings))


@lru_cache(maxsize=4)
def _plain_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """
    The tokenizer's backend without added tokens.

    NOTE: `split_special_tokens=True` is not enough, it still matches added tokens that are not marked special, as
    `<think>` is here and in Qwen's tokenizers.
    """
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    absent: dict[str, Any] = {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(fields | absent))


__all__ = ["encode_documents", "encode_prompt", "encode_rendered", "guard_control_tokens"]
