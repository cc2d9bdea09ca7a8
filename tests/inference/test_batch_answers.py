"""Answers for a file of prompts: equal to transformers' own, all fields kept, and completed after an interruption."""

import csv
import json
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from hf_pretrain.data.documents import load_documents
from hf_pretrain.inference.batch_answers import count_answers, read_prompts, write_answers
from hf_pretrain.rows.encoding import encode_conversation
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
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


@pytest.mark.slow
def test_answers_equal_those_of_transformers_one_by_one(model, tokenizer, talker, tmp_path):
    source = write_jsonl(tmp_path / "prompts.jsonl", RECORDS)
    words = f"--use_cpu --temperature 0 --max_new_tokens 40 --batch_size 2 --model_name_or_path {talker}".split()
    files = ["--input", source, "--output", str(tmp_path / "answers.jsonl")]
    result = start([sys.executable, str(ROOT / "recipes/generate.py"), *words, *files])
    assert result.returncode == 0 and "5 answers" in result.stdout, result.stdout
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [row.pop("generated") for row in rows]
    assert rows == RECORDS
    prompts = [[{"role": "user", "content": "two and two?"}], SUM[:1], RECORDS[2]["messages"], WEATHER[:1]]
    prompts.append([{"role": "user", "content": "你好吗"}])
    for prompt, row, answer in zip(prompts, RECORDS, answers, strict=True):
        inputs = tokenizer.apply_chat_template(
            prompt, tools=row.get("tools"), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=40, pad_token_id=tokenizer.pad_token_id)
        assert answer == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert (
        "</think>\n\nIt is four." in answers[0] and answers[2] == "HELLO YOU" and '<tool_call>\n{"name"' in answers[3]
    )
    check_that_sft_trains(answers, talker, tmp_path)


def check_that_sft_trains(answers: list[str], talker: Path, path: Path) -> None:
    """Train on `path/answers.jsonl`, and compare the trained text of each row with the answers."""
    words = f"--use_cpu --bf16 false --report_to none --max_steps 1 --validation_fraction 0 --output_dir {path}/taught"
    names = ["--model_name_or_path", str(talker), "--dataset_name", str(path / "answers.jsonl")]
    result = start([sys.executable, str(ROOT / "recipes/sft.py"), *names, *words.split()])
    assert result.returncode == 0 and not (path / "taught/rejected.jsonl").exists(), result.stdout[-3000:]
    (launch,) = json.loads((path / "taught/run.json").read_text())
    assert launch["data"]["counts"][0].startswith(f"Training: {len(answers)} documents,"), launch["data"]
    reading = Reading(kind="conversation", validation_fraction=0)
    documents, _ = load_documents([str(path / "answers.jsonl")], reading)
    tokenizer = load_tokenizer(talker)
    for document, answer in zip(documents, answers, strict=True):
        parts = json.loads(document["text"])
        ids, is_trained = encode_conversation(tokenizer, parts["messages"], parts.get("tools"))
        trained = [index for index, trains in zip(ids, is_trained, strict=True) if trains]
        assert tokenizer.decode(trained, skip_special_tokens=True).strip() == answer.strip()


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_killed_run_is_completed(model, tokenizer, tmp_path, do_sample):
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


def test_each_batch_draws_random_numbers_of_its_own(model, tokenizer, tmp_path):
    prompts = read_prompts(Path(write_jsonl(tmp_path / "a.jsonl", RECORDS[:1] * 4)), tokenizer, max_tokens=400)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 50.0, "pad_token_id": tokenizer.pad_token_id}
    write_answers(prompts, tmp_path / "b.jsonl", model, tokenizer, batch_size=1, **options)
    assert len(set((tmp_path / "b.jsonl").read_text(encoding="utf-8").splitlines())) == 4


def test_a_cut_line_is_cut_off(tmp_path):
    path = tmp_path / "answers.jsonl"
    line, last = '{"prompt": "你好", "generated": "y"}\n', '{"prompt": "a", "generated": "x"}'
    for length in range(len(last) + 1):
        path.write_text(line + last[:length], encoding="utf-8")
        assert count_answers(path, [{"prompt": "你好"}, {"prompt": "a"}]) == 1 and path.read_text("utf-8") == line


def test_a_file_of_other_content_stays_as_it_is(tmp_path):
    path, line = tmp_path / "notes.json", '{"prompt": "a", "generated": "x"}\n'
    for content in ('{"a": [1, 2]}', '{"prompt": "a"}', "notes\n", line + '{"prompt": "b"}', '{"pro\n' + line):
        path.write_text(content)
        with pytest.raises(UserError):
            count_answers(path, [{"prompt": "a"}, {"prompt": "a"}][: content.count("\n") or 1])
        assert path.read_text() == content


@pytest.mark.parametrize("prompt", ["", " ", None])
def test_messages_stand_in_for_a_blank_prompt(tokenizer, tmp_path, prompt):
    """A row of a CSV file has all columns."""
    path = tmp_path / "prompts.jsonl"
    if prompt is None:
        write_jsonl(path, [{"prompt": None, "messages": SUM[:1]}])
    else:
        path = tmp_path / "prompts.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["prompt", "messages"], [prompt, json.dumps(SUM[:1])]])
    ((_, ids),) = read_prompts(path, tokenizer, max_tokens=400)
    assert ids == tokenizer.apply_chat_template(SUM[:1], add_generation_prompt=True, return_dict=False)


def test_two_processes_do_not_complete_one_output(model, tokenizer, tmp_path):
    path, prompts = tmp_path / "answers.jsonl", [({"prompt": "a"}, [1])]
    options = {"batch_size": 2, "max_new_tokens": 1, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    with FileLock(tmp_path / ".answers.jsonl.lock"), pytest.raises(UserError):
        write_answers(prompts, path, model, tokenizer, **options)
    assert not path.exists()
    assert write_answers(prompts, path, model, tokenizer, **options) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["answers.jsonl"]
