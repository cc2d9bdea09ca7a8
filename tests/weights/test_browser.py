"""A model runs in a tab of a browser: `convert --format web`, served as static files, answers as `chat` does."""

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hf_pretrain.inference.static_page import PageHandler
from hf_pretrain.weights import browser
from tests.invariants.launching import ROOT, cpu_environment


pytestmark = pytest.mark.slow
READY = "() => /Ready|就绪/.test(document.getElementById('status').textContent)"


@pytest.fixture
def served():
    """Return a function that serves a directory in a thread, with the headers for threads or as a plain server."""
    servers = []

    def serve(directory, handler=PageHandler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory)))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield serve
    for server in servers:
        server.shutdown()


def export(source: str, target, *words: str) -> None:
    command = [sys.executable, str(ROOT / "recipes/convert.py"), "--from", source, "--to", str(target)]
    result = subprocess.run(
        [*command, "--format", "web", *words], env=cpu_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


def greedy_answer(source: str, question: str, *words: str) -> str:
    """Return what `chat --temperature 0` answers."""
    command = [sys.executable, str(ROOT / "recipes/chat.py"), "--model_name_or_path", source, "--temperature", "0"]
    result = subprocess.run(
        [*command, *words], input=f"{question}\n", env=cpu_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def ask(page, question: str) -> str:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_function("() => document.getElementById('send').textContent === 'Send'", timeout=120_000)
    return page.locator("#log article").last.inner_text()


def open_page(page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#load:not([hidden])", timeout=30_000)
    page.click("#load")
    page.wait_for_function(READY, timeout=120_000)
    page.locator("#settings summary").click()
    page.fill("#temperature", "0")


@pytest.mark.parametrize(("name", "words"), [("sft", ()), ("sft-torchrun", ())])
def test_a_page_answers_as_chat_does(name, words, trained, served, page, tmp_path):
    source = str(trained(name).directory)
    export(source, tmp_path / "web", "--dtype", "float16", *words)
    open_page(page, served(tmp_path / "web"))
    page.fill("#max_tokens", "24")
    answer = ask(page, "river stone green?")
    assert answer.strip() and answer.strip() in greedy_answer(source, "river stone green?", "--max_new_tokens", "24")
