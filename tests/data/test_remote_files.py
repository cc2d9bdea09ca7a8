"""Files at addresses, from servers of these tests: every format is read as from a file of this machine."""

import gzip
import http.server
import json
import os
import threading
from functools import partial

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_pretrain.data import remote_files
from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.sources import find_sources
from hf_pretrain.rows.reading import Reading
from hf_pretrain.run_directory.facts import RunFacts
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.names import public_name
from tests.toys import write_jsonl


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(remote_files, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home/hf_pretrain/files"


@pytest.fixture
def folder(tmp_path):
    """A directory with one text in each of several formats."""
    folder = tmp_path / "served"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ["one"])
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps([{"text": "two"}]).encode()))
    (folder / "c.csv").write_text("text,n\nthree,1\n")
    pq.write_table(pa.table({"text": ["four"]}), folder / "d.parquet")
    (folder / "README.md").write_text("not data")
    return folder


@pytest.fixture
def web(folder):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def texts(*names: str) -> list[str]:
    documents, _ = load_documents([*names], Reading(validation_fraction=0))
    return documents["text"][:]


def test_every_format_is_read_over_http(web):
    names = [f"http://{web}/{name}" for name in ("a.jsonl", "b.json.gz", "c.csv", "d.parquet")]
    assert texts(*names) == ["one", "two", "three", "four"]
    assert texts(f"{names[0]}?signature=x") == ["one"]


def test_a_file_is_copied_once_and_again_when_it_changes(web, folder, cache):
    name = f"http://{web}/a.jsonl"
    assert texts(name) == texts(name) == ["one"] and len([*cache.iterdir()]) == 1
    write_jsonl(folder / "a.jsonl", ["new"])
    os.utime(folder / "a.jsonl", (1, 1))
    assert texts(name) == ["new"] and len([*cache.iterdir()]) == 2


def test_directories_and_globs(folder):
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket", recursive=True)
    assert texts("memory://bucket") == texts("memory://bucket/") == ["one", "two", "three", "four"]
    assert texts("memory://bucket/[ab].*") == ["one", "two"]
    assert texts(f"file://{folder}/a.jsonl") == texts(f"file://{folder}/*.jsonl") == ["one"]


def test_what_is_pushed_shows_no_password():
    assert public_name("https://host/a.jsonl?signature=x") == "https://host/a.jsonl"
    assert public_name("sftp://me:pw@host/a@b.jsonl") == "sftp://host/a@b.jsonl"
    assert public_name("file:///home/me/a.jsonl") == "a.jsonl"
    assert RunFacts(datasets=["s3://bucket/a.jsonl", "me/data"]).hub_datasets == ["me/data"]


def test_a_bucket(folder, monkeypatch):
    """Read from a server of S3's protocol. The weekly workflow installs the packages."""
    moto, _ = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(variable, "us-east-1")
    try:
        bucket = fsspec.filesystem("s3", skip_instance_cache=True)
        bucket.mkdir("bucket")
        bucket.put(str(folder), "bucket/data", recursive=True)
        assert texts("s3://bucket/data/a.jsonl") == ["one"]
        assert texts("s3://bucket/data/") == ["one", "two", "three", "four"]
        assert texts("s3://bucket/data/*.csv") == ["three"]
        with pytest.raises(UserError):
            find_sources("s3://none/a.jsonl")
    finally:
        server.stop()
