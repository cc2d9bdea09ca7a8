"""
The control tokens of MiniMind's tokenizers, and how documents, prompts and rendered conversations are encoded.

Text never becomes a control token here. A text that contains the characters of a control token, such as `<|im_end|>`
or `<think>`, is encoded letter by letter like any other text and decodes to itself. Only the chat template writes
control tokens, so no document can end itself early or speak as the assistant. Added tokens that are normalized and not
special, such as those of `--add_tokens`, are words and no control tokens.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ..runtime.errors import UserError
from .content_parts import fit_contents


PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


# Added tokens that are not special, so that `skip_special_tokens=True` keeps them in decoded text for tool parsers and
# users.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


# The reserved ones keep the ids of text in their places when a control token is added.
SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *MARKS, *(f"<|reserved_{index}|>" for index in range(27))]


_TEMPLATES = Path(__file__).parent / "templates"
CHAT_TEMPLATE = (_TEMPLATES / "minimind.jinja").read_text(encoding="utf-8")
# The response template parses an answer into reasoning, tool calls and content. A call whose arguments are not JSON
# keeps them as text, and a malformed call becomes content, because a small model writes both.
RESPONSE_TEMPLATE = (_TEMPLATES / "response.json").read_text(encoding="utf-8")


# Until a text is encoded, a guard separates the first character of a spelled control token from the rest. The guard is
# a character of Unicode's private use area; in a text that already contains this character, it is doubled.
_GUARD = "\ue000"


# How the backend spells control tokens while it encodes a text with guards. No text can contain what nobody knows.
_HIDDEN = f"{_GUARD}{secrets.token_hex(16)}{{}}{_GUARD}"


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
    encodings = _backend(tokenizer, hides=True).encode_batch_fast(texts, add_special_tokens=False)
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
        `UserError`: if the chat template fails.
    """
    return encode_chat(tokenizer, messages, tools, add_generation_prompt=True, **thinking_variables(enable_thinking))


def encode_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    **variables: Any,
) -> list[int]:
    """Encode a conversation like `apply_chat_template` with the same arguments; see [`encode_prompt`]."""
    rendered, spans = render_guarded(tokenizer, messages, tools, **variables)
    ids, _ = encode_rendered(tokenizer, rendered, [start for start, _ in spans])
    if not ids:
        raise UserError("The chat template renders no token. Put one that writes messages beside the tokenizer.")
    return ids


def render_guarded(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    *,
    chat_template: str | None = None,
    **variables: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """
    Render a conversation like `apply_chat_template`. Texts that spell a control token get guards.

    Returns:
        `tuple`: the rendered text with guards ([`guard_control_tokens`]), and the range `[start, end)` of characters
        of each text that the template marks as generated by the assistant.

    Raises:
        `UserError`: if there is no chat template, or it fails.
    """
    # As transformers does, for templates that ask whether a message has a field.
    filled = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in filled:
        if "tool_calls" in message:
            # Templates such as Llama 3.1's read the form of OpenAI only.
            calls = message["tool_calls"]
            message["tool_calls"] = [c if "function" in c else {"type": "function", "function": c} for c in calls]
    with template_errors(messages):
        chat_template = tokenizer.get_chat_template(chat_template, tools)
        # NOTE: `apply_chat_template` returns a mask of tokens instead of these ranges of characters.
        (rendered,), spans = render_jinja_template(
            conversations=[guard_control_tokens(tokenizer, fit_contents(tokenizer, filled, chat_template))],
            tools=guard_control_tokens(tokenizer, tools),
            chat_template=chat_template,
            return_assistant_tokens_mask="endgeneration" in chat_template,
            **tokenizer.special_tokens_map | variables,
        )
    return rendered, spans[0] if spans else []


@contextmanager
def template_errors(messages: list[dict[str, Any]]) -> Iterator[None]:
    """Raise every error of a chat template that renders `messages` as a `UserError`."""
    try:
        yield
    except Exception as error:  # a user's template may raise any error
        start = str(messages[0].get("content"))[:80] if messages else ""
        cause = str(error) or type(error).__name__
        raise UserError(
            f"The chat template cannot render the conversation that begins {start!r}: {cause}. "
            "Change the template, or the conversation (in a chat, with /system or /reset)."
        ) from error


def check_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `UserError` if a tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        fix = "Put a chat_template.jinja beside it, or use a tokenizer of `hf-pretrain tokenizer`"
        raise UserError(f"The tokenizer {tokenizer.name_or_path} has no chat template. {fix}.")


def find_turn_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the special token with which the chat template ends an answer; `None` if there is none."""
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    with suppress(UserError):
        rendered, _ = render_guarded(tokenizer, messages)
        ids, _ = encode_rendered(tokenizer, rendered.rpartition("Because.")[2])
        return next((token for token in ids if _is_special(tokenizer, token)), None)
    return None


def set_stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """
    Let a model stop at the eos of its tokenizer, and where the chat template ends a turn.

    The two differ for bases of Qwen, Llama and SmolLM, whose documents end with `<|endoftext|>`. Other stop tokens of
    the model stay if they are special tokens of the tokenizer.
    """
    config = model.generation_config
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    wanted = dict.fromkeys((tokenizer.eos_token_id, find_turn_end(tokenizer), *known))
    tokens = [token for token in wanted if _is_special(tokenizer, token)]
    # A single one stays a number, as other programs write it.
    config.eos_token_id = tokens if len(tokens) > 1 else tokens[0]


def _is_special(tokenizer: PreTrainedTokenizerFast, token: int | None) -> bool:
    return token in tokenizer.added_tokens_decoder and tokenizer.added_tokens_decoder[token].special


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
        return _control_tokens(tokenizer).beginning.sub(rf"\g<0>{_GUARD}", value.replace(_GUARD, 2 * _GUARD))
    if isinstance(value, dict):
        # Guard keys as well: a template may write the names of arguments.
        return {guard_control_tokens(tokenizer, k): guard_control_tokens(tokenizer, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard_control_tokens(tokenizer, item) for item in value]
    return value


def encode_rendered(
    tokenizer: PreTrainedTokenizerFast, text: str, answers: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """
    Encode the text that a chat template rendered from guarded messages ([`guard_control_tokens`]).

    Without guards, the ids are those of transformers. Guarded spellings are plain text. No token reaches across the
    start of an answer: the model gets the text before it alone.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the template.
        text (`str`): the rendered text, with guards.
        answers (`Sequence[int]`): ascending positions in `text` at which the assistant begins to write.

    Returns:
        `tuple[list[int], list[int]]`: token ids, and the position in `text` of the first character of each token.
    """
    control = _control_tokens(tokenizer)
    backend = _backend(tokenizer)
    tokens = _encode_part(backend, text, 0, len(text))
    # `kept` maps positions in the encoded text to positions in `text`.
    kept: Sequence[int] = range(len(text) + 1)
    # A normalizer may turn other spellings into control tokens. Then there are more than the template wrote.
    hides = _GUARD in text or sum(token in control.ids for token, *_ in tokens) > len(control.pattern.findall(text))
    if hides:
        text, kept = _hide_control_tokens(control, text, tokens)
        backend = _backend(tokenizer, hides)
        tokens = _encode_part(backend, text, 0, len(text))
    for answer in reversed(answers):
        cut = bisect_left(kept, answer)
        end = bisect_left(tokens, cut, key=itemgetter(1))
        # The last token may reach across the start of the answer.
        stop = tokens[end - 1][2] if end and tokens[end - 1][0] not in control.ids else cut
        # Tokens do not depend on the text before a control token, unless it is normalized with it.
        last = next((place for place in reversed(range(end)) if tokens[place][0] in control.ids), 0)
        for begin in (last, 0):
            head = _encode_part(backend, text, tokens[begin][1] if begin else 0, cut)
            if head[:1] == tokens[begin : begin + 1]:
                break
        tokens[begin:end] = head + _encode_part(_backend(tokenizer, hides, continues=True), text, cut, stop)
    return [token for token, _, _ in tokens], [kept[start] for _, start, _ in tokens]


def _encode_part(backend: Tokenizer, text: str, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return id, start and end of each token of a part of a text that is encoded alone."""
    encoding = backend.encode(text[start:stop], add_special_tokens=False)
    return [(token, start + a, start + b) for token, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)]


def control_pattern(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """Return a pattern that matches each control token in a rendered text, but no guarded spelling."""
    return _control_tokens(tokenizer).pattern


class _ControlTokens(NamedTuple):
    """Ids of the control tokens, a pattern that matches one, and one that matches the first character of each."""

    ids: frozenset[int]
    pattern: re.Pattern[str]
    beginning: re.Pattern[str]


def control_spellings(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the spellings of the control tokens of a tokenizer, the longest first."""
    template = str(tokenizer.chat_template)
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if _is_control(token, template))
    return sorted(added, key=len, reverse=True)


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerFast) -> _ControlTokens:
    """Return the control tokens of a tokenizer. The cache assumes that it gets no further ones after its first use."""
    template = str(tokenizer.chat_template)
    # Longest spelling first: a regular expression takes the first alternative that matches.
    added = sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content))
    control = {token.content: index for index, token in added if _is_control(token, template)}
    beginnings = [f"{re.escape(spelling[0])}(?={re.escape(spelling[1:])})" for spelling in control]
    # An empty pattern would match everywhere, `(?!)` matches nowhere.
    patterns = (re.compile("|".join(parts) or "(?!)") for parts in (map(re.escape, control), beginnings))
    return _ControlTokens(frozenset(control.values()), *patterns)


def _is_control(token: AddedToken, template: str) -> bool:
    """
    Return whether an added token is a control token.

    Others are words, or text that Gemma has as added tokens: white space, and HTML tags that no template writes.
    """
    is_tag = re.fullmatch("</?[a-z][a-z0-9]*>", token.content) and token.content not in MARKS
    is_text = token.normalized or token.content.isspace() or (is_tag and token.content not in template)
    return token.special or not is_text


def _hide_control_tokens(
    control: _ControlTokens, text: str, tokens: list[tuple[int, int, int]]
) -> tuple[str, list[int]]:
    """
    Return a rendered text for the backend that hides control tokens, and the positions of its characters in `text`.

    Only those in `tokens` count: some match between spaces only.
    """
    found = [range(start, end) for token, start, end in tokens if token in control.ids]
    parts: list[str] = []
    kept: list[int] = []
    # A doubled guard is one guard of the text itself.
    for match in re.finditer(f"({control.pattern.pattern})|{_GUARD}{_GUARD}|[^{_GUARD}]", text):
        is_control = match[1] and any(match.start() in span for span in found)
        parts.append(_HIDDEN.format(match[0]) if is_control else match[0].replace(2 * _GUARD, _GUARD))
        kept += [match.start()] * len(parts[-1])
    return "".join(parts), [*kept, len(text)]


@lru_cache(maxsize=8)
def _backend(tokenizer: PreTrainedTokenizerFast, hides: bool = False, continues: bool = False) -> Tokenizer:
    """
    Return a copy of the tokenizer's backend without truncation, padding and post-processor, which moves offsets.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.
        hides (`bool`): spell control tokens as no text does ([`_hide_control_tokens`]). The ids stay. Without them in
            the vocabulary, no text becomes one, also where a Unigram model has `</s>` as a piece.
        continues (`bool`): add no space to the beginning of a text.
    """
    hook = _without_prefix if continues else None
    fields = json.loads(tokenizer.backend_tokenizer.to_str(), object_hook=hook)
    fields |= {"truncation": None, "padding": None, "post_processor": None}
    if hides:
        hidden, model = {}, fields["model"]
        for token in fields["added_tokens"]:
            if token["id"] in _control_tokens(tokenizer).ids:
                hidden[token["content"]] = _HIDDEN.format(token["content"])
                token |= {"content": hidden[token["content"]], "normalized": False, "single_word": False}
        vocab = model["vocab"]  # pairs of piece and score in a Unigram model
        if isinstance(vocab, list):
            model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
        else:
            model["vocab"] = {hidden.get(piece, piece): index for piece, index in vocab.items()}
            model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not hidden.keys() & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(fields))


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a serialized tokenizer that adds no space to the beginning of a text."""
    if part.get("type") in ("Prepend", "Metaspace", "ByteLevel"):
        switches = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}
        part |= {name: value for name, value in switches.items() if name in part}
    return part
