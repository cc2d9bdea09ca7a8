"""The server process, tested with the official `openai` client."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import BaseHandler, GenerationState

from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.stages.serving import CBGenerateManager, ReasoningMode, _sampling, check_ports, template_kwargs
from hf_pretrain.tokenizer.encoding import encode_prompt
from hf_pretrain.tokenizer.loading import load_tokenizer
from tests.invariants.launching import ROOT, cpu_environment, free_port, start
from tests.talking import CHINESE, SUM, TOOL, WEATHER


openai = pytest.importorskip("openai")


@contextmanager
def serving(model: Path, path: Path):
    """Serve a model as `out/run`. Give a client, the log of its server, and its process."""
    port = free_port()
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--port", str(port), "--device", "cpu"]
    (path / "out").mkdir()
    (path / "out/run").symlink_to(model)
    with open(path / "log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=path,
            env=cpu_environment(PYTHONPATH=str(ROOT), HF_HOME=str(path / "empty")),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=500)
    deadline = time.monotonic() + 500
    try:
        while "Serving out/run at" not in (path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (path / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield client, path / "log", process
    finally:
        process.terminate()
        process.wait(timeout=300)


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    with serving(talker, tmp_path_factory.mktemp("server")) as found:
        yield found


def ask(server, messages, **options):
    client, log, _ = server
    try:
        return client.chat.completions.create(model="out/run", messages=messages, temperature=0, **options)
    except openai.APIError as error:
        raise AssertionError(log.read_text()[-3000:]) from error


def test_its_log_begins_with_its_address(server):
    client, log, _ = server
    ask(server, SUM[:1])
    assert log.read_text().splitlines()[0].startswith("Serving out/run at ") and "Loading" not in log.read_text()


def test_it_binds_to_loopback(server):
    client, log, process = server
    assert f"Serving out/run at {client.base_url}".rstrip("/") in log.read_text()
    (listening,) = (each for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN")
    assert listening.laddr == ("127.0.0.1", client.base_url.port)


def test_it_prints_no_line_per_request(server):
    client, log, _ = server
    client.models.list()
    assert "Serving" in log.read_text() and "INFO" not in log.read_text()


def test_the_model_is_listed(server):
    """This must also work on a machine without a Hub cache."""
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


def test_a_temperature_samples(server):
    """The toy model is certain of its answers; only a high temperature makes it err."""
    answers = [post(server, "/v1/chat/completions", chat(temperature=50, max_tokens=10)).json() for _ in range(2)]
    texts = [str(answer["choices"][0]["message"]) for answer in answers]
    assert texts[0] != texts[1] and not any("It is four." in text for text in texts)


@pytest.mark.parametrize("fields", [{"temperature": 50}, {"generation_config": {"temperature": 50.0}}])
@pytest.mark.parametrize("do_sample", [None, False])
def test_do_sample_of_a_request_wins_over_its_temperature(server, fields, do_sample):
    config = {"max_new_tokens": 10} | fields.get("generation_config", {})
    config |= {} if do_sample is None else {"do_sample": do_sample}
    fields = chat(temperature=None) | fields | {"generation_config": json.dumps(config)}
    answers = [post(server, "/v1/chat/completions", fields).json()["choices"][0]["message"] for _ in range(2)]
    assert (answers[0] == answers[1]) == (do_sample is False)
    assert ("add them" in str(answers[0])) == (do_sample is False)


def test_a_tiny_temperature_takes_the_most_probable_token(server):
    """The logits divided by it would be infinite, and could not be sampled from."""
    answer = post(server, "/v1/chat/completions", chat(temperature=1e-40))
    assert answer.json()["choices"][0]["message"]["content"] == "It is four."


def test_a_temperature_samples_with_continuous_batching(talker):
    """In this process, because the cache of a real server would fill the memory of a machine without a GPU."""
    model = MiniMindForCausalLM.from_pretrained(talker).eval()
    tokenizer = load_tokenizer(talker)
    inputs = {"input_ids": encode_prompt(tokenizer, SUM[:1])}

    async def answer(temperature: float) -> str:
        # As the server does, build the settings of a request, and take those of the first one.
        config = _sampling(BaseHandler._build_generation_config)(
            BaseHandler(None, GenerationState()), {"temperature": temperature}, model.generation_config, use_cb=True
        )
        config.max_new_tokens = 14
        manager = CBGenerateManager(ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64))
        manager.init_cb(model, config)
        try:
            return (await manager.generate_non_streaming(model, tokenizer, inputs, config, request_id="one"))[0]
        finally:
            manager.stop()

    assert "It is four." in asyncio.run(answer(0.0)) and "It is four." not in asyncio.run(answer(50.0))


def test_chinese_letters_of_several_tokens_arrive_whole(server):
    """The toy tokenizer has no token for any of these letters."""
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(server, CHINESE[:1], stream=True)]
    assert "".join(chunks) == CHINESE[1]["content"] and set(CHINESE[1]["content"]) <= set(chunks)


# Flags


@pytest.mark.parametrize("reasoning", ReasoningMode)
def test_flags_become_variables_of_the_template(reasoning):
    """minimind-3's own template has another name for the variable, and another default."""
    prompts = {
        name: load_tokenizer(ROOT / "tests/fixtures/tokenizers/v3").apply_chat_template(
            SUM[:1], tokenize=False, add_generation_prompt=True, **kwargs
        )
        for name, kwargs in (("flag", template_kwargs('{"x": 1}', reasoning)), ("on", {"open_thinking": True}))
    }
    assert (prompts["flag"] == prompts["on"]) == (reasoning is ReasoningMode.ON)
    assert template_kwargs('{"x": 1, "enable_thinking": 3}', reasoning)["x"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs '{' is not JSON"),
        (["--chat_template_kwargs", "[]"], "--chat_template_kwargs '[]' must be a JSON object"),
        (["--continuous_batching", "--device", "cpu"], "--continuous_batching needs an accelerator"),
        (["--compare", "x"], "--compare needs the chat page"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, message):
    command = [sys.executable, str(ROOT / "recipes/serve.py"), *words]
    result = start(command, apart=True)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_port_in_use_is_reported_before_the_model_is_loaded(talker):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        command = [sys.executable, str(ROOT / "recipes/serve.py"), "--model_name_or_path", str(talker)]
        result = start([*command, "--port", str(port)], apart=True)
    assert result.returncode == 2 and f"error: Port {port} of 127.0.0.1 cannot be used" in result.stderr
    with pytest.raises(ValueError, match="Port 70000 of localhost cannot be used"):
        check_ports("localhost", [70000])


# Refused requests


def post(server, path: str, body, **options):
    """Send a request as any program may do; `body` is sent as JSON, or as it is if it is bytes."""
    url = str(server[0].base_url).removesuffix("/v1/") + path
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    with requests.Session() as session:
        session.trust_env = False
        return session.post(url, data=content, headers=headers, timeout=500)


def chat(**fields) -> dict:
    return {"model": "out/run", "messages": SUM[:1], "temperature": 0, **fields}


@pytest.mark.parametrize("path", ["/load_model", "/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("model", ["owner/other", "/etc", "out/run@other", ["out/run"]])
def test_no_other_model_is_loaded(server, path, model):
    """The server must not ask the Hub for the model either."""
    answer = post(server, path, chat(model=model))
    assert answer.status_code == 400 and "serves out/run only" in answer.json()["detail"]
    assert "owner/other" not in server[1].read_text()


def test_its_own_model_may_be_loaded(server):
    answer = post(server, "/load_model", {"model": "out/run"})
    assert answer.status_code == 200 and '"status": "ready"' in answer.text and '"cached": true' in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        # A web page may send these requests without a preflight request.
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
    ],
)
@pytest.mark.parametrize("path", ["/reset", "/v1/chat/completions"])
def test_pages_of_other_origins_are_refused(server, path, headers, status):
    assert post(server, path, chat(), headers=headers).status_code == status
    assert '"cached": true' in post(server, "/load_model", {"model": "out/run"}).text


def test_a_page_of_its_own_origin_is_accepted(server):
    origin = str(server[0].base_url).removesuffix("/v1/")
    answer = post(server, "/v1/chat/completions", chat(), headers={"Origin": origin})
    assert answer.json()["choices"][0]["message"]["content"] == "It is four."


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"chat_template": "{% for a in range(10**9) %}{% endfor %}"}, "not chat_template"),
        ({"tools": [], "conversation": []}, "not conversation, tools"),
        ({"max_length": 10**9}, "not max_length"),
        ("chat_template", "must be an object"),
    ],
)
def test_a_request_may_not_bring_a_template(server, kwargs, words):
    answer = post(server, "/v1/chat/completions", chat(chat_template_kwargs=kwargs))
    assert answer.status_code == 400 and words in answer.json()["detail"]


@pytest.mark.parametrize("stop", [[str(number) for number in range(1000)], ["x" * 1000], [3], {"a": 1}])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_limited(server, stop, stream):
    for fields in ({"stop": stop}, {"generation_config": json.dumps({"stop_strings": stop})}):
        answer = post(server, "/v1/chat/completions", chat(stream=stream, **fields))
        assert answer.status_code == 400 and "stop" in answer.json()["detail"]


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_ask_for_one_answer_only(server, name, stream):
    answer = post(server, "/v1/chat/completions", chat(stream=stream, generation_config=json.dumps({name: 3000})))
    assert answer.status_code == 400 and f"{name} 3000" in answer.json()["detail"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop",
    # The last tokens of an answer, parts of tokens, the beginning of a string that does not come, the first of two.
    ["four", ["ou"], "t is", "r.!", "missing", ["five", "four", " is"], "It", None, []],
)
def test_an_answer_ends_before_a_stop_string(server, stop, stream):
    expected = "It is four."
    for string in [stop] if isinstance(stop, str) else stop or []:
        expected = expected.partition(string)[0]
    answer = ask(server, SUM[:1], stop=stop, stream=stream, max_tokens=14)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(part.content or "" for part in parts) == expected
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "add them"
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_also_ends_the_reasoning_and_a_completion(server, stream):
    answer = ask(server, SUM[:1], stop=" them", stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "add"
    assert "".join(part.content or "" for part in parts) == ""
    prompt = load_tokenizer(Path(server[1].parent / "out/run")).apply_chat_template(
        SUM[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    options = {"model": "out/run", "prompt": prompt, "temperature": 0, "stop": ["!", "fou"]}
    answer = server[0].completions.create(stream=stream, **options)
    assert "".join(chunk.choices[0].text for chunk in (answer if stream else [answer])) == "It is "


@pytest.mark.parametrize(
    ("path", "neutral", "refused"),
    [
        (
            "/v1/chat/completions",
            {"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "parallel_tool_calls": True}
            | {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto", "functions": []}
            | {"user": "me", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_usage": True}}
            | {"logit_bias": {}, "frequency_penalty": 0, "service_tier": "auto", "stop": [], "tools": []},
            {"n": 2, "logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5, "parallel_tool_calls": False}
            | {"response_format": {"type": "json_object"}, "modalities": ["text", "audio"], "tool_choice": "required"}
            | {"functions": [TOOL["function"]], "function_call": {"name": "f"}, "reasoning_effort": "low"}
            | {"audio": {}, "prediction": {}, "web_search_options": {}, "verbosity": "low"},
        ),
        (
            "/v1/completions",
            {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "presence_penalty": 0},
            {"n": 2, "best_of": 2, "echo": True, "suffix": "x", "logit_bias": {"5": 1}, "presence_penalty": 1}
            | {"logprobs": 0},
        ),
        (
            "/v1/responses",
            {"background": False, "include": [], "reasoning": {}, "text": {"format": {"type": "text"}}, "store": True}
            | {"truncation": "disabled", "top_logprobs": 0, "tool_choice": "none", "tools": [TOOL]},
            {"background": True, "include": ["a"], "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
            | {"truncation": "auto", "top_logprobs": 1, "previous_response_id": "x", "conversation": "x"}
            | {"prompt": {"id": "x"}, "max_tool_calls": 1, "tool_choice": "required"},
        ),
    ],
)
def test_each_field_takes_effect_or_is_refused(server, path, neutral, refused):
    """Fields of OpenAI's API. Clients may send null or the default, too."""
    body = {"model": "out/run", "temperature": 0}
    question = {"chat": {"messages": SUM[:1]}, "comp": {"prompt": "two and two?"}, "resp": {"input": "two and two?"}}
    body |= question[path[4:8]]
    plain = post(server, path, body).json()
    nothing = post(server, path, body | {name: None for name in [*refused, *neutral, "stop", "seed", "stream"]})
    default = post(server, path, body | neutral)
    texts = [answer.get("choices", answer.get("output")) for answer in (plain, nothing.json(), default.json())]
    assert texts[0] and len({str(strip_ids(text)) for text in texts}) == 1
    for name, value in refused.items():
        answer = post(server, path, body | {name: value})
        assert answer.status_code == 400 and answer.json()["detail"].startswith(f"{name}: "), (name, answer.text)


def strip_ids(value):
    """Return JSON without the ids of its parts."""
    if isinstance(value, dict):
        return {name: strip_ids(each) for name, each in value.items() if name != "id"}
    return [strip_ids(each) for each in value] if isinstance(value, list) else value


def test_tools_that_may_not_be_called_are_not_offered(server):
    answer = ask(server, WEATHER[:1], tools=[TOOL], tool_choice="none").choices[0].message
    assert answer == ask(server, WEATHER[:1]).choices[0].message != ask(server, WEATHER[:1], tools=[TOOL])


def test_a_response_is_a_stream_only_if_asked_for(server):
    answer = server[0].responses.create(model="out/run", input="two and two?", temperature=0)
    assert answer.output_text == "It is four."
    stream = server[0].responses.create(model="out/run", input="two and two?", temperature=0, stream=True)
    assert [event.type for event in stream][-1] == "response.completed"


@pytest.mark.parametrize("size", [10_000_000, 300_000])
def test_a_body_beyond_the_positions_is_refused_unread(server, size):
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * size}]}),
        ("/v1/completions", {"prompt": "x" * size}),
        ("/v1/responses", {"input": "x" * size}),
        ("/reset", {"x": "x" * size}),
    ):
        answer = post(server, path, {"model": "out/run"} | fields)
        assert answer.status_code == 400 and "positions hold" in answer.json()["detail"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_positions_is_refused_before_any_work(server, stream):
    """The toy model has 1,024 positions."""
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x y" * 1000}]}),
        ("/v1/completions", {"prompt": "x y" * 1000}),
        ("/v1/responses", {"input": "x y" * 1000}),
    ):
        answer = post(server, path, {"model": "out/run", "stream": stream} | fields)
        assert answer.status_code == 400 and "tokens, and the model has 1,024 positions" in answer.json()["detail"]


def test_an_answer_ends_where_the_positions_do(server):
    """Otherwise it would continue past the rotary table, and end in an error."""
    endless = json.dumps({"min_new_tokens": 1000, "max_new_tokens": 5000, "do_sample": False})
    body = {"model": "out/run", "prompt": "x y" * 300, "generation_config": endless}
    answer = post(server, "/v1/completions", body).json()
    assert answer["usage"]["total_tokens"] == 1024 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", [b"{", b"[" * 20_000, b"[1]", b"3", b"\xff", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_object_is_refused(server, body):
    assert post(server, "/v1/chat/completions", body).status_code == 400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "hot"),
        ({"temperature": -1}, "strictly positive float"),
        ({"max_tokens": 0}, "`max_new_tokens` must be greater than 0"),
        ({"tools": {"a": 1}}, "Tools should"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 'the role "robot"'),
        ({"messages": [{"content": "x"}]}, "KeyError: 'role'"),
        ({"messages": "x"}, "TypeError"),
        ({"messages": []}, "empty conversation"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "JSONDecodeError",
        ),
    ],
)
def test_wrong_fields_are_answered_with_the_reason(server, fields, words):
    answer = post(server, "/v1/chat/completions", chat(**fields))
    assert answer.status_code == 400 and words in answer.json()["detail"], answer.text


def test_an_error_of_the_server_is_not_blamed_on_the_request(talker, tmp_path):
    shutil.copytree(talker, tmp_path / "model")
    config = json.loads((talker / "generation_config.json").read_text())
    # transformers compares it with a number while it generates.
    (tmp_path / "model/generation_config.json").write_text(json.dumps(config | {"max_time": "soon"}))
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "model", tmp_path / "server") as server:
        answer = post(server, "/v1/chat/completions", chat())
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")
        # The server writes its log after its response.
        deadline = time.monotonic() + 60
        while "TypeError: '>' not supported" not in server[1].read_text():
            assert time.monotonic() < deadline, server[1].read_text()
            time.sleep(0.1)
        # Wrong fields still get their reason, also those that only `generate` checks.
        for fields in ({"temperature": -1}, {"messages": [{"content": "x"}]}):
            assert post(server, "/v1/chat/completions", chat(**fields)).status_code == 400


def test_it_still_answers_after_all_refused_requests(server):
    assert ask(server, SUM[:1]).choices[0].message.content == "It is four."
