"""The server process, asked by the official `openai` client."""

import json
import subprocess
import sys
import time

import pytest

from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.talking import SUM, TOOL, WEATHER


openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    """A client, and the log of the server that it talks to."""
    port, path = free_port(), tmp_path_factory.mktemp("server")
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--port", str(port), "--device", "cpu"]
    (path / "out").mkdir()
    (path / "out/run").symlink_to(talker)
    with open(path / "log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=path,
            env=cpu_environment(PYTHONPATH=str(ROOT), HF_HOME=str(path / "empty")),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    deadline = time.monotonic() + 120
    try:
        while "Uvicorn running" not in (path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (path / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield client, path / "log"
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(server, messages, **options):
    client, log = server
    try:
        return client.chat.completions.create(model="out/run", messages=messages, temperature=0, **options)
    except openai.APIError as error:
        raise AssertionError(log.read_text()[-3000:]) from error


def test_it_binds_to_loopback(server):
    _, log = server
    assert "Serving out/run at http://127.0.0.1:" in log.read_text()
    assert "Uvicorn running on http://127.0.0.1:" in log.read_text()


def test_the_model_is_listed(server):
    """Also on a machine that never downloaded anything."""
    assert [model.id for model in server[0].models.list()] == ["out/run"]


def test_a_completion_with_reasoning(server):
    (choice,) = ask(server, SUM[:1]).choices
    assert choice.message.content == "It is four."
    assert choice.message.reasoning_content == "add them"
    assert choice.finish_reason == "stop"


def test_a_completion_without_reasoning(server):
    (choice,) = ask(server, SUM[:1], extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    assert choice.message.content == "It is four."
    assert getattr(choice.message, "reasoning_content", None) is None


def test_a_stream(server):
    deltas = [chunk.choices[0].delta for chunk in ask(server, SUM[:1], stream=True)]
    parts = {name: [getattr(delta, name, None) or "" for delta in deltas] for name in ("content", "reasoning_content")}
    assert "".join(parts["content"]) == "It is four." and "".join(parts["reasoning_content"]) == "add them"
    assert sum(map(bool, parts["content"])) > 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_used(server, stream):
    answer = ask(server, WEATHER[:1], tools=[TOOL], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages = [
        *WEATHER[:1],
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert ask(server, messages, tools=[TOOL]).choices[0].message.content == "It rains in Oslo."


def test_a_system_message_and_history(server):
    messages = [{"role": "system", "content": "Answer in capitals."}, {"role": "user", "content": "hello"}]
    messages += [{"role": "assistant", "content": "HELLO YOU"}, {"role": "user", "content": "again"}]
    assert ask(server, messages).choices[0].message.content == "HELLO AGAIN"
