"""Renamed columns, and the names that other programs give to questions and answers."""

import json

import datasets
import pytest
from datasets import Dataset

from hf_pretrain.data.conversations import RECORDS
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.records import read_records
from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError


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
    records = read_records([source], Reading(kind=None, columns=COLUMNS))
    assert [json.loads(record.text) for record in records] == EXPECTED
    answers, expected = ["text=Antwort"], [row["Antwort"] for row in ROWS]
    assert [record.text for record in read_records([source], Reading(kind=None, columns=answers))] == expected
    texts, _ = load_documents([source], Reading(**how | {"columns": answers}))
    assert [row["text"] for row in texts] == expected
    columns = ["prompt=Frage", "solution=Antwort"]
    tasks, _ = load_tasks([source], Reading(kind="task", columns=columns, validation_fraction=0))
    assert tasks["solution"][:] == expected
    how |= {"columns": ["prompt=Frag"], "max_rejected_ratio": 1.0}
    with pytest.raises(UserError):
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


def test_columns_decide_between_several_meanings(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "q", "context": "c", "answer": "a", "response": "b", "output": "z"}))
    for pairs, user in ((["prompt=question"], "q"), (["instruction=question", "input=context"], "q\nc")):
        ours = "completion" if pairs[0][0] == "p" else "output"
        (record,) = read_records([str(path)], Reading(kind=None, columns=[*pairs, f"{ours}=answer"]))
        assert json.loads(record.text) == {"messages": [{"role": "user", "content": user}, A]}
    # A column that decides nothing leaves the fields that do.
    path.write_text(json.dumps({"prompt": "q", "completion": "a", "rules": "s"}))
    (record,) = read_records([str(path)], Reading(kind=None, columns=["system=rules"]))
    assert json.loads(record.text) == {"messages": [SYSTEM, Q, A]}
