"""The chat template of a run, and the text of the assistant in it, also where the template does not mark it."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..runtime.errors import UserError
from .chat_template import add_marks, fix_date, has_marks
from .control_tokens import (
    BOS_TOKEN,
    CHAT_TEMPLATE,
    EOS_TOKEN,
    RESPONSE_TEMPLATE,
    control_pattern,
    find_turn_end,
    render_guarded,
    thinking_variables,
)


def render_answers(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """
    Render a conversation, and find the text that the assistant generates.

    The marks of the template say where that is. In a template without marks, an answer is what the text of the
    conversation adds to the prompt that inference renders for it. It must stay the same when more messages follow:
    Qwen3, for example, drops thoughts of earlier turns, so that only answers to the last question are as the model
    generates them. It also writes the empty thought of an answer without a thought only if the answer is the last
    message. A call of a tool before it gets a blank thought, so that it reads as the model generates it.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        messages (`list[dict]`): the conversation in the internal form.
        tools (`list[dict]`, *optional*): JSON schemas of the available tools.
        variables: further variables of the template.

    Returns:
        `tuple`: the rendered text with guards, and ranges `[start, end)` of its characters. With marks, there is a
        range for each marked text; without them, one for each message of the assistant, which is `(0, 0)` where the
        answer cannot be trained.

    Raises:
        `UserError`: if the template fails.
    """
    rendered, spans = render_guarded(tokenizer, messages, tools, **variables)
    if has_marks(tokenizer.get_chat_template(tools=tools)):
        return rendered, spans

    def render(number: int, **more: bool) -> str:
        return render_guarded(tokenizer, messages[:number], tools, **variables | more)[0]

    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    pattern = control_pattern(tokenizer)
    spans = [_find_answer(render, place, rendered, len(messages), pattern) for place in places]
    asked = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    untrained = {place for place, (start, end) in zip(places, spans, strict=True) if start == end and place > asked}
    blank = [{"reasoning_content": "\n"} | m if i in untrained else m for i, m in enumerate(messages)]
    if blank != messages:
        again, found = render_answers(tokenizer, blank, tools, **variables)
        if all(start < end for place, (start, end) in zip(places, found, strict=True) if place > asked):
            return again, found
    return rendered, spans


def _find_answer(
    render: Callable[..., str], place: int, rendered: str, num_messages: int, control: re.Pattern[str]
) -> tuple[int, int]:
    # Templates may refuse a conversation that is cut there, for example one without a message.
    with suppress(UserError):
        through = rendered if place == num_messages - 1 else render(place + 1)
        # Some prompts begin a thought, and only those without thinking fit an answer that has none.
        for variables in ({}, thinking_variables(False)):
            prompt = render(place, add_generation_prompt=True, **variables)
            if rendered.startswith(prompt) and through.startswith(prompt):
                return len(prompt), _find_end(rendered, through, len(prompt), control)
    return 0, 0


def _find_end(rendered: str, through: str, start: int, control: re.Pattern[str]) -> int:
    """
    Return where the answer that begins at `start` ends in `rendered`; `start` if it reads otherwise there.

    Args:
        rendered (`str`): the whole conversation.
        through (`str`): the conversation up to this answer.
    """
    if rendered.startswith(through):
        # A space behind the stop token, as LLaVA's, may share its token with the next message.
        return max(start, len(through.rstrip(" ")))
    # Templates such as Phi-3's write further control tokens behind the last answer.
    same = next(i for i, (a, b) in enumerate(zip(rendered + "\0", through + "\1", strict=False)) if a != b)
    end = max((match.end() for match in control.finditer(rendered, start, same)), default=start)
    while end < same and rendered[end].isspace():
        end += 1
    return end if end > start and not control.sub("", through[end:]).strip() else start


def set_template(
    tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None, date: str | None = None
) -> str | None:
    """
    Give a tokenizer the chat template of a run, and check that its answers can be trained.

    The function adds marks to the templates of MiniMind's own tokenizers. They render the same text as before.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): changed in place.
        chat_template (`str`, *optional*): path of a template file to use instead, or `minimind` for the template of
            this package.
        date (`str`, *optional*): the date that the template writes, in ISO format; by default today's.

    Returns:
        `str`, *optional*: a note if only answers to the last question of a conversation can be trained.

    Raises:
        `UserError`: if there is no template; or if it has no marks and no answer can be found, or none that ends with
            a special token.
    """
    if chat_template == "minimind" and not tokenizer.get_added_vocab().keys() >= {BOS_TOKEN, EOS_TOKEN}:
        missing = f"{BOS_TOKEN} and {EOS_TOKEN}, which are no tokens of this tokenizer"
        raise UserError(f"--chat_template minimind uses {missing}. Write a template with its own control tokens.")
    template = tokenizer.chat_template
    if chat_template == "minimind":
        # `chat` and `serve` recognise the calls that this template writes.
        template, tokenizer.response_template = CHAT_TEMPLATE, json.loads(RESPONSE_TEMPLATE)
    if chat_template not in (None, "minimind"):
        try:
            template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"--chat_template {chat_template} cannot be read: {error}. Pass a Jinja template, or minimind."
            raise UserError(message) from error
    if not template:
        raise UserError("The tokenizer has no chat template. Pass --chat_template minimind, or a template file.")
    # Some tokenizers have several templates by name.
    tokenizer.chat_template = fix_date(add_marks(template) if isinstance(template, str) else template, date)
    return None if has_marks(tokenizer.get_chat_template()) else _check_answers(tokenizer)


def _check_answers(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Check a template without marks as [`set_template`] describes."""
    turn = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    _, spans = render_answers(tokenizer, [*turn, *turn])
    fix = "Pass a template with {% generation %} and {% endgeneration %} around answers by --chat_template"
    if spans[-1][0] == spans[-1][1]:
        cause = "no conversation begins with the prompt that the template renders for its answer"
        raise UserError(f"The answers in the tokenizer's chat template cannot be found: {cause}. {fix}.")
    if find_turn_end(tokenizer) is None:
        raise UserError(f"The chat template ends no answer with a special token, so the model would not stop. {fix}.")
    if spans[0][0] < spans[0][1]:
        return None
    cause = "the chat template renders earlier ones otherwise than the model generates them"
    return f"Only answers to the last question of each conversation are trained: {cause}."
