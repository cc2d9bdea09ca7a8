"""The chat page: a question typed into a real browser, answers of two real servers, stop and regenerate."""

import shutil
import subprocess
import sys
import urllib.request

import pytest

from hf_pretrain.stages.web_chat import Endpoint, Sampling, show, stream_answer, to_requests
from tests.invariants.launching import ROOT, cpu_environment, free_port


@pytest.fixture(scope="module")
def models(talker, tmp_path_factory) -> list[str]:
    """The model that has memorized answers, and a copy of it under another name."""
    copy = tmp_path_factory.mktemp("models") / "second"
    shutil.copytree(talker, copy)
    return [str(talker), str(copy)]


@pytest.fixture(scope="module")
def address(models) -> str:
    """The address of the page, with both models behind it."""
    web_port, port = free_port(), free_port()
    words = ["--web", "--web_port", str(web_port), "--port", str(port), "--device", "cpu", "--log_level", "error"]
    words += ["--model_name_or_path", models[0], "--compare", models[1]]
    process = subprocess.Popen([sys.executable, str(ROOT / "recipes/serve.py"), *words], env=cpu_environment())
    url = f"http://127.0.0.1:{web_port}"
    while process.poll() is None:
        try:
            urllib.request.urlopen(url).close()
            break
        except OSError:
            continue
    assert process.poll() is None
    yield url
    process.terminate()
    process.wait()


def wait_for_text(page, number: int, text: str) -> None:
    page.wait_for_function(
        "([n, text]) => document.querySelector(`#chat-${n}`)?.innerText.includes(text)",
        arg=[number, text],
        timeout=60_000,
    )


@pytest.mark.slow
def test_two_models_answer_beside_each_other(page, address, models):
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    for number in (0, 1):
        page.locator(f"#chat-{number}").wait_for(timeout=30_000)
        assert models[number] in page.locator(f"#chat-{number}").inner_text()
    page.locator("#question textarea").fill("two and two?")
    page.locator("#question textarea").press("Enter")
    # The question and both answers, with the thought apart.
    for number in (0, 1):
        wait_for_text(page, number, "two and two?")
        wait_for_text(page, number, "It is four.")
        wait_for_text(page, number, "Thinking")
    page.locator("#regenerate").click()
    page.wait_for_timeout(500)
    for number in (0, 1):
        wait_for_text(page, number, "It is four.")
        assert page.locator(f"#chat-{number} .user.message").count() == 1
    page.locator("#clear").click()
    page.wait_for_function("() => document.querySelectorAll('.bot.message').length === 0", timeout=20_000)
    assert errors == []


def test_reasoning_and_tool_calls_stand_apart_from_the_answer():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "I count.", "tool_calls": [call]},
    ]
    question, thought, answer, tool = show(history)
    assert (question.role, thought.content, thought.metadata["title"]) == ("user", "I count.", "Thinking")
    assert answer.content == "2" and not answer.metadata
    assert tool.metadata["title"] == "Call of the tool add" and '{"a": 1}' in tool.content
    assert to_requests(history)[1] == {"role": "assistant", "content": "2", "tool_calls": [call]}


def test_a_server_that_is_gone_is_an_answer_and_not_a_crash():
    (answer,) = stream_answer(Endpoint("m", f"http://127.0.0.1:{free_port()}/v1"), [], Sampling())
    assert "Connection error" in answer["error"] and show([answer])[0].metadata["title"] == "Error"
    assert to_requests([answer]) == []
