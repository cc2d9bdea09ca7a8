"""
Read records as conversations and preferences.

In the internal form, a conversation is a document `{"text": str}` too, and its text is JSON. A conversation has
`messages`, each with `role` and `content`. A message of the assistant may also have `reasoning_content` and
`tool_calls`. A conversation may have `tools`, `chat_template_kwargs` and `weights`: a loss weight for each message of
the assistant. Instead of `messages`, a preference has `prompt`, `chosen` and `rejected`, each a list of messages.
"""

import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any

from .formats import BadRecord, json_type, parse_json, write_json
from .messages import (
    as_text,
    check_answers,
    check_record_fields,
    is_blank,
    parse_tools,
    parsed_as,
    quoted,
    read_messages,
    read_turn,
    take_weights,
)


# Names that data sets give to a question and its answer.
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
ANSWERS = ("completion", "output", "answer", "response")
# The answer that `hf-pretrain generate` writes into a record.
GENERATED = "generated"
# The fields of each kind of conversation. A record is of the first kind whose fields it has.
_NAMED_KINDS: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("conversations",),  # of MiniMind and ShareGPT
    ("prompt", "completion"),
    ("instruction", "output"),  # of Alpaca
)
CONVERSATION_KEYS = (*_NAMED_KINDS, *product(QUESTIONS, ANSWERS), ("prompt", GENERATED))
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
# Variables of chat templates that a record must not replace.
_RESERVED_KWARGS = {"messages", "conversations", "tools", "chat_template", "add_generation_prompt", "self", "range"}


def read_conversation(record: Any) -> str:
    """
    Read the conversation of one record.

    Records with `messages`, and with `prompt` and `completion` (texts or lists of messages), are in TRL's formats.
    `conversations` holds MiniMind's messages, the first of which may hold the tools, or ShareGPT's with `from` and
    `value`. Alpaca's records may lack `input` and `history`. The other kinds have one of `QUESTIONS` and one of
    `ANSWERS`, and optionally `history`. A field `system` becomes the first message of any kind. A text in `generated`
    replaces the answers at the end of `prompt` or `messages`, and those in other fields.

    Args:
        record (`Any`): a parsed record, which must be a `dict`. Fields that are null count as absent, because a table
            holds every column in every row. So do empty texts, as CSV files have no nulls. A list may be JSON text.

    Returns:
        `str`: JSON in the internal form.

    Raises:
        `BadRecord`: if the record has none of these formats, a message is malformed, the assistant says nothing, or
            one of its answers is empty.
    """
    record = _check_record(record)
    check_record_fields(record)
    messages, tools = _read_kind(record, _find_kind(record))
    messages = _with_system(messages, record)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("the assistant says nothing in it, so there is nothing to learn; drop the line")
    weights = take_weights(messages)
    check_answers(messages, weights)
    parts: dict[str, Any] = {"messages": messages}
    if any(weight != 1 for weight in weights):
        parts["weights"] = weights
    return _write(parts, record, tools)


def _find_kind(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of the first kind that a record has; raise `BadRecord` without any."""
    if isinstance(record.get(GENERATED), str):
        # Also an empty one: the record then holds an empty answer, and not that of another field.
        for key in ("prompt", "messages"):
            if not is_blank(record.get(key)):
                return key, GENERATED
    # An empty field decides only if there is no other kind.
    for names in ({name for name, value in record.items() if not is_blank(value)}, record.keys()):
        for keys in CONVERSATION_KEYS:
            if names >= {*keys}:
                return keys if keys in _NAMED_KINDS[:3] else _check_pair(record, keys)
    wanted = " or ".join(" with ".join(keys) for keys in _NAMED_KINDS)
    wanted += "; name its columns, e.g. --columns prompt=question completion=answer"
    text = "; pass --dataset_kind text for text" if "text" in record else ""
    raise BadRecord(f"no conversation: its fields are {', '.join(map(str, record))}, and it needs {wanted}{text}")


def _check_pair(record: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields of a question and its answer; raise `BadRecord` if other fields could be meant, too."""
    # Fields that a question may need, and that only the user can place. An instruction may have an input.
    rivals = {"context", "passage", "choices", "options", *(() if keys in _NAMED_KINDS else (*QUESTIONS, *ANSWERS))}
    rivals -= {*keys, "input"} if "instruction" in keys else {*keys}
    if others := [name for name in record if name in rivals and not is_blank(record[name])]:
        advice = "name all that count, e.g. --columns instruction=question input=context output=answer"
        raise BadRecord(f"{' and '.join(map(repr, keys))} stand beside {', '.join(map(repr, others))}; {advice}")
    return keys


def _read_kind(record: dict[str, Any], keys: tuple[str, ...]) -> tuple[list[dict], list | None]:
    """Return the messages of a record of the kind with these fields, and the tools that one of them holds."""
    if keys == ("prompt", "completion"):
        messages, tools = read_turn(record["prompt"], "prompt", "user")
        return messages + read_turn(record["completion"], "completion", "assistant")[0], tools
    if keys[-1] == GENERATED:
        messages, tools = read_turn(record[keys[0]], keys[0], "user")
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return messages + _read_generated(as_text(record[GENERATED], GENERATED)), tools
    if len(keys) == 2:
        answer = {"role": "assistant", "content": as_text(record[keys[1]], keys[1])}
        return read_messages([*_read_question(record, keys[0]), answer], keys[1])
    # The other kinds have a single field, which holds the messages.
    return read_messages(record[keys[0]], keys[0])


def _read_generated(text: str) -> list[dict]:
    """Return the message of an answer that `hf-pretrain generate` has written: text, then calls within their marks."""
    content, *parts = re.split("<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)
    # The tokenizer would encode these marks letter by letter.
    if any(map(str.strip, parts[1::2])) or "tool_call>" in content:
        raise BadRecord(f"{GENERATED!r} has <tool_call> apart from whole calls at its end; fix or drop it")
    answer = {"role": "assistant", "content": content}
    if parts:
        # Templates write a line break between them.
        answer |= {"content": content.removesuffix("\n"), "tool_calls": list(map(parse_json, parts[::2]))}
    return read_messages([answer], GENERATED)[0]


def _read_question(record: dict[str, Any], key: str) -> list[dict]:
    """Return the messages of `history`, earlier pairs of question and answer, and the question in the field `key`."""
    names = ("instruction", "input") if key == "instruction" else (key,)
    asked = [as_text(record[name], name) for name in names if not is_blank(record.get(name))]
    turns = [] if is_blank(record.get("history")) else parsed_as(record["history"], "history", list)
    if not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in turns):
        raise BadRecord("'history' is no list of pairs of question and answer; fix or drop the line")
    texts = [*(as_text(text, "history") for turn in turns for text in turn), "\n".join(asked)]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _with_system(messages: list[dict], record: dict[str, Any]) -> list[dict]:
    """Return messages with the record's system message, unless they begin with another one."""
    if is_blank(record.get("system")) or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": as_text(record["system"], "system")}, *messages]


def read_preference(record: Any) -> str:
    """
    Read the preference of one record.

    `chosen` and `rejected` are messages, lists of messages, texts, or transcripts (HH-RLHF). The prompt is in
    `prompt`, or `chosen` and `rejected` both begin with it (MiniMind, TRL), or both (UltraFeedback), or it is in
    `conversations` (ShareGPT) or in one of `QUESTIONS`. A field `system` becomes its first message.

    Args:
        record (`Any`): a parsed record, which must be a `dict`.

    Returns:
        `str`: JSON in the internal form.

    Raises:
        `BadRecord`: if a field is missing, a message is malformed, the two do not answer the same prompt, or they are
            equal.
    """
    record = _check_record(record)
    missing = [key for key in ("chosen", "rejected") if key not in record]
    if missing:
        raise BadRecord(f"no {missing[0]!r} (there is: {', '.join(map(str, record))}); write chosen and rejected")
    check_record_fields(record)
    turns: dict[str, list[dict]] = {"prompt": []}
    tools = None
    for key, role in (("chosen", "assistant"), ("rejected", "assistant"), ("prompt", "user")):
        if key == "prompt" and is_blank(record.get(key)):
            continue
        turns[key], found = read_turn(_read_transcript(record[key]), key, role)
        tools = tools or found
        if take_weights(turns[key])[-1:] not in ([], [1]) and key != "prompt":
            raise BadRecord(f"{key!r} has a loss weight, but a preference compares whole answers; remove the field")
    prompt, answers = _split_prompt(**turns)
    if not prompt:
        prompt, found = _read_prompt(record)
        tools = tools or found
    if answers["chosen"] == answers["rejected"]:
        raise BadRecord("chosen and rejected are equal; drop the line")
    for key, messages in answers.items():
        if not messages or messages[0]["role"] != "assistant":
            raise BadRecord(f"{key!r} does not continue with an answer of the assistant; fix or drop the line")
        if len(messages) > 1:
            raise BadRecord(f"{key!r} continues after the answer, and only the last one can be compared; cut it off")
    check_answers(answers["chosen"], [1])
    return _write({"prompt": _with_system(prompt, record), **answers}, record, tools)


def _read_transcript(value: Any) -> Any:
    """Return the messages of a text that begins with `\\n\\nHuman: `, as in HH-RLHF; other values as they are."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return value
    _, *parts = re.split("\n\n(Human|Assistant): ?", value)
    return [{"role": _SPEAKERS[who], "content": text} for who, text in zip(parts[::2], parts[1::2], strict=True)]


def _read_prompt(record: dict[str, Any]) -> tuple[list[dict], list | None]:
    """Return the prompt of a preference that has no field `prompt`, and the tools that one of its messages holds."""
    names = [name for name in ("conversations", "messages", *QUESTIONS) if not is_blank(record.get(name))]
    if not names:
        raise BadRecord("chosen and rejected share no prompt; name its column, e.g. --columns prompt=question")
    if names[0] in QUESTIONS:
        return _read_question(record, _check_pair(record, (names[0], "chosen"))[0]), None
    messages, tools = read_messages(record[names[0]], names[0])
    take_weights(messages)
    if messages[-1]["role"] == "assistant":
        raise BadRecord(f"{names[0]!r} ends with an answer, and chosen and rejected are others; remove it")
    return messages, tools


def _split_prompt(
    prompt: list[dict], chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], dict[str, list[dict]]]:
    """
    Return the prompt of a preference, and its two answers without the prompt.

    Args:
        prompt (`list[dict]`): the prompt that the record states; empty if it states none.
        chosen, rejected (`list[dict]`): the answers, with or without the prompt before them.

    Raises:
        `BadRecord`: if the answers begin with another prompt than the stated one.
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))
    # Both answers may begin with equal messages of the assistant. They belong to the answers, not to the prompt.
    while shared and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    if prompt and (not shared or chosen[0]["role"] == "assistant"):
        return prompt, {"chosen": chosen, "rejected": rejected}
    stated, begun = ([(part["role"], part["content"].strip()) for part in side] for side in (prompt, chosen[:shared]))
    # The stated prompt may be only a part of it, such as the last question.
    if not any(begun[i : i + len(stated)] == stated for i in range(shared + 1)):
        raise BadRecord("chosen and rejected begin with another prompt than the one in 'prompt'; remove one")
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


RECORDS: dict[str, Callable[[Any], str]] = {"conversation": read_conversation, "preference": read_preference}


def first_question(text: str) -> str:
    """Return the first message of the user in a conversation or preference in the internal form."""
    parts = json.loads(text)
    messages = parts.get("prompt") or parts["messages"]
    # Without a question, the whole text decides the split.
    return next((message["content"] for message in messages if message["role"] == "user"), text)


def _check_record(record: Any) -> dict[str, Any]:
    """Return the fields of a record that are not null. Raise `BadRecord` if it is not an object."""
    if not isinstance(record, dict):
        raise BadRecord(f"not an object but {json_type(record)}; write it as {{'messages': [...]}}")
    return {key: value for key, value in record.items() if value is not None}


def _write(parts: dict[str, Any], record: dict[str, Any], tools: list | None) -> str:
    """Return the internal form as JSON, with the record's tools, or else with `tools`, found in a message."""
    if not is_blank(record.get("functions")):
        raise BadRecord("'functions' is an older form of 'tools'; write tools")
    if tools := parse_tools(record) or tools:
        parts["tools"] = tools
    if not is_blank(record.get("chat_template_kwargs")):
        kwargs = parsed_as(record["chat_template_kwargs"], "chat_template_kwargs", dict)
        # A variable that is null is not set.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        taken = next((k for k in kwargs if k in _RESERVED_KWARGS), None)
        if taken is not None:
            raise BadRecord(f"'chat_template_kwargs' holds {quoted(taken)}, which a record cannot set; remove it")
        parts["chat_template_kwargs"] = kwargs
    return write_json(parts)
