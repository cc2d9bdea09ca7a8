"""The choice of pushed files, over real HTTP, from a directory with many other files."""

import json
import re
import shlex
import subprocess
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from hf_pretrain.hub import pushing
from hf_pretrain.hub.pushing import create_repository, push_folder
from hf_pretrain.runtime.errors import UserError
from tests.hub_server import TOKEN, connect
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
def hub(hub, monkeypatch):
    connect(monkeypatch, hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    create_repository("toy")
    return hub


@pytest.fixture
def run_directory(tmp_path) -> Path:
    for name in MODEL | OTHERS:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(SECRET if name in OTHERS else f"of {name}"))
    return tmp_path / "run"


@pytest.mark.parametrize(("also", "more"), [((), set()), (("*.gguf", "*.pth"), {"weights.pth"})])
def test_only_listed_files_and_the_weights_of_a_conversion_are_pushed(hub, run_directory, also, more):
    push_folder(run_directory, "user/toy", also=also)
    assert set(hub.repos["user/toy"].files) - {".gitattributes"} == MODEL | more
    assert (SECRET.encode() in hub.bytes_received()) == bool(more)


def test_the_printed_command_pushes_the_same_files(hub, run_directory):
    hub.fail = lambda method, path: 403 if "/commit/" in path else None
    with pytest.raises(UserError) as error:
        push_folder(run_directory, "user/toy")
    (command,) = re.findall(r"`(hf upload .*)`", str(error.value))
    hub.fail = lambda method, path: None
    environment = cpu_environment(**hub.client_environment())
    result = subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(hub.repos["user/toy"].files) - {".gitattributes"} == MODEL
    assert SECRET.encode() not in hub.bytes_received()


def test_a_hub_that_never_answers_fails_the_push(hub, run_directory, monkeypatch):
    monkeypatch.setattr(pushing, "ANSWER_SECONDS", 0.5)
    pushing.create_repository("toy")
    over = threading.Event()
    hub.fail = lambda method, path: over.wait(60) and None if "/commit/" in path else None
    with pytest.raises(UserError):
        push_folder(run_directory, "user/toy")
    over.set()
    assert set(run_directory.iterdir()) == {run_directory / name.split("/")[0] for name in MODEL | OTHERS}


def test_an_error_of_the_hub_quotes_no_token(monkeypatch):
    monkeypatch.setattr(pushing, "get_token", lambda: TOKEN)
    assert pushing.describe_error(OSError(f"Bearer {TOKEN}\n was refused")) == "Bearer <token> was refused"
