"""
Tasks for reinforcement: prompts whose answers can be checked, embedded or from files of the user's own.

| name | a prompt asks for | checked by |
|---|---|---|
| `embedded:answer-format` | an answer of a given shape to a question from the dialogues | `format` |
| `embedded:arithmetic` | the result of adding, subtracting or multiplying two numbers | `arithmetic` |
| `embedded:idiom-task` | the second half of a Chinese idiom from the idiom corpus | `idiom` |
| `embedded:tool-call` | a call of one of the tools that the system message lists | `tool_call` |

A task is `{"prompt": [messages], "task": str, "solution": [str], ...}`: what TRL calls a conversational prompt, and the
columns that its reward functions read. Embedded tasks are the same for the same seed.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset

from ..runtime.names import DatasetName
from .conversations import read_messages
from .corpora import load_embedded
from .formats import BadRecord, check_values, file_format, read_file, write_json
from .loading import find_sources
from .rejected import RejectedLines
from .splitting import hashes_are_between


NUM_EMBEDDED = 2000
# A question in a dialogue, wherever it begins; those that are a whole line make tasks.
ENGLISH_QUESTION = re.compile(
    r"(?=\b((?:What|Who|How|Why|When|Where|Which|Do|Does|Did|Are|Is|Can|Have|Will)\b[^.!?\n]{5,60}\?))", re.ASCII
)


@dataclass(frozen=True)
class AnswerFormat:
    """
    A shape that an answer can be asked to have.

    Args:
        instruction (`str`): how a prompt asks for it.
        parts (`tuple[str, ...]`): regular expressions, each to match the whole of what is checked.
        with_thought (`bool`): whether the thought before the answer is checked too.
    """

    instruction: str
    parts: tuple[str, ...]
    with_thought: bool = False


ANSWER_FORMATS = {
    "sentence": AnswerFormat(
        "Answer in one short sentence that begins with a capital letter and ends with a full stop.",
        # One line; the capital letter; one full stop, at the end; two to twelve words.
        (r".+", r"(?s)[A-Z].*", r"(?s)[^.!?]+\.", r"\S+(\s+\S+){1,11}"),
    ),
    "number": AnswerFormat("Answer with a number and nothing else.", (r"-?\d+(\.\d+)?",)),
    "reasoning": AnswerFormat(
        "Think first, between <think> and </think>, then answer.",
        (r"(?s)<think>.*", r"(?s)\s*\S.*</think>.*", r"(?s).*</think>\s*\S.*", r"(?s)(?!.*</think>.*</think>).*"),
        with_thought=True,
    ),
}

# What the chat template says of tools, as a system message: TRL renders no tools that it cannot call.
TOOLS_INTRODUCTION = "These tools can be called, each described by one line of JSON:\n<tools>\n"
TOOLS_INSTRUCTION = (
    "</tools>\nTo call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": <tool name>, "arguments": <object>}\n</tool_call>'
)


def tools_message(tools: list[dict[str, Any]], system: str = "") -> str:
    """The system message that the chat template makes of `tools`, described by their JSON schemas."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return (f"{system}\n\n" if system else "") + TOOLS_INTRODUCTION + lines + TOOLS_INSTRUCTION


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("get_weather", "The weather in a city.", city="string"),
    _tool("set_timer", "Starts a timer.", minutes="integer"),
    _tool("translate", "Translates a word.", word="string", language="string"),
]
_CITIES = ["Beijing", "Paris", "London", "Tokyo", "Berlin", "Rome", "Madrid", "Moscow"]
_WORDS = ["river", "green", "apple", "house", "music", "friend", "winter", "bread"]
_LANGUAGES = ["French", "German", "Spanish", "Italian"]


# The embedded tasks: rows from a source of chance, with the `origins` of the documents that they are made of


def _documents(*parts: str) -> Iterator[dict[str, str]]:
    return (record for part in parts for record in load_embedded(part) if not isinstance(record, BadRecord))


def _answer_formats(generator: random.Random) -> Iterator[dict[str, Any]]:
    questions: dict[str, None] = {}
    origins = defaultdict(list)
    for document in _documents("chatterbot", "chitchat"):
        for line in document["text"].split("\n"):
            for match in ENGLISH_QUESTION.finditer(line):
                origins[match[1]].append(document["origin"])
                if line[3:] == match[1]:
                    questions[match[1]] = None
    shuffled = list(questions)
    generator.shuffle(shuffled)
    for question in shuffled:
        content = f"{question} {ANSWER_FORMATS['sentence'].instruction}"
        prompt = [{"role": "user", "content": content}]
        yield {"prompt": prompt, "answer_format": "sentence", "origins": origins[question]}


def _arithmetic(generator: random.Random) -> Iterator[dict[str, Any]]:
    operations: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
    }
    while True:
        sign = generator.choice("++--*")
        largest = 9 if sign == "*" else 50
        a, b = generator.randint(0, largest), generator.randint(0, largest)
        content = f"What is {a} {sign} {b}? {ANSWER_FORMATS['number'].instruction}"
        yield {
            "prompt": [{"role": "user", "content": content}],
            "solution": [str(operations[sign](a, b))],
            "answer_format": "number",
        }


def _idioms(generator: random.Random) -> Iterator[dict[str, Any]]:
    endings, origins = defaultdict(list), defaultdict(list)
    for document in _documents("idiom"):
        idiom = document["text"].split(" (")[0]
        if len(idiom) == 4:
            endings[idiom[:2]].append(idiom[2:])
            origins[idiom[:2]].append(document["origin"])
    beginnings = list(endings)
    generator.shuffle(beginnings)
    for beginning in beginnings:
        # Several idioms may begin alike: each of them is right.
        solution = [ending for found in endings[beginning] for ending in (found, beginning + found)]
        prompt = [{"role": "user", "content": f"补全成语：{beginning}__"}]
        yield {"prompt": prompt, "solution": solution, "origins": origins[beginning]}


def _tool_calls(generator: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        city, word, language = map(generator.choice, (_CITIES, _WORDS, _LANGUAGES))
        minutes = generator.randint(1, 60)
        content, name, arguments = generator.choice(
            [
                (f"What is the weather in {city}?", "get_weather", {"city": city}),
                (f"Set a timer for {minutes} minutes.", "set_timer", {"minutes": minutes}),
                (f"What is {word} in {language}?", "translate", {"word": word, "language": language}),
            ]
        )
        tools = generator.sample(TOOLS, len(TOOLS))
        yield {
            "prompt": [{"role": "system", "content": tools_message(tools)}, {"role": "user", "content": content}],
            "solution": [json.dumps({"name": name, "arguments": arguments})],
            "tools": json.dumps(tools),
        }


EMBEDDED_TASKS: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "answer-format": _answer_formats,
    "arithmetic": _arithmetic,
    "idiom-task": _idioms,
    "tool-call": _tool_calls,
}
TASK_COLUMNS: dict[str, Any] = {"solution": [], "answer_format": None, "tools": None}


def _load_embedded_tasks(name: str, seed: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    task = name.removeprefix("embedded:")
    if task not in EMBEDDED_TASKS:
        known = ", ".join(f"embedded:{task}" for task in EMBEDDED_TASKS)
        raise ValueError(f"--dataset_name {name}: no such embedded task. There are: {known}.")
    rows = EMBEDDED_TASKS[task](random.Random(f"{seed} {task}"))
    for row, _ in zip(rows, range(NUM_EMBEDDED), strict=False):
        origins = row.pop("origins", None) or [json.dumps(row["prompt"])]
        yield TASK_COLUMNS | row | {"task": task}, origins


# Files


def read_task(record: Any, *, describe_tools: bool = True) -> dict[str, Any]:
    """
    A task from a record: TRL's (`prompt`, messages or text, and whatever columns the rewards read), or MiniMind's
    (`conversations`, whose last message is the answer to be replaced, tools in the system message, and the target in
    `gt`, which becomes `solution`). With `describe_tools`, the tools become part of the system message.

    Raises:
        `BadRecord`: if it is neither.
    """
    if not isinstance(record, dict):
        raise BadRecord('not an object; write it as {"prompt": [{"role": "user", "content": ...}]}')
    for name, value in record.items():
        check_values([name, value], name)
    if "prompt" in record:
        prompt = record["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {**record, "prompt": _read_messages(_non_empty_list(messages, "prompt"), "prompt")[0]}
    if "conversations" not in record:
        raise BadRecord("neither `prompt` nor `conversations`; give one of them")
    *messages, _ = _non_empty_list(record["conversations"], "conversations")
    messages = _non_empty_list(messages, "conversations without the answer")
    prompt, schemas = _read_messages(messages, "conversations")
    tools = None
    if schemas is not None:
        tools = write_json(schemas, "tools")
        if describe_tools:
            system = prompt.pop(0)["content"] if prompt[0]["role"] == "system" else ""
            prompt.insert(0, {"role": "system", "content": tools_message(schemas, system)})
    target = record.get("gt", [])
    solution = [str(value) for value in (target if isinstance(target, list) else [target])]
    return TASK_COLUMNS | {"prompt": prompt, "solution": solution, "tools": tools, "task": None}


def _non_empty_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"`{name}` holds no message; write a list of them")
    return value


def _read_messages(messages: list[Any], name: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages, with the arguments of calls as JSON: a table would give every call the arguments of all."""
    read, tools = read_messages(messages, name)
    for message in read:
        for call in message.get("tool_calls", []):
            call["arguments"] = write_json(call["arguments"], "arguments")
    return read, tools


def _read_records(name: str) -> Iterator[tuple[str, int, int | None, Any]]:
    """Source, line, byte and content of every record under a name that is not embedded."""
    sources = find_sources(name)
    if sources is None:
        dataset = DatasetName.parse(name)
        try:
            records = datasets.load_dataset(dataset.repo_id, dataset.config, revision=dataset.revision, split="train")
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{name!r} is no file here, and could not be loaded from the Hub (as name:config@revision): {error}"
            ) from error
        yield from ((name, line, None, record) for line, record in enumerate(records, start=1))
        return
    for source in sources:
        if file_format(Path(source)) not in (".jsonl", ".json"):
            raise ValueError(f"{source}: tasks are read from .jsonl and .json. Convert the file.")
        yield from ((source, *found) for found in read_file(Path(source), text_column="prompt"))


class _ColumnTypes:
    """The types of the columns that all tasks share in one table."""

    def __init__(self) -> None:
        self.types: dict[str, pa.DataType] = {}

    def add(self, task: dict[str, Any]) -> None:
        """Raises `BadRecord` for a value of another type than those of the tasks before, or of none that a table has."""
        for name, value in task.items():
            try:
                kind = pa.array([value]).type
                before = self.types.get(name, kind)
                if kind != before:
                    schemas = [pa.schema([(name, each)]) for each in (before, kind)]
                    kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            except (pa.ArrowException, OverflowError) as error:
                reason = (
                    f"column {name!r} does not fit into a table with those of the lines before; mend or drop the line"
                )
                raise BadRecord(reason) from error
            self.types[name] = kind


def _load_tasks(
    name: str,
    seed: int,
    describe_tools: bool,
    rejected: RejectedLines,
    types: _ColumnTypes,
    check: Callable[[dict[str, Any]], None] | None,
) -> list[tuple[dict[str, Any], list[str]]]:
    """Everything under one name: the tasks, and what the side of each goes by."""
    rows: list[tuple[dict[str, Any], list[str]]] = []
    if re.match(r"embedded(:|$)", name):
        rows = list(_load_embedded_tasks(name, seed))
        for task, _ in rows:
            types.add(task)
        return rows
    for source, line, offset, record in _read_records(name):
        rejected.num_lines += 1
        try:
            if isinstance(record, BadRecord):
                raise record
            task = read_task(record, describe_tools=describe_tools)
            if check is not None:
                check(task)
            types.add(task)
            rows.append((task, [json.dumps(task["prompt"])]))
        except BadRecord as error:
            rejected.add(source, line, offset, error.reason)
    rejected.check_ratio()
    if not rows:
        raise ValueError(f"--dataset_name {name} holds no task.{rejected.describe()}")
    return rows


def load_tasks(
    dataset_names: list[str],
    *,
    validation_fraction: float = 0.01,
    seed: int = 42,
    describe_tools: bool = True,
    max_rejected_ratio: float = 0.01,
    rejected_path: str | Path | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Dataset, Dataset]:
    """
    Tasks to train on and tasks to hold out, chosen by a hash of their prompts; those that are made of the embedded
    corpora are held out where all that they are made of is held out by the other stages.

    Args:
        dataset_names (`list[str]`): each one `embedded:<task>`, a path, glob or directory (`.jsonl`, `.json`), or a
            Hub id, of records as [`read_task`] takes.
        validation_fraction (`float`, defaults to 0.01): share of the tasks to hold out.
        seed (`int`, defaults to 42): of the embedded tasks.
        describe_tools (`bool`, defaults to `True`): put the tools of MiniMind's records into the system message. Those
            that the trainer can call are described by the chat template instead.
        max_rejected_ratio (`float`, defaults to 0.01): share of bad lines that is tolerated.
        rejected_path (`str` or `Path`, *optional*): JSONL file that bad lines are listed in.
        check (`Callable`, *optional*): raises `BadRecord` for a task of the user's that cannot be trained on.

    Raises:
        `ValueError`: if a name leads to no task, too many lines are bad, or nothing is left to train on.
    """
    rejected = RejectedLines(max_rejected_ratio, rejected_path)
    reading = (seed, describe_tools, rejected, _ColumnTypes(), check)
    loaded = (task for name in dataset_names for task in _load_tasks(name, *reading))
    rows, origins = zip(*loaded, strict=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    held_out = [
        all(hashes_are_between(task_origins, [None] * len(task_origins), 0.0, validation_fraction))
        for task_origins in origins
    ]
    sides = [
        [row for row, is_held_out in zip(rows, held_out, strict=True) if is_held_out is side] for side in (False, True)
    ]
    if not sides[0]:
        raise ValueError(f"--validation_fraction {validation_fraction} holds out all {len(rows)} tasks. Lower it.")
    train, validation = (
        Dataset.from_list([{column: row.get(column) for column in columns} for row in side]) for side in sides
    )
    return train, validation


__all__ = ["ANSWER_FORMATS", "EMBEDDED_TASKS", "load_tasks", "read_task", "tools_message"]
