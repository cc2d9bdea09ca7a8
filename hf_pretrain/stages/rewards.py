"""
Verifiable reward functions with TRL's signature: `reward(completions, **columns) -> list[float | None]`.

A completion is a list of messages, or text. The columns are the columns of the tasks (`data/reward_tasks.py`). `None`
means that a reward does not apply to a row, so a run can mix several kinds of tasks with several rewards.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig

from ..data.formats import BadRecord
from ..data.reward_tasks import ANSWER_FORMATS
from ..runtime.errors import UserError
from ..runtime.names import check_word
from .tools import load_object, read_schemas


# Maximum reward of a wrong answer. An answer with some correct parts gets a proportional share of it.
PARTIAL_CREDIT = 0.2
# With re.ASCII, a Chinese character next to a number is not part of the number.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w|\.\d)", re.ASCII)
# A number with or without a unit beside it: 3.1069km, USD36.05.
_QUANTITY = re.compile(r"(?:(?<![\w.])[-+])?(?<![\d.])\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\d|\.\d)", re.ASCII)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
Completion = str | list[dict[str, Any]]


def answer_of(completion: Completion) -> str:
    """Return the text of the assistant's last message, without its reasoning."""
    if isinstance(completion, str):
        text = completion
    else:
        message = next((m for m in reversed(completion) if m.get("role") == "assistant"), {})
        text = message.get("content") or ""
    # Completions that TRL did not parse still hold the reasoning in their text.
    return text.rpartition("</think>")[2].strip()


def _by_row(score: Callable[..., float | None]) -> Callable[..., list[float | None]]:
    """Turn a function of one completion and the columns of its task into a reward function of TRL."""

    @wraps(score)
    def reward(completions: list[Completion], **columns: Any) -> list[float | None]:
        # TRL also passes the state of the trainer.
        lists = {name: values for name, values in columns.items() if isinstance(values, Sequence)}
        return [
            score(completion, **{name: values[row] for name, values in lists.items()})
            for row, completion in enumerate(completions)
        ]

    return reward


@_by_row
def format_reward(completion: Completion, answer_format: str | None = None, **row: Any) -> float | None:
    """
    Return 1 for an answer in the format `answer_format` (a key of `ANSWER_FORMATS`). Otherwise return 0.2 times the
    share of the format's parts that match.
    """
    if answer_format is None:
        return None
    check_word("answer_format", answer_format, ANSWER_FORMATS)
    shape = ANSWER_FORMATS[answer_format]
    answer = answer_of(completion)
    share = sum(re.fullmatch(part, answer) is not None for part in shape.parts) / len(shape.parts)
    return 1.0 if share == 1 else PARTIAL_CREDIT * share


@_by_row
def arithmetic_reward(
    completion: Completion, solution: Any = None, task: str | None = None, **row: Any
) -> float | None:
    """Return 1 if the last number of the answer is the solution, 0.2 if there is another number, 0 without one."""
    values = _values(solution)
    if task not in (None, "arithmetic") or not values:
        return None
    target = float(values[0])
    # Remove thousands separators: 1,234 is one number.
    numbers = _NUMBER.findall(answer_of(completion).replace(",", ""))
    if numbers and float(numbers[-1]) == target:
        return 1.0
    return PARTIAL_CREDIT if numbers else 0.0


@_by_row
def solution_reward(completion: Completion, solution: Any = None, **row: Any) -> float | None:
    """
    Return the share of the solution's values that the answer contains, as text or as a number.

    MiniMind's agent stage checks its `gt` in the same way, but also finds a number within a longer one (5 in 15). Here
    a number counts only as a whole. Text inside tool calls does not count.
    """
    values = _values(solution)
    # A value that the model only passes to a tool is not an answer.
    answer = _written_calls(answer_of(completion))[1].replace(",", "")
    numbers = [float(number) for number in _QUANTITY.findall(answer)]
    found = [_holds(answer, numbers, value.strip().replace(",", "")) for value in values]
    return sum(found) / len(values) if values else None


def _values(solution: Any) -> list[str]:
    """Return the values of a solution, which is text, a number, or a list of them."""
    values = [value for value in (solution if isinstance(solution, list) else [solution]) if value is not None]
    if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        raise UserError(f"solution {solution!r:.100} must be text, a number, or a list of them")
    return [str(value) for value in values]


def _holds(answer: str, numbers: list[float], value: str) -> bool:
    """Return whether an answer contains a value."""
    if _NUMBER.fullmatch(value):
        return any(abs(number - float(value)) < 1e-6 for number in numbers)
    return value != "" and value.lower() in answer.lower()


@_by_row
def tool_call_reward(
    completion: Completion, tools: str | None = None, solution: Any = None, task: str | None = None, **row: Any
) -> float | None:
    """
    Return 0.25 for exactly one `<tool_call>` that parses, 0.5 if it names a tool, with all its required arguments
    and no unknown ones, and 1 if name and arguments also equal the solution or there is no solution to compare with.
    """
    if tools is None or task not in (None, "tool-call"):
        return None
    parameters = {}
    for function in (tool["function"] for tool in read_schemas(tools)):
        schema = function.get("parameters") or {}
        parameters[function["name"]] = set(schema.get("required") or ()), set(schema.get("properties") or ())
    # Tasks from users' files have no kind and may have several correct calls, so only the form of a call counts.
    expected = [json.loads(value) for value in _values(solution)] if task is not None else []
    calls = _tool_calls(completion)
    if len(calls) != 1:
        return 0.0
    required, known = parameters.get(calls[0]["name"], (set(), set()))
    arguments = calls[0]["arguments"]
    if calls[0]["name"] not in parameters or not isinstance(arguments, dict):
        return 0.25
    if not required <= arguments.keys() <= known:
        return 0.25
    # Compare parsed JSON: the order of keys and white space do not matter.
    return 1.0 if not expected or calls[0] == expected[0] else 0.5


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


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "format": format_reward,
    "arithmetic": arithmetic_reward,
    "solution": solution_reward,
    "tool_call": tool_call_reward,
}


def check_task(functions: list[Any], task: dict[str, Any]) -> None:
    """Raise `BadRecord` for a task that a built-in reward among `functions` cannot use: try an empty answer."""
    for name, reward in REWARDS.items():
        if reward in functions:
            try:
                reward([""], **{column: [value] for column, value in task.items()})
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise BadRecord(f"--rewards {name} cannot use this task ({error}); mend or drop the line") from error


def load_reward_functions(names: list[str]) -> list[Callable[..., list[float | None]] | str]:
    """
    Return reward functions by name.

    A name is a key of `REWARDS`, `module.path:function` (modules in the current directory included), or the directory
    or Hub id of a reward model, `owner/model`, which TRL loads itself.

    Raises:
        `UserError`: if nothing has such a name, or a model is no sequence classifier with one label.
    """
    loaded: list[Any] = []
    for name in names:
        if name in REWARDS:
            loaded.append(REWARDS[name])
        elif ":" not in name and "/" in name:
            _check_reward_model(name)
            loaded.append(name)
        else:
            loaded.append(load_object(name, flag="--rewards", known=REWARDS))
    return loaded


def _check_reward_model(name: str) -> None:
    """
    Raise `ValueError` for a model that is no sequence classifier with one label.

    transformers loads every other model with a random head, which would give random rewards, or fails.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise UserError(f"--rewards {name} is no reward model that can be read: {error}") from error
    architectures = ", ".join(config.get("architectures") or ["of no known architecture"])
    # A config without names for its labels has two.
    num_labels = len(config.get("id2label") or range(2))
    if not architectures.endswith("ForSequenceClassification") or num_labels != 1:
        raise UserError(
            f"--rewards {name}: a reward model must be a sequence classifier with one label, and this one is "
            f"{architectures} with {num_labels} labels. Pass another one, or a function (module.path:function) that "
            "calls this model."
        )
