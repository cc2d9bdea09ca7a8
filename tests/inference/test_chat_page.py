"""The chat page in a real browser, with two real models: one knows its answers, the other never ends one."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import requests
from openai import OpenAI

from hf_pretrain.inference.tools import offer_tools
from tests.faults.driving import wait_for
from tests.inference.test_chat_messages import SETTINGS, ask_page
from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.talking import CHINESE, save_rambler


# The machine may be busy with other tests.
TIMEOUT = 400_000
LENGTH = "Longest answer in tokens"


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Serve a page, and give its address and the port of its server."""
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
def served(talker) -> Iterator[tuple[str, int]]:
    """Serve the model that knows its answers."""
    with serving("--model_name_or_path", str(talker)) as served:
        yield served


@pytest.fixture(scope="module")
def rambling(talker, tmp_path_factory) -> Iterator[tuple[str, int]]:
    """Serve the model that never ends an answer. At the end, the server stops during an answer."""
    rambler = tmp_path_factory.mktemp("models") / "rambler"
    save_rambler(rambler, talker)
    with serving("--model_name_or_path", str(rambler)) as (url, port):
        yield url, port
        next(iter(complete(port, "hi", max_tokens=2048, stream=True)))


@pytest.fixture
def visit(page) -> Iterator[Callable]:
    """Return a function that opens a served page. Afterwards, check that it has loaded nothing from elsewhere."""
    hosts, errors, own = set(), [], {""}
    page.set_default_timeout(TIMEOUT)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def open_page(url: str) -> Any:
        own.add(url.removeprefix("http://"))
        page.goto(url)
        page.locator("#settings button").first.click()
        return page

    yield open_page
    assert errors == [] and hosts <= own


def set_number(page, label: str, value: float) -> None:
    box = page.get_by_label(f"number input for {label}")
    box.fill(str(value))
    box.press("Tab")


def ask(page, text: str) -> None:
    page.locator("#question textarea:enabled").fill(text)
    page.locator("#question textarea").press("Enter")


def texts_of(page, role: str) -> list[str]:
    return page.locator(f"#chat .{role}.message").all_inner_texts()


def wait_for_text(page, text: str) -> None:
    page.locator("#chat").get_by_text(text).first.wait_for()


def wait_for_answer(page, *, chars: int = 1) -> None:
    """Wait until the answers have this many characters."""
    texts = "[...document.querySelectorAll('#chat .bot.message')].map((e) => e.innerText)"
    page.wait_for_function(f"(chars) => {texts}.join('').length >= chars", arg=chars)


def wait_for_questions(page, count: int) -> None:
    """Wait until the page shows this many questions, and can stop an answer."""
    page.locator("#chat .user.message").nth(count - 1).wait_for()
    page.locator("#question .stop-button").wait_for()


def wait_for_end(page) -> str:
    """Wait until the answer has ended, and return the text of all answers."""
    page.locator("#question .submit-button").wait_for()
    return "".join(texts_of(page, "bot"))


def complete(port: int, text: str, timeout: float = 300, **options) -> Any:
    """Ask a server without the page."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=timeout)
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)


def check_idle(rambling) -> None:
    """
    Check that the server generates nothing: it answers one request after the other, and what is left of a long answer
    would take longer than the timeout.
    """
    complete(rambling[1], "hi", timeout=40, max_tokens=1)


@pytest.mark.slow
def test_an_answer_grows_with_its_thought_folded(visit, served, talker):
    page = visit(served[0])
    set_number(page, LENGTH, 40)
    assert str(talker) in page.locator("#chat").inner_text()
    ask(page, "two and two?")
    wait_for_text(page, "It is four.")
    wait_for_end(page)
    assert [text.strip() for text in texts_of(page, "user")] == ["two and two?"]
    # The thought is folded, apart from the answer.
    thought = page.locator("#chat").get_by_text("add them")
    thought.wait_for(state="hidden")
    page.locator("#chat").get_by_text("Thinking").click()
    thought.wait_for(state="visible")
    page.get_by_label("Clear").click()
    page.locator(".message").first.wait_for(state="detached")
    set_number(page, "Temperature", 0)
    question, answer = (message["content"] for message in CHINESE)
    ask(page, question)
    wait_for_text(page, answer)
    assert "\ufffd" not in wait_for_end(page)


@pytest.mark.slow
def test_stop_and_closing_the_page_end_answers_at_the_server(visit, rambling):
    page = visit(rambling[0])
    set_number(page, LENGTH, 2048)
    ask(page, "hello")
    wait_for_answer(page, chars=5)
    early = len("".join(texts_of(page, "bot")))
    wait_for_answer(page, chars=early + 10)
    # No question is lost, and nothing is cleared, while an answer grows.
    assert page.locator("#question textarea").is_disabled() and not page.get_by_label("Clear").is_visible()
    page.locator("#question .stop-button").click()
    check_idle(rambling)
    stopped = wait_for_end(page)
    page.wait_for_timeout(1000)
    assert early + 10 <= len(stopped) < 2048 and stopped == "".join(texts_of(page, "bot"))
    # The answer stays while the conversation continues. Stop the next one before its first token.
    ask(page, "and now?")
    wait_for_questions(page, 2)
    page.locator("#question .stop-button").click()
    check_idle(rambling)
    assert wait_for_end(page).startswith(stopped)
    assert [text.strip() for text in texts_of(page, "user")] == ["hello", "and now?"]
    page.get_by_label("Clear").click()
    page.locator(".message").first.wait_for(state="detached")
    page.wait_for_timeout(1000)
    assert page.locator(".message").count() == 0
    ask(page, "hello")
    wait_for_answer(page)
    assert [text.strip() for text in texts_of(page, "user")] == ["hello"]
    page.goto("about:blank")
    check_idle(rambling)


@pytest.mark.slow
def test_settings_reach_the_server(visit, served, rambling):
    page = visit(rambling[0])
    ask(page, " ")
    page.get_by_text("Type a message first").first.wait_for()
    assert page.locator(".message").count() == 0
    set_number(page, LENGTH, 7)
    set_number(page, "Temperature", 0)
    # Without sampling, every client gets the same answer.
    expected = complete(rambling[1], "hello", temperature=0, max_tokens=7).choices[0].message.content
    ask(page, "hello")
    wait_for_answer(page)
    assert wait_for_end(page).split() == expected.split()
    page = visit(served[0])
    set_number(page, LENGTH, 30)
    set_number(page, "Temperature", 0)
    page.get_by_label("System message").fill("Answer in capitals.")
    ask(page, "hello")
    wait_for_text(page, "HELLO")


@pytest.mark.slow
def test_a_question_is_answered_again_and_taken_back_as_it_was_typed(visit, served):
    page, typed = visit(served[0]), "is <b>x</b> & `<i>` &lt;?"
    set_number(page, LENGTH, 2)
    ask(page, typed)
    wait_for_answer(page)
    short = wait_for_end(page)
    set_number(page, LENGTH, 60)
    page.get_by_role("button", name="Retry").click()
    answer = "document.querySelector('#chat .bot.message')"
    page.wait_for_function(f"length => {answer} && {answer}.innerText.length > length", arg=len(short) + 5)
    wait_for_end(page)
    assert len(texts_of(page, "user")) == 1
    assert texts_of(page, "user")[0].strip() == typed.replace("`", "")
    page.get_by_role("button", name="Undo").click()
    page.locator(".message").first.wait_for(state="detached")
    assert page.locator("#question textarea").input_value() == typed


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_is_used(served):
    url = f"http://127.0.0.1:{served[1]}/v1"
    messages = ask_page(url, *SETTINGS, tools=offer_tools("tests.talking:get_weather"))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "rain" and messages[3]["content"] == "It rains in Oslo."


@pytest.mark.slow
def test_a_refusal_is_shown_with_the_reason_of_the_server(served):
    url = f"http://127.0.0.1:{served[1]}/v1"
    messages = ask_page(url, "x y" * 1000, *SETTINGS[1:])
    assert messages[-1]["error"].startswith(f"{url}: The prompt has ")


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
        page.locator("#chat .user.message img").first.wait_for(state="attached")
        assert page.locator("#chat .user.message video").count() == 0
        assert f"<img src={url}/b.png>" in page.locator("#chat .user.message").first.inner_text()
        host.settimeout(3)
        with pytest.raises(TimeoutError):
            host.accept()


def test_a_chinese_browser_gets_a_chinese_page(page, served):
    check_chinese_page(page.context.browser.new_context(locale="zh-CN").new_page(), served[0])


@pytest.mark.slow
def test_a_flag_gives_every_browser_a_chinese_page(page, talker):
    with serving("--model_name_or_path", str(talker), "--language", "zh") as (url, _):
        check_chinese_page(page, url)


def check_chinese_page(page, url: str) -> None:
    page.set_default_timeout(TIMEOUT)
    page.goto(url)
    page.locator("#settings button", has_text="设置").click()
    assert page.locator("#question textarea").get_attribute("placeholder") == "输入消息"
    page.get_by_label("系统消息").wait_for()
    set_number(page, "回答的最大 token 数", 40)
    page.locator("#question .submit-button").click()
    page.get_by_text("请先输入消息。").wait_for()
    ask(page, "two and two?")
    page.locator("#chat").get_by_text("思考").wait_for()
