"""Chat templates: mark what the assistant generates, and render conversations within a time limit."""

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from .encoding import guard_control_tokens
from .special_tokens import BOS_TOKEN, CHAT_TEMPLATE_PATH, EOS_TOKEN


# Where the templates of MiniMind's own tokenizers write what the assistant says, and the same with marks.
_MARKED = re.compile(r"{%-?\s*generation\s*-?%}.*{%-?\s*endgeneration\s*-?%}", flags=re.DOTALL)


_UNMARKED = {
    # V1, and MiniMind2's
    "{{ content + '</s>' + '\\n' }}": "{% generation %}{{ content + '</s>' }}{% endgeneration %}{{ '\\n' }}",
    "{{ content + '<|im_end|>' + '\\n' }}": "{% generation %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    # later MiniMind2's
    "{{- '<|im_start|>' + message.role + '\\n' + content }}": (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- generation %}{{- content }}"
    ),
    # minimind-3's; an empty thought is part of the prompt, as in its generation prompt
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n        {%- endif %}": (
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- endif %}"
        "{%- set thought = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' %}"
        "{%- if not reasoning_content.strip('\\n') %}{{- thought }}{%- endif %}{%- generation %}"
        "{%- if reasoning_content.strip('\\n') %}{{- thought }}{%- endif %}{{- content.lstrip('\\n') }}"
    ),
    "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}": (
        "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == \"tool\" %}"
    ),
}  # fmt: skip


def mark_template(tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
    """
    Makes sure that a tokenizer's chat template marks what the assistant generates. Templates of MiniMind's own
    tokenizers are given the marks and still render the same.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): changed in place.
        chat_template (`str`, *optional*): a file to take the template from, or `minimind` for this package's own.

    Raises:
        `ValueError`: if there is no template, or it has no marks and is not known.
    """
    if chat_template is not None:
        path = CHAT_TEMPLATE_PATH if chat_template == "minimind" else Path(chat_template)
        if chat_template == "minimind" and not tokenizer.get_added_vocab().keys() >= {BOS_TOKEN, EOS_TOKEN}:
            raise ValueError(
                f"--chat_template minimind is written with {BOS_TOKEN} and {EOS_TOKEN}, which are no tokens of this "
                "tokenizer: write a template with its own control tokens."
            )
        if not path.is_file():
            raise ValueError(
                f"--chat_template {chat_template}: no such file. Write a path to a Jinja template, or minimind."
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    template = tokenizer.chat_template or ""
    if not _MARKED.search(template):
        for unmarked, marked in _UNMARKED.items():
            template = template.replace(unmarked, marked)
    if not _MARKED.search(template):
        raise ValueError(
            "The tokenizer's chat template does not mark what the assistant generates with {% generation %} and "
            "{% endgeneration %}. Add the marks and pass the file by --chat_template, or pass --chat_template minimind."
            if tokenizer.chat_template
            else "The tokenizer has no chat template. Pass --chat_template minimind, or a file of your own."
        )
    tokenizer.chat_template = template


# CPU time for one conversation, which usually takes a millisecond. Real time would depend on what else is running.
MAX_RENDER_SECONDS = 10.0


class _TimeLimitReached(Exception):
    pass


def render_guarded(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: dict[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """
    A conversation as the tokenizer's chat template writes it, with guards in whatever spells a control token
    ([`~tokenizer.encoding.guard_control_tokens`]); and where in it each text begins and ends that the assistant generates.

    Raises:
        `ValueError`: if the template cannot render the conversation, takes more than `MAX_RENDER_SECONDS`, or leaves a
            part of it out.
    """
    guarded = guard_control_tokens(tokenizer, messages)
    try:
        with _cpu_time_limit(MAX_RENDER_SECONDS):
            (rendered,), (spans,) = render_jinja_template(
                conversations=[guarded],
                tools=guard_control_tokens(tokenizer, tools),
                chat_template=tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
                **chat_template_kwargs,
            )
    except Exception as error:  # whatever a template does
        start = messages[0]["content"][:80]
        if isinstance(error, _TimeLimitReached):
            template = tokenizer.chat_template[:80]
            raise ValueError(
                f"The chat template that begins {template!r} takes more than {MAX_RENDER_SECONDS:g} s for the "
                f"conversation that begins {start!r}. Look for a loop that does not end, or pass another template by "
                "--chat_template."
            ) from None
        raise ValueError(
            f"The chat template cannot render the conversation that begins {start!r}: {error or type(error).__name__}"
        ) from error
    _check_is_whole(rendered, guarded, has_thoughts=bool(chat_template_kwargs.get("enable_thinking", True)))
    return rendered, spans


def _check_is_whole(rendered: str, messages: list[dict[str, Any]], *, has_thoughts: bool) -> None:
    """Raises `ValueError` if a text, a called tool's name or, with `has_thoughts`, a thought is not in `rendered`."""
    for message in messages:
        parts = [message["content"], *([message.get("reasoning_content", "")] if has_thoughts else [])]
        absent = next((part for part in parts if part.strip() not in rendered), None)
        for name in (call["name"] for call in message.get("tool_calls", [])):
            # As it is, or as JSON writes it.
            if name.strip() not in rendered and json.dumps(name, ensure_ascii=False)[1:-1] not in rendered:
                absent = name
        if absent is not None:
            raise ValueError(
                f"The chat template leaves {absent[:80]!r} out, of a message of the {message['role']}. Pass a template "
                "that knows tools and thoughts by --chat_template, or drop such conversations."
            )


@contextmanager
def _cpu_time_limit(seconds: float) -> Iterator[None]:
    """
    Raises [`_TimeLimitReached`] in a block that takes more CPU time than this.

    NOTE: Python gives signals to the main thread alone, which data are prepared in, also in worker processes. In other
    threads and on Windows, which has no such timer, there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TimeLimitReached

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


__all__ = ["mark_template"]
