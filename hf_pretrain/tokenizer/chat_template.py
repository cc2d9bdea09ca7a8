"""Mark the text that the assistant generates in a chat template, and render conversations."""

import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..runtime.errors import UserError
from .control_tokens import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, guard_control_tokens


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
        `UserError`: if there is no template, or it has no marks and is not one of MiniMind's.
    """
    if chat_template == "minimind" and not tokenizer.get_added_vocab().keys() >= {BOS_TOKEN, EOS_TOKEN}:
        missing = f"{BOS_TOKEN} and {EOS_TOKEN}, which are no tokens of this tokenizer"
        raise UserError(f"--chat_template minimind uses {missing}. Write a template with its own control tokens.")
    template = CHAT_TEMPLATE if chat_template == "minimind" else add_marks(tokenizer.chat_template or "")
    if chat_template not in (None, "minimind"):
        try:
            template = add_marks(Path(chat_template).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            message = f"--chat_template {chat_template} cannot be read: {error}. Pass a Jinja template, or minimind."
            raise UserError(message) from error
    if not _MARKED.search(template):
        raise UserError(
            "The tokenizer has no chat template, or it does not mark what the assistant generates with "
            "{% generation %} and {% endgeneration %}. Pass a file with the marks by --chat_template, or pass "
            "--chat_template minimind."
        )
    tokenizer.chat_template = template


def check_is_whole(
    tokenizer: PreTrainedTokenizerFast, rendered: str, messages: list[dict[str, Any]], *, has_thoughts: bool
) -> None:
    """
    Raise `UserError` if `rendered` lacks a text, the name of a called tool or, with `has_thoughts`, a thought.

    A template that does not know tools or thoughts drops them silently, and training would never see them.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.
        rendered (`str`): the text that [`~tokenizer.control_tokens.render_guarded`] returned.
        messages (`list[dict]`): the conversation in the internal form of `data.conversations`.
    """
    for message in guard_control_tokens(tokenizer, messages):
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
