"""
Reward functions that can be verified, with TRL's signature: `reward(completions, **columns) -> list[float | None]`.

A completion is a list of messages (or a text); the columns are those of the tasks (`data/tasks.py`). `None` means that
a reward does not apply to a row, so that several tasks can be mixed with several rewards.
"""

import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from datasets import Dataset

from ..data.formats import BadRecord
from ..data.tasks import ANSWER_FORMATS


# For an answer that is not right, all its parts that are taken together are worth this much.
PARTIAL_CREDIT = 0.2
# ASCII: Chinese characters beside a number are no part of it.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w|\.\d)", re.ASCII)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# Booleans are numbers in Python alone.
_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}

Completion = str | list[dict[str, Any]]


def answer_of(completion: Completion, *, with_thought: bool = False) -> str:
    """The text of the last message of the assistant, by default without what it thought before."""
    if isinstance(completion, str):
        text, thought = completion, ""
    else:
        message = next((m for m in reversed(completion) if m.get("role") == "assistant"), {})
        text, thought = message.get("content") or "", message.get("reasoning_content") or ""
    if with_thought:
        return f"<think>\n{thought}\n</think>\n\n{text}".strip() if thought else text.strip()
    return text.rpartition("</think>")[2].strip()


def _column(values: list[Any] | None, completions: list[Completion]) -> list[Any]:
    return [None] * len(completions) if values is None else values


def _score(
    name: str, completions: list[Completion], task: list[str | None] | None, score: Callable[[int, str], float | None]
) -> list[float | None]:
    """`score(row, answer)` of each completion whose row is of the task `name`, or of none."""
    tasks = _column(task, completions)
    return [
        score(row, answer_of(completion)) if tasks[row] in (None, name) else None
        for row, completion in enumerate(completions)
    ]


def format_reward(
    completions: list[Completion], *, answer_format: list[str | None], **columns: Any
) -> list[float | None]:
    """1 for an answer of the shape that `answer_format` names in `ANSWER_FORMATS`; else 0.2 times its share of the parts."""
    rewards: list[float | None] = []
    for completion, name in zip(completions, answer_format, strict=True):
        if name is None:
            rewards.append(None)
            continue
        shape = ANSWER_FORMATS[name]
        answer = answer_of(completion, with_thought=shape.with_thought)
        share = sum(re.fullmatch(part, answer) is not None for part in shape.parts) / len(shape.parts)
        rewards.append(1.0 if share == 1 else PARTIAL_CREDIT * share)
    return rewards


def arithmetic_reward(
    completions: list[Completion], *, solution: list[list[str]], task: list[str | None] | None = None, **columns: Any
) -> list[float | None]:
    """1 if the last number of the answer is the solution, 0.2 if there is one at all."""

    def score(row: int, answer: str) -> float | None:
        values, numbers = _values(solution[row]), _NUMBER.findall(answer.replace(",", ""))
        if not values:
            return None
        if numbers and float(numbers[-1]) == float(values[0]):
            return 1.0
        return PARTIAL_CREDIT if numbers else 0.0

    return _score("arithmetic", completions, task, score)


def idiom_reward(
    completions: list[Completion], *, solution: list[list[str]], task: list[str | None] | None = None, **columns: Any
) -> list[float | None]:
    """1 for an idiom that goes on as the prompt begins, whole or its second half; 0.2 for any two or four characters."""

    def score(row: int, answer: str) -> float:
        characters = "".join(re.findall(r"[\u4e00-\u9fff]", answer))
        idioms = _values(solution[row])
        if characters in idioms or any(len(idiom) == 4 and idiom in answer for idiom in idioms):
            return 1.0
        return PARTIAL_CREDIT if len(characters) in (2, 4) else 0.0

    return _score("idiom-task", completions, task, score)


def solution_reward(
    completions: list[Completion], *, solution: list[list[str] | str], **columns: Any
) -> list[float | None]:
    """
    The share of the solution's values that the answer holds, as text or as a number: how MiniMind's agent stage checks
    its `gt`. Tool calls that wait for their result hold nothing.
    """
    rewards: list[float | None] = []
    for completion, target in zip(completions, solution, strict=True):
        values = _values(target)
        answer = _written_calls(answer_of(completion))[1].replace(",", "")
        numbers = [float(number) for number in _NUMBER.findall(answer)]
        found = [_holds(answer, numbers, value.strip().replace(",", "")) for value in values]
        rewards.append(sum(found) / len(values) if values else None)
    return rewards


def _values(solution: Any) -> list[str]:
    """The texts of a solution: a text, a number, or a list of them."""
    values = solution if isinstance(solution, list) else [solution]
    return [str(value) for value in values if value is not None]


def _holds(answer: str, numbers: list[float], value: str) -> bool:
    if _NUMBER.fullmatch(value):
        return any(abs(number - float(value)) < 1e-6 for number in numbers)
    return value != "" and value.lower() in answer.lower()


def tool_call_reward(
    completions: list[Completion],
    *,
    tools: list[str | None],
    solution: list[list[str]] | None = None,
    task: list[str | None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """
    0.25 for one `<tool_call>` that parses, 0.5 if its name and arguments fit the schema of a tool, 1 if they are those
    of the solution, or if there is none.
    """
    solutions = _column(solution, completions)
    tasks = _column(task, completions)
    rewards: list[float | None] = []
    for row, completion in enumerate(completions):
        if tools[row] is None or tasks[row] not in (None, "tool-call"):
            rewards.append(None)
            continue
        calls = _tool_calls(completion)
        if len(calls) != 1:
            rewards.append(0.0)
        elif not _fits(calls[0], _read_schemas(tools[row])):
            rewards.append(0.25)
        elif tasks[row] is not None and calls[0] != json.loads(solutions[row][0]):
            rewards.append(0.5)
        else:
            rewards.append(1.0)
    return rewards


def _written_calls(text: str) -> tuple[list[str], str]:
    """What stands in the calls of a text, and the rest of the text."""
    # Behind the last end no call is whole, and a search from each beginning there would take quadratic time.
    end = text.rfind("</tool_call>") + len("</tool_call>") if "</tool_call>" in text else 0
    return _TOOL_CALL.findall(text[:end]), _TOOL_CALL.sub("", text[:end]) + text[end:]


def _tool_calls(completion: Completion) -> list[dict[str, Any]]:
    """The calls of a completion's last assistant message, whether TRL parsed them or not; none where one is broken."""
    message = {} if isinstance(completion, str) else next((m for m in completion if m.get("tool_calls")), {})
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    try:
        calls += [json.loads(text) for text in _written_calls(answer_of(completion))[0]]
    except (ValueError, RecursionError):
        # No JSON, or numbers of too many digits, or too many brackets.
        return []
    is_whole = all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call for call in calls
    )
    return [{"name": call["name"], "arguments": call["arguments"]} for call in calls] if is_whole else []


def _read_schemas(tools: str) -> dict[str, dict[str, Any]]:
    """
    The JSON schema of each tool's parameters, by the tool's name.

    Raises:
        `ValueError`: if the column `tools` of a task holds anything else.
    """
    try:
        content = json.loads(tools)
        if not isinstance(content, list):
            raise ValueError("not a list")
        functions = [tool.get("function", tool) for tool in content]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        for name, schema in schemas.items():
            properties, required = schema.get("properties") or {}, schema.get("required") or []
            words = [name, *required, *(kind for given in properties.values() for kind in _kinds(given))]
            if not isinstance(required, list) or not all(isinstance(word, str) for word in words):
                raise ValueError("a name, a type, or an entry of `required` is not text")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            "The column `tools` of a task must be JSON text: a list of tools, each with a name and a JSON schema of its "
            f"parameters. This is not: {str(tools)[:200]} ({error!r})."
        ) from error
    return schemas


def _kinds(schema: Any) -> list[str]:
    """The names of the types that the schema of a parameter allows; of all where it names none."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return list(_JSON_TYPES) if not kinds else [kinds] if isinstance(kinds, str) else kinds


def _is_of_kind(value: Any, kind: str) -> bool:
    return kind not in _JSON_TYPES or _JSON_TYPES[kind](value)


def _fits(call: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> bool:
    """Whether a call names a tool and gives the arguments that its schema asks for, each of its type."""
    name, arguments = call["name"], call["arguments"]
    if name not in schemas or not isinstance(arguments, dict):
        return False
    properties, required = schemas[name].get("properties") or {}, schemas[name].get("required") or []
    if not set(required) <= arguments.keys() <= properties.keys():
        return False
    return all(any(_is_of_kind(value, kind) for kind in _kinds(properties[key])) for key, value in arguments.items())


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "format": format_reward,
    "arithmetic": arithmetic_reward,
    "idiom": idiom_reward,
    "solution": solution_reward,
    "tool_call": tool_call_reward,
}


def load_reward_functions(names: list[str]) -> list[Callable[..., list[float | None]] | str]:
    """
    Reward functions by name: a key of `REWARDS`, `module.path:function` (the current directory is looked into too), or
    `owner/model`, a directory or Hub id of a reward model, which TRL loads itself.

    Raises:
        `ValueError`: if there is none under a name.
    """
    if not names:
        raise ValueError(f"--rewards names none: give one or more of {', '.join(REWARDS)}, or module.path:function.")
    return [_load_reward(name) for name in names]


def check_rewards(functions: list[Any], tasks: Dataset, *, dataset_names: list[str]):
    """
    Sees that some task gets a reward. Only built-in rewards are asked: which rows concern them does not depend on the
    answer, while a function of the user's may say `None` to an empty one.

    Raises:
        `ValueError`: if none does.
    """
    names = {function: name for name, function in REWARDS.items()}
    if not all(callable(function) and function in names for function in functions):
        return
    if _concern(functions, tasks):
        return
    fitting = ", ".join(name for name, function in REWARDS.items() if _concern([function], tasks))
    raise ValueError(
        f"--rewards {' '.join(names[function] for function in functions)} concerns no task of --dataset_name "
        f"{' '.join(dataset_names)}: nothing would be learnt. Give one that does "
        f"({fitting + ', ' if fitting else ''}module.path:function)."
    )


def check_task(functions: list[Any], task: dict[str, Any]) -> None:
    """Raises `BadRecord` for a task with a column that a built-in reward among `functions` cannot compare answers to."""
    kind = task.get("task")
    for name, of_kind, column, is_usable, wanted in (
        ("arithmetic", "arithmetic", "solution", _begins_with_number, "a number, or a list that begins with one"),
        ("idiom", "idiom-task", "solution", _are_values, "text, or a list of texts"),
        ("solution", kind, "solution", _are_values, "text, a number, or a list of them"),
        ("format", kind, "answer_format", _is_format, f"one of {', '.join(ANSWER_FORMATS)}"),
        ("tool_call", "tool-call", "tools", _are_tools, "a JSON array of JSON schemas"),
        ("tool_call", "tool-call", "solution", _begins_with_json, "a list with the JSON of a call"),
    ):
        value = task.get(column)
        is_absent = value is None or (column == "solution" and value == [])
        # Of a task of no kind, a call is worth as much as its form alone.
        is_compared = kind in (None, of_kind) and (name, column, kind) != ("tool_call", "solution", None)
        if REWARDS[name] in functions and is_compared and not is_absent and not is_usable(value):
            raise BadRecord(f"--rewards {name} cannot use its {column!r}; write {wanted}, or drop the line")


def _are_values(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values)


def _begins_with_number(value: Any) -> bool:
    try:
        return _are_values(value) and math.isfinite(float(_values(value)[0]))
    except (IndexError, ValueError):
        return False


def _begins_with_json(value: Any) -> bool:
    try:
        return isinstance(json.loads(_values(value)[0]), dict)
    except (IndexError, ValueError, RecursionError):
        return False


def _is_format(value: Any) -> bool:
    return isinstance(value, str) and value in ANSWER_FORMATS


def _are_tools(value: Any) -> bool:
    try:
        _read_schemas(value)
    except ValueError:
        return False
    return True


def _concern(rewards: list[Callable[..., list[float | None]]], tasks: Dataset) -> bool:
    """Whether any row has the columns of one of these built-in rewards and is not left alone by it."""
    rewards = [reward for reward in rewards if _required_columns(reward) <= set(tasks.column_names)]
    return any(
        reward([""], **{name: [value] for name, value in row.items()}) != [None] for row in tasks for reward in rewards
    )


def _required_columns(reward: Callable[..., list[float | None]]) -> set[str]:
    parameters = inspect.signature(reward).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}


def _load_reward(name: str) -> Callable[..., list[float | None]] | str:
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name and "/" in name:
        return name
    return load_function(name, flag="--rewards", known=REWARDS)


def load_function(name: str, *, flag: str, known: dict[str, Any]) -> Callable[..., Any]:
    """What `module.path:function` names; `ValueError` that says which part of it is wrong, naming `flag`."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise ValueError(f"{flag} {name} is unknown. Give one of {', '.join(known)}, or module.path:function.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{flag} {name}: the module {module_name} cannot be imported from here or from the environment ({error})."
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(f"{flag} {name}: {module.__file__} has no function {function_name!r}.")
    return function


__all__ = [
    "REWARDS",
    "check_rewards",
    "check_task",
    "load_function",
    "load_reward_functions",
    *(function.__name__ for function in REWARDS.values()),
]
