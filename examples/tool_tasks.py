"""
Tasks for the tools of `examples/tools.py`, made from the tools themselves.

    python examples/tool_tasks.py out/tool-tasks 80 1 2

writes three files: `conversations.jsonl` shows calls in 80 conversations of 1 question each, with 2 wordings of each
kind of question, for `hf-pretrain sft`. `tasks.jsonl` holds questions in six wordings with what the answer must state,
for `hf-pretrain grpo`. `held_out.json` holds questions in eight wordings with the calls that they need, for
`hf-pretrain evaluate --tasks tool_call --tool_cases FILE`. No question of a file occurs in another one.
"""

import datetime
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tools
from transformers.utils import get_json_schema


TOOLS = (tools.calculate, tools.convert_units, tools.calendar, tools.stock)
# Each question offers all four, as `chat --tools examples/tools.py` does.
DESCRIPTIONS = [get_json_schema(each) for each in TOOLS]
_SIGNS = {"product": "*", "sum": "+", "difference": "-"}
_PLURALS = {"inch": "inches", "foot": "feet"}
# Wordings of each kind. The last two are for held-out questions only.
_WORDINGS = {
    "product": (
        "What is {a} times {b}?", "Calculate {a} * {b}.",
        "I buy {a} boxes with {b} eggs each. How many eggs are that?", "Multiply {a} by {b}.",
        "There are {a} rows of {b} chairs. How many chairs is that in all?", "How much is {a} x {b}?",
        "Each of {a} bags weighs {b} grams. What do they weigh together?", "Give me the product of {a} and {b}.",
    ),
    "sum": (
        "What is {a} plus {b}?", "Calculate {a} + {b}.",
        "I have {a} coins and get {b} more. How many do I have then?", "Add {a} and {b}.",
        "A shop sold {a} cups on Monday and {b} on Tuesday. How many in all?", "How much is {a} and {b} together?",
        "{a} people came by bus and {b} by train. How many people came?", "Give me the sum of {a} and {b}.",
    ),
    "difference": (
        "What is {a} minus {b}?", "Calculate {a} - {b}.",
        "I had {a} euros and spent {b}. How much is left?", "Subtract {b} from {a}.",
        "Of {a} seats, {b} are taken. How many are free?", "How much is {a} less {b}?",
        "A book has {a} pages. I read {b} of them. How many remain?", "Take {b} away from {a}.",
    ),
    "units": (
        "How many {t} are {v} {s}?", "Convert {v} {s} to {t}.",
        "It measures {v} {s}. What is that in {t}?", "What are {v} {s} in {t}?",
        "I need {v} {s} in {t}, please.", "{v} {s} are how many {t}?",
        "Express {v} {s} in {t}.", "The label says {v} {s}. How much is it in {t}?",
    ),
    "date": (
        "What date is {n} days after {d}?", "Which date comes {n} days after {d}?",
        "It is {d}. What is the date in {n} days?", "Add {n} days to {d}.",
        "My parcel left on {d} and takes {n} days. On which date does it come?", "{d} plus {n} days is which date?",
        "A course starts on {d} and ends {n} days later. When does it end?", "Tell me the date {n} days from {d}.",
    ),
    "weekday": (
        "Which weekday is {d}?", "What day of the week is {d}?",
        "Is {d} a Monday or another weekday?", "I was born on {d}. Which weekday was that?",
        "On which weekday does {d} fall?", "Name the weekday of {d}.",
        "Our meeting is on {d}. What day is that?", "Tell me the day of the week of {d}.",
    ),
    "stock": (
        "How many {i} are in stock?", "How many {i} do we have?",
        "Do we have any {i}?", "Count the {i}, please.",
        "A customer asks for {i}. How many can we sell?", "What is our stock of {i}?",
        "Are there {i} left, and how many?", "Tell me the number of {i} in the store.",
    ),
}  # fmt: skip


def _call(kind: str, generator: random.Random) -> tuple[dict[str, Any], Any, dict[str, Any], str]:
    """Return what fills a wording, the tool, its arguments, and the answer, in which `{}` stands for the result."""
    b, a = sorted((generator.randint(11, 99), generator.randint(3, 60)))
    day = datetime.date(2026, 1, 1) + datetime.timedelta(days=generator.randrange(1000))
    match kind:
        case "units":
            source, target = generator.sample(list(generator.choice([tools._METRES, tools._GRAMS])), 2)
            value, plural = generator.randint(2, 90), _PLURALS.get(target, target)
            words = {"v": value, "s": _PLURALS.get(source, source), "t": plural}
            arguments = {"value": value, "source": source, "target": target}
            return words, tools.convert_units, arguments, f"It is {{}} {plural}."
        case "date" | "weekday":
            days = generator.randint(2, 99) if kind == "date" else 0
            return {"d": day, "n": days}, tools.calendar, {"date": f"{day}", "days": days}, "It is {}."
        case "stock":
            item = generator.choice(list(tools._STOCK))
            return {"i": item}, tools.stock, {"item": item}, f"We have {{}} {item}."
    expression = f"{a} {_SIGNS[kind]} {b}"
    return {"a": a, "b": b}, tools.calculate, {"expression": expression}, f"{expression} is {{}}."


def make_questions(name: str, number: int, num_wordings: int, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Yield different questions that are not in `seen`, and add them to it."""
    generator = random.Random(name)
    while number:
        kind = generator.choice(list(_WORDINGS))
        words, tool, arguments, answer = _call(kind, generator)
        text = generator.choice(_WORDINGS[kind][:num_wordings]).format(**words)
        if text in seen:
            continue
        seen.add(text)
        number -= 1
        result = tool(**arguments)
        # The calendar returns both.
        states = dict(zip(("weekday", "date"), result.split(", "), strict=False)).get(kind, result)
        yield {
            "text": text,
            "call": {"name": tool.__name__, "arguments": arguments},
            "result": result,
            "states": states,
            "answer": answer.format(states),
        }


def _conversation(questions: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    messages = [
        message
        for question in questions
        for message in (
            {"role": "user", "content": question["text"]},
            {"role": "assistant", "content": "", "tool_calls": [question["call"]]},
            {"role": "tool", "content": question["result"]},
            {"role": "assistant", "content": question["answer"]},
        )
    ]
    return {"messages": messages, "tools": DESCRIPTIONS}


def _task(question: dict[str, Any]) -> dict[str, Any]:
    system = {"role": "system", "content": "", "tools": DESCRIPTIONS}
    return {"prompt": [system, {"role": "user", "content": question["text"]}], "solution": [question["states"]]}


def _case(question: dict[str, Any]) -> dict[str, Any]:
    call = question["call"]
    expected = {"name": call["name"], "arguments": {name: [value] for name, value in call["arguments"].items()}}
    return {
        "question": question["text"],
        "tools": [each.__name__ for each in TOOLS],
        "calls": [expected | {"result": question["result"]}],
        "states": [question["states"]],
    }


def main(directory: str, num_conversations: str = "80", num_rounds: str = "1", num_wordings: str = "2") -> None:
    path, seen = Path(directory), set[str]()
    path.mkdir(parents=True, exist_ok=True)
    held_out = make_questions("held out", 240, 8, seen)
    content = {"tools": DESCRIPTIONS, "cases": list(map(_case, held_out))}
    (path / "held_out.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    shown = make_questions("conversations", int(num_conversations) * int(num_rounds), int(num_wordings), seen)
    # The description of the tools, the longest part, stands once in a conversation of several rounds.
    _write(path / "conversations.jsonl", map(_conversation, zip(*[shown] * int(num_rounds), strict=True)))
    _write(path / "tasks.jsonl", map(_task, make_questions("tasks", 1000, 6, seen)))


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
