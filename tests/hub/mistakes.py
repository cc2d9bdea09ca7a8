"""What a Hub refuses, or does not have."""

import time

from huggingface_hub import constants

from hf_pretrain.data.documents import load_documents
from hf_pretrain.hub.pushing import create_repository, push_folder
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.parser import RecipeParser
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.weight_files import resolve
from tests.hub import conftest  # noqa: F401
from tests.hub_server import TOKEN, HubServer, Repo, connect
from tests.mistakes import Mistake


FILES = {
    "user/data": {"README.md": b"", "pretrain_hq.jsonl": b'{"text": "one"}\n', "sft/mini.jsonl": b""},
    "user/several": {"config.json": b"{}", "full_sft_32.pth": b"", "pretrain_32.pth": b""},
}


def at_hub(act, *words, status=None, token=TOKEN):
    """Return a function that acts at the loopback Hub, which refuses downloads and commits with a status."""

    def make(monkeypatch, tmp_path):
        with HubServer() as hub:
            connect(monkeypatch, hub.endpoint, str(tmp_path / "cache"))
            hub.fail = lambda _, path: status if "/resolve/" in path or "/commit/" in path else None
            for name, files in FILES.items():
                hub.repos[name] = Repo(private=False)
                hub.repos[name].commit("all", files)
            monkeypatch.setenv("HF_TOKEN", token)
            act(*words or [tmp_path])

    return make


def without_hub(act, *words, is_offline=False):
    """Return a function that acts where neither the Hub nor ModelScope answers: nothing listens at port 9."""

    def make(monkeypatch, tmp_path):
        connect(monkeypatch, "http://127.0.0.1:9", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        for name, value in {"CACHE": tmp_path, "HOME": tmp_path, "ENDPOINT": "http://127.0.0.1:9"}.items():
            monkeypatch.setenv(f"MODELSCOPE_{name}", str(value))
        # The client would wait 23 seconds between its attempts.
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        act(*words)

    return make


def read(name):
    load_documents([name], Reading(validation_fraction=0))


def push(path):
    (path / "config.json").write_text("{}")
    create_repository("toy")
    push_folder(path, "user/toy")


def parse(*words):
    RecipeParser((ChatArguments,)).parse_args([*words])


MISSING = "has no such file. It holds README.md, pretrain_hq.jsonl, sft/mini.jsonl"
MISTAKES = [
    Mistake(f"user/data:pretrain_h.jsonl.* {MISSING}", at_hub(read, "user/data:pretrain_h.jsonl")),
    Mistake(rf"user/data:\*.jsonl.* {MISSING}", at_hub(read, "user/data:*.jsonl")),
    Mistake("user/none:a.jsonl.* Check the name, the revision", at_hub(read, "user/none:a.jsonl")),
    Mistake("user/data.* Check the name, the revision", at_hub(read, "user/data:pretrain_hq.jsonl@v9")),
    Mistake("cannot be downloaded: .*401 .*hf auth login", at_hub(read, "user/data:pretrain_hq.jsonl", status=401)),
    Mistake("cannot be downloaded: .*403 .*hf auth login", at_hub(read, "user/data:sft/mini.jsonl", status=403)),
    Mistake("cannot be downloaded: .*refused", without_hub(read, "user/data:sft/mini.jsonl")),
    Mistake("cannot be downloaded: .*offline mode", without_hub(read, "user/data:sft/mini.jsonl", is_offline=True)),
    Mistake("several files of weights.*such as user/several:", at_hub(resolve, "user/several")),
    Mistake("user/several holds no file nope.pth", at_hub(resolve, "user/several:nope.pth")),
    Mistake("user/nope is neither a file or directory here nor a model on the Hub", at_hub(resolve, "user/nope")),
    Mistake("user/x.* is neither a directory here nor a Hub id", without_hub(load_tokenizer, "user/x")),
    Mistake("user/toy failed: 403.* The files are in .* `hf upload user/toy .*config.json`", at_hub(push, status=403)),
    Mistake(
        "The Hub repository toy cannot be created or opened at http://127.*: .* Log in with `hf auth login`",
        at_hub(create_repository, "toy", token="hf_wrong"),
    ),
    Mistake(
        "modelscope:me/none cannot be downloaded: .* Check the name and the connection.* MODELSCOPE_API_TOKEN",
        without_hub(parse, "--dataset_name", "modelscope:me/none"),
    ),
    Mistake(
        "modelscope:me/mine cannot be created or opened: .*MODELSCOPE_API_TOKEN",
        without_hub(create_repository, "modelscope:me/mine"),
    ),
]
