"""Texts as lists of parts, for chat templates that take no others, as those of many models for images."""

from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template


_TEXTS = {"user": "Why", "assistant": "Because"}


def fit_contents(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], chat_template: str
) -> list[dict[str, Any]]:
    """Return messages whose texts are lists of parts if `chat_template` drops or refuses other texts."""
    return list(map(_in_parts, messages)) if _needs_parts(tokenizer, chat_template) else messages


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message.get("content")
    return message | {"content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


@lru_cache(maxsize=16)
def _needs_parts(tokenizer: PreTrainedTokenizerFast, chat_template: str) -> bool:
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in _TEXTS.items()]

    def renders(conversation: list[dict[str, Any]]) -> bool:
        with suppress(Exception):  # a template may raise any error
            (rendered,), _ = render_jinja_template(
                conversations=[conversation], chat_template=chat_template, **tokenizer.special_tokens_map
            )
            return all(text in rendered for text in _TEXTS.values())
        return False

    return not renders(messages) and renders(list(map(_in_parts, messages)))
