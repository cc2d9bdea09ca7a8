"""
Read records as conversations and preferences.

In the internal form, a conversation is a document `{"text": str}` too, and its text is JSON. A conversation has
`messages`, each with `role` and `content`. A message of the assistant may also have `reasoning_content` and
`tool_calls`. A conversation may have `tools` and `chat_template_kwargs`. Instead of `messages`, a preference has
`prompt`, `chosen` and `rejected`, each a list of messages.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from .formats import BadRecord, check_characters, check_values, json_type, write_json


ROLES = ("system", "user", "assistant", "tool")
# Values of ShareGPT's `from`.
SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool"},
}

# A record is of the first kind whose fields it has.
CONVERSATION_KEYS = {
    "messages": {"messages"},
    "minimind": {"conversations"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
}
# Variables that this package passes to chat templates, and names that Jinja and transformers define in them. A record
# must not replace these, nor any variable for a special token.
_RESERVED_KWARGS = {
    *("self", "messages", "conversations", "tools", "documents", "chat_template", "compiled_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner"),
}


def read_conversation(record: Any, *, kind: str | None = None) -> str:
    """
    Read the conversation of one record.

    Args:
        record (`Any`): a parsed record, which must be a `dict`. Fields that are null count as absent, because a table
            holds every column in every row.
        kind (`str`, *optional*): a key of `CONVERSATION_KEYS`; the default is the first one whose fields are present.
            `messages` and `prompt_completion` are TRL's formats; the latter holds texts or lists of messages.
            `minimind` has its `tools` in the first message. `sharegpt` writes messages as `from` and `value`. `alpaca`
            may lack `input` and `history`. In every kind, a field `system` becomes the first message.

    Returns:
        `str`: JSON in the internal form.

    Raises:
        `BadRecord`: if the record has none of these formats, a message is malformed, or the assistant says nothing.
    """
    record = _check_record(record)
    # If a record has the fields of several kinds, the order of `CONVERSATION_KEYS` decides.
    if kind is None:
        kind = next((kind for kind, keys in CONVERSATION_KEYS.items() if record.keys() >= keys), None)
    if kind is None or not record.keys() >= CONVERSATION_KEYS[kind]:
        kinds = CONVERSATION_KEYS.values() if kind is None else [CONVERSATION_KEYS[kind]]
        # Two kinds have the same fields.
        wanted = " or ".join(dict.fromkeys(" with ".join(sorted(keys)) for keys in kinds))
        raise BadRecord(f"no conversation: its fields are {', '.join(map(str, record))}, and it needs {wanted}")
    if kind == "prompt_completion":
        messages, tools = _read_turn(record["prompt"], "prompt", "user")
        messages += _read_turn(record["completion"], "completion", "assistant")[0]
    elif kind == "alpaca":
        question = "\n".join(_text(record[key], key) for key in ("instruction", "input") if record.get(key))
        # `history` holds earlier pairs of question and answer.
        turns = [*_parsed(record.get("history", []), "history", list), (question, record["output"])]
        if not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in turns):
            raise BadRecord("'history' is no list of pairs of question and answer; fix or drop the line")
        messages, tools = [], None
        for asked, answered in turns:
            messages += [_message("user", _text(asked, "history")), _message("assistant", _text(answered, "output"))]
    else:
        # The remaining kinds have a single field, which holds the messages.
        (key,) = CONVERSATION_KEYS[kind]
        messages, tools = read_messages(record[key], key)
    if record.get("system") and messages[0]["role"] != "system":
        messages = [_message("system", _text(record["system"], "system")), *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("the assistant says nothing in it, so there is nothing to learn; drop the line")
    return _write({"messages": messages}, record, tools)


def read_preference(record: Any) -> str:
    """
    Read the preference of one record.

    `chosen` and `rejected` are lists of messages or texts. The prompt is in `prompt`, or `chosen` and `rejected` both
    begin with it (MiniMind, TRL).

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
    answers: dict[str, list[dict]] = {}
    tools = None
    for key in ("chosen", "rejected"):
        answers[key], found = _read_turn(record[key], key, "assistant")
        tools = tools or found
    if "prompt" in record:
        prompt, found = _read_turn(record["prompt"], "prompt", "user")
        tools = tools or found
    else:
        # Without a `prompt`, the first messages that both have in common are the prompt.
        pairs = zip(answers["chosen"], answers["rejected"], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, answers.values())))
        # Both answers may begin with equal messages of the assistant. They belong to the answers, not to the prompt.
        while shared and answers["chosen"][shared - 1]["role"] == "assistant":
            shared -= 1
        prompt = answers["chosen"][:shared]
        answers = {key: messages[shared:] for key, messages in answers.items()}
    if not prompt:
        raise BadRecord("chosen and rejected share no prompt; give them the same first messages, or a prompt")
    if answers["chosen"] == answers["rejected"]:
        raise BadRecord("chosen and rejected are equal; drop the line")
    for key, messages in answers.items():
        if not messages or messages[0]["role"] != "assistant":
            raise BadRecord(f"{key!r} does not continue with an answer of the assistant; fix or drop the line")
        if len(messages) > 1:
            raise BadRecord(f"{key!r} continues after the answer, and only the last one can be compared; cut it off")
    return _write({"prompt": prompt, **answers}, record, tools)


SCHEMAS: dict[str, Callable[[Any], str]] = {
    "conversation": read_conversation,
    **{f"conversation:{kind}": partial(read_conversation, kind=kind) for kind in CONVERSATION_KEYS},
    "preference": read_preference,
}


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
    tools = _read_tools(record["tools"]) if record.get("tools") else tools
    if tools:
        parts["tools"] = tools
    if record.get("chat_template_kwargs"):
        kwargs = _parsed(record["chat_template_kwargs"], "chat_template_kwargs", dict)
        # In a table, a conversation also has the variables of all other conversations, with the value null.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        taken = next((k for k in kwargs if k in _RESERVED_KWARGS or k.endswith(("_token", "_tokens"))), None)
        if taken is not None:
            raise BadRecord(f"'chat_template_kwargs' holds {_quoted(taken)}, which a record cannot set; remove it")
        parts["chat_template_kwargs"] = kwargs
    return write_json(parts, "messages")


def _read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools, which may be given as JSON; raise `BadRecord` unless each is an object."""
    tools = _parsed(value, "tools", list)
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("'tools' is no list of JSON schemas; fix or drop the line")
    return tools


def _read_turn(value: Any, name: str, role: str) -> tuple[list[dict], list | None]:
    """Return messages from a list of messages, or from a text: one message with the given role."""
    return ([_message(role, _text(value, name))], None) if isinstance(value, str) else read_messages(value, name)


def read_messages(messages: Any, name: str) -> tuple[list[dict], list | None]:
    """
    Return messages in the internal form, and the tools that MiniMind writes into one of them.

    Args:
        messages (`Any`): a parsed value, which must be a list of messages.
        name (`str`): name of the column in reasons.

    Raises:
        `BadRecord`: if the value is not a list of messages, or a message is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"{name!r} is no list of messages but {json_type(messages) if messages != [] else 'empty'}")
    read, tools = [], None
    for message in messages:
        # The JSON parser puts a BadRecord in place of an object with a repeated key.
        if isinstance(message, BadRecord):
            raise message
        if not isinstance(message, dict):
            raise BadRecord(f"{name!r} holds {json_type(message)} in place of a message")
        message = {key: value for key, value in message.items() if value is not None}
        if "from" in message:
            message = _from_sharegpt(message)
        if message.get("role") not in ROLES:
            raise BadRecord(f"a message has the role {_quoted(message.get('role'))}; known are {', '.join(ROLES)}")
        if message.get("tools"):
            tools = _read_tools(message["tools"])
        read.append(_read_message(message))
    return read, tools


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Translate a ShareGPT message into one with `role` and `content`."""
    name = message["from"]
    if not isinstance(name, str) or name not in SHAREGPT_ROLES:
        raise BadRecord(f"a message is from {_quoted(name)}; known are {', '.join(SHAREGPT_ROLES)}")
    if name == "function_call":
        call = _parsed(message.get("value", ""), "function_call", (dict, list))
        return {"role": "assistant", "content": "", "tool_calls": call if isinstance(call, list) else [call]}
    # Without a value, the message has no content either.
    return {"role": SHAREGPT_ROLES[name]} | ({"content": message["value"]} if "value" in message else {})


def _read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return one message in the internal form; raise `BadRecord` if its parts are malformed."""
    calls = _parsed(message["tool_calls"], "tool_calls", list) if message.get("tool_calls") else None
    # The assistant may think or call a tool without saying anything.
    if "content" not in message and not (
        message["role"] == "assistant" and (calls or message.get("reasoning_content"))
    ):
        raise BadRecord(f"a message of the {message['role']} has no content; write it or drop the line")
    if message["role"] == "assistant":
        content, reasoning = _text(message.get("content", ""), "content"), message.get("reasoning_content")
        # Some data sets write the thought into the text instead of a field.
        if not reasoning:
            reasoning, content = _split_thought(content)
        extra: dict[str, Any] = {}
        if reasoning:
            extra["reasoning_content"] = _text(reasoning, "reasoning_content")
        if calls:
            extra["tool_calls"] = [_read_call(call) for call in calls]
        return _message("assistant", content, **extra)
    return _message(message["role"], _text(message["content"], "content"))


def _split_thought(content: str) -> tuple[str, str]:
    """
    Split an answer's text into the thought that it begins with and the rest.

    If the marks stayed in the text, the tokenizer would encode them letter by letter.

    NOTE: do not use a regular expression here. With white space on both sides of `.*?`, it takes cubic time if the
    closing mark is missing.
    """
    thought, closing, rest = content.lstrip().partition("</think>")
    if not closing or not thought.startswith("<think>"):
        return "", content
    return thought.removeprefix("<think>").strip(), rest.lstrip()


def _message(role: str, content: str, **extra: Any) -> dict[str, Any]:
    """Build a message whose first keys are `role` and `content`, so that equal messages give equal JSON."""
    return {"role": role, "content": content, **extra}


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call as `name` and `arguments`, from OpenAI's format or without its `function` level."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord("a tool call has no name; write it as {'name': ..., 'arguments': {...}}")
    arguments = function.get("arguments")
    # In a table, a call also has the arguments of all other calls, with the value null.
    arguments = _parsed(arguments, "arguments", dict) if arguments else {}
    return {"name": function["name"], "arguments": {k: v for k, v in arguments.items() if v is not None}}


def _parsed(value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """Return a value, parsed if it is JSON text. Raise `BadRecord` if it is not of type `kind`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{name!r} is text that is not JSON, or nests too deep; fix or drop the line") from error
    if not isinstance(value, kind):
        raise BadRecord(f"{name!r} holds {json_type(value)}; fix or drop the line")
    check_values(value, name)
    return value


def _quoted(value: Any) -> str:
    """Return a wrong value for a message to users: quoted if it is a short text, else its type."""
    return repr(value) if isinstance(value, str) and len(value) <= 40 else json_type(value)


def _text(value: Any, name: str) -> str:
    """Return a text, joined if it is a list of parts. Raise `BadRecord` for anything else."""
    if isinstance(value, list):  # the OpenAI API writes a text as a list of parts
        texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(value) or not all(isinstance(text, str) for text in texts):
            raise BadRecord(f"{name!r} has parts that are not text; drop the line")
        value = "".join(texts)
    if not isinstance(value, str):
        raise BadRecord(f"{name!r} holds {json_type(value)}, not text; quote it or drop the line")
    check_characters(value, name)
    return value


__all__ = ["SCHEMAS", "first_question", "read_conversation", "read_messages", "read_preference"]
