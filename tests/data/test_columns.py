"""Renamed columns, and the names that other programs give to questions and answers."""

import json

import datasets
import pytest
from datasets import Dataset

from hf_pretrain.data.columns import parse_columns
from hf_pretrain.data.conversations import RECORDS
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import BadRecord
from hf_pretrain.data.records import read_records
from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.reading import Reading


ROWS = [{"Frage": f"{number}?", "Antwort": f"so {number}", "messages": "of another kind"} for number in range(9)]
COLUMNS = ["prompt=Frage", "completion=Antwort"]
EXPECTED = [
    {"messages": [{"role": "user", "content": row["Frage"]}, {"role": "assistant", "content": row["Antwort"]}]}
    for row in ROWS
]


@pytest.fixture(params=["jsonl", "csv", "parquet", "hub", "stream"])
def source(request, tmp_path, monkeypatch) -> str:
    """Return the name of `ROWS` in a form."""
    table, name = Dataset.from_list(ROWS), str(tmp_path / f"rows.{request.param}")
    if request.param in ("hub", "stream"):
        rows = table if request.param == "hub" else table.to_iterable_dataset()
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        return "org/rows"
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[request.param](name)
    return name


def test_columns_of_every_source_are_renamed(source, request):
    how = {"validation_fraction": 0, "columns": COLUMNS, "streaming": "stream" in request.node.name}
    documents, _ = load_documents([source], Reading(kind="conversation", **how))
    assert [json.loads(row["text"]) for row in documents] == EXPECTED
    assert [
        json.loads(record.text) for record in read_records([source], Reading(kind=None, columns=COLUMNS))
    ] == EXPECTED
    answers = ["text=Antwort"]
    assert [record.text for record in read_records([source], Reading(kind=None, columns=answers))] == [
        row["Antwort"] for row in ROWS
    ]
    texts, _ = load_documents([source], Reading(**how | {"columns": answers}))
    assert [row["text"] for row in texts] == [row["Antwort"] for row in ROWS]
    tasks, _ = load_tasks(
        [source], Reading(kind="task", columns=["prompt=Frage", "solution=Antwort"], validation_fraction=0)
    )
    assert tasks["solution"][:] == [row["Antwort"] for row in ROWS]
    how |= {"columns": ["prompt=Frag"], "max_rejected_ratio": 1.0}
    with pytest.raises(
        ValueError, match=r"9 x no column 'Frag' \(there is: Frage, Antwort, messages\); correct --col"
    ):
        load_documents([source], Reading(kind="conversation", **how))


def test_records_without_a_column_and_with_ours(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"q": "q", "prompt": "no", "input": "no", "a": "a", "rules": null}', "no JSON", "[1]"]
    path.write_text("\n".join([*lines, '{"q": "q", "a": "a"}', '{"q": "q", "a": "a", "rules": "s"}\n']))
    records = list(read_records([str(path)], Reading(kind=None, columns=["prompt=q", "completion=a", "system=rules"])))
    texts = [json.loads(record.text)["messages"] for record in records if not record.reason]
    assert texts == [[Q, A], [SYSTEM, Q, A]] and records[0].content["system"] is None
    reasons = [record.reason[:30] for record in records if record.reason]
    assert reasons == [
        "broken JSON: Expecting value; ",
        "not an object but an array; wr",
        "no column 'rules' (there is: q",
    ]


def test_embedded_records_keep_their_names():
    columns = ["prompt=Frage", "text=Antwort"]
    train, _ = load_documents(["embedded:chatterbot"], Reading(kind="conversation", columns=columns))
    assert len(train) > 100


@pytest.mark.parametrize(
    "pair, words",
    [
        ("prompt", "--columns prompt is no pair of its own. Write OUR=THEIRS"),
        ("promt=q", "--columns promt is unknown; the nearest one is prompt. All: messages, conv"),
        ("prompt=b", "--columns prompt=b is no pair of its own"),
        ("=b", "--columns  is unknown"),
    ],
)
def test_wrong_pairs_are_named(pair, words):
    with pytest.raises(ValueError, match=words):
        parse_columns(("prompt=a", pair))


Q, A, B = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b")))
BEFORE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
SYSTEM = {"role": "system", "content": "s"}
# The README files of LLaMA-Factory (data/README.md) and ms-swift (custom-dataset) show records of these forms.
FORMS = [
    *({question: "q", answer: "a"} for question in ("question", "query", "instruction", "input", "prompt")
      for answer in ("answer", "response", "output")),
    {"instruction": "", "input": "q", "output": "a"},
    {"question": "q", "answer": "a", "context": " ", "response": None, "id": 7},
]  # fmt: skip


@pytest.mark.parametrize("record", FORMS, ids=str)
def test_names_of_other_programs(record):
    assert json.loads(RECORDS["conversation"](record)) == {"messages": [Q, A]}
    with_more = {**record, "history": [["x", "y"]], "system": "s"}
    assert json.loads(RECORDS["conversation"](with_more)) == {"messages": [SYSTEM, *BEFORE, Q, A]}
    both = json.loads(RECORDS["conversation"]({"instruction": "i", "input": "q", "response": "a"}))
    assert both == {"messages": [{"role": "user", "content": "i\nq"}, A]}


@pytest.mark.parametrize(
    "record, prompt",
    [
        ({"conversations": [{"from": "human", "value": "q"}]}, [Q]),
        ({"conversations": [*BEFORE, Q], "system": "s"}, [SYSTEM, *BEFORE, Q]),
        ({"messages": [*BEFORE[:1], {**BEFORE[1], "weight": 0}, Q]}, [*BEFORE, Q]),
        ({"question": "q", "system": "s"}, [SYSTEM, Q]),
        ({"query": "q", "history": [["x", "y"]]}, [*BEFORE, Q]),
        ({"instruction": "q", "input": ""}, [Q]),
    ],
)
def test_preferences_of_other_programs(record, prompt):
    gpt = [{"from": "gpt", "value": text} for text in "ab"]
    for chosen, rejected in (("a", "b"), (A, B), gpt):
        read = json.loads(RECORDS["preference"]({**record, "chosen": chosen, "rejected": rejected}))
        assert read == {"prompt": prompt, "chosen": [A], "rejected": [B]}


@pytest.mark.parametrize(
    "schema, record, words",
    [
        (
            "conversation",
            {"question": "q", "answer": "a", "response": "b"},
            "'question' and 'answer' stand beside 're",
        ),
        ("conversation", {"question": "q", "query": "r", "answer": "a"}, "stand beside 'query'; name all that count"),
        ("conversation", {"question": "q", "context": "c", "answer": "a"}, "stand beside 'context'"),
        ("conversation", {"question": "q", "choices": ["b"], "answer": "a"}, "stand beside 'choices'"),
        ("conversation", {"instruction": "q", "context": "c", "output": "a"}, "stand beside 'context'"),
        ("conversation", {"question": "q", "input": "c", "answer": "a"}, "stand beside 'input'"),
        ("conversation", {"question": "q", "answer": 3}, "'answer' holds an integer"),
        ("conversation", {"title": "q", "reply": "a"}, "its fields are title, reply, .*--columns prompt=question"),
        ("preference", {"question": "q", "query": "r", "chosen": "a", "rejected": "b"}, "stand beside 'query'"),
        (
            "preference",
            {"chosen": "a", "rejected": "b"},
            "share no prompt; name its column, e.g. --columns prompt=",
        ),
        (
            "preference",
            {"conversations": [Q, A], "chosen": "a", "rejected": "b"},
            "'conversations' ends with an answer",
        ),
    ],
)
def test_fields_of_several_meanings_are_refused(schema, record, words):
    with pytest.raises(BadRecord, match=words):
        RECORDS[schema](record)


def test_columns_decide_between_several_meanings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "q", "context": "c", "answer": "a", "response": "b", "output": "z"}))
    for pairs, user in ((["prompt=question"], "q"), (["instruction=question", "input=context"], "q\nc")):
        ours = "completion" if pairs[0][0] == "p" else "output"
        (record,) = read_records([str(path)], Reading(kind=None, columns=[*pairs, f"{ours}=answer"]))
        assert json.loads(record.text) == {"messages": [{"role": "user", "content": user}, A]}
