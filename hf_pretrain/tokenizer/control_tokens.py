"""
The control tokens of MiniMind's tokenizers, and how documents, prompts and rendered conversations are encoded.

Text never becomes a control token here. A text that contains the characters of a control token, such as `<|im_end|>`
or `<think>`, is encoded letter by letter like any other text and decodes to itself. Only the chat template writes
control tokens, so no document can end itself early or speak as the assistant. Added tokens that are normalized and not
special, such as those of `--add_tokens`, are words and no control tokens.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..runtime.errors import UserError


PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


# Added tokens that are not special, so that `skip_special_tokens=True` keeps them in decoded text for tool parsers and
# users.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


# Reserved ids, so that a new control token does not move the ids of text.
RESERVED_TOKENS = [f"<|reserved_{index}|>" for index in range(27)]


SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *MARKS, *RESERVED_TOKENS]


CHAT_TEMPLATE_PATH = Path(__file__).parent / "templates" / "minimind.jinja"


# The response template parses an answer into reasoning, tool calls and content. A call whose arguments are not JSON
# keeps them as text, and a malformed call becomes content, because a small model writes both.
RESPONSE_TEMPLATE_PATH = Path(__file__).parent / "templates" / "response.json"


# Until a text is encoded, a guard separates the first character of a spelled control token from the rest. The guard is
# a character of Unicode's private use area; in a text that already contains this character, it is doubled.
_GUARD = "\ue000"


_UNGUARDED = re.compile(f"{_GUARD}{_GUARD}|[^{_GUARD}]")


def encode_documents(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """
    Encode each document as bos, its text, eos; without bos if the tokenizer has none, as Qwen's.

    Args:
        texts (`list[str]`): the documents.
        tokenizer ([`PreTrainedTokenizerFast`]): with eos.

    Returns:
        `list[list[int]]`: token ids of each document.
    """
    # The fast variant computes no offsets, which documents do not need.
    encodings = _plain_backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [[*bos, *encoding.ids, tokenizer.eos_token_id] for encoding in encodings]


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    enable_thinking: bool | None = None,
) -> list[int]:
    """
    Encode a conversation up to the point where the assistant answers.

    The ids equal the result of `apply_chat_template`, except that no message can produce a control token.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        messages (`list[dict]`): the conversation so far.
        tools (`list[dict]`, *optional*): JSON schemas of the available tools.
        enable_thinking (`bool`, *optional*): with or without reasoning; by default the template decides.

    Returns:
        `list[int]`: token ids, the generation prompt included.

    Raises:
        `ValueError`: if the chat template fails.
    """
    with template_errors(messages):
        rendered = tokenizer.apply_chat_template(
            guard_control_tokens(tokenizer, messages),
            tools=guard_control_tokens(tokenizer, tools),
            add_generation_prompt=True,
            tokenize=False,
            **thinking_variables(enable_thinking),
        )
    return encode_rendered(tokenizer, rendered)[0]


@contextmanager
def template_errors(messages: list[dict[str, Any]]) -> Iterator[None]:
    """Raise every error of a chat template that renders `messages` as a `UserError`."""
    try:
        yield
    except Exception as error:  # a user's template may raise any error
        start = str(messages[0].get("content"))[:80]
        cause = error or type(error).__name__
        raise UserError(
            f"The chat template cannot render the conversation that begins {start!r}: {cause}. "
            "Change the template, or the conversation (in a chat, with /system or /reset)."
        ) from error


def check_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `ValueError` if a tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} has no chat template. Use a tokenizer of "
            "`hf-pretrain tokenizer`, or put a chat_template.jinja beside it."
        )


def thinking_variables(enable_thinking: bool | None) -> dict[str, bool]:
    """Return the variables that switch the reasoning of a chat template on or off; none for its default."""
    # minimind-3's own template names the same variable `open_thinking`.
    return {} if enable_thinking is None else dict.fromkeys(("enable_thinking", "open_thinking"), enable_thinking)


def guard_control_tokens(tokenizer: PreTrainedTokenizerFast, value: Any) -> Any:
    """
    Return a copy of messages or tools in which no text spells a control token.

    A chat template renders the copy, and [`encode_rendered`] removes the guards again.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): its added tokens are the control tokens, except for words.
        value (JSON): any nesting of dictionaries, lists and texts.
    """
    if isinstance(value, str):
        _, beginning = _control_patterns(tokenizer)
        return beginning.sub(rf"\g<0>{_GUARD}", value.replace(_GUARD, 2 * _GUARD))
    if isinstance(value, dict):
        # Guard keys as well: a template may write the names of arguments.
        return {guard_control_tokens(tokenizer, k): guard_control_tokens(tokenizer, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard_control_tokens(tokenizer, item) for item in value]
    return value


def encode_rendered(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """
    Encode the text that a chat template rendered from guarded messages ([`guard_control_tokens`]).

    Control tokens in the text come from the template; guarded spellings are plain text.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the template.
        text (`str`): the rendered text, with guards.

    Returns:
        `tuple[list[int], list[tuple[int, int]]]`: token ids, and the range `[start, end)` of characters of each token
        in `text`, including guards.
    """
    # Cut the text at the template's control tokens, and encode the text between them without control tokens.
    control, _ = _control_patterns(tokenizer)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for match in [*control.finditer(text), None]:
        end = match.start() if match else len(text)
        plain = text[position:end]
        kept: Sequence[int] = range(position, end)
        if _GUARD in plain:
            # A doubled guard is one guard of the text itself. `kept` maps the characters back to positions in `text`.
            kept = [found.start() for found in _UNGUARDED.finditer(text, position, end)]
            plain = "".join(text[i] for i in kept)
        if plain:
            encoding = _plain_backend(tokenizer).encode(plain, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(kept[first], kept[last - 1] + 1) for first, last in encoding.offsets]
        if match:
            # A control token is one id for its whole spelling.
            ids.append(tokenizer.convert_tokens_to_ids(match[0]))
            offsets.append(match.span())
            position = match.end()
    return ids, offsets


@lru_cache(maxsize=4)
def _control_patterns(tokenizer: PreTrainedTokenizerFast) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a pattern that matches control tokens, and one that matches the first character of each."""
    added = tokenizer.added_tokens_decoder.values()
    # The cache assumes that nobody adds tokens to a tokenizer after its first use. Sort the longest spelling first,
    # because a regular expression takes the first alternative that matches.
    control = (token.content for token in added if token.special or not token.normalized)
    spellings = sorted(control, key=len, reverse=True)
    beginnings = [f"{re.escape(spelling[0])}(?={re.escape(spelling[1:])})" for spelling in spellings]
    # An empty pattern would match everywhere, `(?!)` matches nowhere.
    return re.compile("|".join(map(re.escape, spellings)) or "(?!)"), re.compile("|".join(beginnings) or "(?!)")


@lru_cache(maxsize=4)
def _plain_backend(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """
    Return the tokenizer's backend, in which control tokens are text. The ids of the added words stay.

    NOTE: `encode_special_tokens` alone is not enough. The backend still matches added tokens that are not special,
    such as `<think>` here and in Qwen's tokenizers. Without the control tokens, the words would get their ids.
    """
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in fields["added_tokens"]:
        token["special"] = token["special"] or not token["normalized"]
    absent: dict[str, Any] = {"truncation": None, "padding": None, "post_processor": None}
    backend = Tokenizer.from_str(json.dumps(fields | absent))
    backend.encode_special_tokens = True
    return backend
