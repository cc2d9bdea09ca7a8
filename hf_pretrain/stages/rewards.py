"""
Verifiable reward functions with TRL's signature: `reward(completions, **columns) -> list[float | None]`.

A completion is a list of messages, or text. The columns are the columns of the tasks (`data/reward_tasks.py`). `None`
means that a reward does not apply to a row, so a run can mix several kinds of tasks with several rewards.
"""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from ..data.formats import BadRecord
from ..data.reward_tasks import ANSWER_FORMATS
from ..runtime.errors import UserError
from ..runtime.names import check_word
from . import rule_rewards
from .rule_rewards import Completion, turns_of
from .scoring_models import load_reward_model
from .tools import load_object, read_schemas


# Maximum reward of a wrong answer. An answer with some correct parts gets a proportional share of it.
PARTIAL_CREDIT = 0.2
# With re.ASCII, a Chinese character next to a number is not part of the number.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w|\.\d)", re.ASCII)


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


def _values(solution: Any) -> list[str]:
    """Return the values of a solution, which is text, a number, or a list of them."""
    values = [value for value in (solution if isinstance(solution, list) else [solution]) if value is not None]
    if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        raise UserError(f"solution {solution!r:.100} must be text, a number, or a list of them")
    return [str(value) for value in values]


def _rule(score: Callable[[str], float]) -> Callable[..., list[float | None]]:
    """Turn a rule for the text of an answer into a reward function of TRL."""

    @wraps(score)
    def reward(completion: Completion, **row: Any) -> float:
        return score(turns_of(completion)[-1])

    return _by_row(reward)


@_by_row
def agent_reward(completion: Completion, tools: str | None = None, solution: Any = None, **row: Any) -> float:
    """Return MiniMind's reward of a rollout with tools, [`~stages.rule_rewards.agent`]."""
    return rule_rewards.agent(turns_of(completion), read_schemas(tools) if tools else [], _values(solution))


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "format": format_reward,
    "arithmetic": arithmetic_reward,
    "length": _rule(rule_rewards.length),
    "thought_length": _rule(rule_rewards.thought_length),
    "closed_thought": _rule(rule_rewards.closed_thought),
    "repetition": _rule(rule_rewards.repetition),
    "agent": agent_reward,
}


def check_task(functions: list[Any], task: dict[str, Any]) -> None:
    """
    Raise `BadRecord` for a task that a built-in reward among `functions` cannot use, or that no reward applies to: try
    an empty answer.
    """
    names = {reward: name for name, reward in REWARDS.items()}
    applies = False
    for reward in functions:
        if reward not in names:
            # It may be a model, whose answer takes time.
            applies = True
            continue
        try:
            applies |= reward([""], **{column: [value] for column, value in task.items()}) != [None]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            message = f"--rewards {names[reward]} cannot use this task ({error}); mend or drop the line"
            raise BadRecord(message) from error
    if not applies:
        raise BadRecord(
            f"--rewards {' '.join(names[reward] for reward in functions)} gives no score, because this "
            "task lacks its column: format needs `answer_format`, and arithmetic `solution`. Pass other --rewards"
        )


def load_reward_functions(
    names: list[str], *, trust_remote_code: bool = False
) -> list[Callable[..., list[float | None]] | str]:
    """
    Return reward functions by name.

    A name is a key of `REWARDS`, `module.path:function` (modules in the current directory included), or the directory
    or Hub id of a reward model, `owner/model` ([`~stages.scoring_models.load_reward_model`]).

    Raises:
        `UserError`: if nothing has such a name, or a model gives no score.
    """
    loaded: list[Any] = []
    for name in names:
        if name in REWARDS:
            loaded.append(REWARDS[name])
        elif ":" not in name and "/" in name:
            loaded.append(load_reward_model(name, trust_remote_code=trust_remote_code))
        else:
            loaded.append(load_object(name, flag="--rewards", known=REWARDS))
    return loaded
