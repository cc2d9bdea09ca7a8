"""A reward for the tasks of `tool_tasks.py`: `--rewards examples.right_result:right_result`."""

import re
from typing import Any


MOST_CHARACTERS = 80


def right_result(completions: list[list[dict[str, Any]]], solution: list[list[str]], **columns: Any) -> list[float]:
    """
    Return for each rollout 0.2 if a call ran without an error, 0.4 more if the result of a call holds what the answer
    must state, and 0.4 more if the last answer states it, too.

    The steps on the way count because a model that is wrong everywhere learns nothing. An answer without a call gets 0
    even if it is right. So does a rollout with text beside a call, or whose answer is longer than a line: a model that
    only needs the right value may learn to write on until it is cut off.
    """
    rewards = []
    for messages, (value,) in zip(completions, solution, strict=True):
        results = [message["content"] for message in messages if message["role"] == "tool"]
        # Neither 12 in -12, 120 or 12,000 nor 3 in 2.3 or 3.5.
        states = re.compile(rf"(?<![\w.,-]){re.escape(value)}(?!\w|[.,-]\d)").search
        beside = [message.get("content") or "" for message in messages if message.get("tool_calls")]
        answer = "" if messages[-1]["role"] == "tool" else messages[-1].get("content") or ""
        is_brief = not any(map(str.strip, beside)) and len(answer.splitlines()) < 2 and len(answer) <= MOST_CHARACTERS
        ran, found = any("error" not in result for result in results), any(map(states, results))
        rewards.append(is_brief * (0.2 * ran + 0.4 * found + 0.4 * (found and bool(states(answer)))))
    return rewards
