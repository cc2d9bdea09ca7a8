"""The chat page in a real browser, with two real models: one knows its answers, the other never ends one."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from openai import OpenAI

from hf_pretrain.inference import chat_page
from hf_pretrain.inference.chat_page import Endpoint, begin_answer, show, to_request
from hf_pretrain.inference.tools import offer_tools
from tests.faults.driving import wait_for
from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.talking import CHINESE, save_rambler


# The machine may be busy with other tests.
TIMEOUT = 120_000
LENGTH = "Longest answer in tokens"


# Histories


QUESTION = {"role": "user", "content": "weather in Oslo?"}
RUNNING = {"role": "assistant", "content": "", "is_running": True}


def call(name: str, arguments: str = "{}") -> dict:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*names: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [call(name) for name in names]}


def result(name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": text}


def test_a_request_has_neither_reasoning_nor_errors_nor_empty_answers():
    history = [
        QUESTION,
        {"role": "assistant", "content": "dry", "reasoning_content": "I see.", "tool_calls": [], "is_running": True},
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "", "error": "gone"},
        QUESTION,
        called("a"),
        result("a", ""),
    ]
    kept = [{"role": "assistant", "tool_calls": [call("a")]}, {"role": "tool", "tool_call_id": "call-a"}]
    assert to_request(history) == [QUESTION, {"role": "assistant", "content": "dry"}, QUESTION, QUESTION, *kept]
    # A server reads the arguments as JSON, and would fail on all requests that follow.
    (message,) = to_request([{"role": "assistant", "content": "", "tool_calls": [call("a", '{"city')]}])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == '{"city'


def answer_with(endpoint: Endpoint, tools: tuple, *settings) -> list[dict]:
    """Return the history of an answer to a question, with the handler of the page and without a browser."""

    async def collect():
        handler, session = chat_page._answering(endpoint, tools, None), SimpleNamespace(session_hash="a", headers={})
        return [now async for _, now in handler(session, begin_answer([], QUESTION["content"]), *settings)]

    return asyncio.run(collect())[-1]


def test_a_model_that_only_calls_tools_comes_to_an_end(monkeypatch):
    async def stream(endpoint, history, *settings):
        yield called("f", "f")

    monkeypatch.setattr(chat_page, "stream_answer", stream)
    history = answer_with(None, (None, {"f": lambda: "rain"}))
    assert history == [QUESTION, *[called("f", "f"), *[result("f", "rain")] * 2] * 15, called("f", "f")]


def test_an_answer_that_is_stopped_before_it_begins_changes_nothing():
    """Otherwise it would look as if it grew for ever, or come back into an empty page."""
    session = SimpleNamespace(session_hash="b", headers={})

    async def stop_and_answer() -> list:
        history = begin_answer([], "hello")
        await chat_page._wait_for_end(session)
        handler = chat_page._answering(Endpoint("m", "http://127.0.0.1:9"), (None, {}), None)
        return [pair for late in (history, []) async for pair in handler(session, late, "", 0, 0.9, 5, True, 32)]

    assert asyncio.run(stop_and_answer()) == []


def test_reasoning_and_tool_calls_stand_apart_from_the_answer():
    answer = {"role": "assistant", "content": "2", "reasoning_content": "I count."}
    answer["tool_calls"] = [call("add", '{"\\u5317": 1}'), call("broken", "{")]
    question, thought, text, tool, broken = show([QUESTION, answer])
    assert question["role"] == "user" and (text["content"], text["metadata"]) == ("2", {})
    assert (thought["content"], thought["metadata"]) == ("I count.", {"title": "Thinking", "status": "done"})
    assert tool["metadata"]["title"] == "Call of the tool add" and '{\n  "北": 1\n}' in tool["content"]
    assert broken["content"] == "```json\n{\n```"
    # A thought that still grows is open.
    assert show([answer | {"content": "", "is_running": True}])[0]["metadata"]["status"] == "pending"
    assert "empty" in show([RUNNING | {"is_running": False}])[0]["content"]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("is <b>x</b> & &lt; bold?", "is &lt;b&gt;x&lt;/b&gt; &amp; &amp;lt; bold?"),
        ("`<b>` or <b>\n```\n<i>&\n```", "`<b>` or &lt;b&gt;\n```\n<i>&\n```"),
        ("a ` <b>", "a ` &lt;b&gt;"),
    ],
)
def test_tags_of_the_user_are_text(typed, shown):
    """Markdown itself shows the tags in code as they are."""
    (message,) = show([{"role": "user", "content": typed}])
    assert message["content"].replace(">", "&gt;") == shown.replace(">", "&gt;")


def test_an_error_is_an_answer_and_not_a_crash():
    url = f"http://127.0.0.1:{free_port()}/v1"
    _, answer = answer_with(Endpoint("m", url), (None, {}), "", 0.8, 0.9, 5, True, 32)
    assert url in answer["error"] and "Connection error" in answer["error"]


# The page


@pytest.fixture(scope="module")
def models(talker, tmp_path_factory) -> list[str]:
    rambler = tmp_path_factory.mktemp("models") / "rambler"
    save_rambler(rambler, talker)
    return [str(talker), str(rambler)]


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Serve a page, and give its address and the first port of its servers."""
    web_port, port = free_port(), free_port()
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--web", "--web_port", str(web_port), "--seed", "0"]
    command += ["--port", str(port), "--use_cpu", "--think", "on", *flags]
    # A proxy cannot reach the servers of this machine.
    process = subprocess.Popen(command, env=cpu_environment(http_proxy="http://127.0.0.1:9", no_proxy="example.org"))

    def answers() -> bool:
        # A connection is no answer: the command opens the port first to see whether it is free.
        with suppress(requests.ConnectionError):
            return requests.get(f"http://127.0.0.1:{web_port}", timeout=60).ok
        return False

    assert wait_for(answers, process, timeout=300), "The page did not start."
    yield f"http://127.0.0.1:{web_port}", port
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def served(models) -> Iterator[tuple[str, int]]:
    """Serve two models. At the end, the servers stop during an answer."""
    with serving("--model_name_or_path", models[0], "--compare", models[1]) as (url, port):
        yield url, port
        next(iter(complete(port + 1, models[1], "hi", max_tokens=2048, stream=True)))


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


def wait_for_questions(page, number: int, count: int) -> None:
    """Wait until the page shows this many questions: then their answers have begun."""
    page.wait_for_function(
        "([n, count]) => document.querySelectorAll(`#chat-${n} .user.message`).length === count", arg=[number, count]
    )


def wait_for_end(page, number: int) -> str:
    """Wait until an answer does not grow any more, and return its text."""
    wait_for_answer(page, number)
    text = bot_text(page, number)
    while True:
        page.wait_for_timeout(1500)
        if text == (text := bot_text(page, number)):
            return text


def empty(page) -> None:
    page.locator("#clear").click()
    page.wait_for_function("() => document.querySelectorAll('.message').length === 0")


def complete(port: int, model: str, text: str, timeout: float = 300, **options) -> Any:
    """Ask a server without the page."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=timeout)
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **options)


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
    empty(chat)
    assert chat.locator("#question textarea").input_value() == "next"
    set_number(chat, "Temperature", 0)
    question, answer = (message["content"] for message in CHINESE)
    ask(chat, question)
    wait_for_text(chat, 0, answer)
    assert "\ufffd" not in bot_text(chat, 0)


@pytest.mark.slow
def test_stop_and_new_chat_and_closing_the_page_end_answers_at_the_server(chat, served, models):
    set_number(chat, LENGTH, 2048)
    ask(chat, "hello")
    wait_for_answer(chat, 1, chars=5)
    early = len(bot_text(chat, 1))
    wait_for_answer(chat, 1, chars=early + 10)
    # No question is lost while an answer grows.
    ask(chat, "and now?")
    chat.get_by_text("Wait for the end of the answer").first.wait_for()
    chat.locator("#stop").click()
    check_idle(served, models)
    stopped = wait_for_end(chat, 1)
    assert early + 10 <= len(stopped) < 2048 and chat.locator("#question textarea").input_value() == "and now?"
    # The answer stays while the conversation continues. Stop the next one before its first token.
    ask(chat, "and now?")
    wait_for_questions(chat, 1, 2)
    chat.locator("#stop").click()
    check_idle(served, models)
    assert wait_for_end(chat, 1).startswith(stopped)
    assert chat.locator("#chat-1 .user.message").all_inner_texts() == ["hello", "and now?"]
    ask(chat, "again")
    wait_for_answer(chat, 1, chars=len(stopped) + 30)
    # The small button of a chat does the same as the large one.
    chat.locator("#chat-1").get_by_label("Clear").click()
    check_idle(served, models)
    chat.wait_for_function("() => document.querySelectorAll('.message').length === 0")
    chat.wait_for_timeout(1000)
    assert chat.locator(".message").count() == 0
    ask(chat, "hello")
    wait_for_answer(chat, 1)
    assert chat.locator("#chat-0 .user.message").all_inner_texts() == ["hello"]
    chat.goto("about:blank")
    check_idle(served, models)


@pytest.mark.slow
def test_settings_reach_the_server(chat, served, models):
    ask(chat, " ")
    chat.get_by_text("Type a message first").first.wait_for()
    assert chat.locator(".message").count() == 0
    set_number(chat, LENGTH, 7)
    set_number(chat, "Temperature", 0)
    # Without sampling, every client gets the same answer.
    answer = complete(served[1] + 1, models[1], "hello", temperature=0, max_tokens=7)
    ask(chat, "hello")
    assert wait_for_end(chat, 1).split() == answer.choices[0].message.content.split()
    chat.get_by_label("System message").fill("Answer in capitals.")
    set_number(chat, LENGTH, 30)
    empty(chat)
    ask(chat, "hello")
    wait_for_text(chat, 0, "HELLO")


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_is_used(served, models):
    endpoint = Endpoint(models[0], f"http://127.0.0.1:{served[1]}/v1")
    history = answer_with(endpoint, offer_tools("tests.talking:get_weather"), "", 0, 0.9, 60, True, 32)
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "assistant"]
    assert history[2]["content"] == "rain" and history[3]["content"] == "It rains in Oslo."


@pytest.mark.slow
def test_a_refusal_is_shown_with_the_reason_of_the_server(served, models):
    endpoint = Endpoint(models[0], f"http://127.0.0.1:{served[1]}/v1")
    history = answer_with(endpoint, (None, {}), "x y" * 1000, 0, 0.9, 60, True, 32)
    assert history[-1]["error"].startswith(f"{endpoint.base_url}: The prompt has ")


@pytest.mark.slow
def test_pages_of_other_hosts_reach_neither_the_page_nor_its_files(served):
    own = {"Host": served[0].removeprefix("http://"), "Origin": served[0]}
    for method, path, foreign in (
        ("get", "/", {"Host": "evil.com"}),
        ("post", "/gradio_api/upload", {"Origin": "http://evil.com"}),
    ):
        for headers, is_refused in ((own, False), (own | foreign, True)):
            answer = requests.request(
                method, served[0] + path, files={"files": b"y" * 99}, headers=headers, timeout=60
            )
            assert (answer.status_code == 403) == is_refused, (path, headers, answer.status_code)
            # The page itself uploads nothing.
            assert method == "get" or answer.status_code >= 400


@pytest.mark.slow
def test_pictures_in_a_text_load_nothing_from_other_hosts(page, served):
    page.set_default_timeout(TIMEOUT)
    page.goto(served[0])
    with socket.create_server(("127.0.0.1", 0)) as host:
        url = f"http://127.0.0.1:{host.getsockname()[1]}"
        ask(page, f"![a]({url}/a.png) <img src={url}/b.png> <video src={url}/c.mp4></video>")
        page.locator("#chat-0 .user.message img").first.wait_for(state="attached")
        assert page.locator("#chat-0 .user.message video").count() == 0
        assert f"<img src={url}/b.png>" in page.locator("#chat-0 .user.message").first.inner_text()
        host.settimeout(3)
        with pytest.raises(TimeoutError):
            host.accept()


def test_a_chinese_browser_gets_a_chinese_page(page, served):
    check_chinese_page(page.context.browser.new_context(locale="zh-CN").new_page(), served[0])


@pytest.mark.slow
def test_a_flag_gives_every_browser_a_chinese_page(page, models):
    with serving("--model_name_or_path", models[0], "--language", "zh") as (url, _):
        check_chinese_page(page, url)


def check_chinese_page(page, url: str) -> None:
    page.set_default_timeout(TIMEOUT)
    page.goto(url)
    page.locator("#send", has_text="发送").wait_for()
    assert page.locator("#clear").inner_text() == "新对话"
    assert page.locator("#question textarea").get_attribute("placeholder") == "输入消息"
    page.locator("#settings button").first.click()
    page.get_by_label("系统消息").wait_for()
    page.locator("#send").click()
    page.get_by_text("请先输入消息。").wait_for()
