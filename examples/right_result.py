"""A reward for the tasks of `tool_tasks.py`: `--rewards examples.right_result:right_result`."""

import re
from typing import Any


def right_result(completions: list[list[dict[str, Any]]], solution: list[list[str]], **columns: Any) -> list[float]:
    """
    Return 0.5 for each rollout in which the result of a tool holds what the answer must state, 1 if the last answer
    states it, too, and otherwise 0.
    """
    rewards = []
    for messages, (value,) in zip(completions, solution, strict=True):
        # Neither 12 in 120 nor 3 in 2.3 or 3.5.
        states = re.compile(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)").search
        found = any(states(message["content"]) for message in messages if message["role"] == "tool")
        rewards.append(0.5 * found * (1 + bool(states(messages[-1]["content"]))))
    return rewards
