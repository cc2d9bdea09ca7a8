"""
Verifiable reward functions with TRL's signature: `reward(completions, **columns) -> list[float | None]`.

A completion is a list of messages, or text. The columns are the columns of the tasks (`data/tasks.py`). `None` means
that a reward does not apply to a row, so a run can mix several kinds of tasks with several rewards.
"""

import importlib
import inspect
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset
from transformers import PreTrainedConfig

from hf_pretrain_cli import hint

from ..data.formats import BadRecord
from ..data.tasks import ANSWER_FORMATS
from ..runtime.errors import UserError


# Maximum reward of a wrong answer. An answer with some correct parts gets a proportional share of it.
PARTIAL_CREDIT = 0.2
# With re.ASCII, a Chinese character next to a number is not part of the number.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w|\.\d)", re.ASCII)
# A number with or without a unit beside it: 3.1069km, USD36.05.
_QUANTITY = re.compile(r"(?:(?<![\w.])[-+])?(?<![\d.])\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\d|\.\d)", re.ASCII)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# In Python a bool is an int; in JSON it is not.
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
    """Return the text of the assistant's last message, by default without its reasoning."""
    if isinstance(completion, str):
        text, thought = completion, ""
    else:
        message = next((m for m in reversed(completion) if m.get("role") == "assistant"), {})
        text, thought = message.get("content") or "", message.get("reasoning_content") or ""
    if with_thought:
        return f"<think>\n{thought}\n</think>\n\n{text}".strip() if thought else text.strip()
    # Completions that TRL did not parse still hold the reasoning in their text.
    return text.rpartition("</think>")[2].strip()


def _column(values: list[Any] | None, completions: list[Completion]) -> list[Any]:
    """Return a column, or `None` for every row if the tasks lack it."""
    return [None] * len(completions) if values is None else values


def _score(
    name: str, completions: list[Completion], task: list[str | None] | None, score: Callable[[int, str], float | None]
) -> list[float | None]:
    """Return `score(row, answer)` of each completion if its row has the task `name` or no task, otherwise `None`."""
    tasks = _column(task, completions)
    return [
        score(row, answer_of(completion)) if tasks[row] in (None, name) else None
        for row, completion in enumerate(completions)
    ]


def format_reward(
    completions: list[Completion], *, answer_format: list[str | None], **columns: Any
) -> list[float | None]:
    """
    Return 1 for an answer in the format `answer_format` (a key of `ANSWER_FORMATS`). Otherwise return 0.2 times the
    share of the format's parts that match.
    """
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
    """Return 1 if the last number of the answer is the solution, 0.2 if there is another number, 0 without one."""

    def score(row: int, answer: str) -> float | None:
        # Remove thousands separators: 1,234 is one number.
        values, numbers = _values(solution[row]), _NUMBER.findall(answer.replace(",", ""))
        if not values:
            return None
        if numbers and float(numbers[-1]) == float(values[0]):
            return 1.0
        return PARTIAL_CREDIT if numbers else 0.0

    return _score("arithmetic", completions, task, score)


def solution_reward(
    completions: list[Completion], *, solution: list[list[str] | str], **columns: Any
) -> list[float | None]:
    """
    Return the share of the solution's values that the answer contains, as text or as a number.

    MiniMind's agent stage checks its `gt` in the same way, but also finds a number within a longer one (5 in 15). Here
    a number counts only as a whole. Text inside tool calls does not count.
    """
    rewards: list[float | None] = []
    for completion, target in zip(completions, solution, strict=True):
        values = _values(target)
        # A value that the model only passes to a tool is not an answer.
        answer = _written_calls(answer_of(completion))[1].replace(",", "")
        numbers = [float(number) for number in _QUANTITY.findall(answer)]
        found = [_holds(answer, numbers, value.strip().replace(",", "")) for value in values]
        rewards.append(sum(found) / len(values) if values else None)
    return rewards


def _values(solution: Any) -> list[str]:
    """Return the values of a solution, which is text, a number, or a list of them."""
    values = solution if isinstance(solution, list) else [solution]
    return [str(value) for value in values if value is not None]


def _holds(answer: str, numbers: list[float], value: str) -> bool:
    """Return whether an answer contains a value."""
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
    Return 0.25 for exactly one `<tool_call>` that parses, 0.5 if its name and arguments fit a tool's schema, and 1 if
    they also equal the solution or there is no solution to compare with.
    """
    solutions = _column(solution, completions)
    tasks = _column(task, completions)
    rewards: list[float | None] = []
    for row, completion in enumerate(completions):
        if tools[row] is None or tasks[row] not in (None, "tool-call"):
            rewards.append(None)
            continue
        calls, expected = _tool_calls(completion), _values(solutions[row])
        if len(calls) != 1:
            rewards.append(0.0)
        elif not _fits(calls[0], _read_schemas(tools[row])):
            rewards.append(0.25)
        # Tasks from users' files have no kind and may have several correct calls, so only the form of a call counts.
        # Compare parsed JSON: the order of keys and white space do not matter.
        elif tasks[row] is not None and expected and calls[0] != json.loads(expected[0]):
            rewards.append(0.5)
        else:
            rewards.append(1.0)
    return rewards


def _written_calls(text: str) -> tuple[list[str], str]:
    """Return the contents of the tool calls in a text, and the text without them."""
    # After the last end tag there is no complete call. Searching there from each start tag would take quadratic time.
    end = text.rfind("</tool_call>") + len("</tool_call>") if "</tool_call>" in text else 0
    return _TOOL_CALL.findall(text[:end]), _TOOL_CALL.sub("", text[:end]) + text[end:]


def _tool_calls(completion: Completion) -> list[dict[str, Any]]:
    """Return the tool calls of a completion, parsed by TRL or not. Return an empty list if one is malformed."""
    message = {} if isinstance(completion, str) else next((m for m in completion if m.get("tool_calls")), {})
    # TRL parses calls into the message if the tokenizer has a response template. Otherwise the text contains them.
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    try:
        calls += [json.loads(text) for text in _written_calls(answer_of(completion))[0]]
    except (ValueError, RecursionError):
        # The text is not JSON, or has numbers with too many digits or too many nested brackets.
        return []
    is_whole = all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call for call in calls
    )
    return [{"name": call["name"], "arguments": call["arguments"]} for call in calls] if is_whole else []


def _read_schemas(tools: str) -> dict[str, dict[str, Any]]:
    """
    Return the JSON schema of each tool's parameters, by the tool's name.

    Raises:
        `ValueError`: if the column `tools` of a task holds anything else.
    """
    try:
        content = json.loads(tools)
        if not isinstance(content, list):
            raise UserError("not a list")
        functions = [tool.get("function", tool) for tool in content]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        for name, schema in schemas.items():
            properties, required = schema.get("properties") or {}, schema.get("required") or []
            words = [name, *required, *(kind for given in properties.values() for kind in _kinds(given))]
            if not isinstance(required, list) or not all(isinstance(word, str) for word in words):
                raise UserError("a name, a type, or an entry of `required` is not text")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(
            "The column `tools` of a task must be JSON text: a list of tools, each with a name and a JSON schema of "
            f"its parameters. This is not: {str(tools)[:200]} ({error!r})."
        ) from error
    return schemas


def _kinds(schema: Any) -> list[str]:
    """Return the names of the types that a parameter's schema allows, or all types if it names none."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return list(_JSON_TYPES) if not kinds else [kinds] if isinstance(kinds, str) else kinds


def _is_of_kind(value: Any, kind: str) -> bool:
    """Return whether a value has a JSON type. An unknown type admits every value."""
    return kind not in _JSON_TYPES or _JSON_TYPES[kind](value)


def _fits(call: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> bool:
    """Return whether a call names a known tool, and its arguments fit the tool's schema in name and type."""
    name, arguments = call["name"], call["arguments"]
    if name not in schemas or not isinstance(arguments, dict):
        return False
    properties, required = schemas[name].get("properties") or {}, schemas[name].get("required") or []
    # The call must have all required arguments, and no unknown ones.
    if not set(required) <= arguments.keys() <= properties.keys():
        return False
    return all(any(_is_of_kind(value, kind) for kind in _kinds(properties[key])) for key, value in arguments.items())


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "format": format_reward,
    "arithmetic": arithmetic_reward,
    "solution": solution_reward,
    "tool_call": tool_call_reward,
}


def load_reward_functions(names: list[str]) -> list[Callable[..., list[float | None]] | str]:
    """
    Return reward functions by name.

    A name is a key of `REWARDS`, `module.path:function` (modules in the current directory included), or the directory
    or Hub id of a reward model, `owner/model`, which TRL loads itself.

    Raises:
        `ValueError`: if nothing has such a name, or a model is no sequence classifier with one label.
    """
    if not names:
        raise UserError(f"--rewards is empty: pass one or more of {', '.join(REWARDS)}, or module.path:function.")
    return [_load_reward(name) for name in names]


def check_rewards(functions: list[Any], tasks: Dataset, *, dataset_names: list[str]):
    """
    Check that at least one task gets a reward.

    The check tries an empty answer, and covers only built-in rewards: for them, the answer does not decide whether
    they apply to a row. A user's function may return `None` for an empty answer.

    Raises:
        `ValueError`: if no task gets a reward.
    """
    names = {function: name for name, function in REWARDS.items()}
    if not all(callable(function) and function in names for function in functions):
        return
    if _concern(functions, tasks):
        return
    # Suggest the rewards that do apply to these tasks.
    fitting = ", ".join(name for name, function in REWARDS.items() if _concern([function], tasks))
    raise UserError(
        f"--rewards {' '.join(names[function] for function in functions)} concerns no task of --dataset_name "
        f"{' '.join(dataset_names)}: the model would learn nothing. Pass one that does "
        f"({fitting + ', ' if fitting else ''}module.path:function)."
    )


def check_task(functions: list[Any], task: dict[str, Any]) -> None:
    """
    Raise `BadRecord` for a task with a column that a built-in reward among `functions` cannot use.
    """
    kind = task.get("task")
    for name, of_kind, column, is_usable, wanted in (
        ("arithmetic", "arithmetic", "solution", _begins_with_number, "a number, or a list that begins with one"),
        ("solution", kind, "solution", _are_values, "text, a number, or a list of them"),
        ("format", kind, "answer_format", _is_format, f"one of {', '.join(ANSWER_FORMATS)}"),
        ("tool_call", "tool-call", "tools", _are_tools, "a JSON array of JSON schemas"),
        ("tool_call", "tool-call", "solution", _begins_with_json, "a list with the JSON of a call"),
    ):
        # A missing column is not a mistake: the reward does not apply to this task.
        value = task.get(column)
        is_absent = value is None or (column == "solution" and value == [])
        # For a task without a kind, only the form of a call counts, not its solution.
        is_compared = kind in (None, of_kind) and (name, column, kind) != ("tool_call", "solution", None)
        if REWARDS[name] in functions and is_compared and not is_absent and not is_usable(value):
            raise BadRecord(f"--rewards {name} cannot use its {column!r}; write {wanted}, or drop the line")


def _are_values(value: Any) -> bool:
    """Return whether a value is text or a number, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values)


def _begins_with_number(value: Any) -> bool:
    """Return whether the first value is a finite number."""
    try:
        return _are_values(value) and math.isfinite(float(_values(value)[0]))
    except (IndexError, ValueError):
        return False


def _begins_with_json(value: Any) -> bool:
    """Return whether the first value is the JSON text of an object."""
    try:
        return isinstance(json.loads(_values(value)[0]), dict)
    except (IndexError, ValueError, RecursionError):
        return False


def _is_format(value: Any) -> bool:
    """Return whether a value names one of `ANSWER_FORMATS`."""
    return isinstance(value, str) and value in ANSWER_FORMATS


def _are_tools(value: Any) -> bool:
    """Return whether a value is the JSON text of tool schemas."""
    try:
        _read_schemas(value)
    except ValueError:
        return False
    return True


def _concern(rewards: list[Callable[..., list[float | None]]], tasks: Dataset) -> bool:
    """Return whether a row has the columns of one of these built-in rewards, and gets a value from it."""
    rewards = [reward for reward in rewards if _required_columns(reward) <= set(tasks.column_names)]
    return any(
        reward([""], **{name: [value] for name, value in row.items()}) != [None] for row in tasks for reward in rewards
    )


def _required_columns(reward: Callable[..., list[float | None]]) -> set[str]:
    """Return the columns that a reward function requires."""
    # A built-in reward names its required columns as keyword arguments without a default.
    parameters = inspect.signature(reward).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}


def _load_reward(name: str) -> Callable[..., list[float | None]] | str:
    """Return one reward function, or the name of a reward model."""
    if name in REWARDS:
        return REWARDS[name]
    # TRL loads a reward model itself, by its Hub id or directory.
    if ":" not in name and "/" in name:
        _check_reward_model(name)
        return name
    return load_object(name, flag="--rewards", known=REWARDS)


def _check_reward_model(name: str) -> None:
    """
    Raise `ValueError` for a model that is no sequence classifier with one label.

    transformers loads every other model with a random head, which would give random rewards, or fails.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise UserError(f"--rewards {name}: this model cannot be read. {error}") from error
    architecture = ", ".join(config.get("architectures") or []) or "of no known architecture"
    # Models with code of their own may have any name, but MiniMind's checkpoints also name the loader of classifiers.
    has_loader = "AutoModelForSequenceClassification" in (config.get("auto_map") or {})
    is_classifier = architecture.endswith("ForSequenceClassification") or (
        has_loader and not architecture.endswith("ForCausalLM")
    )
    # A config without names for its labels has two.
    num_labels = len(config.get("id2label") or range(2))
    if is_classifier and num_labels == 1:
        return
    labels = f" with {num_labels} labels" if is_classifier else ""
    raise UserError(
        f"--rewards {name}: a reward model must be a sequence classifier with one label, and this one is "
        f"{architecture}{labels}. Pass another one, or a function (module.path:function) that calls this model."
    )


def load_object(name: str, *, flag: str, known: Iterable[str], allows_lists: bool = False) -> Any:
    """
    Import and return the function or class that `module.path:name` names.

    Args:
        name (`str`): what the user typed.
        flag (`str`): the flag, for messages.
        known (`Iterable[str]`): the names without a module path, for messages.
        allows_lists (`bool`, defaults to `False`): return a list, too.

    Raises:
        `ValueError`: if the name cannot be imported. The message names the part that is wrong.
    """
    module_name, colon, object_name = name.partition(":")
    if not colon:
        known = list(known)
        names = f"one of {', '.join(known)}{hint(name, known, ' (the nearest one is {})')}, or " if known else ""
        raise UserError(f"{flag} {name} is unknown. Pass {names}module.path:function.")
    # Python adds the directory of the script (recipes/) to `sys.path`, but not the current directory.
    # Append it, so that a user's file cannot shadow an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with refusing_exit():
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{flag} {name}: the module {module_name} cannot be imported from the current directory or the "
            f"environment ({error})."
        ) from error
    # Use `vars` instead of `getattr`: a module may define `__getattr__`, which would import something for any name.
    found = vars(module).get(object_name)
    if not callable(found) and not (allows_lists and isinstance(found, list)):
        raise UserError(f"{flag} {name}: {module.__file__} has no function {object_name!r}.")
    return found


@contextmanager
def refusing_exit() -> Iterator[None]:
    """
    Raise `ValueError` if code of the user within the block calls `exit()`, which would end the run as a success.
    """
    try:
        yield
    except SystemExit as error:
        # The last frame is that of `exit` itself, a function of the module `site`.
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename
        ]
        raise UserError(
            f"A reward, tool or environment called exit({error.code!r}), in {frames[-1].filename}, line "
            f"{frames[-1].lineno}. The run stops without a result. Return a value or raise an error there."
        ) from error


__all__ = [
    "REWARDS",
    "check_rewards",
    "check_task",
    "load_object",
    "load_reward_functions",
    "refusing_exit",
    *(function.__name__ for function in REWARDS.values()),
]
