"""The chat page in a real browser, with two real servers: one model knows its answers, the other never ends one."""

import asyncio
import contextlib
import inspect
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
import psutil
import pytest
from gradio.components import _Keywords
from openai import OpenAI

from hf_pretrain.stages.chat_client import Endpoint
from hf_pretrain.stages.web_chat import _wait_until_ready, make_page, show
from tests.invariants.launching import ROOT, cpu_environment, free_port, start
from tests.talking import CHINESE, TOOL, save_rambler


# The machine may be busy with other tests.
TIMEOUT = 120_000
LENGTH = "Longest answer in tokens"


@pytest.fixture(scope="module")
def models(talker, tmp_path_factory) -> list[str]:
    rambler = tmp_path_factory.mktemp("models") / "rambler"
    save_rambler(rambler, talker)
    return [str(talker), str(rambler)]


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, int, subprocess.Popen]]:
    """Serve a page. Give its address, the first port of its servers, and its process."""
    web_port, port = free_port(), free_port()
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--web", "--web_port", str(web_port)]
    command += ["--port", str(port), "--device", "cpu", "--log_level", "error", *words]
    # A proxy cannot reach the servers of this machine.
    process = subprocess.Popen(command, env=cpu_environment(http_proxy="http://127.0.0.1:9", no_proxy="example.org"))
    url = f"http://127.0.0.1:{web_port}"
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None:
            assert time.monotonic() < deadline, "The page did not start."
            try:
                urllib.request.urlopen(url).close()
                break
            except OSError:
                time.sleep(0.1)
        assert process.poll() is None
        yield url, port, process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def served(models) -> Iterator[tuple[str, int, subprocess.Popen]]:
    with serving("--model_name_or_path", models[0], "--compare", models[1], "--seed", "0") as found:
        yield found


@pytest.fixture
def chat(page, served):
    """Return the page in the browser. Afterwards, check that it has loaded nothing from elsewhere."""
    hosts, errors = set(), []
    page.set_default_timeout(TIMEOUT)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(served[0])
    page.locator("#settings button").first.click()
    yield page
    assert errors == [] and hosts <= {served[0].removeprefix("http://"), ""}


def set_number(page, label: str, value: float) -> None:
    box = page.get_by_label(f"number input for {label}")
    box.fill(str(value))
    box.press("Tab")


def ask(page, text: str) -> None:
    page.locator("#question textarea").fill(text)
    page.locator("#question textarea").press("Enter")


def bot_text(page, number: int) -> str:
    return "".join(page.locator(f"#chat-{number} .bot.message").all_inner_texts())


def wait_for_text(page, number: int, text: str) -> None:
    page.wait_for_function(
        "([n, text]) => document.querySelector(`#chat-${n}`).innerText.includes(text)", arg=[number, text]
    )


def wait_for_answer(page, number: int, *, chars: int = 1) -> None:
    """Wait until an answer has this many characters."""
    page.wait_for_function(
        "([n, chars]) => [...document.querySelectorAll(`#chat-${n} .bot.message`)]"
        ".map((e) => e.innerText).join('').length >= chars",
        arg=[number, chars],
    )


def wait_until_empty(page) -> None:
    page.wait_for_function("() => document.querySelectorAll('.message').length === 0")


@contextmanager
def whole_answer(page) -> Iterator[None]:
    """
    Wait until the answers that this block starts or stops have ended: the stream of their request then closes. The
    page takes no other question before.
    """
    ended = []
    for event in ("requestfinished", "requestfailed"):
        page.on(event, lambda request: ended.append(request) if "queue/data" in request.url else None)
    yield
    deadline = time.monotonic() + TIMEOUT / 1000
    while not ended:
        assert time.monotonic() < deadline, "The answers did not end."
        page.wait_for_timeout(100)


def wait_for_end(page, number: int) -> str:
    """Wait until an answer does not grow any more, and return its text."""
    wait_for_answer(page, number)
    text = bot_text(page, number)
    while True:
        page.wait_for_timeout(2000)
        if text == (text := bot_text(page, number)):
            return text


def complete(port: int, model: str, text: str, timeout: float = 300, **options) -> str:
    """Ask a server without the page."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=timeout)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, **options).choices[0].message.content


def check_idle(served, models) -> None:
    """
    Check that the second server generates nothing: it answers one request after the other, and what is left of a long
    answer would take longer than the timeout.
    """
    complete(served[1] + 1, models[1], "hi", timeout=40, max_tokens=1)


@pytest.mark.slow
def test_two_models_answer_beside_each_other(chat, models):
    set_number(chat, LENGTH, 40)
    for number in (0, 1):
        assert models[number] in chat.locator(f"#chat-{number}").inner_text()
    with whole_answer(chat):
        ask(chat, "two and two?")
        wait_for_text(chat, 0, "It is four.")
        # The answer is complete while the other one still grows; the next question can be typed meanwhile.
        chat.locator("#question textarea").fill("next")
    assert len(wait_for_end(chat, 1)) > 20
    assert chat.locator("#question textarea").input_value() == "next"
    for number in (0, 1):
        assert chat.locator(f"#chat-{number} .user.message").all_inner_texts() == ["two and two?"]
    # The thought is folded, apart from the answer.
    thought = chat.locator("#chat-0").get_by_text("add them")
    assert not thought.is_visible()
    chat.locator("#chat-0").get_by_text("Thinking").click()
    thought.wait_for(state="visible")
    chat.locator("#clear").click()
    wait_until_empty(chat)
    assert chat.locator("#question textarea").input_value() == "next"


@pytest.mark.slow
def test_an_answer_streams_and_stop_ends_it_at_the_server(chat, served, models):
    set_number(chat, LENGTH, 2048)
    with whole_answer(chat):
        ask(chat, "hello")
        wait_for_answer(chat, 1, chars=5)
        early = len(bot_text(chat, 1))
        wait_for_answer(chat, 1, chars=early + 10)
        chat.locator("#stop").click()
        check_idle(served, models)
    stopped = wait_for_end(chat, 1)
    # Much shorter than 2,048 tokens, and it stays while the conversation continues.
    assert early + 10 <= len(stopped) < 2048
    set_number(chat, LENGTH, 5)
    with whole_answer(chat):
        ask(chat, "and now?")
    wait_for_answer(chat, 1, chars=len(stopped) + 1)
    assert wait_for_end(chat, 1).startswith(stopped)
    assert chat.locator("#chat-1 .user.message").all_inner_texts() == ["hello", "and now?"]


@pytest.mark.slow
def test_stop_before_the_first_token(chat, served, models):
    set_number(chat, LENGTH, 2048)
    with whole_answer(chat):
        ask(chat, "hello")
        chat.locator("#stop").click()
        check_idle(served, models)
    assert chat.get_by_text("Error").count() == 0
    set_number(chat, LENGTH, 5)
    ask(chat, "two and two?")
    wait_for_answer(chat, 1)


@pytest.mark.slow
def test_a_closed_page_ends_its_answers_at_the_server(chat, served, models):
    set_number(chat, LENGTH, 2048)
    ask(chat, "hello")
    wait_for_answer(chat, 1)
    chat.goto("about:blank")
    check_idle(served, models)


@pytest.mark.slow
def test_a_new_chat_forgets_a_growing_answer(chat, served, models):
    set_number(chat, LENGTH, 2048)
    with whole_answer(chat):
        ask(chat, "hello")
        wait_for_answer(chat, 1)
        # The small button of a chat does the same as the large one.
        chat.locator("#chat-1").get_by_label("Clear").click()
        check_idle(served, models)
    wait_until_empty(chat)
    # It stays empty.
    chat.wait_for_timeout(1000)
    assert chat.locator(".message").count() == 0
    set_number(chat, LENGTH, 5)
    ask(chat, "again")
    wait_for_answer(chat, 1)
    assert chat.locator("#chat-0 .user.message").all_inner_texts() == ["again"]


@pytest.mark.slow
def test_a_new_chat_stays_empty_if_the_answer_ends_late(page, served, models, monkeypatch):
    """When a handler ends, gradio sends its last output again. On a busy machine, this can be late."""
    postprocess, ended = gr.Blocks.postprocess_data, []

    async def postprocess_late(self, function, predictions, state):
        if _Keywords.FINISHED_ITERATING in predictions:
            await asyncio.sleep(1)
            ended.append(time.monotonic())
        return await postprocess(self, function, predictions, state)

    monkeypatch.setattr(gr.Blocks, "postprocess_data", postprocess_late)
    rambler = make_page([Endpoint(models[1], f"http://127.0.0.1:{served[1] + 1}/v1")])
    _, url, _ = rambler.launch(server_port=free_port(), quiet=True, prevent_thread_lock=True)
    try:
        page.set_default_timeout(TIMEOUT)
        page.goto(url)
        ask(page, "hello")
        wait_for_answer(page, 0)
        page.locator("#question textarea").fill("next")
        with whole_answer(page):
            page.locator("#clear").click()
        page.wait_for_timeout(1000)
        assert ended and page.locator(".message").count() == 0
        assert page.locator("#question textarea").input_value() == "next"
    finally:
        rambler.close()


@pytest.mark.slow
def test_settings_reach_the_server_and_regenerate_answers_again(chat, served, models):
    set_number(chat, LENGTH, 30)
    # At a lower temperature, two sampled answers of this model may be equal.
    set_number(chat, "Temperature", 2)
    set_number(chat, "Top p", 1)
    with whole_answer(chat):
        ask(chat, "hello")
    sampled = wait_for_end(chat, 1)
    chat.locator("#question textarea").fill("a draft")
    with whole_answer(chat):
        chat.locator("#regenerate").click()
    assert wait_for_end(chat, 1) != sampled
    set_number(chat, LENGTH, 7)
    set_number(chat, "Temperature", 0)
    # Without sampling, every client gets the same answer.
    expected = complete(served[1] + 1, models[1], "hello", temperature=0, max_tokens=7)
    for _ in range(2):
        with whole_answer(chat):
            chat.locator("#regenerate").click()
        assert "".join(wait_for_end(chat, 1).split()) == "".join(expected.split())
    assert chat.locator("#chat-1 .user.message").count() == 1
    assert chat.locator("#question textarea").input_value() == "a draft"
    chat.get_by_label("System message").fill("Answer in capitals.")
    set_number(chat, LENGTH, 30)
    ask(chat, "hello")
    wait_for_text(chat, 0, "HELLO")


def test_all_handlers_run_in_the_thread_of_the_answers():
    """gradio runs plain functions in other threads, where Stop could not cancel an answer."""
    page = make_page([Endpoint("m", "http://127.0.0.1:1/v1")])
    handlers = [handler.fn for handler in page.fns.values() if handler.fn is not None]
    assert len(handlers) >= 3
    assert all(inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn) for fn in handlers)


@pytest.mark.slow
def test_regenerate_without_a_question_does_nothing(chat):
    chat.locator("#regenerate").click()
    ask(chat, " ")
    chat.wait_for_timeout(1500)
    assert chat.locator(".message").count() == 0 and chat.get_by_text("Error").count() == 0


@pytest.mark.slow
def test_a_tool_is_called_and_gets_the_result_that_the_user_types(chat):
    set_number(chat, LENGTH, 60)
    chat.get_by_label("Tools (JSON list of schemas)").fill(json.dumps([TOOL]))
    with whole_answer(chat):
        ask(chat, "weather in Oslo?")
    wait_for_text(chat, 0, "Call of the tool get_weather")
    wait_for_text(chat, 0, '"city": "Oslo"')
    chat.get_by_placeholder("Type the result of get_weather").wait_for()
    with whole_answer(chat):
        ask(chat, "rain")
    wait_for_text(chat, 0, "It rains in Oslo.")
    # The other model has called nothing, so the result is not for it.
    assert chat.locator("#chat-1 .user.message").all_inner_texts() == ["weather in Oslo?"]
    chat.get_by_placeholder("Type a message").wait_for()


@pytest.mark.slow
def test_chinese_letters_of_several_tokens_arrive_whole(chat):
    set_number(chat, LENGTH, 60)
    set_number(chat, "Temperature", 0)
    question, answer = (message["content"] for message in CHINESE)
    ask(chat, question)
    wait_for_text(chat, 0, answer)
    assert "\ufffd" not in bot_text(chat, 0)


@pytest.mark.slow
def test_errors_of_the_server_are_shown(chat):
    set_number(chat, LENGTH, 5)
    with whole_answer(chat):
        ask(chat, "x y" * 600)
    # The other model has more positions.
    wait_for_text(chat, 0, "tokens, and the model has 1,024 positions for prompt and answer.")
    wait_for_answer(chat, 1)
    chat.locator("#clear").click()
    wait_until_empty(chat)
    chat.get_by_label("Tools (JSON list of schemas)").fill("{")
    ask(chat, "hello")
    wait_for_text(chat, 0, "The tools in the settings are not JSON")


@pytest.mark.slow
def test_pictures_in_a_text_load_nothing_from_other_hosts(page, served):
    page.set_default_timeout(TIMEOUT)
    page.goto(served[0])
    with socket.create_server(("127.0.0.1", 0)) as host:
        url = f"http://127.0.0.1:{host.getsockname()[1]}"
        ask(page, f"![a]({url}/a.png) <img src={url}/b.png> <video src={url}/c.mp4></video>")
        page.locator("#chat-0 .user.message img").first.wait_for(state="attached")
        host.settimeout(3)
        with pytest.raises(TimeoutError):
            host.accept()


@pytest.mark.slow
def test_the_servers_get_the_flags_of_the_command(served, models):
    commands = [child.cmdline() for child in psutil.Process(served[2].pid).children()]
    assert sum("--seed=0" in words for words in commands) == len(models) == len(commands)


@pytest.mark.slow
def test_the_servers_end_with_the_page_during_an_answer(page, models):
    with serving("--model_name_or_path", models[1], "--reasoning", "off") as (url, port, process):
        page.set_default_timeout(TIMEOUT)
        page.goto(url)
        page.locator("#settings button").first.click()
        # The flag is the initial setting.
        assert not page.get_by_label("Thinking").is_checked()
        set_number(page, LENGTH, 2048)
        ask(page, "hello")
        wait_for_answer(page, 0)
        servers = psutil.Process(process.pid).children()
        process.terminate()
        process.wait(timeout=60)
        assert servers and not any(server.is_running() for server in servers)


@pytest.mark.slow
def test_the_servers_end_with_a_page_that_is_killed(models):
    with serving("--model_name_or_path", models[0], "--compare", models[0]) as (_, _, process):
        servers = psutil.Process(process.pid).children()
        process.kill()
        _, alive = psutil.wait_procs(servers, timeout=60)
        for server in alive:
            server.kill()
    assert len(servers) == 2 and alive == []


@pytest.mark.parametrize("taken", ["--port", "--web_port"])
def test_ports_in_use_are_reported_before_a_model_is_loaded(models, taken):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = run_recipe("--web", "--model_name_or_path", models[0], taken, str(port))
    assert result.returncode == 2 and f"Port {port} of 127.0.0.1 cannot be used" in result.stderr


@pytest.mark.parametrize(("distance", "words"), [(0, []), (1, ["--compare", "{0}"])])
def test_a_port_for_two_servers_is_reported_before_a_model_is_loaded(models, distance, words):
    port = free_port()
    words = [word.format(models[0]) for word in words] + ["--port", str(port), "--web_port", str(port + distance)]
    result = run_recipe("--web", "--model_name_or_path", models[0], *words)
    ports = ", ".join(str(port + number) for number in range(distance + 1))
    message = f"--web_port {port + distance} is the port of a model, too. The models use {ports}:"
    assert result.returncode == 2 and message in result.stderr


def test_a_model_without_a_chat_template_is_refused(models, tmp_path):
    for path in Path(models[0]).iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    result = run_recipe("--web", "--model_name_or_path", models[0], "--compare", str(tmp_path))
    assert result.returncode == 2 and "has no chat template" in result.stderr


def run_recipe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--device", "cpu", *words]
    return start(command, apart=True)


def test_reasoning_and_tool_calls_stand_apart_from_the_answer():
    call = {"function": {"name": "add", "arguments": '{"\\u5317": 1}'}}
    answer = {"role": "assistant", "content": "2", "reasoning_content": "I count.", "tool_calls": [call]}
    question, thought, text, tool = show([{"role": "user", "content": "1 + 1?"}, answer])
    assert (question.role, thought.content, thought.metadata) == (
        "user",
        "I count.",
        {"title": "Thinking", "status": "done"},
    )
    assert text.content == "2" and not text.metadata
    assert tool.metadata["title"] == "Call of the tool add" and '{\n  "北": 1\n}' in tool.content
    # A thought that still grows is open.
    assert show([answer | {"content": "", "is_running": True}])[0].metadata["status"] == "pending"
    (broken,) = show(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    )
    assert broken.content == "```json\n{\n```"
    assert re.search("empty", show([{"role": "assistant", "content": ""}])[0].content)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.0 200 OK\r\n\r\n[1]", b"HTTP/1.0 200 OK\r\n\r\n{}"]
)
def test_another_program_at_the_port_of_a_model_is_not_its_server(answer):
    """The page keeps waiting, and ends with the exit status of its own server."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    connection.recv(4096)
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(3)"])
        with pytest.raises(SystemExit) as end:
            _wait_until_ready(server, Endpoint("m", f"http://127.0.0.1:{other.getsockname()[1]}/v1"))
        # This ends the thread.
        other.shutdown(socket.SHUT_RDWR)
    assert end.value.code == 3
