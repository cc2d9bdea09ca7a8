"""Masks, weights and truncation of hand-marked conversations."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer

from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.rows.encoding import ConversationEncoder, encode_conversation
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer


TOKENIZERS = Path(__file__).parents[1] / "fixtures/tokenizers"
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is two and two? It is four, said the user to the assistant."] * 4, vocab_size=420)


# Each record in its usual form, and the text that the template renders, with the trained text between ⟦ and ⟧.
MARKED = {
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
    # The trained characters of the text, as marked by hand and according to the mask.
    parts = re.split("[⟦⟧]", marked)
    text, expected = "".join(parts), [index % 2 == 1 for index, part in enumerate(parts) for _ in part]
    decoded, found = "", []
    for token, flag in zip(ids, trained, strict=True):
        piece = tokenizer.decode([token])
        decoded += piece
        found += [flag] * len(piece)
    assert decoded == text[: len(decoded)] and (num_cut or decoded == text)
    assert found == expected[: len(found)]


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


def test_the_template_of_this_package_can_replace_another(tokenizer):
    plain = load_tokenizer(TOKENIZERS / "v3")
    set_template(plain, "minimind")
    assert plain.chat_template == tokenizer.chat_template


def test_the_loss_weight_of_an_answer(tokenizer):
    first, values = {"role": "assistant", "content": "five"}, (0, False, 0.5)
    turns = [[USER, {**first, name: value}, USER, ANSWER] for name in ("weight", "loss") for value in values]
    weighted = [read_conversation({"messages": turn}) for turn in turns]
    # Other programs name the weight `loss`.
    assert weighted[:3] == weighted[3:]
    plain = read_conversation({"messages": [USER, first, USER, ANSWER]})
    for tokens in (tokenizer, *(load_tokenizer(TOKENIZERS / version) for version in ("v1", "v3"))):
        set_template(tokens)
        is_generated = np.array(encode_conversation(tokens, [USER, first])[1]) > 0
        for train_on in ("assistant", "all"):
            ids, weights, _ = ConversationEncoder(train_on)([plain, *weighted], tokens, max_length=100).values()
            for value, found, row in zip(values, weights[1:], ids[1:], strict=False):
                expected = weights[0].copy()
                expected[: len(is_generated)][is_generated] = float(value)
                assert found.tolist() == expected.tolist() and row == ids[0]


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


def conversations(lengths) -> Dataset:
    messages = [
        [{"role": "user", "content": "two " * length}, {"role": "assistant", "content": "four " * (length + 1)}]
        for length in lengths
    ]
    return Dataset.from_dict({"text": [read_conversation({"messages": turns}) for turns in messages]})


def test_rows_without_trained_tokens_are_dropped_and_counted(tokenizer):
    documents = conversations([1, 40, 2])
    how = {"max_length": 32, "encoder": ConversationEncoder()}
    rows, report = prepare_rows(documents, tokenizer, **how)
    assert report.num_documents == 3 and report.num_dropped == 1
    for row in rows:
        starts = [sum(row["seq_lengths"][:i]) for i in range(len(row["seq_lengths"]) + 1)]
        assert all(sum(row["loss_mask"][a + 1 : b]) > 0 for a, b in zip(starts[:-1], starts[1:], strict=True))
    assert report.num_tokens_trained == sum(weight != 0 for row in rows for weight in row["loss_mask"])
    assert "1 conversations without any were dropped" in str(report)
    stream = IterableDataset.from_generator(lambda: iter(documents))
    streamed, _ = prepare_rows(stream, tokenizer, **how)
    assert list(streamed) == list(rows)
    none, report = prepare_rows(conversations([40]), tokenizer, **how)
    assert len(none) == report.num_tokens == 0 and report.num_dropped == 1
    # No token comes before the first one, so it trains nothing.
    assert ConversationEncoder("all")(documents["text"][:1], tokenizer, max_length=1)["input_ids"] == [[]]
