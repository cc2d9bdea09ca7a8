"""The server, tested with the official `openai` client and with raw requests."""

import contextlib
import json
import logging
import runpy
import socket
import sys
from collections.abc import Iterator

import psutil
import pytest
import requests

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.stages.serving import MAX_BYTES, check_ports, model_manager, serve_model
from tests.invariants.launching import ROOT, free_port
from tests.talking import CHINESE, SUM, TOOL, WEATHER


openai = pytest.importorskip("openai")


@contextlib.contextmanager
def served(model: str, **options) -> Iterator[openai.OpenAI]:
    """Serve a model in this process, and give a client, whose `model` is its name."""
    port = free_port()
    server = serve_model(model, host="127.0.0.1", port=port, non_blocking=True, device="cpu", **options)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=3, timeout=500)
    client.served = model
    yield client
    server.server.force_exit = True
    server.kill_server()
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def client(talker, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # As on a machine without a Hub cache.
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("empty")))
        with served(str(talker)) as found:
            yield found


def ask(client, messages, **options):
    return client.chat.completions.create(model=client.served, messages=messages, **{"temperature": 0} | options)


def texts(answer, stream: bool) -> tuple[str, str]:
    """Return the reasoning and the content of an answer or of a stream."""
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    return tuple("".join(getattr(p, name, None) or "" for p in parts) for name in ("reasoning_content", "content"))


def test_only_the_model_is_listed_and_only_on_loopback(client):
    assert [model.id for model in client.models.list()] == [client.served]
    listening = [each for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert [each.laddr.ip for each in listening if each.laddr.port == client.base_url.port] == ["127.0.0.1"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_apart_and_can_be_switched_off(client, stream):
    assert texts(ask(client, SUM[:1], stream=stream), stream) == ("add them", "It is four.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert texts(ask(client, SUM[:1], stream=stream, extra_body=off), stream) == ("", "It is four.")


# As MiniMind's chat_api.py sends it, to a model that this machine does not have.
API_CLIENT = {"chat_template_kwargs": {"open_thinking": True}, "reasoning_effort": "medium"}


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        (API_CLIENT, "add them"),
        ({"open_thinking": True}, "add them"),
        ({"open_thinking": False}, ""),
        ({"open_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "add them"),
        ({"chat_template_kwargs": {"open_thinking": False}}, ""),
    ],
)
def test_minimind_clients_switch_the_reasoning_and_may_name_any_model(client, fields, thought):
    options = {"model": "minimind-local:latest", "extra_body": fields, "temperature": 0}
    answer = client.chat.completions.create(messages=SUM[:1], **options)
    assert texts(answer, stream=False) == (thought, "It is four.")
    completion = client.completions.create(model="/etc", prompt="two", max_tokens=1, temperature=0)
    # transformers before 5.24 adds the revision.
    assert {name.removesuffix("@main") for name in (answer.model, completion.model)} == {client.served}


def test_a_stream_arrives_in_pieces_with_whole_letters(client):
    """The toy tokenizer has no token for any of these letters."""
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(client, CHINESE[:1], stream=True)]
    assert "".join(chunks) == CHINESE[1]["content"] and set(CHINESE[1]["content"]) <= set(chunks)


@pytest.mark.parametrize("options", [{}, {"stream": True}])
def test_a_tool_is_called_and_its_result_is_used(client, options):
    answer = ask(client, WEATHER[:1], tools=[TOOL], **options)
    if options:
        chunks = [chunk.choices[0] for chunk in answer]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
    messages = [
        *WEATHER[:1],
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert ask(client, messages, tools=[TOOL]).choices[0].message.content == "It rains in Oslo."


def test_only_a_temperature_samples(client):
    """The toy model is certain of its answers; only a high temperature makes it err."""
    hot = [str(ask(client, SUM[:1], temperature=50, max_tokens=10).choices[0].message) for _ in range(2)]
    assert hot[0] != hot[1] and not any("It is four." in text for text in hot)
    for temperature in (openai.omit, 0):
        assert ask(client, SUM[:1], temperature=temperature).choices[0].message.content == "It is four."


# Refused requests


def post(client, path: str, body, **headers: str) -> requests.Response:
    """Send a request as any program may do; `body` is sent as JSON, or as it is if it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
    with requests.Session() as session:
        session.trust_env = False
        return session.post(str(client.base_url).removesuffix("/v1/") + path, content, headers=headers, timeout=500)


def chat(**fields) -> dict:
    return {"messages": SUM[:1], "temperature": 0, **fields}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = "x y" * 1000


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, chat(open_thinking="no"), 400, "open_thinking: "),
        *((path, {}, 404, "This server answers") for path in ("/load_model", "/reset", "/v1/responses")),
        *((CHAT, body, 400, "JSON") for body in (b"{", b"[" * 20_000, b"[1]", b"\xff")),
        (CHAT, chat(chat_template_kwargs="x"), 400, "must be an object"),
        (CHAT, chat(stop=[3]), 400, "AttributeError"),
        (CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400, "tokens, and the model has 1,024 positions"),
        (CHAT, chat(messages=[{"role": "user", "content": LONG}], stream=True), 400, "the model has 1,024 positions"),
        (COMPLETION, {"prompt": LONG}, 400, "tokens, and the model has 1,024 positions"),
        (COMPLETION, {"prompt": "x" * MAX_BYTES}, 400, "bytes"),
        (CHAT, chat(temperature="hot"), 400, "hot"),
        (CHAT, chat(max_tokens=-1), 400, "`max_new_tokens` must be greater than 0"),
        (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, 'the role "robot"'),
        (CHAT, chat(messages=[{"content": "x"}]), 400, "KeyError: 'role'"),
        (CHAT, chat(messages="x"), 400, "TypeError"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(client, path, body, status, words):
    answer = post(client, path, body)
    assert answer.status_code == status and words in answer.json()["detail"], answer.text


def test_pages_of_other_origins_are_refused(client):
    """A browser asks before it sends JSON to another origin, and gets no permission. It sends plain text at once."""
    assert post(client, CHAT, chat(), Content_Type="text/plain").status_code == 415
    with requests.Session() as session:
        session.trust_env = False
        asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        answer = session.options(str(client.base_url) + "chat/completions", headers=asks, timeout=500)
    assert answer.status_code >= 400 and "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (COMPLETION, {"prompt": "two and two?", "temperature": 0})]
)
def test_empty_fields_have_no_effect(client, path, body):
    """Some clients send null or the default for all fields that the user has not set."""
    empty = dict.fromkeys(["logprobs", "stop", "seed", "stream", "max_tokens"]) | {"logit_bias": {}, "n": 1}
    choices = [post(client, path, body | more).json()["choices"] for more in ({}, empty)]
    assert choices[0] == choices[1]


def test_a_stop_string_ends_an_answer(client):
    answer = ask(client, SUM[:1], stop=["five", "is"])
    assert texts(answer, stream=False) == ("add them", "It is") and answer.choices[0].finish_reason == "stop"


def test_an_answer_ends_where_the_positions_do(client):
    """Otherwise it would continue past the rotary table, and end in an error. The toy model has 1,024 positions."""
    body = {"prompt": "x y" * 300, "temperature": 50, "max_tokens": 5000}
    lengths = [post(client, COMPLETION, body).json()["usage"]["total_tokens"] for _ in range(3)]
    assert max(lengths) <= 1024


# The recipe


def test_the_positions_of_the_served_model_are_extended(talker, monkeypatch):
    # The server's loader stays in transformers; later tests of this process load other models.
    monkeypatch.setattr(model_manager.transformers, "MiniMindForCausalLM", MiniMindForCausalLM, raising=False)
    with served(str(talker), rope_scaling="1024:4") as client:
        prompt = "x y" * 1000
        assert ask(client, [{"role": "user", "content": prompt}], max_tokens=1).usage.prompt_tokens > 1024
        assert ask(client, SUM[:1]).choices[0].message.content == "It is four."


def test_mistakes_are_reported_before_a_model_is_loaded(talker, tmp_path, monkeypatch, capsys):
    for path in talker.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        name = ["--model_name_or_path", str(talker)]
        for words, message in (
            (["--compare", "x"], "--compare and --tools need the chat page"),
            ([*name, "--port", port], f"error: Port {port} of 127.0.0.1 cannot be used"),
            (["--web", *name, "--web_port", port], f"error: Port {port} of 127.0.0.1 cannot be used"),
            (["--web", *name, "--port", "8031", "--compare", "x", "--web_port", "8032"], "error: Port 8032 of"),
            (["--web", *name, "--compare", str(tmp_path)], "has no chat template"),
        ):
            monkeypatch.setattr(sys, "argv", ["serve.py", *words])
            with pytest.raises(SystemExit):
                runpy.run_path(str(ROOT / "recipes/serve.py"), run_name="__main__")
            assert message in capsys.readouterr().err, words
    with pytest.raises(UserError, match="Port 8033 of localhost cannot be used"):
        check_ports("localhost", [8033, 8033])
