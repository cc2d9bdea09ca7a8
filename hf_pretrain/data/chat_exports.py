"""
Read what ChatGPT and Telegram export as conversations.

ChatGPT's `conversations.json` is an array of conversations, each a tree in `mapping`. Telegram Desktop's `result.json`
is one chat, or an object with all chats in `chats.list`
(https://github.com/telegramdesktop/tdesktop, Telegram/SourceFiles/export/output/export_output_json.cpp).
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from transformers.utils import logging


logger = logging.get_logger(__name__)

# Seconds of silence after which a chat begins another conversation.
PAUSE_SECONDS = 3600
# What ChatGPT writes where it shows a link or a name; in older exports, `【3†source】`.
_MARK = re.compile(" ?(\ue200[^\ue201]*\ue201|【\\d[^】]*†[^】]*】)")
# Kinds of ChatGPT's contents that are no part of the conversation.
_NOT_SHOWN = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context")


def read_export(value: Any) -> list[dict[str, Any]] | None:
    """
    Return the conversations of an export in which both sides write; `None` for anything else.

    Args:
        value (`Any`): a parsed file, or its JSON text.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, list):
            parts = [_read_whole(conversation) for conversation in value]
            found = [part for part in parts if part is not None]
            if not found:
                return None
            if len(found) < len(parts):
                left_out = f"{len(parts) - len(found)} of {len(parts)} conversations"
                logger.warning(f"{left_out} of ChatGPT's export have another form, and are left out.")
        else:
            chats = value["chats"]["list"] if "chats" in value else [value]
            chats = [chat for chat in chats if isinstance(chat, dict) and chat.get("type") == "personal_chat"]
            found = [part for chat in chats for part in _split_chat(chat)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return [{"messages": part} for part in found if {"user", "assistant"} <= {message["role"] for message in part}]


def _read_whole(conversation: Any) -> list[dict[str, Any]] | None:
    """Return the messages of a conversation of ChatGPT's export; `None` for a damaged one."""
    try:
        return _read_chatgpt(conversation)
    except (KeyError, TypeError, AttributeError):
        return None


def _read_chatgpt(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Return the messages of the branch of a conversation that ChatGPT shows, without hidden and empty ones and thoughts.

    They end before the first image, file or call of a tool, because later answers depend on it.
    """
    mapping, place = conversation["mapping"], conversation["current_node"]
    branch: list[Any] = []
    # A damaged tree may have a circle.
    while place in mapping and len(branch) < len(mapping):
        branch.append(mapping[place].get("message"))
        place = mapping[place].get("parent")
    messages = []
    for message in filter(None, reversed(branch)):
        role, content, about = message["author"]["role"], message["content"], message.get("metadata") or {}
        is_hidden = about.get("is_visually_hidden_from_conversation") or message.get("weight") == 0
        if is_hidden or content["content_type"] in _NOT_SHOWN:
            continue
        is_call = role == "tool" or message.get("recipient", "all") != "all"
        if is_call or about.get("attachments") or content["content_type"] != "text":
            break
        text = "".join(content["parts"])
        for reference in about.get("content_references") or ():
            # The list of sources below an answer matches a space.
            if _MARK.match(mark := reference.get("matched_text") or "") and reference.get("alt"):
                text = text.replace(mark, reference["alt"])
        if text := _MARK.sub("", text).strip():
            messages.append({"role": role, "content": text})
    return messages


def _split_chat(chat: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """
    Yield the conversations of a chat of Telegram with one other person, whose id the chat has.

    The owner of the export is the assistant. A conversation ends before an hour of silence. It has the consecutive
    messages of one person as one message, without media and forwarded texts.
    """
    written, number, last, num_odd = [], 0, 0, 0
    for message in chat.get("messages") or ():
        try:
            parts = message.get("text") or ""
            text = "".join(part if isinstance(part, str) else part["text"] for part in parts).strip()
            # Calls and media have no text, and a forwarded text is someone else's.
            if text and "forwarded_from" not in message:
                role = "user" if message["from_id"] == f"user{chat['id']}" else "assistant"
                seconds = int(message["date_unixtime"])
                number, last = number + (seconds - last > PAUSE_SECONDS), seconds
                written.append((number, role, text))
        except (KeyError, TypeError, ValueError, AttributeError):
            num_odd += 1
    if num_odd:
        logger.warning(f"{num_odd} messages of a chat of Telegram have another form, and are left out.")
    for _, conversation in groupby(written, lambda item: item[0]):
        runs = groupby(conversation, lambda item: item[1])
        yield [{"role": role, "content": "\n".join(text for *_, text in run)} for role, run in runs]
