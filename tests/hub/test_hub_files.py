"""Single files of dataset repositories, over HTTP from the loopback Hub."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from hf_pretrain.data import remote_files
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.hub_datasets import parse_hub_file
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.names import DatasetName
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.weight_files import resolve
from tests.hub_server import Repo, connect


@pytest.fixture
def repo(hub, monkeypatch, tmp_path) -> Repo:
    """A repository like MiniMind's: files with different columns, in two commits."""
    connect(monkeypatch, hub.endpoint, str(tmp_path / "cache"))
    repo = hub.repos["user/data"] = Repo(private=False)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    files = {"sft/mini.jsonl": lines({"conversations": chat}), "README.md": b"# data"}
    repo.commit("first", files | {"pretrain_hq.jsonl": lines({"text": "old"})})
    repo.commit("second", files | {"pretrain_hq.jsonl": lines({"text": "one"}, {"text": "two"}, {"txt": "bad"})})
    return repo


def lines(*records: dict) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def texts(name: str, **arguments) -> list[str]:
    documents, _ = load_documents([name], Reading(validation_fraction=0, max_rejected_ratio=0.5, **arguments))
    return documents["text"][:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b:c.jsonl", DatasetName("a/b", "c.jsonl")),
        ("a/b:d/c.jsonl.gz@v1", DatasetName("a/b", "d/c.jsonl.gz", "v1")),
        # The Hub's own branches have names with slashes.
        ("a/b:c.jsonl@refs/pr/3", DatasetName("a/b", "c.jsonl", "refs/pr/3")),
        ("hf://datasets/a/b/c.jsonl", DatasetName("a/b", "c.jsonl")),
        ("hf://datasets/a/b@v1/d/c.jsonl", DatasetName("a/b", "d/c.jsonl", "v1")),
        *((name, None) for name in ("a/b:config", "a/b", "my/data.jsonl", "embedded:chatterbot")),
    ],
)
def test_names_of_files(name, expected):
    assert parse_hub_file(name) == expected


def test_one_file_of_a_repository_is_read_line_by_line(repo):
    # The bad third line is rejected, as in a local file.
    assert texts("user/data:pretrain_hq.jsonl") == ["one", "two"]
    (conversation,) = texts("user/data:sft/mini.jsonl", kind="conversation")
    assert json.loads(conversation)["messages"][1]["content"] == "hello"


def test_addresses_of_the_hub(repo, monkeypatch, tmp_path):
    monkeypatch.setattr(remote_files, "HF_HOME", str(tmp_path / "home"))
    assert texts("hf://datasets/user/data/pretrain_hq.jsonl") == ["one", "two"]
    assert texts(f"hf://datasets/user/data@{repo.commits[0][0]}/pretrain_hq.jsonl") == ["old"]
    assert texts("hf://datasets/user/data/pretrain_*.jsonl") == ["one", "two"]


@pytest.mark.parametrize("is_offline", [False, True])
def test_without_a_connection_the_cache_answers(repo, hub, monkeypatch, is_offline):
    assert texts("user/data:pretrain_hq.jsonl") == ["one", "two"]
    # Nothing listens at port 9.
    connect(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    # The client would wait 23 seconds between its attempts.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert texts("user/data:pretrain_hq.jsonl") == ["one", "two"]
    with pytest.raises(UserError):
        texts("user/data:sft/mini.jsonl")


class LoginPage(BaseHTTPRequestHandler):
    """The answer of a network that asks for a login first."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else b"<html>Log in</html>")

    do_HEAD = do_GET


@pytest.mark.parametrize("load", [load_tokenizer, resolve])
def test_a_hub_that_answers_html_is_named(load, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), LoginPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connect(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(UserError):
            load("user/x")
    finally:
        server.shutdown()
        server.server_close()


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, capsys):
    connect(monkeypatch, "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(UserError):
        load_tokenizer("user/x")
    assert time.monotonic() - begin < 10 and "cannot be reached" in capsys.readouterr().err
