"""The audit of conversations, against counts by hand."""

import copy
import re
from html import unescape

import pytest
from datasets import Dataset

from hf_pretrain.data.audit import find_worst
from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.data.inspection import inspect_data
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.control_tokens import encode_prompt
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import write_jsonl


def turn(question, answer, **more):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is two and two? It is four, said the user to the assistant."] * 4, vocab_size=420)


def inspect(tmp_path, tokenizer, records, **how):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    return path, inspect_data(
        [str(path)], Reading(kind=None), tokenizer_name=str(tmp_path / "tokenizer"), num_shown=1, **how
    )


def test_the_counts_of_tokens_and_faults(tmp_path, tokenizer):
    records = [
        {"messages": turn("two?", "It is four.") + turn("and?", "two")},
        {"messages": turn("What is " * 40, "four")},
        {"messages": turn("two?", "It is " * 40)},
    ]
    path, text = inspect(tmp_path, tokenizer, records, max_length=60)
    num_answers, total = {1: 0, 2: 0}, 0
    for record in records:
        for number in range(1, len(record["messages"]) // 2 + 1):
            prompt = encode_prompt(tokenizer, record["messages"][: 2 * number - 1])
            ids = tokenizer.apply_chat_template(record["messages"][: 2 * number]).input_ids
            # The template writes a line break behind the stop token. Only tokens within the length count.
            num_answers[number] += max(min(len(ids) - 1, 60) - len(prompt), 0)
        total += min(len(ids), 60)
    assert f"Conversations        3, {total} tokens" in text
    for number, count in num_answers.items():
        assert f"Tokens, trained      {count / total:.1%}: answer {number}" in text
    assert f"33.3% of 3 conversations train nothing: no answer begins within --max_length (first: {path}:2)" in text
    assert f"33.3% of 3 conversations have an answer that --max_length cuts (first: {path}:3)" in text
    longest = re.findall(r"Most tokens +([\d.]+): .*:(\d)", text)
    assert [int(line) for _, line in longest] == [2, 3, 1] or [int(line) for _, line in longest] == [3, 2, 1]
    assert [float(value) for value, _ in longest] == sorted((float(value) for value, _ in longest), reverse=True)
    # Both figures count the bytes of the text without special tokens, so the mean lies within the single ones.
    mean = float(re.search(r"Tokens  .*; ([\d.]+) per byte", text)[1])
    odd = [float(value) for value, _ in re.findall(r"Most tokens per byte +([\d.]+): .*:(\d)", text)]
    by_hand = []
    for record in records:
        rendered = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        num_bytes = len(rendered.replace("<|im_start|>", "").replace("<|im_end|>", "").encode())
        by_hand.append((len(tokenizer.apply_chat_template(record["messages"]).input_ids), num_bytes))
    assert odd == pytest.approx(sorted((ids / size for ids, size in by_hand), reverse=True), rel=1e-3)
    assert mean == pytest.approx(sum(ids for ids, _ in by_hand) / sum(size for _, size in by_hand), abs=1e-3)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (("<|im_end|>", ""), "end an answer without a special token"),
        (("<|im_end|>", "<|im_end|>"), None),
        (
            ("'<|im_start|>assistant\n' }}{%- endif", "'<|im_start|>bot\n' }}{%- endif"),
            "have another prompt in inference",
        ),
        (("{%- for", "{{- bos_token }}{%- for"), "begin with two bos tokens"),
    ],
)
def test_faults_of_a_template(tokenizer, change, finding):
    changed = copy.deepcopy(tokenizer)
    head = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    head += "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    head += "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    template = head + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    changed.chat_template = template.replace(*change)
    documents = Dataset.from_dict({"text": [read_conversation({"messages": turn("two?", "four")})]})
    lines = find_worst(documents, changed, max_length=100)
    assert (lines == []) if finding is None else finding in lines[0]


def test_the_page_colours_what_is_trained_and_cut(tmp_path, tokenizer):
    record = {"question": "<b>two?</b>", "answer": "It is four. " * 10, "topic": "sums"}
    page = tmp_path / "audit.html"
    # The names that other programs give to a question and an answer are read.
    assert "Fields not read      topic (1)" in inspect(tmp_path, tokenizer, [record], max_length=40, page=str(page))[1]
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text
    first = re.search("<pre>(.*?)</pre>", text, re.DOTALL)[1]
    spans = re.findall('<span class="(.*?)">(.*?)</span>', first, re.DOTALL)
    ids = tokenizer.apply_chat_template(turn(record["question"], record["answer"])).input_ids
    assert [state for state, _ in spans] == ["", "trained", "cut"]
    assert unescape("".join(part for _, part in spans)) == tokenizer.decode(ids)
    assert unescape(spans[0][1] + spans[1][1]) == tokenizer.decode(ids[:40])


def test_weights_and_variables(tokenizer):
    first, second = turn("two?", "It is four."), turn("and?", "two")
    unweighted = {"messages": [first[0], first[1] | {"weight": 0}, second[0], second[1] | {"weight": 0}]}
    documents = Dataset.from_dict({"text": [read_conversation({"messages": first}), read_conversation(unweighted)]})
    (line,) = find_worst(documents, tokenizer, max_length=100, variables={"enable_thinking": False})
    assert line.startswith("50.0% of 2 conversations train nothing") and "weights are 0" in line
