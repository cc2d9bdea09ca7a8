"""`recipes/data.py`: `clean` drops bad records only and counts each one; the figures of `inspect` are right."""

import json
import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from hf_pretrain.data.cleaning import DuplicateFinder, OverlapFinder, clean_data, find_flaw, normalize
from hf_pretrain.data.inspection import SAMPLE_SIZE, describe, render, survey_records
from hf_pretrain.data.records import Record, read_records
from hf_pretrain.rows.encoding import ConversationEncoder
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.toys import write_jsonl


WORDS = "the of and to in is was for on that with as by at from river mountain city people water light".split()


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Looks up the weather. " * 20}}


def chat(question: str, **answer) -> dict:
    """Return a conversation of a question and an answer with the given fields."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}]}


def clean_file(path: Path, **how) -> tuple[list[dict], list[dict]]:
    """Return the records of a file that a cleaning keeps, and the list of the others."""
    output = path.with_name("cleaned.jsonl")
    text = clean_data([str(path)], str(output), Reading(kind=None), **how)
    kept, dropped = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in (output, path.with_name("cleaned.jsonl.dropped"))
    )
    assert text.startswith(f"{len(kept) + len(dropped)} records read, {len(kept)} kept, {len(dropped)} dropped")
    for reason, number in Counter(entry["reason"] for entry in dropped).items():
        assert f" {number}  {reason}" in text
    return kept, dropped


def run_command(*words: str) -> None:
    with patch.object(sys, "argv", ["data.py", *words]):
        runpy.run_path(str(ROOT / "recipes/data.py"), run_name="__main__")


def sentences(number: int, seed: int = 0) -> list[str]:
    """Return different texts of about 300 characters."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=60)) + f" {number}" for number in range(number)]


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("short", "shorter than 20 characters"),
        ("the same line again\n" * 10, "more than 50% in repeated lines"),
        ("1 + 2 = 3; 4 + 5 = 9; 10 - 3 = 7", "less than 40% letters"),
        ("A text that people wrote, and that has words.", ""),
        ("这是一个用中文写的句子，它应该被保留下来，因为它有意义。", ""),
    ],
)
def test_rules(text, flaw):
    assert find_flaw(text, 20) == flaw


def jaccard(left: str, right: str) -> float:
    pieces = [{normalize(text)[i : i + 8] for i in range(len(normalize(text)) - 7)} for text in (left, right)]
    return len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1])


def test_near_duplicates_are_those_of_the_jaccard_index():
    finder = DuplicateFinder(0.8)
    texts = sentences(50)
    assert [finder.add(text, text) for text in texts] == [""] * 50
    assert finder.add(f"  {texts[0]}\n", texts[0]) == "exact duplicate"
    # Case and width of characters make a near duplicate.
    assert finder.add(texts[0].upper(), texts[0].upper()) == "near duplicate"
    near, far = texts[1].replace(" of ", " off ", 1), " ".join(reversed(texts[2].split()))
    assert jaccard(texts[1], near) > 0.9 and finder.add(near, near) == "near duplicate"
    assert jaccard(texts[2], far) < 0.5 and finder.add(far, far) == ""
    exact = DuplicateFinder(0)
    assert [exact.add(text, text) for text in ("caf\u00e9", near, "x²", "x2", "cafe\u0301\n")] == [""] * 4 + [
        "exact duplicate"
    ]


def test_conversations_differ_in_calls_and_thoughts(tmp_path):
    answers = [{"content": "", "tool_calls": [{"name": name, "arguments": {}}]} for name in ("weather", "timer")]
    answers += [{"content": "Yes.", "reasoning_content": text} for text in sentences(2)]
    chats = [chat("Please do what I asked you to do yesterday evening.", **answer) for answer in answers]
    write_jsonl(tmp_path / "a.jsonl", [*chats, *chats])
    kept, dropped = clean_file(tmp_path / "a.jsonl")
    assert kept == chats and [entry["reason"] for entry in dropped] == ["exact duplicate"] * 4


def test_overlap_with_held_out_text():
    held_out = "Which gas do plants take from the air, and which one do they give back to it?"
    finder = OverlapFinder([held_out])
    assert finder.finds(f"Question: {held_out.upper()} Answer: ...")
    assert not finder.finds(held_out[:50]) and not finder.finds("Plants take a gas from the air. " * 5)
    # A short text must be equal as a whole.
    # Without held-out texts, nothing is computed: the text is not even read.
    assert not OverlapFinder([]).finds(None)
    finder = OverlapFinder(["What is 17 + 4?", "x" * 60])
    assert finder.finds(" what is 17 + 4? ") and not finder.finds("What is 17 + 4? It is 21.")


def test_every_record_is_kept_or_counted(tmp_path):
    texts = sentences(30)
    lines = [*texts, texts[0], texts[1].replace(" of ", " off ", 1), "short", {"text": 5}]
    records = [json.dumps({"text": line} if isinstance(line, str) else line) for line in lines]
    # No file can hold half a surrogate pair.
    records.append(json.dumps({"text": sentences(32)[31], "note": "\ud83d"}))
    (tmp_path / "a.jsonl").write_text("\n".join([*records, "{broken"]) + "\n")
    kept, dropped = clean_file(tmp_path / "a.jsonl", more_held_out=[texts[7]])
    assert [record["text"] for record in kept] == [text for text in texts if text != texts[7]]
    assert [entry["line"] for entry in dropped] == [8, *range(31, 37)]
    expected = ["in the held-out data", "exact duplicate", "near duplicate", "shorter than 20 characters"]
    assert [entry["reason"] for entry in dropped][:4] == expected
    assert dropped[5]["reason"].startswith("bad line: column 'note' holds half a surrogate pair")


def test_the_fields_of_a_record_decide_its_schema(tmp_path):
    question, answer = chat("What is it?", content="A river.")["messages"]
    records = [
        {"prompt": "What is it?", "completion": "A river."},
        {"prompt": "What is it?", "completion": "A river.", "text": "A river."},
        {"prompt": "What is it?", "completion": "A river.", "text": None, "chosen": "A", "rejected": "B"},
        {"messages": [question, answer]},
    ]
    bad = [[], {"body": "a"}, {"messages": [{"role": "nobody"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", [*bad, *records])
    found = list(read_records([path], Reading(kind=None)))
    assert [record.content for record in found] == [None, None, None, *records]
    assert [record.kind for record in found[3:]] == ["conversation", "text", "preference", "conversation"]
    reasons = ["not an object but an array", "no column 'text'", "a message has the role 'nobody'"]
    assert all(record.reason.startswith(reason) for record, reason in zip(found, reasons, strict=False))


def test_a_sample_is_even_and_counts_are_whole():
    records = [Record("a", number, None, "x" * (number % 7 + 1)) for number in range(3 * SAMPLE_SIZE)]
    survey = survey_records([*records, Record("a", 0, None, "", "bad")])
    assert survey.num_records == len(records) and survey.reasons == {"bad": 1}
    assert survey.num_bytes == sum(len(record.text) for record in records)
    assert len({record.line for record in survey.sample}) == SAMPLE_SIZE
    # Each third of the data gives about a third of the sample.
    thirds = Counter(record.line // SAMPLE_SIZE for record in survey.sample)
    assert all(abs(number / SAMPLE_SIZE - 1 / 3) < 0.03 for number in thirds.values())


def test_the_description_agrees_with_the_data(tmp_path):
    texts = sentences(40)
    survey = survey_records(read_records([write_jsonl(tmp_path / "a.jsonl", [*texts, texts[0]])], Reading(kind=None)))
    tokenizer = train_tokenizer(texts, vocab_size=400)
    found = dict(describe(survey, tokenizer, max_length=16))
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) + 2 for text in [*texts, texts[0]]]
    assert found["Tokens"].startswith(f"about {sum(lengths):,};")
    assert found["Tokens"].endswith(f"; {sum(lengths) / sum(map(len, [*texts, texts[0]])):.3f} per byte")
    assert found["Exact duplicates"].startswith(f"{1 / 41:.1%} ") and found["Over --max_length"].startswith("100.0%")
    size = found["Model size"].removeprefix("up to ").partition(" parameters")[0]
    assert int(size.replace(",", "")) == pytest.approx(4 * sum(lengths) / 20, rel=0.05)
    assert found["Records"].startswith("41 texts, ")


def test_rejected_answers_are_no_text_to_train_on(tmp_path):
    pairs = [{"prompt": f"question {n}", "chosen": "good", "rejected": f"a much worse answer {n}"} for n in range(4)]
    survey = survey_records(read_records([write_jsonl(tmp_path / "a.jsonl", pairs)], Reading(kind=None)))
    assert survey.num_bytes == sum(len(pair["prompt"] + "\n" + pair["chosen"]) for pair in pairs)
    # The rejected answers alone tell these pairs from the first four.
    more = [pair | {"rejected": "another"} for pair in pairs]
    survey = survey_records(
        read_records([write_jsonl(tmp_path / "b.jsonl", [*pairs, *more, more[0]])], Reading(kind=None))
    )
    assert survey.num_duplicates == 1
    tokenizer = train_tokenizer(sentences(40), vocab_size=400)
    assert all("worse" not in tokenizer.decode(render(record, tokenizer)) for record in survey.sample)


def test_tools_and_variables_of_a_conversation_are_rendered_as_in_training(tmp_path):
    tokenizer = train_tokenizer(sentences(40), vocab_size=400)
    records = [chat("hi", content="hello"), chat("hi", content="hello") | {"tools": [TOOL]}]
    records.append(records[0] | {"chat_template_kwargs": {"enable_thinking": False}})
    rendered = []
    for record in read_records([write_jsonl(tmp_path / "a.jsonl", records)], Reading(kind=None)):
        rendered.append(render(record, tokenizer))
        assert rendered[-1] == ConversationEncoder()([record.text], tokenizer, max_length=10_000)["input_ids"][0]
    assert "get_weather" in tokenizer.decode(rendered[1]) and rendered[0] != rendered[2]


def test_the_command(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [*sentences(30), "short"])
    words = ["clean", source, "--output", str(tmp_path / "b.jsonl")]
    run_command(*words)
    assert "31 records read, 30 kept, 1 dropped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command(*words)
    assert "b.jsonl exists" in capsys.readouterr().err
    words[-1] = str(tmp_path / "c.jsonl")
    run_command(*words, "--held_out", write_jsonl(tmp_path / "held_out.jsonl", [sentences(2)[1], "ab"]))
    assert "1  in the held-out data" in capsys.readouterr().out
    run_command("inspect", source, "--show", "2")
    printed = capsys.readouterr().out
    assert "31 texts, " in printed and printed.count("--- ") == 2
    (tmp_path / "book.md").write_text("第一章\n\n" + "他们在河边走了很久。" * 9, encoding="gb18030")
    files = ["--encoding", "gb18030", "--whole_files"]
    run_command("inspect", str(tmp_path / "book.md"), *files)
    assert "1 texts, " in capsys.readouterr().out
    run_command("clean", str(tmp_path / "book.md"), "--output", str(tmp_path / "d.jsonl"), *files)
    assert json.loads((tmp_path / "d.jsonl").read_text("utf-8"))["text"].startswith("第一章\n\n他们在")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "--max_length", "0"], "--max_length 0 must be at least 8"),
        (["clean", "--near_duplicates", "-1"], "--near_duplicates -1.0 must be at least 0 and at most 1"),
        (["clean", "--output", ""], "--output is empty"),
    ],
)
def test_mistakes_end_with_one_line(capsys, words, message):
    with pytest.raises(SystemExit):
        run_command(words[0], "a.jsonl", *words[1:])
    assert message in capsys.readouterr().err.splitlines()[-1]
