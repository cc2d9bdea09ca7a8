"""
The rules by which MiniMind's `train_grpo.py` and `train_agent.py` reward an answer, with the same values.

Each function takes the text of the answer, or of all turns of a rollout, as the model wrote it: with the thought, the
tags and the tool calls.
"""

import json
import re
from contextlib import suppress
from typing import Any


_PIECE = re.compile(r"\w+|[^\w\s]")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
Completion = str | list[dict[str, Any]]


def turns_of(completion: Completion) -> list[str]:
    """Return the texts that the model wrote in a completion: one for each message of the assistant."""
    if isinstance(completion, str):
        return [completion]
    # `reinforcement.py` keeps the text of a message that TRL has parsed.
    texts = [part.get("text", part.get("content")) for part in completion if part.get("role") == "assistant"]
    return [text or "" for text in texts] or [""]


def clip(score: float) -> float:
    """Return a score within ±3."""
    return max(-3.0, min(score, 3.0))


def answer_in(text: str) -> str:
    """Return a text without the thought that it begins with."""
    _, closing, answer = text.partition("</think>")
    return answer.strip() if closing else text


def length(text: str, shortest: int = 20) -> float:
    """Return 0.5 for 20 to 800 characters, the thought included, otherwise -0.5."""
    return 0.5 if shortest <= len(text.strip()) <= 800 else -0.5


def thought_length(text: str) -> float:
    """Return 1 for a thought of 20 to 300 characters, -0.5 for another one, and 0 without a closed thought."""
    thought, closing, _ = text.partition("</think>")
    if not closing:
        return 0.0
    return 1.0 if 20 <= len(thought.strip()) <= 300 else -0.5


def closed_thought(text: str) -> float:
    """Return 0.25 for one `</think>`, -0.25 for several, and 0 for none."""
    count = text.count("</think>")
    return 0.25 if count == 1 else -0.25 if count else 0.0


def repetition(text: str) -> float:
    """Return minus the share of the answer's 3-grams that occur before, but at least -0.5."""
    return _repetition(answer_in(text))


def _repetition(answer: str) -> float:
    pieces = _PIECE.findall(answer.lower())
    grams = list(zip(pieces, pieces[1:], pieces[2:], strict=False))
    return -min(0.5, (len(grams) - len(set(grams))) / max(len(grams), 1))


def calls_in(text: str) -> list[dict[str, Any]]:
    """Return the tool calls of a text that are JSON objects."""
    calls = []
    # After the last end tag there is no complete call. Searching there from each start tag would take quadratic time.
    for found in _CALL.findall(text[: text.rfind("</tool_call>") + len("</tool_call>")]):
        with suppress(ValueError, RecursionError):
            calls.append(json.loads(found))
    return [call for call in calls if isinstance(call, dict)]


def agent(turns: list[str], tools: list[dict[str, Any]], targets: list[str]) -> float:
    """
    Return the reward of a whole rollout with tools, within ±3.

    A tag without a partner costs 0.5. A rollout without a call gets the other rewards of this module, for an answer of
    at least 5 characters. A rollout with calls gets 0.5 if all are valid and there are as many as targets. Otherwise
    each missing, needless or invalid call costs 0.5. It gets 2.5 times the share of the targets that its last answer
    contains. Repeated 3-grams there cost up to 0.5, and a call at the end costs 0.5.

    Args:
        turns (`list[str]`): the texts that the model wrote between the results of tools.
        tools (`list[dict]`): JSON schemas of the tools of the task.
        targets (`list[str]`): what the answer has to contain.
    """
    answers = [answer_in(turn).strip() for turn in turns]
    reward = -0.5 * sum(abs(answer.count("<tool_call>") - answer.count("</tool_call>")) for answer in answers)
    calls = [call for answer in answers for call in calls_in(answer)]
    if not calls:
        text = turns[-1]
        rules = length(text, shortest=5) + thought_length(text) + closed_thought(text) + repetition(text)
        return clip(reward + rules)
    num_valid = sum(_is_valid(call, tools) for call in calls)
    gap = abs(num_valid - len(targets)) + len(calls) - num_valid
    reward += -0.5 * gap if gap else 0.5
    is_unfinished = bool(calls_in(turns[-1]))
    final = "" if is_unfinished else answers[-1].rpartition("</tool_call>")[2]
    found = {target for target in targets if _holds(final, target.strip())}
    reward += 2.5 * len(found) / max(len(targets), 1) - 0.5 * is_unfinished
    return clip(reward + _repetition(final or answers[-1]))


def _is_valid(call: dict[str, Any], tools: list[dict[str, Any]]) -> bool:
    """Return whether a call names one of the tools and has its required arguments."""
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = next(iter(calls_in(f"<tool_call>{arguments}</tool_call>")), {})
    known = [tool["function"] for tool in tools if tool["function"]["name"] == call.get("name")]
    if not known or not isinstance(arguments, dict):
        return False
    required = (known[0].get("parameters") or {}).get("required") or []
    return all(arguments.get(name) not in (None, "", [], {}) for name in required)


def _holds(text: str, target: str) -> bool:
    """Return whether a text contains a target, or a number that equals it."""
    if target and target.lower() in text.lower():
        return True
    number = target.replace(",", "")
    written = re.findall(rf"(?<![\w.]){_NUMBER}(?![\w.])", text.replace(",", ""))
    return bool(re.fullmatch(_NUMBER, number)) and any(abs(float(value) - float(number)) < 1e-6 for value in written)
