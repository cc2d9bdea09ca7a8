"""Mark the text that the assistant generates in a chat template, and render conversations."""

import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ..runtime.errors import UserError
from .control_tokens import BOS_TOKEN, CHAT_TEMPLATE_PATH, EOS_TOKEN, guard_control_tokens, template_errors


# transformers returns a mask of the assistant's tokens only for text between these marks.
_MARKED = re.compile(r"{%-?\s*generation\s*-?%}.*{%-?\s*endgeneration\s*-?%}", flags=re.DOTALL)


# Places in the templates of MiniMind's own tokenizers that write the assistant's text, and the same places with marks.
_UNMARKED = {
    # V1 and MiniMind2
    "{{ content + '</s>' + '\\n' }}": "{% generation %}{{ content + '</s>' }}{% endgeneration %}{{ '\\n' }}",
    "{{ content + '<|im_end|>' + '\\n' }}": (
        "{% generation %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    ),
    # later MiniMind2
    "{{- '<|im_start|>' + message.role + '\\n' + content }}": (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}{{- content }}"
    ),
    # minimind-3. An empty <think> block stays outside the marks: the generation prompt contains it, so the model never
    # generates it.
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n')"
    " + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n        {%- endif %}": (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- endif %}"
        "{%- set thought = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' %}"
        "{%- if not reasoning_content.strip('\\n') %}{{- thought }}{%- endif %}{%- generation %}"
        "{%- if reasoning_content.strip('\\n') %}{{- thought }}{%- endif %}{{- content.lstrip('\\n') }}"
    ),
    "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}": (
        "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == \"tool\" %}"
    ),
}  # fmt: skip


def add_marks(template: str) -> str:
    """Mark what the assistant generates in a template of MiniMind's own tokenizers; return others unchanged."""
    if not _MARKED.search(template):
        for unmarked, marked in _UNMARKED.items():
            template = template.replace(unmarked, marked)
    return template


def mark_template(tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
    """
    Make sure that a tokenizer's chat template marks the text that the assistant generates.

    The function adds the marks to the templates of MiniMind's own tokenizers. They render the same text as before.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): changed in place.
        chat_template (`str`, *optional*): path of a template file to use instead, or `minimind` for the template of
            this package.

    Raises:
        `ValueError`: if there is no template, or it has no marks and is not one of MiniMind's.
    """
    if chat_template == "minimind" and not tokenizer.get_added_vocab().keys() >= {BOS_TOKEN, EOS_TOKEN}:
        raise UserError(
            f"--chat_template minimind uses {BOS_TOKEN} and {EOS_TOKEN}, which are no tokens of this tokenizer. "
            "Write a template with its own control tokens."
        )
    if chat_template is not None:
        path = CHAT_TEMPLATE_PATH if chat_template == "minimind" else Path(chat_template)
        if not path.is_file():
            raise UserError(
                f"--chat_template {chat_template}: no such file. Pass the path of a Jinja template, or minimind."
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    template = add_marks(tokenizer.chat_template or "")
    if not _MARKED.search(template):
        raise UserError(
            "The tokenizer has no chat template, or it does not mark what the assistant generates with "
            "{% generation %} and {% endgeneration %}. Pass a file with the marks by --chat_template, or pass "
            "--chat_template minimind."
        )
    tokenizer.chat_template = template


def render_guarded(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: dict[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """
    Render a conversation with the tokenizer's chat template. Texts that spell a control token get guards.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a template that marks the text that the assistant generates.
        messages (`list[dict]`): a conversation in the internal form of `data.conversations`.
        tools (`list[dict]`, *optional*): JSON schemas of the available tools.
        chat_template_kwargs (`dict`): further variables of the template.

    Returns:
        `tuple`: the rendered text with guards ([`~tokenizer.control_tokens.guard_control_tokens`]), and the range
        `[start, end)` of characters of each text that the assistant generates.

    Raises:
        `ValueError`: if the template fails, or leaves out a part of the conversation.
    """
    guarded = guard_control_tokens(tokenizer, messages)
    with template_errors(messages):
        # NOTE: `apply_chat_template` returns a mask of tokens instead of these ranges of characters.
        (rendered,), (spans,) = render_jinja_template(
            conversations=[guarded],
            tools=guard_control_tokens(tokenizer, tools),
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
            **chat_template_kwargs,
        )
    _check_is_whole(rendered, guarded, has_thoughts=bool(chat_template_kwargs.get("enable_thinking", True)))
    return rendered, spans


def _check_is_whole(rendered: str, messages: list[dict[str, Any]], *, has_thoughts: bool) -> None:
    """
    Raise `ValueError` if `rendered` lacks a text, the name of a called tool or, with `has_thoughts`, a thought.

    A template that does not know tools or thoughts drops them silently, and training would never see them.
    """
    for message in messages:
        parts = [message["content"], *([message.get("reasoning_content", "")] if has_thoughts else [])]
        absent = next((part for part in parts if part.strip() not in rendered), None)
        for name in (call["name"] for call in message.get("tool_calls", [])):
            # Templates write a name as it is or as JSON, which escapes some characters.
            if name.strip() not in rendered and json.dumps(name, ensure_ascii=False)[1:-1] not in rendered:
                absent = name
        if absent is not None:
            raise UserError(
                f"The chat template leaves {absent[:80]!r} out, in a message of the {message['role']}. Pass a "
                "template that renders tools and thoughts by --chat_template, or drop such conversations."
            )
