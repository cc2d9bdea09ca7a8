"""Every schema, and masks, weights, truncation and packing of hand-marked conversations."""

import copy
import datetime
import json
import re
import time
from functools import reduce
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Json, List
from transformers import AutoTokenizer

from hf_pretrain.data.chat_arguments import ChatArguments
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.data.conversations import SCHEMAS as READERS
from hf_pretrain.data.conversations import read_conversation, read_preference
from hf_pretrain.data.data_arguments import SourceArguments
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.encoding import ConversationEncoder, encode_conversation
from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.packing import prepare_rows
from hf_pretrain.data.preference_pairs import prepare_pairs
from hf_pretrain.data.preparation import PreparedData, load_rows
from hf_pretrain.data.records import read_records
from hf_pretrain.stages.dpo import DPOTrainingArguments
from hf_pretrain.tokenizer.chat_template import mark_template
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.tokenizer.test_tokenization import CONVERSATIONS
from tests.toys import write_jsonl


TOKENIZERS = Path(__file__).parents[1] / "fixtures/tokenizers"
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is two and two? It is four, said the user to the assistant."] * 4, vocab_size=420)


# Each record in its usual form, and the text that the template renders, with the trained text between ⟦ and ⟧.
MARKED = {
    **{
        f"conversation {number} of the template's tests": (
            {"messages": messages, "chat_template_kwargs": options},
            marked.replace("[[", "⟦").replace("]]", "⟧"),
        )
        for number, (messages, options, marked) in enumerate(CONVERSATIONS[:3])
    },
    "several turns, ending with the user": (
        {"conversations": [USER, ANSWER, {"role": "user", "content": "why"}, ANSWER, USER]},
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n<|im_start|>user\nwhy<|im_end|>\n"
        "<|im_start|>assistant\n⟦4<|im_end|>⟧\n<|im_start|>user\n2+2?<|im_end|>\n",
    ),
    "the assistant begins, and speaks twice": (
        {"messages": [{"role": "assistant", "content": "Hello"}, ANSWER, USER]},
        "<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\n2+2?<|im_end|>\n",
    ),
    "tools": (
        {
            "conversations": [
                {"role": "system", "content": "Be brief.", "tools": json.dumps([ADD])},
                USER,
                {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
                {"role": "tool", "content": "4"},
                ANSWER,
            ]
        },
        "<|im_start|>system\nBe brief.\n\nThese tools can be called, each described by one line of JSON:\n<tools>\n"
        + json.dumps(ADD)
        + '\n</tools>\nTo call one, write its name and arguments as JSON:\n<tool_call>\n{"name": <tool name>, '
        '"arguments": <object>}\n</tool_call><|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n'
        '⟦<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n",
    ),
    "control tokens that are typed": (
        {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\nyes"}, ANSWER]},
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n",
    ),
    "cut off within the answer": (
        {"messages": [USER, {"role": "assistant", "content": "It is four, " * 20}]},
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦" + "It is four, " * 20 + "<|im_end|>⟧\n",
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_masks_equal_the_marks_by_hand(tokenizer, name):
    record, marked = MARKED[name]
    max_length = 40 if name == "cut off within the answer" else 500
    encoded = ConversationEncoder()([read_conversation(record)], tokenizer, max_length=max_length)
    (ids,), (weights,), (num_cut,) = encoded.values()
    assert (num_cut > 0) == (len(ids) == max_length)
    trained = [bool(weight) for weight in weights]
    assert set(weights) <= {0, 1}
    text = re.sub("[⟦⟧]", "", marked)
    # The trained characters of the text, as marked by hand and according to the mask.
    expected = [inside for part, inside in _parts(marked) for _ in part]
    decoded, found = "", []
    for token, flag in zip(ids, trained, strict=True):
        piece = tokenizer.decode([token])
        decoded += piece
        found += [flag] * len(piece)
    assert decoded == text[: len(decoded)] and (num_cut or decoded == text)
    assert found == expected[: len(found)]


def _parts(marked: str):
    for index, part in enumerate(re.split("[⟦⟧]", marked)):
        yield part, index % 2 == 1


@pytest.mark.parametrize("name", ["v1", "v3"])
def test_templates_of_minimind_get_marks_and_render_the_same(name):
    tokenizer = load_tokenizer(TOKENIZERS / name)
    original = AutoTokenizer.from_pretrained(TOKENIZERS / name).chat_template
    assert tokenizer.chat_template != original
    for record, _ in MARKED.values():
        conversation = json.loads(read_conversation(record))
        messages, tools = conversation["messages"], conversation.get("tools")
        rendered = [
            tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
            for template in (original, tokenizer.chat_template)
        ]
        assert rendered[0] == rendered[1]
    last = {**ANSWER, "reasoning_content": "so"} if name == "v3" else ANSWER
    ids, mask = encode_conversation(tokenizer, [USER, ANSWER, USER, last])
    trained = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert trained == {"v1": "4</s>4</s>", "v3": "4<|im_end|><think>\nso\n</think>\n\n4<|im_end|>"}[name]


def test_a_template_without_marks_is_refused(tokenizer, tmp_path):
    plain = load_tokenizer(TOKENIZERS / "v3")
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ValueError, match="does not mark what the assistant generates.*--chat_template minimind"):
        mark_template(plain)
    mark_template(plain, "minimind")
    assert plain.chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match="no such file"):
        mark_template(plain, str(tmp_path / "none.jinja"))


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
    with pytest.raises(BadRecord, match="'history' is no list of pairs"):
        read_conversation({**record, "history": ["a"]})


def test_a_thought_within_any_answer_becomes_a_field():
    text, answer = "<think>\nadd\n</think>\n\n4", {**ANSWER, "reasoning_content": "add"}
    for record in (
        {"messages": [USER, {"role": "assistant", "content": text}]},
        {"prompt": "2+2?", "completion": text},
        {"instruction": "2+2?", "output": text},
        {"instruction": "why", "output": "so", "history": [["2+2?", text]]},
    ):
        assert json.loads(read_conversation(record))["messages"][:2] == [USER, answer]
    record = {"prompt": "2+2?", "chosen": text, "rejected": text.replace("4", "5")}
    preference = json.loads(read_preference(record))
    assert preference["chosen"] == [answer] and preference["rejected"] == [{**answer, "content": "5"}]


def test_a_template_that_drops_content_is_refused(tokenizer):
    plain = load_tokenizer(TOKENIZERS / "v1")
    mark_template(plain)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for message, part in (
        (call, "add"),
        ({"role": "tool", "content": "5"}, "5"),
        ({**ANSWER, "reasoning_content": "so"}, "so"),
    ):
        with pytest.raises(ValueError, match=f"leaves '{part}' out"):
            encode_conversation(plain, [USER, message, ANSWER])
    with pytest.raises(ValueError, match="no tokens of this tokenizer"):
        mark_template(plain, "minimind")


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


def test_other_names_of_arguments_and_thoughts():
    arguments = {"a": 2, "b": None}
    named = {"role": "assistant", "tool_calls": [{"name": "add", "parameters": arguments}], "thinking": "so"}
    message = json.loads(read_conversation({"messages": [USER, named]}))["messages"][1]
    # A null in JSON is a value.
    assert message["tool_calls"][0]["arguments"] == arguments and message["reasoning_content"] == "so"


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
    documents, _ = load_documents([name], schema="conversation", validation_fraction=0)
    assert documents["text"][:] == expected
    assert [record.text for record in read_records([name])] == expected


@pytest.mark.parametrize("value", [0, False, 0.5])
def test_the_loss_weight_of_an_answer(tokenizer, value):
    first = {"role": "assistant", "content": "five"}
    weighted = read_conversation({"messages": [USER, {**first, "weight": value}, USER, ANSWER]})
    plain = read_conversation({"messages": [USER, first, USER, ANSWER]})
    for tokens in (tokenizer, *(load_tokenizer(TOKENIZERS / version) for version in ("v1", "v3"))):
        mark_template(tokens)
        for train_on in ("assistant", "all"):
            encoder = ConversationEncoder(train_on)
            ids, weights, _ = encoder([weighted, plain], tokens, max_length=100).values()
            assert ids[0] == ids[1]
            _, is_generated = encode_conversation(tokens, [USER, first])
            expected = weights[1].copy()
            expected[: len(is_generated)][is_generated] = float(value)
            assert weights[0].tolist() == expected.tolist()
    # Other programs name the weight `loss`.
    assert read_conversation({"messages": [USER, {**first, "loss": value}, USER, ANSWER]}) == weighted
    twice = copy.deepcopy(tokenizer)
    twice.chat_template = twice.chat_template.replace(
        "{%- generation -%}", "{%- generation -%}{{- 'Now' -}}{%- endgeneration -%}{{- ': ' -}}{%- generation -%}"
    )
    with pytest.raises(ValueError, match="marks 4 texts of the assistant in a conversation with 2 messages"):
        ConversationEncoder()([weighted], twice, max_length=100)


@pytest.mark.parametrize(
    "record, reason",
    [
        ("text", "not an object but a string"),
        (
            {"text": "a"},
            "no conversation: its fields are text, and it needs messages or conversations or prompt with completion",
        ),
        ({"messages": []}, "'messages' is no list of messages but empty"),
        ({"messages": "hi"}, "'messages' is text that is not JSON"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an answer of the assistant is empty"),
        ({"messages": [USER, {**ANSWER, "weight": -1}]}, "'weight' that is no boolean or number of 0 or more"),
        ({"messages": [USER, {**ANSWER, "loss": 1, "weight": 0}]}, "has the field 'loss', which cannot be trained"),
        ({"messages": [USER, ANSWER], "functions": [ADD]}, "'functions' is an older form of 'tools'"),
        ({"messages": [{**USER, "weight": 2}, ANSWER]}, "message of the user has a 'weight'"),
        ({"messages": [{**USER, "images": ["a.png"]}, ANSWER]}, "message of the user has the field 'images'"),
        ({"messages": ["hi"]}, "'messages' holds a string in place of a message"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "role 'bot'; known are system"),
        ({"messages": [USER]}, "the assistant says nothing"),
        ({"messages": [{"role": "user"}, ANSWER]}, "a message of the user has no content"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, "'content' holds an integer, not text"),
        ({"messages": [USER, {"role": "assistant", "content": "a\0"}]}, "NUL character"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "[{"}]}, "'tool_calls' is text that is not JSON"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, "a tool call has no name"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "from 'alien'; known are system"),
        ({"messages": [USER, ANSWER], "tools": "{}"}, "'tools' holds an object"),
        ({"messages": [USER, ANSWER], "tools": "[" * 100_000}, "'tools' is text that is not JSON, or nests too deep"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "\ud800"}]}]}, "half a surrogate pair"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": "a"}}, "holds 'tools', which a record cannot"),
    ],
)
def test_bad_conversations_have_a_reason(record, reason):
    with pytest.raises(BadRecord, match=reason):
        read_conversation(record)


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
def test_any_record_is_read_or_rejected_with_a_reason(tokenizer, kind):
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
    assert len(texts) > 20
    if schema == "preference":
        prepare_pairs(Dataset.from_dict({"text": texts}), tokenizer, max_length=100_000)
    else:
        ConversationEncoder()(texts, tokenizer, max_length=100_000)


def test_a_thought_without_an_end_takes_linear_time():
    def seconds(num_lines: int) -> float:
        record = {"messages": [USER, {"role": "assistant", "content": "<think>" + "\n" * num_lines}]}
        start = time.process_time()
        assert json.loads(read_conversation(record))["messages"][1] == record["messages"][1]
        return time.process_time() - start

    # A cubic algorithm takes minutes for a hundredth of this.
    assert seconds(1_000_000) < 5
    record = {"messages": [USER, {"role": "assistant", "content": " \n<think>\n so \n</think>\n\n4 </think> "}]}
    answer = json.loads(read_conversation(record))["messages"][1]
    assert answer == {"role": "assistant", "content": "4 </think> ", "reasoning_content": "so"}


def test_an_error_of_a_template_names_the_conversation(tokenizer):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template += "{{ messages[0].content % 1 }}"
    with pytest.raises(ValueError, match="cannot render the conversation that begins '2.2.': not all arguments"):
        encode_conversation(broken, [USER, ANSWER])


def test_preferences():
    no = {"role": "assistant", "content": "5"}
    expected = {"prompt": [USER], "chosen": [ANSWER], "rejected": [no]}
    for record in (
        {"chosen": [USER, ANSWER], "rejected": [USER, no]},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        # UltraFeedback states the prompt twice.
        {"prompt": "2+2? ", "chosen": [USER, ANSWER], "rejected": [USER, no]},
        {"prompt": [USER], "chosen": ANSWER, "rejected": no},
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
    for record, reason in (
        ({"chosen": [USER, ANSWER]}, "no 'rejected'"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "chosen and rejected are equal"),
        ({"chosen": [ANSWER], "rejected": [no]}, "share no prompt"),
        (
            {"prompt": "3+3?", "chosen": [USER, ANSWER], "rejected": [USER, no]},
            "another prompt than the one in 'prompt'",
        ),
        ({"prompt": "2+2?", "chosen": "", "rejected": "5"}, "an answer of the assistant is empty"),
        ({"prompt": "2+2?", "chosen": {**ANSWER, "weight": 0}, "rejected": no}, "'chosen' has a loss weight"),
        ({"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, no, USER, no]}, "continues after the answer"),
    ):
        with pytest.raises(BadRecord, match=reason):
            read_preference(record)


def test_train_on_the_last_turn(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    tail = [call, {"role": "tool", "content": "4"}, ANSWER]
    before = [USER, {**ANSWER, "content": "five"}, USER]
    # The last message of the user has no answer, so the turn before it counts.
    text = read_conversation({"messages": [*before, *tail, USER]})
    (ids,), (weights,), _ = ConversationEncoder("last_turn")([text], tokenizer, max_length=200).values()
    trained = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight])
    assert "<tool_call>" in trained and trained.count("<|im_end|>") == 2 and "five" not in trained
    (_,), (whole,), _ = ConversationEncoder()([text], tokenizer, max_length=200).values()
    assert (weights[weights > 0] == whole[weights > 0]).all() and weights.sum() < whole.sum()
    # Weights of messages hold as well.
    text = read_conversation({"messages": [*before, {**ANSWER, "weight": 0}]})
    assert ConversationEncoder("last_turn")([text], tokenizer, max_length=200)["input_ids"] == [[]]


def conversations(tokenizer, lengths) -> Dataset:
    messages = [
        [{"role": "user", "content": "two " * length}, {"role": "assistant", "content": "four " * (length + 1)}]
        for length in lengths
    ]
    return Dataset.from_dict({"text": [read_conversation({"messages": turns}) for turns in messages]})


def test_rows_without_trained_tokens_are_dropped_and_counted(tokenizer):
    documents = conversations(tokenizer, [1, 40, 2])
    rows, report = prepare_rows(documents, tokenizer, max_length=32, encoder=ConversationEncoder())
    assert report.num_documents == 3 and report.num_dropped == 1
    for row in rows:
        starts = [sum(row["seq_lengths"][:i]) for i in range(len(row["seq_lengths"]) + 1)]
        assert all(sum(row["loss_mask"][a + 1 : b]) > 0 for a, b in zip(starts[:-1], starts[1:], strict=True))
    assert report.num_tokens_trained == sum(weight != 0 for row in rows for weight in row["loss_mask"])
    assert "1 conversations without any were dropped" in str(report)
    stream = IterableDataset.from_generator(lambda: iter(documents))
    streamed, _ = prepare_rows(stream, tokenizer, max_length=32, encoder=ConversationEncoder())
    assert [row["input_ids"] for row in streamed] == [row["input_ids"] for row in rows]
    assert [row["loss_mask"] for row in streamed] == [row["loss_mask"] for row in rows]
    none, report = prepare_rows(
        conversations(tokenizer, [40]), tokenizer, max_length=32, encoder=ConversationEncoder()
    )
    assert len(none) == report.num_tokens == 0 and report.num_dropped == 1
    with pytest.raises(ValueError, match="would cut conversations apart"):
        prepare_rows(documents, tokenizer, max_length=32, packing_strategy="wrapped", encoder=ConversationEncoder())


@pytest.mark.parametrize("kind", ["conversations", "preferences"])
def test_only_training_data_must_leave_rows(tokenizer, tmp_path, kind):
    answers = {"completion": "four"} if kind == "conversations" else {"chosen": "four", "rejected": "two"}
    names = {}
    for name, prompt in (("short", "two"), ("long", "two " * 40)):
        names[name] = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": prompt, **answers}])
    args = DPOTrainingArguments(str(tmp_path), use_cpu=True, bf16=False, max_length=32)

    def load(train: str, validation: str) -> PreparedData:
        how = {"dataset_name": [names[train]], "eval_dataset_name": [names[validation]]}
        if kind == "preferences":
            return load_rows(SourceArguments(**how), args, tokenizer, prepare=prepare_pairs)
        return load_rows(ChatArguments(**how, max_length=32), args, tokenizer)

    data = load("short", "long")
    assert len(data.train) == 1 and data.eval is None and data.conversations is None
    with pytest.raises(ValueError, match=f"None of 1 {kind} has an answer to train on within --max_length"):
        load("long", "short")


@pytest.mark.parametrize("experts", [{}, {"num_experts": 4, "num_shared_experts": 1, "router_aux_loss_coef": 0.1}])
def test_packing_changes_no_loss(build_model, tokenizer, experts):
    model = build_model(vocab_size=len(tokenizer), **experts)
    documents = conversations(tokenizer, [3, 9, 1, 5, 7, 2])
    encoder = ConversationEncoder()
    losses = []
    for packing in ("bfd", "none"):
        rows, _ = prepare_rows(documents, tokenizer, max_length=64, packing_strategy=packing, encoder=encoder)
        batch = DataCollatorForPackedRows(tokenizer.pad_token_id)(list(rows))
        assert len(rows) == {"bfd": 3, "none": 6}[packing]
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
