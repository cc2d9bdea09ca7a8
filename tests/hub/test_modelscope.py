"""
Names of ModelScope with its own client, over real HTTP: a server on this machine keeps what the client uploads and
gives it back.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from hf_pretrain.hub.pushing import create_repository
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import SFTTrainingArguments
from tests.invariants.launching import ROOT, start


pytest.importorskip("modelscope_hub")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        needs_token = self.command == "POST" and "Bearer token" not in str(self.headers.get("Authorization"))
        status, data = (401, "log in") if needs_token else self.find_answer(url, body)
        is_file = isinstance(data, bytes)
        content = data if is_file else json.dumps({"Code": status, "Success": status == 200, "Data": data}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def find_answer(self, url, body: bytes):
        """Return the status and the data of an answer."""
        repos, blobs = self.server.repos, self.server.blobs
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = "/".join(re.sub("/repo(/files|/tree)?$", "", url.path).split("/")[-2:])
        if self.command == "PUT":
            blobs[url.path.split("/")[-1]] = body
            return 200, {}
        if self.command == "POST" and url.path == "/api/v1/models":
            fields = json.loads(body)
            name = f"{fields['Path']}/{fields['Name']}"
            if name in repos:
                return 409, "already exists"
            repos[name], self.server.visibility[name] = {}, fields["Visibility"]
            return 200, {"Name": fields["Name"], "Path": fields["Path"]}
        if url.path.endswith("/objects/batch"):
            blob = f"http://{self.headers['Host']}/blob"
            oids = [entry["oid"] for entry in json.loads(body)["objects"]]
            return 200, {"objects": [{"oid": oid, "actions": {"upload": {"href": f"{blob}/{oid}"}}} for oid in oids]}
        if "/commit/" in url.path:
            for action in json.loads(body)["actions"]:
                is_lfs = action["type"] == "lfs"
                content = blobs[action["sha256"]] if is_lfs else base64.b64decode(action["content"])
                repos["/".join(url.path.split("/")[5:7])][action["path"]] = content
            return 200, {"oid": "1"}
        if "FilePath" in query:
            return 200, repos[name][query["FilePath"]]
        if name not in repos:
            return 404, "not found"
        entries = [
            {"Path": path, "Name": path, "Type": "blob", "Size": len(content)}
            | {"Sha256": hashlib.sha256(content).hexdigest()}
            for path, content in repos[name].items()
        ]
        return 200, {"Files": entries} if url.path.endswith(("/repo/files", "/repo/tree")) else {"Name": name}

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def modelscope(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repos, server.blobs, server.visibility = {}, {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "MODELSCOPE_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "MODELSCOPE_API_TOKEN": "token",
        "MODELSCOPE_CACHE": str(tmp_path / "cache"),
        "MODELSCOPE_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


def run_recipe(name: str, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key.startswith("MODELSCOPE_")}
    result = start([sys.executable, str(ROOT / f"recipes/{name}.py"), *words], **environment)
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


def test_a_pushed_model_comes_back_and_trains_on_data_of_modelscope(modelscope, toys, tmp_path):
    words = ["--from", str(toys / "dense"), "--to", str(tmp_path / "llama"), "--format", "llama", "--push"]
    output = run_recipe("convert", *words, "--hub_model_id", "modelscope:me/mine", "--hub_private_repo")
    assert f"Pushed to http://127.0.0.1:{modelscope.server_port}/models/me/mine" in output
    pushed = modelscope.repos["me/mine"]
    assert pushed["model.safetensors"] == (tmp_path / "llama/model.safetensors").read_bytes()
    card = pushed["README.md"].decode()
    assert "modelscope download --model me/mine --local_dir mine" in card and 'from_pretrained("mine")' in card
    # 1 is private, and 5 public.
    assert modelscope.visibility == {"me/mine": 1}

    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    line = json.dumps({"messages": chat}).encode() + b"\n"
    modelscope.repos["me/data"] = {"chat.jsonl": 8 * line, "other.jsonl": b"no JSON"}
    words = ["--model_name_or_path", "modelscope:me/mine", "--dataset_name", "modelscope:me/data:chat.jsonl"]
    words += ["--use_cpu", "--bf16", "false", "--max_length", "32", "--max_steps", "1", "--eval_strategy", "no"]
    words += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--validation_fraction", "0"]
    words += ["--push_to_hub", "--hub_strategy", "end", "--hub_model_id", "modelscope:me/tuned"]
    run_recipe("sft", *words, "--output_dir", str(tmp_path / "out"))
    assert modelscope.repos["me/tuned"].keys() >= {"model.safetensors", "README.md", "tokenizer.json"}
    assert modelscope.visibility["me/tuned"] == 5
    # Nothing but the published files: no data, no log, no record.
    assert not {"run.json", "log.jsonl"} & modelscope.repos["me/tuned"].keys()


def test_names_become_paths_in_flags_and_yaml_files(modelscope, tmp_path):
    modelscope.repos["me/data"] = {"a.jsonl": b"{}\n", "b.jsonl": b"{}\n"}
    (tmp_path / "run.yaml").write_text("dataset_name: ['modelscope:me/data:b.jsonl', embedded]\n")
    types = (ModelArguments, ChatArguments, SFTTrainingArguments)
    words = ["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    _, data, args = parse_args(*types, stage="sft", argv=[*words, "--hub_model_id", "modelscope:me/mine"])
    path, other = data.dataset_name
    assert open(path, "rb").read() == b"{}\n" and path.endswith("b.jsonl") and other == "embedded"
    assert args.hub_model_id == "modelscope:me/mine"


def test_a_file_that_is_not_there_is_noticed(modelscope):
    modelscope.repos["me/data"] = {"a.jsonl": b"{}\n"}
    for name in ("modelscope:me/none", "modelscope:me/data:none.jsonl"):
        with pytest.raises(UserError):
            RecipeParser((ChatArguments,)).parse_args(["--dataset_name", name])


def test_a_refused_repository_is_noticed(modelscope, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "wrong")
    with pytest.raises(UserError):
        create_repository("modelscope:me/mine")
    assert "me/mine" not in modelscope.repos
