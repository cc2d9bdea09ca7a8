"""
Read what ChatGPT and Telegram export as conversations.

ChatGPT's `conversations.json` is an array of conversations, each a tree in `mapping`. Telegram Desktop's `result.json`
is one chat, or an object with all chats in `chats.list`
(https://github.com/telegramdesktop/tdesktop, Telegram/SourceFiles/export/output/export_output_json.cpp).
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any


# Seconds of silence after which a chat begins another conversation.
PAUSE_SECONDS = 3600
# Kinds of ChatGPT's contents that are no part of the conversation.
_NOT_SHOWN = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context")


def read_chatgpt(record: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Return the messages of the branch of a conversation that ChatGPT shows.

    They end before the first image, file or call of a tool, because later answers depend on it. Hidden and empty
    messages and thoughts are left out.
    """
    branch = []
    mapping, place = record["mapping"], record["current_node"]
    # A damaged tree may have a circle.
    while place in mapping and len(branch) < len(mapping):
        branch.append(mapping[place].get("message"))
        place = mapping[place].get("parent")
    messages = []
    for message in filter(None, reversed(branch)):
        role, content, metadata = message["author"]["role"], message["content"], message.get("metadata") or {}
        is_hidden = metadata.get("is_visually_hidden_from_conversation") or message.get("weight") == 0
        if is_hidden or content.get("content_type") in _NOT_SHOWN:
            continue
        parts = content.get("parts")
        is_text = content.get("content_type") == "text" and all(isinstance(part, str) for part in parts or ())
        if role == "tool" or message.get("recipient", "all") != "all" or metadata.get("attachments") or not is_text:
            break
        if text := "".join(parts or ()).strip():
            messages.append({"role": role, "content": text})
    return messages


def split_telegram(export: Any) -> list[dict[str, Any]] | None:
    """
    Return the conversations of Telegram's personal chats in the order of the file; `None` for anything else.

    The owner of the export is the assistant. A conversation ends before an hour of silence. It has the consecutive
    messages of one person as one message, without media. Conversations in which only one person writes are left out.
    """
    if not isinstance(export, dict):
        return None
    chats = export["chats"].get("list") if isinstance(export.get("chats"), dict) else [export]
    keys = {"type", "id", "messages"}
    if not isinstance(chats, list) or not all(isinstance(chat, dict) and chat.keys() >= keys for chat in chats):
        return None
    found = (list(_split_chat(chat)) for chat in chats if chat["type"] == "personal_chat")
    return [{"messages": messages} for part in found for messages in part if len(messages) > 1]


def _split_chat(chat: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the conversations of a chat with one other person, whose id the chat has."""
    written = []
    number, last = 0, 0
    for message in chat["messages"]:
        text = message.get("text") or ""
        parts = text if isinstance(text, list) else [text]
        text = "".join(part if isinstance(part, str) else part["text"] for part in parts).strip()
        # Calls and pinned messages are of type `service`. A forwarded text is of someone else.
        if message.get("type") != "message" or not text or "forwarded_from" in message:
            continue
        seconds = int(message["date_unixtime"])
        number, last = number + (seconds - last > PAUSE_SECONDS), seconds
        role = "user" if message["from_id"] == f"user{chat['id']}" else "assistant"
        written.append((number, role, text))
    for _, conversation in groupby(written, lambda item: item[0]):
        runs = groupby(conversation, lambda item: item[1])
        yield [{"role": role, "content": "\n".join(text for *_, text in run)} for role, run in runs]
