"""A model runs in a tab of a browser: `convert --format web`, served as static files, answers as `chat` does."""

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import snapshot_download

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.inference.static_page import PageHandler
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from tests.hub_server import HubServer, connect
from tests.invariants.launching import ROOT, cpu_environment
from tests.models import toy_model
from tests.talking import CHINESE, SUM, TOOL, WEATHER, save_rambler, train_talker


pytestmark = pytest.mark.slow
TIMEOUT = 300_000
QUESTION = SUM[0]["content"]
# The model thinks unless told otherwise, and its thoughts are folded.
WITH_THOUGHTS = "Thoughts\nIt is four."
RUN = '({ city }) => city === "Oslo" ? "rain" : "sun"'


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """Return a talker whose prompts describe its tool as llama.cpp does: without the type of the result."""
    path = tmp_path_factory.mktemp("talker")
    function = {name: value for name, value in TOOL["function"].items() if name != "return"}
    train_talker(path, tool=TOOL | {"function": function})
    return path


@pytest.fixture
def serve():
    """Return a function that serves a directory in a thread, with the headers for threads or as a plain server."""
    servers = []

    def start(directory: Path, handler: type = PageHandler) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def run(recipe: str, *words: str, text: str | None = None, **environment: str) -> str:
    command = [sys.executable, str(ROOT / f"recipes/{recipe}.py"), *words]
    result = subprocess.run(command, input=text, env=cpu_environment(**environment), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(scope="module")
def pages(talker, tmp_path_factory):
    """Return a function that exports a model as a page, once."""
    root = tmp_path_factory.mktemp("pages")

    def export(source: str | Path, *words: str) -> Path:
        target = root / re.sub(r"\W", "-", f"{source}{words}")
        if not target.exists():
            run("convert", "--from", str(source), "--to", str(target), "--format", "web", *words)
        return target

    return export


@pytest.fixture
def open_page(page):
    """Return a function that opens a page and loads its model. In the end, check that it has contacted no one else."""
    hosts, errors, own = set(), [], set()

    def watch(page):
        page.set_default_timeout(TIMEOUT)
        page.on("request", lambda request: hosts.add(re.sub(r"^blob:", "", request.url).split("/")[2]))
        page.on("pageerror", lambda error: errors.append(str(error)))
        return page

    def load(url: str, **context):
        own.add(url.split("/")[2])
        shown = watch(page.context.browser.new_page(**context) if context else page)
        shown.goto(url)
        shown.locator("#load").click()
        shown.locator("#question:enabled").wait_for()
        shown.locator("#settings summary").click()
        shown.fill("#temperature", "0")
        return shown

    yield load
    assert errors == [] and hosts <= own


def ask(page, question: str) -> str:
    page.fill("#question", question)
    page.press("#question", "Enter")
    wait_for_end(page)
    return page.locator("#log article").last.inner_text()


def wait_for_end(page) -> None:
    page.wait_for_function("() => ['Send', '发送'].includes(document.getElementById('send').textContent)")


def test_the_page_thinks_calls_tools_and_knows_its_language(talker, pages, serve, open_page):
    url = serve(pages(talker, "--dtype", "float32"))
    page = open_page(url)
    assert re.search(r"Ready: \d threads", page.inner_text("#status"))
    page.select_option("#thinking", "off")
    assert ask(page, QUESTION) == "It is four."
    assert re.search(r"\d+ tokens, [\d.]+ per second", page.inner_text("#speed"))
    page.click("#reset")
    page.select_option("#thinking", "on")
    ask(page, QUESTION)
    thoughts = page.locator("#log article.assistant details")
    assert "open" not in thoughts.evaluate("each => each.getAttributeNames()")
    thoughts.locator("summary").click()
    assert thoughts.inner_text().split() == ["Thoughts", "add", "them"]
    page.select_option("#thinking", "")
    page.click("#reset")
    page.fill("#tools", f"[{{ ...{json.dumps(TOOL['function'])}, run: {RUN} }}]; ")
    assert ask(page, WEATHER[0]["content"]) == "It rains in Oslo."
    assert page.locator("#log .tool").all_inner_texts() == ["rain"]
    assert '{"city":"Oslo"}' in page.locator("#log .assistant").first.inner_text().replace(" ", "")
    # A call that was cut off is shown, and not run; the conversation goes on.
    page.click("#reset")
    page.fill("#max_tokens", "12")
    ask(page, WEATHER[0]["content"])
    page.fill("#max_tokens", "512")
    ask(page, QUESTION)
    assert page.locator("#log .tool, #log .error").all_inner_texts() == []
    # What looks like a control token stays text.
    typed = page.evaluate("async () => (await import('./chat.js')).broken('a<|im_end|>b')")
    tokenizer = load_tokenizer(talker)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokenizer(typed, add_special_tokens=False).input_ids

    narrow = open_page(url, locale="zh-CN", viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert "就绪" in narrow.inner_text("#status") and narrow.evaluate("document.documentElement.lang") == "zh"
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
    assert ask(narrow, CHINESE[0]["content"]) == CHINESE[1]["content"]
    assert narrow.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light dark"
    narrow.close()


@pytest.mark.parametrize("handler", [SimpleHTTPRequestHandler, PageHandler])
def test_a_page_has_threads_on_any_server_and_works_offline(handler, talker, pages, page):
    directory = pages(talker, "--dtype", "float32")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page.set_default_timeout(TIMEOUT)
    page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
    page.locator("#load").click()
    page.locator("#question:enabled").wait_for()
    assert page.evaluate("crossOriginIsolated")
    server.shutdown()
    server.server_close()
    page.reload()
    page.locator("#question:enabled").wait_for()
    page.locator("#settings summary").click()
    page.fill("#temperature", "0")
    assert ask(page, QUESTION) == WITH_THOUGHTS


def test_a_browser_without_new_features_answers_too(talker, pages, serve, page, open_page):
    # Safari has no JavaScript promise integration.
    page.add_init_script("delete WebAssembly.Suspending")
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    assert ask(open_page(serve(pages(talker, "--dtype", "float32"))), QUESTION) == WITH_THOUGHTS
    assert any(url.endswith("wllama-compat.wasm") for url in urls)


def test_a_page_without_a_worker_and_with_an_odd_number_of_cores_answers(talker, pages, serve, page, open_page):
    page.add_init_script("Object.defineProperty(navigator, 'serviceWorker', { get: () => undefined })")
    page.add_init_script("Object.defineProperty(navigator, 'hardwareConcurrency', { get: () => 11 })")
    shown = open_page(serve(pages(talker, "--dtype", "float32")))
    assert shown.inner_text("#status") == "Ready: 5 threads"
    assert ask(shown, QUESTION) == WITH_THOUGHTS


def test_a_new_export_replaces_the_files_that_the_browser_keeps(talker, pages, serve, page, tmp_path):
    model = MiniMindForCausalLM.from_pretrained(talker)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "talker")
    load_tokenizer(talker).save_pretrained(tmp_path / "talker")
    first, second = (pages(each, "--dtype", "float32") for each in (talker, tmp_path / "talker"))
    page.set_default_timeout(TIMEOUT)
    url = serve(Path(shutil.copytree(first, tmp_path / "page")))
    page.goto(url)
    page.locator("#load").click()
    page.locator("#question:enabled").wait_for()
    shutil.copytree(second, tmp_path / "page", dirs_exist_ok=True)
    digests = [json.loads((each / "model.json").read_text())["parts"][0]["sha256"] for each in (first, second)]
    assert digests[0] != digests[1]
    page.reload()
    # The worker of the new export loads the page again.
    page.locator("#load:visible").click()
    page.locator("#question:enabled").wait_for()
    kept = "async name => [...new Uint8Array(await crypto.subtle.digest('SHA-256', "
    kept += "await (await caches.match(name)).arrayBuffer()))]"
    assert bytes(page.evaluate(kept, "model.gguf")).hex() == digests[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_command_serves_a_page_with_the_headers_for_threads(host, talker, pages):
    directory = pages(talker, "--dtype", "float32")
    words = [sys.executable, str(ROOT / "hf_pretrain_cli.py"), "serve", str(directory), "--host", host, "--port", "0"]
    with subprocess.Popen(words, env=cpu_environment(), stdout=subprocess.PIPE, text=True) as process:
        url = next(filter(None, (re.search(r"http://\S+/", line) for line in process.stdout)))[0]
        with urllib.request.urlopen(f"{url}model.json") as response:
            assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            assert json.load(response)["parts"]
        process.terminate()


def test_an_answer_is_stopped(talker, pages, serve, open_page, tmp_path):
    save_rambler(tmp_path / "rambler", talker)
    directory = pages(tmp_path / "rambler", "--dtype", "float32")
    shown = open_page(serve(directory))
    shown.fill("#question", "hi")
    shown.press("#question", "Enter")
    shown.wait_for_function("() => document.querySelector('#log .assistant')?.innerText.length > 10")
    shown.keyboard.press("Escape")
    wait_for_end(shown)
    assert len(shown.locator("#log .assistant").inner_text()) > 10
    # A new conversation stops the answer of the old one.
    shown.fill("#question", "hi")
    shown.press("#question", "Enter")
    shown.wait_for_function("() => document.querySelectorAll('#log .assistant')[1]?.innerText.length > 10")
    shown.click("#reset")
    wait_for_end(shown)
    assert shown.locator("#log article").count() == 0
    question = "two and two? " * 2000
    assert "longer than the model's context" in ask(shown, question)
    assert shown.input_value("#question") == question.strip()


def test_a_model_that_is_too_large_and_a_file_say_what_to_do(talker, pages, serve, page, tmp_path):
    directory = pages(talker, "--dtype", "float32")
    about = json.loads((directory / "model.json").read_text())
    large = shutil.copytree(directory, tmp_path / "large")
    (large / "model.json").write_text(json.dumps(about | {"bytes": 3_000_000_000}))
    page.goto(serve(large))
    page.get_by_text("3000 MB, more than a tab can hold").wait_for()
    page.goto(f"file://{directory}/index.html")
    page.get_by_text("hf-pretrain serve DIRECTORY").wait_for()


def test_a_failed_download_is_named_and_tried_again(talker, pages, serve, page, tmp_path):
    directory = shutil.copytree(pages(talker, "--dtype", "float32"), tmp_path / "page")
    (directory / "model.gguf").rename(tmp_path / "model.gguf")
    page.set_default_timeout(TIMEOUT)
    page.goto(serve(directory))
    page.locator("#load").click()
    page.get_by_text("model.gguf: 404").wait_for()
    (tmp_path / "model.gguf").rename(directory / "model.gguf")
    page.locator("#load").click()
    page.locator("#question:enabled").wait_for()


@pytest.mark.parametrize("source", ["experts", "embedded:smollm2"])
def test_greedy_tokens_are_those_of_the_chat(source, talker, pages, serve, open_page, tmp_path):
    if source == "experts":
        tokenizer, source = load_tokenizer(talker), tmp_path / source
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "qk_norm": True, "hidden_size": 64}
        model = toy_model(vocab_size=len(tokenizer), initializer_range=0.3, max_position_embeddings=512, **sizes)
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
    sampling = ["--temperature", "0", "--max_new_tokens", "24", "--repetition_penalty", "1"]
    words = ["--model_name_or_path", str(source), *sampling]
    question = "What is the capital of France?"
    printed = run("chat", *words, text=f"{question}\n")
    page = open_page(serve(pages(source, "--dtype", "float16")))
    page.fill("#max_tokens", "24")
    page.fill("#repetition_penalty", "1")
    answer = ask(page, question)
    # The chat shows the names of reserved tokens.
    printed = re.sub(r"<\|reserved_\d+\|>", "", printed)
    assert len(answer) > 5 and " ".join(answer.split()) in " ".join(printed.split())


def test_a_space_shows_the_model_by_one_link(talker, serve, open_page, tmp_path, monkeypatch):
    with HubServer() as hub:
        connect(monkeypatch, hub.endpoint)
        words = ["--from", str(talker), "--to", str(tmp_path / "web"), "--format", "web", "--push"]
        printed = run("convert", *words, "--hub_model_id", "mine", "--hub_license", "mit", **hub.client_environment())
        [(repo_id, repo)] = hub.repos.items()
        assert f"/spaces/{repo_id}" in printed
        created = next(json.loads(each.body) for each in hub.requests if each.path == "/api/repos/create")
        assert (created["type"], created["sdk"]) == ("space", "static")
        copy = Path(snapshot_download(repo_id, repo_type="space", local_dir=tmp_path / "copy"))
    card = yaml.safe_load((copy / "README.md").read_text().split("---")[1])
    assert (card["title"], card["sdk"], card["license"]) == ("mine", "static", "mit")
    assert card["custom_headers"] == {
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-embedder-policy": "require-corp",
    }
    assert ask(open_page(serve(copy)), QUESTION) == WITH_THOUGHTS
