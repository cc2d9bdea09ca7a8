"""
Draws per record, as MiniMind makes them: whether a record gets a system message, an empty thought, or a thought.

A draw depends only on the seed and the record. So it is the same in each epoch and process, and after a resume.
"""

import hashlib
import json
from typing import Any


SYSTEM_MESSAGES = (
    "You are a helpful assistant. Answer briefly and correctly.",
    "You are MiniMind, a small language model that likes to help.",
    "Answer the questions of the user as well as you can.",
    "你是一个乐于助人的助手，请简洁、正确地回答。",
    "你是 MiniMind，一个愿意帮忙的小型语言模型。",
    "请尽你所能回答用户的问题。",
)


def draw(seed: int | None, purpose: str, record: Any) -> float:
    """Return a number in [0, 1) for a record, which must be JSON. Another purpose gives an independent number."""
    key = json.dumps([seed, purpose, record])
    # 48 bits fit into a float, so the quotient is below 1.
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest()) / 2**48


def add_system_message(
    messages: list[dict[str, Any]], tools: list[Any] | None, *, seed: int, ratio: float
) -> list[dict[str, Any]]:
    """
    Return messages with a random system message before them, with the probability `ratio`.

    Conversations with tools or with a system message of their own stay as they are.
    """
    if tools or messages[0]["role"] == "system" or draw(seed, "system", messages) >= ratio:
        return messages
    number = int(draw(seed, "which system message", messages) * len(SYSTEM_MESSAGES))
    return [{"role": "system", "content": SYSTEM_MESSAGES[number]}, *messages]
