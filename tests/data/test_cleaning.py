"""`recipes/data.py`: `clean` drops bad records only and counts each one; the figures of `inspect` are right."""

import json
import random
import runpy
import sys
from collections import Counter
from unittest.mock import patch

import pytest

from hf_pretrain.data.cleaning import (
    CleaningRules,
    DuplicateFinder,
    OverlapFinder,
    find_flaw,
    normalize,
    write_cleaned,
)
from hf_pretrain.data.inspection import SAMPLE_SIZE, describe, find_language, render, survey_records
from hf_pretrain.data.records import Record, find_schema, read_records
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.toys import write_jsonl


WORDS = "the of and to in is was for on that with as by at from river mountain city people water light".split()


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
    assert find_flaw(text, CleaningRules()) == flaw


def jaccard(left: str, right: str) -> float:
    pieces = [{normalize(text)[i : i + 8] for i in range(len(normalize(text)) - 7)} for text in (left, right)]
    return len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1])


def test_near_duplicates_are_those_of_the_jaccard_index():
    finder = DuplicateFinder(0.8)
    texts = sentences(50)
    assert [finder.add(text) for text in texts] == [""] * 50
    # Texts that differ only in white space, case and character width are equal.
    assert finder.add(f"  {texts[0].upper()}\n") == "exact duplicate"
    near, far = texts[1].replace(" of ", " off ", 1), " ".join(reversed(texts[2].split()))
    assert jaccard(texts[1], near) > 0.9 and finder.add(near) == "near duplicate"
    assert jaccard(texts[2], far) < 0.5 and finder.add(far) == ""
    assert DuplicateFinder(None).add(near) == ""


def test_overlap_with_held_out_text():
    held_out = "Which gas do plants take from the air, and which one do they give back to it?"
    finder = OverlapFinder([held_out])
    assert finder.finds(f"Question: {held_out.upper()} Answer: ...")
    assert not finder.finds(held_out[:50]) and not finder.finds("Plants take a gas from the air. " * 5)


def test_every_record_is_kept_or_counted(tmp_path):
    texts = sentences(30)
    lines = [*texts, texts[0], texts[1].replace(" of ", " off ", 1), "short", {"text": 5}]
    records = [json.dumps({"text": line} if isinstance(line, str) else line) for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join([*records, "{broken"]) + "\n")
    held_out = OverlapFinder([texts[7]])
    source = str(tmp_path / "a.jsonl")
    report = write_cleaned(read_records([source]), tmp_path / "b.jsonl", CleaningRules(), held_out)
    kept = [json.loads(line)["text"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert kept == [text for text in texts if text != texts[7]]
    dropped = [json.loads(line) for line in (tmp_path / "b.jsonl.dropped.jsonl").read_text().splitlines()]
    assert report.num_records == len(lines) + 1 == report.num_kept + len(dropped)
    assert [entry["line"] for entry in dropped] == [8, 31, 32, 33, 34, 35]
    counts: Counter[str] = Counter()
    for reason, number in report.dropped.items():
        counts[reason.split(":")[0]] += number
    assert counts == {
        "in the held-out data": 1,
        "exact duplicate": 1,
        "near duplicate": 1,
        "shorter than 20 characters": 1,
        "bad line": 2,
    }


def test_conversations_keep_their_form(tmp_path):
    chats = [
        {"conversations": [{"role": "user", "content": text}, {"role": "assistant", "content": f"It is {number}."}]}
        for number, text in enumerate(sentences(5))
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in [*chats, chats[0]]))
    assert find_schema(str(path)) == "conversation"
    report = write_cleaned(read_records([str(path)]), tmp_path / "out.jsonl", CleaningRules(), OverlapFinder([]))
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == chats
    assert report.dropped == {"exact duplicate": 1}


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
    survey = survey_records(read_records([write_jsonl(tmp_path / "a.jsonl", [*texts, texts[0]])]))
    tokenizer = train_tokenizer(texts, vocab_size=400)
    found = dict(describe(survey, tokenizer, max_length=16))
    lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) + 2 for text in [*texts, texts[0]]]
    assert found["Tokens"].startswith(f"about {sum(lengths):,};")
    assert found["Exact duplicates"].startswith(f"{1 / 41:.1%} ") and found["Over --max_length"].startswith("100.0%")
    assert found["Languages"] == "en 100%" and "For tiny" in found


@pytest.mark.parametrize(
    ("text", "language"), [("今天天气很好，我们去公园散步吧，顺便买一点水果。", "zh"), ("hi", "?")]
)
def test_languages(text, language):
    assert find_language(text) == language


def test_records_are_shown_as_the_model_sees_them(tmp_path):
    tokenizer = train_tokenizer(sentences(40), vocab_size=400)
    chat = {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat) + "\n")
    (record,) = read_records([str(tmp_path / "a.jsonl")])
    shown = tokenizer.decode(render(record, tokenizer))
    assert shown.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>")


def test_the_command(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [*sentences(30), "short"])
    words = ["data.py", "clean", source, "--output", str(tmp_path / "b.jsonl")]
    with patch.object(sys, "argv", words):
        runpy.run_path(str(ROOT / "recipes/data.py"), run_name="__main__")
    assert "31 records read, 30 kept, 1 dropped" in capsys.readouterr().out
    assert json.loads((tmp_path / "b.jsonl.report.json").read_text())["num_kept"] == 30
    with patch.object(sys, "argv", words), pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "recipes/data.py"), run_name="__main__")
    assert "b.jsonl exists" in capsys.readouterr().err
    with patch.object(sys, "argv", ["data.py", "inspect", source, "--show", "2"]):
        runpy.run_path(str(ROOT / "recipes/data.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "31, " in printed and printed.count("--- ") == 2 and "tokens per parameter" in printed
