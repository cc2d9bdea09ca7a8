"""
Verifiable reward functions with TRL's signature: `reward(completions, **columns) -> list[float | None]`.

A completion is a list of messages, or text. The columns are the columns of the tasks (`data/reward_tasks.py`). `None`
means that a reward does not apply to a task, so a run can mix several kinds of tasks with several rewards.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from ..data.formats import BadRecord
from ..data.reward_tasks import ANSWER_FORMATS
from ..inference.tools import load_object, read_schemas
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.names import check_word
from ..tokenizer.control_tokens import encode_chat
from .minimind_rewards import Completion, agent, closed_thought, length, repetition, thought_length, turns_of
from .record_template import tools_of
from .scoring_models import load_reward_model


Reward = Callable[..., list[float | None]]
# Maximum reward of a wrong answer. An answer with some correct parts gets a proportional share of it.
PARTIAL_CREDIT = 0.2
# 1,234 is one number, 3,4 are two, and 12 is one in 12kg and 12th, but not in x12 and 1.12.3. With re.ASCII, a Chinese
# character before a number is not part of it.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\.?\d)", re.ASCII)


def answer_of(completion: Completion) -> str:
    """Return the text of the assistant's last message, without its reasoning."""
    messages = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    text = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), None) or ""
    # Completions that TRL did not parse still hold the reasoning in their text. One that is not closed has no answer.
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def _by_completion(score: Callable[..., float | None]) -> Reward:
    """Turn a function of one completion and the columns of its task into a reward function of TRL."""

    @wraps(score)
    def reward(completions: list[Completion], **columns: Any) -> list[float | None]:
        # TRL also passes the state of the trainer.
        lists = {name: values for name, values in columns.items() if isinstance(values, Sequence)}
        each = enumerate(completions)
        return [score(text, **{name: values[index] for name, values in lists.items()}) for index, text in each]

    return reward


@_by_completion
def format_reward(completion: Completion, answer_format: str | None = None, **columns: Any) -> float | None:
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


@_by_completion
def arithmetic_reward(
    completion: Completion, solution: Any = None, task: str | None = None, **columns: Any
) -> float | None:
    """Return 1 if the last number of the answer is the solution, 0.2 if there is another number, 0 without one."""
    values = _values(solution)
    if task not in (None, "arithmetic") or not values:
        return None
    # GSM8K's solutions end with `#### 1,200`.
    target = float(values[0].rpartition("####")[2].replace(",", ""))
    # The second minus is Unicode's.
    numbers = _NUMBER.findall(answer_of(completion).replace("\u2212", "-"))
    if numbers and float(numbers[-1].replace(",", "")) == target:
        return 1.0
    return PARTIAL_CREDIT if numbers else 0.0


def _values(solution: Any) -> list[str]:
    """Return the values of a solution, which is text, a number, or a list of them."""
    values = [value for value in (solution if isinstance(solution, list) else [solution]) if value is not None]
    if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        raise UserError(f"solution {solution!r:.100} must be text, a number, or a list of them")
    return [str(value) for value in values]


def _rule(score: Callable[[str], float]) -> Reward:
    """Turn a rule for the text of an answer into a reward function of TRL."""

    return _by_completion(wraps(score)(lambda completion, **columns: score(turns_of(completion)[-1])))


@_by_completion
def agent_reward(completion: Completion, tools: str | None = None, solution: Any = None, **columns: Any) -> float:
    """Return MiniMind's reward of a rollout with tools, [`~stages.minimind_rewards.agent`]."""
    return agent(turns_of(completion), read_schemas(tools) if tools else [], _values(solution))


@_by_completion
def reasoning_gym_reward(completion: Completion, reasoning_gym: Any = None, **columns: Any) -> float | None:
    """Return what the verifier of a task of reasoning-gym gives, [`~data.reasoning_gym_tasks.score_answer`]."""
    if reasoning_gym is None:
        return None
    return load_named("hf_pretrain.data.reasoning_gym_tasks:score_answer")(answer_of(completion), reasoning_gym)


REWARDS: dict[str, Reward] = {
    "format": format_reward,
    "arithmetic": arithmetic_reward,
    **{rule.__name__: _rule(rule) for rule in (length, thought_length, closed_thought, repetition)},
    "agent": agent_reward,
    "reasoning_gym": reasoning_gym_reward,
}


def _check_rewards(functions: list[Any], task: dict[str, Any]) -> None:
    """
    Raise `BadRecord` for a task that a built-in reward among `functions` cannot use, or that no reward applies to: try
    an empty answer.
    """
    names = {reward: name for name, reward in REWARDS.items()}
    # A function or model of the user may apply. The answer of a model takes time.
    applies = any(reward not in names for reward in functions)
    for reward in filter(names.get, functions):
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


def task_check(
    tokenizer: PreTrainedTokenizerFast,
    *,
    rewards: list[Any],
    max_prompt_length: int,
    tools: Any = None,
    **options: Any,
) -> Callable[[dict[str, Any]], None]:
    """
    Return a function that raises `BadRecord` for a task that the run cannot use.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): a tokenizer whose chat template must render the prompt.
        rewards (`list`): reward functions; the needs of the built-in ones are known.
        max_prompt_length (`int`): the longest prompt, in tokens, that leaves room for a completion.
        tools (`list` of functions, *optional*): tools that the template describes.
        options: variables of the template.

    Raises:
        `UserError`: if no prompt would fit, or the template cannot render one.
    """
    if max_prompt_length < 1:
        raise UserError(
            f"--max_completion_length leaves {max_prompt_length} of the model's positions for the prompt. Lower it, "
            "or with --tools --max_turn_length."
        )
    options = {"add_generation_prompt": True} | options

    def check(task: dict[str, Any]) -> None:
        if task.get("reasoning_gym") and reasoning_gym_reward not in rewards:
            raise UserError(f"{task['task']} needs its verifier: add reasoning_gym to --rewards.")
        _check_rewards(rewards, task)
        own = tools_of(task["prompt"])
        unknown = {tool["function"]["name"] for tool in own or []} - {tool.__name__ for tool in tools or []}
        if tools and unknown:
            raise BadRecord(f"it offers the tool {min(unknown)}, which is not in --tools; add it, or drop the line")
        prompt = encode_chat(tokenizer, task["prompt"], own or tools, **options)
        if own and prompt == encode_chat(tokenizer, task["prompt"], **options):
            raise UserError(
                "The chat template describes no tools, but a task has some. Use a model whose template writes them, "
                "or drop the tools of the tasks."
            )
        if len(prompt) > max_prompt_length:
            raise BadRecord(
                f"the prompt is longer than the {max_prompt_length} tokens that --max_completion_length leaves of the "
                "model's positions; shorten it, or drop the line"
            )

    return check


def load_reward_functions(names: list[str], *, trust_remote_code: bool = False) -> list[Reward | str]:
    """
    Return reward functions by name.

    A name is a key of `REWARDS`, `module.path:function` (modules in the current directory included), or the directory
    or Hub id of a reward model, `owner/model` ([`~stages.scoring_models.load_reward_model`]).

    Raises:
        `UserError`: if nothing has such a name, or a model gives no score.
    """
    return [_load_reward(name, trust_remote_code) for name in names]


def _load_reward(name: str, trust_remote_code: bool) -> Reward | str:
    """
    Return a reward function by name. A function of the user raises `UserError` unless it returns a score for each
    completion.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name and ("/" in name or Path(name).is_dir()):
        return load_reward_model(name, trust_remote_code=trust_remote_code)
    reward = load_object(name, flag="--rewards", known=REWARDS)
    # TRL itself runs models, and awaits coroutines.
    if isinstance(reward, nn.Module) or inspect.iscoroutinefunction(reward):
        return reward

    @wraps(reward)
    def checked(completions: list[Completion], **columns: Any) -> list[float | None]:
        returned = reward(completions=completions, **columns)
        with suppress(TypeError, ValueError):
            scores = [None if score is None else float(score) for score in returned]
            if len(scores) == len(completions):
                return scores
        raise UserError(
            f"--rewards {name} returned {returned!r:.200} for {len(completions)} completions. Return a list with a "
            "number or None for each."
        )

    return checked
