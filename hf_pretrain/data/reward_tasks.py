"""
Tasks of reinforcement learning: prompts whose answers a program can check, embedded or from the user's own files.

| name | a prompt asks for | checked by |
|---|---|---|
| `embedded:answer-format` | an answer of a given form to a question from the dialogues | `format` |
| `embedded:arithmetic` | the sum, difference or product of two numbers | `arithmetic` |
| `reasoning_gym:<family>` | the answer to a task of the package reasoning-gym | `reasoning_gym` |

A task is `{"prompt": [messages], "task": str, "solution": [str], ...}`: a conversational prompt as TRL expects it, and
the columns that the reward functions read. The first message of a prompt with tools holds them as JSON, as in
MiniMind's files. The same seed gives the same embedded tasks.
"""

import itertools
import json
import operator
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from ..rows.draws import add_system_message
from ..rows.reading import Reading
from ..runtime.errors import UserError
from ..runtime.named import load_named
from ..runtime.names import DatasetName, check_word
from .columns import parse_columns, rename_columns
from .corpora import load_embedded
from .documents import hashes_are_between
from .formats import BadRecord, check_values, parse_json, write_json
from .messages import check_record_fields, read_messages, read_turn, take_weights
from .rejected import RejectedLines
from .sources import find_sources, read_source


# Maximum number of tasks of each kind that a program makes.
NUM_TASKS = 2000
# A question anywhere in a line of a dialogue. The lookahead finds overlapping questions. Only questions that fill a
# whole line become tasks.
ENGLISH_QUESTION = re.compile(
    r"(?=\b((?:What|Who|How|Why|When|Where|Which|Do|Does|Did|Are|Is|Can|Have|Will)\b[^.!?\n]{5,60}\?))", re.ASCII
)


@dataclass(frozen=True)
class AnswerFormat:
    """
    A form that a prompt can require of an answer.

    Args:
        instruction (`str`): sentence in the prompt that asks for the form.
        parts (`tuple[str, ...]`): regular expressions, each of which must match the whole answer.
    """

    instruction: str
    parts: tuple[str, ...]


ANSWER_FORMATS = {
    "sentence": AnswerFormat(
        "Answer in one short sentence that begins with a capital letter and ends with a full stop.",
        # In order: one line; a capital letter first; one full stop, at the end; two to twelve words.
        (r".+", r"(?s)[A-Z].*", r"(?s)[^.!?]+\.", r"\S+(\s+\S+){1,11}"),
    ),
    "number": AnswerFormat("Answer with a number and nothing else.", (r"-?\d+(\.\d+)?",)),
}


# Embedded tasks: generators of rows, each with the `origins` of the documents behind it.


def _answer_formats(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield one task per English question of the dialogues, in random order."""
    questions: dict[str, None] = {}
    origins = defaultdict(list)
    for document in itertools.chain(load_embedded("chatterbot"), load_embedded("chitchat")):
        for line in document["text"].split("\n"):
            for match in ENGLISH_QUESTION.finditer(line):
                # Collect the origin of every document with this question: the task is in the validation set only if
                # all of them are.
                origins[match[1]].append(document["origin"])
                # Compare without the speaker's mark, such as "A: ".
                if line[3:] == match[1]:
                    questions[match[1]] = None
    shuffled = list(questions)
    generator.shuffle(shuffled)
    for question in shuffled:
        content = f"{question} {ANSWER_FORMATS['sentence'].instruction}"
        prompt = [{"role": "user", "content": content}]
        yield {"prompt": prompt, "answer_format": "sentence", "origins": origins[question]}


def _arithmetic(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Yield random problems with two numbers, without end."""
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    while True:
        # Multiplication is the hardest, so it is half as frequent as addition or subtraction.
        sign = generator.choice("++--*")
        largest = 9 if sign == "*" else 50
        a, b = generator.randint(0, largest), generator.randint(0, largest)
        content = f"What is {a} {sign} {b}? {ANSWER_FORMATS['number'].instruction}"
        prompt, solution = [{"role": "user", "content": content}], [str(operations[sign](a, b))]
        yield {"prompt": prompt, "solution": solution, "answer_format": "number"}


EMBEDDED_TASKS = {"answer-format": _answer_formats, "arithmetic": _arithmetic}
# Columns that every embedded task and every task in MiniMind's format has, so that all kinds fit into one table.
TASK_COLUMNS: dict[str, Any] = {"solution": [], "answer_format": None, "tools": None}


def _load_embedded_tasks(name: str, seed: int, num_tasks: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the tasks of one embedded kind, each with the origins of the documents behind it."""
    task = name.removeprefix("embedded:")
    check_word("--dataset_name", name, [f"embedded:{task}" for task in EMBEDDED_TASKS])
    # With the name in the seed, each kind of task gets a different random sequence.
    rows = EMBEDDED_TASKS[task](random.Random(f"{seed} {task}"))
    for row in itertools.islice(rows, num_tasks):
        # The split of tasks without documents hashes their prompt.
        origins = row.pop("origins", None) or [json.dumps(row["prompt"])]
        yield TASK_COLUMNS | row | {"task": task}, origins


# Tasks from files and the Hub.


def read_task(record: Any) -> dict[str, Any]:
    """
    Read the task of one record, in TRL's or MiniMind's format.

    TRL's format has a `prompt` (messages or text) and any columns that the rewards read. MiniMind's format has
    `conversations`, with the tools in the system message and the answer to replace as the last message. Its target
    `gt` becomes `solution`.

    Args:
        record (`Any`): a parsed record, which must be a `dict`.

    Raises:
        `BadRecord`: if the record has neither format.
    """
    if not isinstance(record, dict):
        raise BadRecord('not an object; write it as {"prompt": [{"role": "user", "content": ...}]}')
    for name, value in record.items():
        check_values([name, value], name)
    # Rewards may read all other columns.
    check_record_fields(record, has_loss=False)
    if "prompt" in record:
        prompt, tools = _as_columns(*read_turn(record["prompt"], "prompt", "user"))
        return {**record, "prompt": prompt} | ({} if tools is None else {"tools": tools})
    if "conversations" not in record:
        raise BadRecord("neither `prompt` nor `conversations`; write one of them, or name it: --columns prompt=...")
    messages, found = read_messages(record["conversations"], "conversations")
    if len(messages) < 2:
        raise BadRecord("`conversations` holds no prompt with an answer; write a list of messages")
    # MiniMind's last message is an answer, which the policy replaces by its own.
    prompt, tools = _as_columns(messages[:-1], found)
    target = record.get("gt", [])
    solution = [str(value) for value in (target if isinstance(target, list) else [target])]
    return TASK_COLUMNS | {"prompt": prompt, "solution": solution, "tools": tools, "task": None}


def _as_columns(messages: list[dict[str, Any]], tools: list | None) -> tuple[list[dict[str, Any]], str | None]:
    """
    Return messages and their tools, with the tools and the arguments of calls as JSON text.

    As nested columns of a table, the arguments would get the names of all other calls.
    """
    # The run trains only the answers that it generates itself.
    take_weights(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["arguments"] = write_json(call["arguments"])
    if tools is None:
        return messages, None
    messages[0]["tools"] = write_json(tools)
    return messages, messages[0]["tools"]


def _read_tasks(
    name: str, reading: Reading, rejected: RejectedLines, finish: Callable[[Any], dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the tasks of files or of a Hub dataset, finished, each with the text whose hash decides the split."""
    columns = parse_columns(tuple(reading.columns or ()))
    for source in find_sources(name) or [name]:
        for line, content in read_source(source, reading):
            rejected.num_lines += 1
            try:
                record = parse_json(content)
                task = read_task(rename_columns(record, columns) if columns else record)
                # The split must not depend on the system message that `finish` adds.
                yield finish(task), [json.dumps(task["prompt"])]
            except BadRecord as error:
                rejected.add(source, line, error.reason)


def load_tasks(
    dataset_names: list[str],
    reading: Reading = Reading(kind="task"),
    *,
    add_system_ratio: float = 0.0,
    rejected_path: str | Path | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    num_tasks: int = NUM_TASKS,
    level: int | None = None,
    raises: bool = False,
) -> tuple[Dataset, Dataset]:
    """
    Load the training set and the validation set of tasks.

    A hash of its prompt decides to which set a task belongs. A task that is made of embedded documents is in the
    validation set if all of these documents are in the validation sets of the other stages.

    Args:
        dataset_names (`list[str]`): each name is `embedded:<task>`, `reasoning_gym:<family>`, a path, glob or
            directory, or a Hub id, with records in a format of [`read_task`].
        reading ([`~rows.reading.Reading`]): how the user wants them to be read and divided. Its seed is also the seed
            of the embedded tasks and of the random system messages.
        add_system_ratio (`float`, defaults to 0.0): share of the tasks that get a random system message.
        rejected_path (`str` or `Path`, *optional*): JSONL file that lists bad lines.
        check (`Callable`, *optional*): raises `BadRecord` for a task of the user that is unfit for training.
        num_tasks (`int`): maximum number of tasks for each name of the first two kinds.
        level (`int`, *optional*): level of the tasks of reasoning-gym; by default, each family's own difficulty.
        raises (`bool`, defaults to `False`): whether their level may rise, so that all higher ones are made, too.

    Returns:
        `tuple`: training set and validation set.

    Raises:
        `UserError`: if a name leads to no task, too many lines are bad, or the training set is empty.
    """
    rejected = RejectedLines(reading.max_rejected_ratio, rejected_path)
    fraction, seed = reading.validation_fraction, reading.seed

    def finish(task: dict[str, Any], *, is_embedded: bool = False) -> dict[str, Any]:
        tools = task["prompt"][0].get("tools")
        task = task | {"prompt": add_system_message(task["prompt"], tools, seed=seed, ratio=add_system_ratio)}
        if check is not None and not is_embedded:
            check(task)
        return task

    loaded: list[tuple[dict[str, Any], list[str]]] = []
    for name in dataset_names:
        num_before = len(loaded)
        if DatasetName.parse(name).repo_id == "reasoning_gym":
            load = load_named("hf_pretrain.data.reasoning_gym_tasks:load_gym_tasks")
            loaded += load(name, reading, rejected, finish, num_tasks, level, raises)
        elif DatasetName.parse(name).is_embedded:
            rows = _load_embedded_tasks(name, seed, num_tasks)
            loaded += [(finish(task, is_embedded=True), found) for task, found in rows]
        else:
            loaded += _read_tasks(name, reading, rejected, finish)
        if len(loaded) == num_before:
            raise UserError(f"--dataset_name {name} holds no task.{rejected.describe()}")
    rejected.check_ratio()
    return _divide(loaded, fraction)


def _divide(loaded: list[tuple[dict[str, Any], list[str]]], fraction: float) -> tuple[Dataset, Dataset]:
    """
    Divide tasks, each with the hashes that decide, into training set and validation set.

    Raises:
        `UserError`: if the training set is empty, or a column holds values of several types.
    """
    # `dict.fromkeys` removes repeated names and keeps their order; a set would not.
    names = dict.fromkeys(name for row, _ in loaded for name in row)
    # The training set and the validation set.
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for row, origins in loaded:
        is_validation = all(hashes_are_between(origins, [None] * len(origins), 0.0, fraction))
        sides[is_validation].append({name: row.get(name) for name in names})
    if not sides[0]:
        raise UserError(f"--validation_fraction {fraction} leaves none of {len(loaded)} tasks. Lower it.")
    try:
        return Dataset.from_list(sides[0]), Dataset.from_list(sides[1])
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(
            f"A column of the tasks has values of several types, or integers above 64 bits: {error}. Write them as "
            "text."
        ) from error
