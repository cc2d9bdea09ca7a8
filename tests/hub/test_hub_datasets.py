"""Whole datasets on the Hub, over HTTP from the loopback Hub: `hf-pretrain data` reads what training reads."""

import io
import json
import runpy
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem

from hf_pretrain.data.documents import load_documents, load_sets
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.reading import Reading
from tests.hub_server import HubServer, Repo, connect
from tests.invariants.launching import ROOT
from tests.toys import write_jsonl


TEXTS = ["one horse walks over the long bridge", "two dogs sleep under the old tree", "three crows sit on a stone"]
OLD = "an old text of this table"
CHAT = [{"role": "user", "content": "who walks there?"}, {"role": "assistant", "content": "A horse walks there."}]
# Two configurations, and a split that no run reads.
CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: text.parquet
  - split: test
    path: test.parquet
- config_name: chats
  data_files: chats.parquet
---
"""


def parquet(*records: dict) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(records)), file)
    return file.getvalue()


def numbered(*texts: str | None) -> bytes:
    return parquet(*({"number": number, "text": text} for number, text in enumerate(texts)))


@pytest.fixture
def hub(hub, monkeypatch, tmp_path) -> HubServer:
    chats = parquet({"conversations": CHAT}, {"conversations": CHAT[:1]})
    repo = hub.repos["user/table"] = Repo(private=False)
    files = {"README.md": CARD, "test.parquet": numbered("never read"), "chats.parquet": chats}
    repo.commit("first", files | {"text.parquet": numbered(OLD)})
    repo.commit("second", files | {"text.parquet": numbered(TEXTS[0], None, *TEXTS[1:], TEXTS[0])})
    connect(monkeypatch, hub.endpoint, str(tmp_path / "cache"))
    # `datasets` has settings of its own, and its file systems remember what a Hub held.
    for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": tmp_path}.items():
        monkeypatch.setattr(datasets.config, name, value)
    HfFileSystem.clear_instance_cache()
    monkeypatch.chdir(tmp_path)
    return hub


@pytest.fixture
def data(hub, monkeypatch, capsys):
    """Return a function that runs `hf-pretrain data` and returns its exit status and output."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["data.py", *words])
        code = 0
        try:
            runpy.run_path(str(ROOT / "recipes/data.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())

    return run


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "kind"), [("user/table", "text"), ("user/table:chats", "conversation")])
def test_cleaning_reads_the_rows_that_training_reads(data, tmp_path, name, kind):
    code, output = data("clean", name, "--min_chars", "0", "--output", "clean.jsonl")
    assert code == 0, output
    reading = Reading(kind, validation_fraction=0, max_rejected_ratio=1)
    documents, _ = load_documents([name], reading, rejected_path="rejected.jsonl")
    dropped = read_lines(tmp_path / "clean.jsonl.dropped")
    bad = [(row["source"], row["line"], row["reason"].removeprefix("bad line: ")) for row in dropped]
    bad = [row for row in bad if row[2] != "exact duplicate"]
    rejected = read_lines(tmp_path / "rejected.jsonl")
    assert bad == [(row["source"], row["line"], row["reason"]) for row in rejected] and bad[0][:2] == (name, 2)
    texts = list(dict.fromkeys(documents["text"]))
    kept = read_lines(tmp_path / "clean.jsonl")
    if kind == "text":
        assert kept == [{"number": row, "text": text} for row, text in zip((0, 2, 3), TEXTS, strict=True)]
        assert [row["text"] for row in kept] == texts
    else:
        assert kept == [{"conversations": CHAT}] and [json.loads(text) for text in texts] == [{"messages": CHAT}]
    assert f"{len(dropped) + len(kept)} records read, {len(kept)} kept" in output


# As in HuggingFaceH4/ultrachat_200k: no split is called train.
ULTRACHAT = b"""---
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: train.parquet
  - split: test_sft
    path: test.parquet
---
"""


def test_splits_are_training_and_validation_data(hub, data):
    chats = {name: [{"role": "user", "content": name}, *CHAT[1:]] for name in ("train", "test")}
    repo = hub.repos["user/ultrachat"] = Repo(private=False)
    files = {f"{name}.parquet": parquet({"messages": chat}) for name, chat in chats.items()}
    repo.commit("only", {"README.md": ULTRACHAT, **files})
    names = ["user/ultrachat[train_sft]", "user/ultrachat:default[test_sft]@main"]
    args = ChatArguments(dataset_name=names[:1], eval_dataset_name=names[1:])
    train, validation = load_sets(args.dataset_name, args.eval_dataset_name, args.reading(42))
    texts = {name: [json.dumps({"messages": chat})] for name, chat in chats.items()}
    assert list(train["text"]) == texts["train"] and list(validation[""]["text"]) == texts["test"]
    code, output = data("inspect", names[1])
    assert code == 0 and "Records" in output, output
    code, output = data("inspect", "user/ultrachat")
    assert code == 2 and "train_sft" in output, output


def test_a_revision_has_its_own_rows_and_holds_out_text(hub, data, tmp_path):
    first = hub.repos["user/table"].commits[0][0]
    write_jsonl(tmp_path / "held_out.jsonl", TEXTS)
    code, output = data("clean", "user/table", f"user/table@{first}", "--held_out", "held_out.jsonl")
    assert code == 0, output
    assert [row["text"] for row in read_lines(tmp_path / "clean.jsonl")] == [OLD]
    dropped = read_lines(tmp_path / "clean.jsonl.dropped")
    assert [row["line"] for row in dropped if row["reason"] == "in the held-out data"] == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("user/none", "Dataset 'user/none' doesn't exist on the Hub"),
        ("user/table:chat", r"BuilderConfig 'chat' not found. Available: ['default', 'chats']"),
        ("user/table@v9", "Revision 'v9' doesn't exist"),
    ],
)
def test_a_wrong_name_gives_one_line(data, name, message):
    code, output = data("inspect", name)
    assert code == 2
    *before, error = output.splitlines()
    assert error.startswith(f"error: {name!r} is no file here, and could not be loaded from the Hub")
    assert message in error and len(before) == 1


def test_without_a_connection_no_other_revision_is_read(hub, data, monkeypatch, tmp_path):
    first, second = (commit for commit, _ in hub.repos["user/table"].commits)
    assert data("clean", "user/table")[0] == 0
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    code, output = data("clean", f"user/table@{first}", "--output", "first.jsonl")
    last = output.splitlines()[-1]
    assert code == 2 and last.startswith(f"error: 'user/table@{first}' could not be loaded from the Hub"), output
    assert second in last and not (tmp_path / "first.jsonl").exists()
    code, output = data("clean", f"user/table@{second}", "--output", "second.jsonl")
    assert code == 0, output
    assert (tmp_path / "second.jsonl").read_text() == (tmp_path / "clean.jsonl").read_text()
