"""Answers for a file of prompts: equal to transformers' own, all fields kept, and completed after an interruption."""

import json
import sys
from pathlib import Path

import pytest

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.batch_answers import count_answers, read_prompts, write_answers
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.invariants.launching import ROOT, start
from tests.talking import SUM, TOOL, WEATHER
from tests.toys import write_jsonl


RECORDS = [
    {"prompt": "two and two?", "id": 1, "note": None},
    # The answer at the end is the one to generate.
    {"messages": SUM},
    {"messages": [{"role": "system", "content": "Answer in capitals."}, {"role": "user", "content": "hello"}]},
    {"prompt": WEATHER[:1], "tools": [TOOL], "answer": "It rains."},
    {"prompt": "你好吗"},
]


def generate(path, source, *flags):
    command = [sys.executable, str(ROOT / "recipes/generate.py"), "--input", str(source), "--use_cpu"]
    command += ["--temperature", "0"]
    return start([*command, "--max_new_tokens", "30", "--batch_size", "2", "--output", str(path), *flags])


@pytest.mark.slow
def test_answers_equal_those_of_transformers_one_by_one(talker, tmp_path):
    source = write_jsonl(tmp_path / "prompts.jsonl", RECORDS)
    result = generate(tmp_path / "answers.jsonl", source, "--model_name_or_path", str(talker))
    assert result.returncode == 0 and "5 answers" in result.stdout, result.stdout
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [row.pop("generated") for row in rows]
    assert rows == RECORDS
    tokenizer = load_tokenizer(talker)
    model = MiniMindForCausalLM.from_pretrained(talker).eval()
    prompts = [[{"role": "user", "content": "two and two?"}], SUM[:1], RECORDS[2]["messages"], WEATHER[:1]]
    prompts.append([{"role": "user", "content": "你好吗"}])
    for prompt, row, answer in zip(prompts, RECORDS, answers, strict=True):
        inputs = tokenizer.apply_chat_template(
            prompt, tools=row.get("tools"), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=30, pad_token_id=tokenizer.pad_token_id)
        assert answer == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert (
        "</think>\n\nIt is four." in answers[0] and answers[2] == "HELLO YOU" and '<tool_call>\n{"name"' in answers[3]
    )


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_killed_run_is_completed(talker, tmp_path, do_sample):
    model, tokenizer = MiniMindForCausalLM.from_pretrained(talker).eval(), load_tokenizer(talker)
    prompts = read_prompts(Path(write_jsonl(tmp_path / "prompts.jsonl", RECORDS)), tokenizer, max_tokens=400)
    options = {"batch_size": 2, "max_new_tokens": 12, "do_sample": do_sample, "pad_token_id": tokenizer.pad_token_id}
    path = tmp_path / "answers.jsonl"
    assert write_answers(prompts, path, model, tokenizer, **options) == 0
    whole = path.read_bytes()
    ends = [len(line) for line in whole.splitlines(keepends=True)]
    for length in (sum(ends[:2]), sum(ends[:4]) + 1, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:length])
        assert write_answers(prompts, path, model, tokenizer, **options) == whole[:length].count(b"\n")
        assert do_sample or path.read_bytes() == whole
        # A sampled answer depends on its batch, and a killed run may have written a part of one.
        assert path.read_bytes().startswith(whole[: sum(ends[:2])]) and path.read_bytes().count(b"\n") == 5
    with pytest.raises(UserError, match=r"line 1 answers no record in its place"):
        write_answers(prompts[1:], path, model, tokenizer, **options)
    # The file of prompts itself holds no answers, and stays as it is.
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(content := source.read_bytes().rstrip(b"\n"))
    with pytest.raises(UserError, match="line 1 answers no record"):
        write_answers(prompts, source, model, tokenizer, **options)
    assert source.read_bytes() == content


@pytest.mark.parametrize("tail", ["", '{"pro', '{"prompt": "a", "generated": "x', '{"prompt": "a", "generated": "x"}'])
def test_a_cut_line_is_cut_off(tmp_path, tail):
    path = tmp_path / "answers.jsonl"
    path.write_text(line := '{"prompt": "你好", "generated": "y"}\n', encoding="utf-8")
    with path.open("a") as file:
        file.write(tail)
    assert count_answers(path, [{"prompt": "你好"}, {"prompt": "a"}]) == 1 and path.read_text("utf-8") == line


@pytest.mark.parametrize(
    "content", ['{"a": [1, 2]}', '{"prompt": "a"}', "notes\n", '{"prompt": "a", "generated": "x"}\n{"prompt": "b"}']
)
def test_a_file_of_other_content_stays_as_it_is(tmp_path, content):
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"line \d answers no record in its place"):
        count_answers(path, [{"prompt": "a"}])
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "hello", "generated": "x"}, r"line 2: .*the field 'generated'"),
        ({"prompt": "hello " * 100}, r"line 2: a prompt of \d+ tokens; --max_new_tokens leaves 30"),
        ({"text": "hello"}, "line 2: 'prompt' is no list of messages but null"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "line 2: no message comes before the answer"),
    ],
)
def test_a_bad_record_is_named(talker, tmp_path, record, message):
    path = Path(write_jsonl(tmp_path / "prompts.jsonl", [RECORDS[0], record]))
    with pytest.raises(UserError, match=message):
        read_prompts(path, load_tokenizer(talker), max_tokens=30)
