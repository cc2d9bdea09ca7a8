"""Files of dataset repositories on ModelScope, over HTTP from a server that speaks its API, through modelscope-hub."""

import hashlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from hf_pretrain.data.loading import load_documents
from hf_pretrain.hub.model_card import RunFacts


modelscope_hub = pytest.importorskip("modelscope_hub")


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


class ModelScope(ThreadingHTTPServer):
    """
    The requests of ModelScope's API that read datasets: the pages of a tree, and files.

    Attributes:
        files (`dict`): the content of each file, by revision and path, of the dataset `user/data`.
        downloads (`list[str]`): the files that were downloaded.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {
            "master": {"pretrain.jsonl": lines("one", "two"), "sft/mini.jsonl": lines("chat"), "README.md": b"# data"},
            "v1": {"pretrain.jsonl": lines("old")},
        }
        self.downloads: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: ModelScope

    def do_GET(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        files = self.server.files.get(query.get("Revision"))
        action = url.path.removeprefix("/api/v1/datasets/user/data/repo")
        if action not in ("", "/tree") or files is None:
            self.reply(404, json.dumps({"Code": 10010205001, "Message": "not found", "Success": False}).encode())
        elif action == "/tree":
            root = query.get("Root", "")
            entries = [describe(path, content) for path, content in files.items() if path.startswith(root)]
            size = int(query["PageSize"])
            page = entries[(int(query["PageNumber"]) - 1) * size :][:size]
            self.reply(200, json.dumps({"Code": 200, "Data": {"Files": page}, "Success": True}).encode())
        else:
            self.server.downloads.append(query["FilePath"])
            self.reply(200, files[query["FilePath"]])

    def reply(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def describe(path: str, content: bytes) -> dict:
    digest = hashlib.sha256(content).hexdigest()
    return {"Path": path, "Name": path.split("/")[-1], "Type": "blob", "Size": len(content), "Sha256": digest}


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[ModelScope]:
    with ModelScope() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        # The package reads the environment only once in each process.
        modelscope_hub.set_default_config(modelscope_hub.HubConfig())
        yield server
        server.shutdown()


def texts(name: str) -> list[str]:
    documents, _ = load_documents([name], validation_fraction=0)
    return documents["text"][:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("modelscope://user/data:pretrain.jsonl", ["one", "two"]),
        ("modelscope://user/data:pretrain.jsonl@v1", ["old"]),
        ("modelscope://user/data:sft/*.jsonl", ["chat"]),
        ("modelscope://user/data", ["one", "two", "chat"]),
    ],
)
def test_files_are_read_line_by_line(server, name, expected):
    assert texts(name) == expected


def test_a_file_is_downloaded_again_only_if_it_has_changed(server):
    for _ in range(2):
        assert texts("modelscope://user/data:pretrain.jsonl") == ["one", "two"]
    assert server.downloads == ["pretrain.jsonl"]
    # Another file in the cache is not taken for this one.
    assert texts("modelscope://user/data:sft/mini.jsonl") == ["chat"]
    server.files["master"]["pretrain.jsonl"] = lines("new")
    assert texts("modelscope://user/data:pretrain.jsonl") == ["new"]


def test_a_file_that_the_repository_no_longer_has_is_not_read(server):
    name = "modelscope://user/data:pretrain*"
    assert texts(name) == ["one", "two"]
    files = server.files["master"]
    files["pretrain_v2.jsonl"] = files.pop("pretrain.jsonl")
    server.downloads.clear()
    assert texts(name) == ["one", "two"] and server.downloads == ["pretrain_v2.jsonl"]


def test_only_data_files_are_downloaded(server):
    assert texts("modelscope://user/data") == ["one", "two", "chat"]
    assert sorted(server.downloads) == ["pretrain.jsonl", "sft/mini.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modelscope://user/data:pretrain.json", "matches; it holds README.md, pretrain.jsonl, sft/mini.jsonl"),
        ("modelscope://user/none:a.jsonl", "Check the name and the revision"),
        ("modelscope://user/data:pretrain.jsonl@v9", "Check the name and the revision"),
    ],
)
def test_mistakes_are_named(server, name, message):
    with pytest.raises(ValueError, match=message):
        texts(name)


@pytest.mark.slow
def test_without_a_connection_the_cache_answers(server, monkeypatch, caplog):
    server.files["v1"]["old.jsonl"] = lines("old")
    assert texts("modelscope://user/data:pretrain.jsonl") == ["one", "two"]
    assert texts("modelscope://user/data:old.jsonl@v1") == ["old"]
    server.shutdown()
    server.server_close()
    with caplog.at_level(logging.WARNING):
        assert texts("modelscope://user/data:pretrain.jsonl") == ["one", "two"]
    assert "is read from the cache" in caplog.text
    # The cache holds a file that matches the pattern. It may lack others.
    for name in ("old.jsonl", "pre*.jsonl"):
        with pytest.raises(ValueError, match="is not in the cache, .* cannot be downloaded: .*MODELSCOPE_ENDPOINT"):
            texts(f"modelscope://user/data:{name}")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ValueError, match=r"needs modelscope-hub: pip install .*\[modelscope\]"):
        texts("modelscope://user/data:pretrain.jsonl")


def test_a_model_card_names_it_and_does_not_link_it_to_the_hub():
    facts = RunFacts(datasets=["modelscope://user/data:a.jsonl", "hf://datasets/other/data@v1/a.jsonl"])
    assert facts.data_name == ", ".join(facts.datasets)
    assert facts.hub_datasets == ["other/data"]
