"""The chat page: a question typed into a real browser, answers of two real servers, stop and regenerate."""

import subprocess
import sys
import urllib.request

import pytest

from hf_pretrain.stages.web_chat import Endpoint, Sampling, show, stream_answer, to_requests
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.toys import toy_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Two models of random weights, which answer with random text."""
    paths = []
    for number in (1, 2):
        path = tmp_path_factory.mktemp("models") / f"model-{number}"
        tokenizer = train_tokenizer([f"{i} is a number of {i}, {i + 1} the next." for i in range(100)], vocab_size=400)
        model = toy_model(vocab_size=len(tokenizer), max_position_embeddings=2048)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        paths.append(str(path))
    return paths


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


def answers(page, number: int) -> list[str]:
    return page.locator(f"#chat-{number} .bot.message").all_inner_texts()


def ask(page, text: str) -> None:
    page.locator("#question textarea").fill(text)
    page.locator("#question textarea").press("Enter")


@pytest.mark.slow
def test_two_models_answer_beside_each_other(page, address, models):
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    for number in (0, 1):
        page.locator(f"#chat-{number}").wait_for(timeout=30_000)
    ask(page, "What is the next number?")
    # The question stands in both columns at once, and both answers grow.
    for number in (0, 1):
        page.locator(f"#chat-{number} .user.message").wait_for(timeout=20_000)
        page.wait_for_function(
            "n => (document.querySelector(`#chat-${n} .bot.message`)?.innerText ?? '').trim().length > 10",
            arg=number,
            timeout=60_000,
        )
    first = answers(page, 0)
    page.locator("#stop").click()
    page.wait_for_timeout(1000)
    stopped = answers(page, 0)
    page.wait_for_timeout(1500)
    # Nothing is added after Stop, and what was there stays.
    assert answers(page, 0) == stopped and len("".join(stopped)) >= len("".join(first)) > 0
    page.locator("#regenerate").click()
    page.wait_for_function(
        "old => document.querySelector('#chat-0 .bot.message')?.innerText !== old", arg=stopped[0], timeout=60_000
    )
    assert page.locator("#chat-0 .user.message").count() == 1
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
