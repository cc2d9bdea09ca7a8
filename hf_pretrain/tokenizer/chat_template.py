"""Marks of chat templates around the text of the assistant, and texts that a template leaves out."""

import json
import re
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ..runtime.errors import UserError
from .control_tokens import guard_control_tokens


# transformers returns a mask of the assistant's tokens only for text between these marks.
_MARK = re.compile(r"{%-?\s*(generation|endgeneration)\s*-?%}")

# Calls of the function by which templates write today's date, and what `fix_date` makes of them.
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_FIXED = re.compile(r"""\("(?:[^"\\]|\\.)*" if true else (strftime_now\(.*?\))\)""")

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


def has_marks(template: str) -> bool:
    """Return whether a template marks what the assistant generates."""
    return _MARK.search(template) is not None


def add_marks(template: str) -> str:
    """Mark what the assistant generates in a template of MiniMind's own tokenizers; return others unchanged."""
    if has_marks(template):
        return template
    marked = template
    for old, new in _UNMARKED.items():
        marked = marked.replace(old, new)
    if marked == template:
        return template
    # Templates of Qwen and others have some of these places, and would get only one mark of a pair.
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=marked)
    except TemplateSyntaxError:
        return template
    return marked


def fix_date(template: Any, date: str | None) -> Any:
    """
    Let a chat template write a date instead of today's; [`free_date`] undoes it. The text of a run must not change
    with the day.

    Args:
        template (`str`): the template; other values, such as several templates by name, are returned unchanged.
        date (`str`, *optional*): the date in ISO format; `None` changes nothing.
    """
    if date is None or not isinstance(template, str):
        return template
    moment = datetime.fromisoformat(date)
    return _TODAY.sub(lambda call: f"({json.dumps(moment.strftime(call[2]))} if true else {call[0]})", template)


def free_date(template: Any) -> Any:
    """Let a chat template write today's date again, as programs that load it expect."""
    return _FIXED.sub(r"\1", template) if isinstance(template, str) else template


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
        parts += [call["name"] for call in message.get("tool_calls", [])]
        # Templates write a text as it is or as JSON, which escapes some characters.
        forms = {part: (part.strip(), json.dumps(part, ensure_ascii=False)[1:-1]) for part in parts}
        absent = next((part for part in parts if not any(form in rendered for form in forms[part])), None)
        if absent is not None:
            raise UserError(
                f"The chat template leaves {absent[:80]!r} out, in a message of the {message['role']}. Pass a "
                "template that renders tools and thoughts by --chat_template, or drop such conversations."
            )
