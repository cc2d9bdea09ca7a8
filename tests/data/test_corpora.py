import itertools
import json
import re

import datasets
import pytest

from hf_pretrain.data.corpora import EMBEDDED_CORPORA, load_embedded
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.formats import read_text
from hf_pretrain.data.reward_tasks import ANSWER_FORMATS, load_tasks
from hf_pretrain.rows.reading import Reading


def test_parts_have_their_documents():
    records = {part: list(load_embedded(part)) for part in EMBEDDED_CORPORA}
    # Without 935, 1 and 1,201 copies of earlier documents.
    assert {part: len(found) for part, found in records.items()} == {
        "chitchat": 7168 - 935,
        "idiom": 30895 - 1,
        "chatterbot": 7644 - 1201,
    }
    documents = {part: [record["text"] for record in found] for part, found in records.items()}
    assert all(len(set(texts)) == len(texts) for texts in documents.values())
    assert documents["chitchat"][0].startswith(
        "A: Hello How are you doing today?\nB: whats up MD im doing good how are you doing?\nA: Im alright, "
    )
    assert documents["idiom"][2003] == "不了不当 (bù liǎo bù dàng)\n解释：犹言拖泥带水，没有了结。\n" + (
        "出处：《古今小说·滕大尹鬼断家私》这老人忒没正经……知道五年十年在世，却去干这样不了不当的事！”"
    )
    assert "A: What language are you written in?\nB: Python." in documents["chatterbot"]
    assert "A: 你是什么语言编写的\nB: Python" in documents["chatterbot"]
    for text in itertools.chain(*documents.values()):
        assert read_text({"text": text}, text_column="text") == text


def opening(text: str) -> str:
    """Return what a dialogue, a conversation, a preference or a dictionary entry begins with, without marks."""
    parts = json.loads(text) if text.startswith("{") else {}
    first = (parts.get("messages") or parts["prompt"])[0]["content"] if parts else text
    return re.sub(r"^[AB]: |^“(?=.+”是什么意思？$)|”是什么意思？$| \(.+\)$", "", first.partition("\n")[0])


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Return a function that returns the openings of a part's training set and validation set."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    return lambda part, schema: [
        {*map(opening, side["text"])} for side in load_documents([f"embedded:{part}"], Reading(kind=schema))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("part", EMBEDDED_CORPORA)
def test_no_stage_trains_on_validation_data(load, part):
    trained, validated = zip(*(load(part, schema) for schema in ("text", "conversation", "preference")), strict=True)
    assert min(map(len, validated)) > 15 and not set.union(*trained) & set.union(*validated)
    # All stages see the same data.
    assert trained[1] <= trained[0] and validated[2] <= validated[1] <= validated[0]


@pytest.mark.slow
def test_tasks_ask_nothing_that_other_stages_train_on():
    trained_on = "".join(
        f"\n{text}" for part in ("chitchat", "chatterbot") for text in load_documents([f"embedded:{part}"])[0]["text"]
    )
    tasks, validation = load_tasks(["embedded:answer-format"], Reading(kind="task", validation_fraction=0.01))
    assert len(validation) >= 5 and len(tasks) + len(validation) == 2000
    suffix = f" {ANSWER_FORMATS['sentence'].instruction}"
    asked = [prompt[0]["content"].removesuffix(suffix) for prompt in validation["prompt"]]
    assert not [question for question in asked if question in trained_on]
