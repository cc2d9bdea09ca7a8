"""The choice of pushed files, over real HTTP, from a directory with many other files."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import constants

from hf_pretrain.hub.pushing import create_repository, push_folder
from tests.hub_server import TOKEN, HubServer
from tests.invariants.launching import cpu_environment


SECRET = "a line of the training text"
MODEL = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modeling_minimind.py"),
    *("README.md", "trainer_state.json", "evaluation.json"),
}
# Files of a run and of other programs, none of which may be pushed.
OTHERS = {
    *("nonfinite-5.json", "rejected.jsonl", "notes.json", "run.json", ".lock", "training_args.bin"),
    *("secret.safetensors", "secret.py", "data.model", "weights.pth", "checkpoint-2/config.json"),
    *(".hub-x/config.json", "nonfinite-5/config.json", "profile/step-1-rank-0.json", "runs/events"),
}


@pytest.fixture
def server(monkeypatch):
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        create_repository("toy")
        yield server


@pytest.fixture
def run_directory(tmp_path) -> Path:
    for name in MODEL | OTHERS:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SECRET if name in OTHERS else f"of {name}")
    return tmp_path / "run"


def test_only_listed_files_are_pushed(server, run_directory):
    push_folder(run_directory, "user/toy")
    assert set(server.repos["user/toy"].files) - {".gitattributes"} == MODEL
    assert SECRET.encode() not in server.bytes_received()


def test_a_conversion_pushes_its_own_kind_of_weights(server, run_directory):
    push_folder(run_directory, "user/toy", also=("*.gguf", "*.pth"))
    assert set(server.repos["user/toy"].files) - {".gitattributes"} == MODEL | {"weights.pth"}


def test_the_printed_command_pushes_the_same_files(server, run_directory):
    server.fail = lambda method, path: 403 if "/commit/" in path else None
    with pytest.raises(ValueError, match="The push to user/toy failed: 403") as error:
        push_folder(run_directory, "user/toy")
    (command,) = re.findall(r"`(hf upload .*)`", str(error.value))
    server.fail = lambda method, path: None
    environment = cpu_environment(**server.client_environment())
    result = subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(server.repos["user/toy"].files) - {".gitattributes"} == MODEL
    assert SECRET.encode() not in server.bytes_received()


def test_a_refused_repository_is_named(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match="The Hub repository toy cannot be created or opened at .* Log in with"):
        create_repository("toy")
