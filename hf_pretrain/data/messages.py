"""
Read messages, tools and tool calls in the forms of OpenAI, ShareGPT and MiniMind, and their loss weights.

`data/conversations.py` describes the internal form.
"""

import contextlib
import json
import re
from typing import Any

from transformers.utils import logging

from .formats import BadRecord, check_characters, check_values, json_type


logger = logging.get_logger(__name__)

ROLES = ("system", "user", "assistant", "tool")
# Values of ShareGPT's `from`.
SHAREGPT_ROLES = {role: role for role in ROLES} | {"human": "user"}
SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant")
SHAREGPT_ROLES |= dict.fromkeys(("observation", "function_response", "function"), "tool")

# Other names of the loss weight and the thought.
_ALIASES = {"loss": "weight", "reasoning": "reasoning_content", "thinking": "reasoning_content"}
# Fields of a message that this package reads, together with those that `_translate` replaces by them.
_READ = {"role", "content", "reasoning_content", "tool_calls", "tools", "weight"}
# Names, identifiers and counts describe a message.
_DESCRIBING = ("_id", "_name", "_tokens")
_MEDIA = {*"image images audio audios video videos".split()}
_LOSS = {*"weight weights loss mask masked".split()}
_TRAINED = {*"train trained trainable training".split()}
# Words in the names of fields of a record that say whether it is to be learned, such as `label` of KTO.
_WANTED = _TRAINED | {*"label labels kto".split()}
# Words in the names of other fields that would change what a message teaches.
_MEANINGFUL = {*"reasoning thinking thought thoughts refusal tool tools function functions call calls".split()}
_MEANINGFUL |= _MEDIA | _LOSS | _TRAINED
# `pandas` writes lists into CSV files as Python prints them.
_PRINTED_MESSAGES = re.compile(r"\s*\[\s*\{(?=[^}]*'(role|from)'\s*:)\s*'(role|from|content|value)'\s*:")


def parse_tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """
    Return the tools of a record or message; `None` without any.

    Raises:
        `BadRecord`: unless each tool is an object.
    """
    if is_blank(fields.get("tools")):
        return None
    tools = parsed_as(fields["tools"], "tools", list)
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("'tools' is no list of JSON schemas; fix or drop the line")
    return tools


def read_turn(value: Any, name: str, role: str) -> tuple[list[dict], list | None]:
    """
    Return the messages of a part of a conversation, and the tools that one of them holds.

    Args:
        value (`Any`): a list of messages, one message, the JSON text of either, or a text: one message.
        name (`str`): name of the column in reasons.
        role (`str`): role of a text.

    Raises:
        `BadRecord`: for a list of messages as Python prints it, and in the cases of [`read_messages`].
    """
    messages = value
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        if _PRINTED_MESSAGES.match(value):
            raise BadRecord(f"{name!r} holds messages as Python prints them; write them as JSON (`json.dumps`)")
        # Plain text may begin with a bracket.
        with contextlib.suppress(ValueError, RecursionError):
            messages = json.loads(value)
    messages = [messages] if isinstance(messages, dict) else messages
    # An answer may be JSON, too.
    if isinstance(value, str) and not (messages and isinstance(messages, list) and all(map(_is_message, messages))):
        messages = [{"role": role, "content": value}]
    check_values(messages, name)
    return read_messages(messages, name)


def _is_message(value: Any) -> bool:
    """Return whether a parsed value looks like a message."""
    return isinstance(value, dict) and (value.get("role") in ROLES or value.keys() >= {"from", "value"})


def read_messages(messages: Any, name: str) -> tuple[list[dict], list | None]:
    """
    Return messages in the internal form, and the tools that MiniMind writes into one of them.

    A message with a loss weight other than 1 also has a field `weight`.

    Args:
        messages (`Any`): a parsed value, which must be a list of messages, or its JSON text.
        name (`str`): name of the column in reasons.

    Raises:
        `BadRecord`: if the value is not a list of messages, or a message is malformed.
    """
    if isinstance(messages, str) and messages.strip():
        messages = parsed_as(messages, name, list)
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"{name!r} is no list of messages but {json_type(messages) if messages != [] else 'empty'}")
    read, tools = [], None
    for message in messages:
        if not isinstance(message, dict):
            raise BadRecord(f"{name!r} holds {json_type(message)} in place of a message")
        message = _translate(message)
        if message.get("role") not in ROLES:
            raise BadRecord(f"a message has the role {quoted(message.get('role'))}; known are {', '.join(ROLES)}")
        tools = parse_tools(message) or tools
        _check_fields(message)
        read.append(_read_message(message))
    return read, tools


def _translate(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without nulls and with the names that this package reads, also for the fields of ShareGPT."""
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message:
        name = message.pop("from")
        if not isinstance(name, str) or name not in SHAREGPT_ROLES:
            raise BadRecord(f"a message is from {quoted(name)}; known are {', '.join(SHAREGPT_ROLES)}")
        message["role"] = SHAREGPT_ROLES[name]
        # Without a value, the message has no content either.
        if "value" in message:
            message["content"] = message.pop("value")
        if name == "function_call":
            calls = parsed_as(message.pop("content", ""), name, (dict, list))
            message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    for alias, name in _ALIASES.items():
        if not is_blank(message.get(alias)) and is_blank(message.get(name)):
            message[name] = message.pop(alias)
    return message


def _check_fields(message: dict[str, Any]) -> None:
    """
    Log the fields of a message that this package leaves out.

    Raises:
        `BadRecord`: for a field whose name says that it would change what the message teaches.
    """
    others = [name for name, value in message.items() if name not in _READ and not is_blank(value)]
    if message["role"] != "assistant":
        others += [name for name in ("tool_calls", "reasoning_content") if not is_blank(message.get(name))]
    for name in others:
        if _words(name) & _MEANINGFUL:
            role = message["role"]
            raise BadRecord(f"a message of the {role} has the field {quoted(name)}, which cannot be trained; drop it")
        logger.warning_once(f"Messages have the field {quoted(name)}, which is left out: the model does not see it.")


def _words(name: Any) -> set[str]:
    """Return the words of the name of a field; none for fields that describe."""
    return set() if str(name).endswith(_DESCRIBING) else {*re.findall("[a-z]+", str(name).lower())}


def check_record_fields(record: dict[str, Any], *, has_loss: bool = True) -> None:
    """
    Raise `BadRecord` for a field beside the messages whose name says that it would change what the record teaches.

    Args:
        record (`dict`): the fields of a record.
        has_loss (`bool`, defaults to `True`): check fields that speak of the loss, not only those that speak of media.
    """
    for name, value in record.items():
        words = set() if is_blank(value) else _words(name)
        # A CSV file holds numbers and booleans as text.
        text = str(value).strip().lower()
        changes_loss = (words & _LOSS and text not in ("1", "1.0", "true")) or (
            words & _WANTED and text in ("0", "0.0", "-1", "false")
        )
        if words & _MEDIA or (has_loss and changes_loss):
            raise BadRecord(
                f"the record has the field {quoted(name)}, which cannot be trained; drop the line, or the field if it "
                "judges nothing"
            )


def _read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return one message in the internal form; raise `BadRecord` if its parts are malformed."""
    role, weight, reasoning = message["role"], _read_weight(message), message.get("reasoning_content")
    calls = [] if is_blank(message.get("tool_calls")) else parsed_as(message["tool_calls"], "tool_calls", list)
    # The assistant may think or call a tool without saying anything.
    if "content" not in message and not (role == "assistant" and (calls or reasoning)):
        raise BadRecord(f"a message of the {role} has no content; write it or drop the line")
    # In this order, so that equal messages give equal JSON.
    read = {"role": role, "content": as_text(message.get("content", ""), "content")}
    if role != "assistant":
        return read
    if reasoning:
        reasoning = as_text(reasoning, "reasoning_content")
    else:
        # Some data sets write the thought into the text instead of a field.
        reasoning, read["content"] = _split_thought(read["content"])
    # The tokenizer would encode these marks letter by letter.
    if mark := re.search("</?think>", f"{reasoning}{read['content']}"):
        raise BadRecord(f"an answer has {mark[0]} apart from a whole thought at its beginning; fix or drop it")
    extra = {"reasoning_content": reasoning, "tool_calls": list(map(_read_call, calls))}
    extra = {name: value for name, value in extra.items() if value}
    return read | extra | ({} if weight == 1 else {"weight": weight})


def _read_weight(message: dict[str, Any]) -> float:
    """
    Return the loss weight of a message, 1 by default.

    Raises:
        `BadRecord`: for a weight that is no number from 0 or boolean, or a weight above 1 of another role.
    """
    weight = message.get("weight", 1)
    # Weights are stored as float32.
    if not isinstance(weight, (bool, int, float)) or not 0 <= weight < 1e9:
        raise BadRecord("a message has a 'weight' that is no boolean or number of 0 or more; correct it")
    # Some files give each message the weight 1.
    if weight not in (0, 1) and message["role"] != "assistant":
        raise BadRecord(f"a message of the {message['role']} has a 'weight'; only answers have weights; remove it")
    return weight


def take_weights(messages: list[dict[str, Any]]) -> list[float]:
    """Remove the loss weights from messages, and return those of the messages of the assistant."""
    return [message.pop("weight", 1) for message in messages if message["role"] == "assistant"]


def check_answers(messages: list[dict[str, Any]], weights: list[float]) -> None:
    """Raise `BadRecord` for an empty answer that is trained: the model would learn to end its answer at once."""
    answers = (message for message in messages if message["role"] == "assistant")
    for answer, weight in zip(answers, weights, strict=True):
        if weight and answer.keys() <= {"role", "content"} and not answer["content"].strip():
            raise BadRecord("an answer of the assistant is empty; write it or drop the line")


def _split_thought(content: str) -> tuple[str, str]:
    """
    Split an answer's text into the thought that it begins with and the rest.

    An answer of a model whose prompt opens the thought, such as DeepSeek-R1, only has the closing mark. It then stands
    at the end of a line.

    NOTE: do not use a regular expression here. With white space on both sides of `.*?`, it takes cubic time if the
    closing mark is missing.
    """
    thought, closing, rest = content.lstrip().partition("</think>")
    is_opened = thought.startswith("<think>")
    if not closing or not (is_opened or rest.lstrip(" \t\r").startswith("\n")):
        return "", content
    return thought.removeprefix("<think>").strip(), rest.lstrip()


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call as `name` and `arguments`, from OpenAI's format or without its `function` level."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord("a tool call has no name; write it as {'name': ..., 'arguments': {...}}")
    # Llama's form names them `parameters`.
    arguments = function.get("arguments") or function.get("parameters")
    return {"name": function["name"], "arguments": parsed_as(arguments, "arguments", dict) if arguments else {}}


def parsed_as(value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
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


def is_blank(value: Any) -> bool:
    """Return whether a value says nothing: null, an empty list or object, or a text of white space."""
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def quoted(value: Any) -> str:
    """Return a wrong value for a message to users: quoted if it is a short text, else its type."""
    return repr(value) if isinstance(value, str) and len(value) <= 40 else json_type(value)


def as_text(value: Any, name: str) -> str:
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
