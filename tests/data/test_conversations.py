"""Every form of conversations and preferences."""

import copy
import datetime
import json
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import datasets
import pytest
from datasets import Dataset, Features, Json, List

from hf_pretrain.data.conversations import RECORDS as READERS
from hf_pretrain.data.conversations import read_conversation, read_preference
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.records import read_records
from hf_pretrain.rows.encoding import ConversationEncoder
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.training import train_tokenizer


USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
SCHEMAS = {
    "messages": {"messages": [USER, ANSWER]},
    "minimind": {"conversations": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    "prompt_completion": {"prompt": "2+2?", "completion": "4"},
    "prompt_completion of messages": {"prompt": [USER], "completion": [ANSWER]},
    "alpaca": {"instruction": "2+2?", "input": "", "output": "4"},
    "a table's nulls": {"messages": [{**USER, "tool_calls": None}, {**ANSWER, "tools": None}], "prompt": None},
    "JSON text": {"messages": json.dumps([USER, ANSWER])},
    "prompt_completion as JSON text": {"prompt": json.dumps([USER]), "completion": json.dumps(ANSWER)},
    "the fields of two kinds": {"messages": [USER, ANSWER], "instruction": "Say no.", "output": "no"},
    "empty cells of a CSV file": {
        **{"messages": "", "conversations": " ", "prompt": "", "completion": "", "instruction": "2+2?", "input": ""},
        **{"output": "4", "history": "", "system": "", "tools": "", "chat_template_kwargs": ""},
    },
    "fields without an effect": {
        "messages": [{**USER, "id": 7, "weight": 0, "images": []}, {**ANSWER, "timestamp": "now", "weight": True}]
    },
    "names, identifiers and counts": {
        "messages": [{**USER, "weight": 1, "tool_name": "a", "call_id": "b"}, {**ANSWER, "reasoning_tokens": 3}]
    },
    "fields of a record without an effect": {
        **{"messages": [USER, ANSWER], "label": True, "weight": "1.0", "loss": 1, "images": [], "image_id": 7},
        **{"video": None, "audio": "", "labels": "arithmetic", "source": "a"},
    },
    "generated": {"prompt": "2+2?", "generated": "4"},
    "generated in place of other answers": {"prompt": [USER], "completion": "5", "answer": "6", "generated": "4"},
    "generated in place of an answer of the messages": {
        "messages": [USER, {"role": "assistant", "content": "5", "weight": 0}],
        "prompt": "",
        "generated": "4",
    },
    "generated is no text": {"messages": [USER, ANSWER], "prompt": "2+3?", "generated": True},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ANSWER]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_gives_the_same_conversation(name):
    assert json.loads(read_conversation(SCHEMAS[name])) == {"messages": [USER, ANSWER]}


def test_fields_beside_a_conversation_are_kept():
    system = {"role": "system", "content": "Be a pirate."}
    for record in (
        {"system": "Be a pirate.", "conversations": [USER, ANSWER]},
        {"system": "Be a pirate.", "instruction": "2+2?", "output": "4"},
    ):
        assert json.loads(read_conversation(record))["messages"] == [system, USER, ANSWER]
    record = {"instruction": "2+2?", "output": "4", "history": [["a", "b"], ["c", "d"]]}
    contents = [message["content"] for message in json.loads(read_conversation(record))["messages"]]
    assert contents == ["a", "b", "c", "d", "2+2?", "4"]


def with_answer(text: str) -> list[tuple[Callable[[Any], str], dict]]:
    """Return records of all kinds with an answer, and their readers."""
    return [
        (read_conversation, {"messages": [USER, {"role": "assistant", "content": text}]}),
        (read_conversation, {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": text}]}),
        (read_conversation, {"prompt": "2+2?", "completion": text}),
        (read_conversation, {"instruction": "2+2?", "output": text}),
        (read_conversation, {"instruction": "why", "output": "so", "history": [["2+2?", text]]}),
        (read_preference, {"prompt": "2+2?", "chosen": text, "rejected": "5"}),
        (read_preference, {"prompt": "2+2?", "chosen": "5", "rejected": text}),
    ]


@pytest.mark.parametrize(
    "text", ["<think>\nadd\n</think>\n\n4", "add</think>\n\n4", "\nadd\n</think> \r\n4", "<think>add</think>4"]
)
def test_a_thought_within_any_answer_becomes_a_field(text):
    for read, record in with_answer(text):
        parts = json.loads(read(record))
        answers = [*parts.get("messages", [])[1:2], *parts.get("chosen", []), *parts.get("rejected", [])]
        assert {**ANSWER, "reasoning_content": "add"} in answers


@pytest.mark.parametrize(
    "text",
    ["Sure.<think>add</think>4", "Sure. <think>\nadd\n</think>\n\n4", "<think>add", "add</think>4", "4</think>"]
    + ["<think>a</think>4 <think>b</think>", "4 <think>"],
)
def test_a_thought_elsewhere_in_an_answer_is_refused(text):
    for read, record in with_answer(text):
        with pytest.raises(BadRecord):
            read(record)


def test_tool_calls_of_sharegpt_and_openai():
    record = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
        "tools": json.dumps([ADD]),
    }
    conversation = json.loads(read_conversation(record))
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert conversation["messages"][1]["tool_calls"] == [CALL] and conversation["tools"] == [ADD]
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps(CALL["arguments"])}}
    nested = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    assert json.loads(read_conversation(nested))["messages"][1]["tool_calls"] == [CALL]
    # Other names. A null in JSON is a value.
    call = {"name": "add", "parameters": {"a": 2, "b": None}}
    named = {"messages": [USER, {"role": "assistant", "tool_calls": [call], "thinking": "so"}]}
    message = json.loads(read_conversation(named))["messages"][1]
    assert message["tool_calls"][0]["arguments"] == call["parameters"] and message["reasoning_content"] == "so"


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {name: kinds}}}}
    for name, kinds in (("add", {"type": "integer", "enum": [1, None]}), ("say", {"type": "string"}))
]
TOOL_RECORDS = [
    {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"name": name, "arguments": {name: value}}]}],
        "tools": [tool],
    }
    for tool, name, value in zip(TOOLS, ("add", "say"), (1, "a"), strict=True)
]


def test_a_generated_answer_has_its_thought_and_calls_in_fields():
    call = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    record = {"prompt": "2+2?", "tools": [ADD], "generated": f"<think>\nadd\n</think>\n\nI add.\n{call}\n{call}"}
    (_, answer) = json.loads(read_conversation(record))["messages"]
    assert answer == ANSWER | {"content": "I add.", "reasoning_content": "add", "tool_calls": [CALL, CALL]}
    for text in (f"{call} so", "<tool_call>", f"so</tool_call>{call}"):
        with pytest.raises(BadRecord):
            read_conversation(record | {"generated": text})


@pytest.mark.parametrize("source", ["parquet", "hub", "hub of type Json"])
def test_a_table_adds_nothing_to_tools_and_calls(tmp_path, monkeypatch, source):
    expected = [read_conversation(record) for record in TOOL_RECORDS]
    assert all("null" not in text.replace("[1, null]", "") for text in expected)
    rows = TOOL_RECORDS
    if source == "hub of type Json":
        # `datasets` keeps JSON of changing types as it is, so its nulls are values.
        rows = [{**row, "tools": [{**row["tools"][0], "strict": None}]} for row in rows]
        expected = [read_conversation(row) for row in rows]
        features = Features({"messages": List(Json()), "tools": List(Json())})
        table = Dataset.from_list(rows, features=features)
    else:
        table = Dataset.from_list(rows)
        assert "say" in table[0]["tools"][0]["function"]["parameters"]["properties"]
    name = str(tmp_path / "chats.parquet")
    if source == "parquet":
        table.to_parquet(name)
    else:
        name = "org/chats"
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    documents, _ = load_documents([name], Reading(kind="conversation", validation_fraction=0))
    assert documents["text"][:] == expected
    assert [(record.text, record.content) for record in read_records([name], Reading(kind=None))] == list(
        zip(expected, rows, strict=True)
    )


WHOLE = {
    "messages": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}]},
            ANSWER,
        ],
        "tools": [ADD],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "alpaca": {"instruction": "2+2?", "input": "now", "output": "4", "history": [["a", "b"]], "system": "Be brief."},
    "generated": {"prompt": [USER], "generated": '<tool_call>{"name": "add"}</tool_call>', "tools": [ADD]},
    "preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": "5", "tools": [ADD]},
}
# Anything that JSON or a table can hold in place of a part of a record.
ODD_VALUES = [None, True, -1, float("nan"), "", "a\0", "\ud800", "[1]", "{}", "<think>", "<|im_end|>", "[" * 9000]
ODD_VALUES += [[], {}, [USER], {"role": "assistant"}, datetime.date(2024, 1, 1), b"bytes"]
ODD_VALUES += [reduce(lambda inner, _: [inner], range(300), 1)]


def places(value, place=()):
    """Yield the path to every value within a record."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


@pytest.mark.parametrize("kind", WHOLE)
def test_any_record_is_read_or_rejected_with_a_reason(kind):
    schema = "preference" if kind == "preference" else "conversation"
    texts = []
    for *way, last in list(places(WHOLE[kind]))[1:]:
        for value in ODD_VALUES:
            record = copy.deepcopy(WHOLE[kind])
            reduce(lambda part, key: part[key], way, record)[last] = value
            try:
                texts.append(READERS[schema](record))
            except BadRecord as error:
                assert error.reason and len(error.reason) < 2000
    # Every record that is accepted can be tokenized.
    texts = [*dict.fromkeys(texts)]
    assert len(texts) > 20
    tokenizer = train_tokenizer(["two and two"], vocab_size=420)
    if schema == "preference":
        prepare_pairs(Dataset.from_dict({"text": texts}), tokenizer, max_length=100_000)
    else:
        ConversationEncoder()(texts, tokenizer, max_length=100_000)


def test_a_thought_without_an_end_takes_linear_time():
    def seconds(num_lines: int) -> float:
        record = {"messages": [USER, {"role": "assistant", "content": "<think>" + "\n" * num_lines}]}
        start = time.process_time()
        with pytest.raises(BadRecord):
            read_conversation(record)
        return time.process_time() - start

    # A cubic algorithm takes minutes for a hundredth of this.
    assert seconds(1_000_000) < 5
    record = {"messages": [USER, {"role": "assistant", "content": " \n<think>\n so \n</think>\n\n4 "}]}
    answer = json.loads(read_conversation(record))["messages"][1]
    assert answer == {"role": "assistant", "content": "4 ", "reasoning_content": "so"}


def test_preferences():
    no = {"role": "assistant", "content": "5"}
    expected = {"prompt": [USER], "chosen": [ANSWER], "rejected": [no]}
    for record in (
        {"chosen": [USER, ANSWER], "rejected": [USER, no]},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        # UltraFeedback states the prompt twice.
        {"prompt": "2+2? ", "chosen": [USER, ANSWER], "rejected": [USER, no]},
        {"prompt": [USER], "chosen": ANSWER, "rejected": no},
        # A transcript of HH-RLHF.
        {key: f"\n\nHuman: 2+2?\n\nAssistant: {answer}" for key, answer in (("chosen", 4), ("rejected", 5))},
        {"prompt": "", "chosen": json.dumps([USER, ANSWER]), "rejected": json.dumps([USER, no])},
        {"prompt": [{**USER, "weight": 0}], "chosen": {**ANSWER, "weight": 1}, "rejected": no},
    ):
        assert json.loads(read_preference(record)) == expected
    system = {"role": "system", "content": "Be brief."}
    for prompt in ("2+2?", [USER], [system, USER]):
        beside = {"system": "Be brief.", "prompt": prompt, "chosen": "4", "rejected": "5"}
        assert json.loads(read_preference(beside))["prompt"] == [system, USER]
    within = {"prompt": "2+2?", "chosen": [system, USER, ANSWER], "rejected": [system, USER, no]}
    assert json.loads(read_preference(within))["prompt"] == [system, USER]
    longer = {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, no]}
    assert json.loads(read_preference(longer))["prompt"] == [USER, ANSWER, USER]
