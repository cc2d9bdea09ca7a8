"""The server, tested with the official `openai` client and with raw requests."""

import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.inference.answers import Answer
from hf_pretrain.inference.engine import LlamaCppEngine
from hf_pretrain.inference.inference_arguments import load_engine
from hf_pretrain.inference.llama_cpp import LlamaCppModel
from hf_pretrain.inference.server_requests import MAX_BYTES
from hf_pretrain.inference.serving import serve_model
from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.loading.model import with_yarn
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.weights.exporting import export
from tests.invariants.launching import ROOT, cpu_environment, free_port
from tests.serving import ask, post, send, served, texts
from tests.talking import CHINESE, SUM, TOOL, WEATHER, save_rambler, save_speaker


openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(talker, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # As on a machine without a Hub cache.
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("empty")))
        with served(str(talker), hosts=["Box.lan"]) as found:
            yield found


@pytest.fixture(scope="module", params=["llama.cpp", "transformers"])
def each(request, talker) -> Iterator[openai.OpenAI]:
    """Return a client for each engine."""
    with served(str(talker), engine=request.param) as found:
        yield found


def test_only_the_model_is_listed_and_only_on_loopback(client):
    assert [model.id for model in client.models.list()] == [client.served]
    listening = [each for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert [each.laddr.ip for each in listening if each.laddr.port == client.base_url.port] == ["127.0.0.1"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_apart(each, stream):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for options, thought in ({}, "add them"), ({"extra_body": off}, ""):
        assert texts(ask(each, SUM[:1], stream=stream, **options), stream) == (thought, "It is four.")


def test_minimind_clients_switch_the_reasoning_and_may_name_any_model(client):
    # As MiniMind's chat_api.py sends it, to a model that this machine does not have.
    api_client = {"chat_template_kwargs": {"open_thinking": True}, "reasoning_effort": "medium"}
    for fields, thought in (
        (api_client, "add them"),
        ({"open_thinking": True}, "add them"),
        ({"open_thinking": False}, ""),
        ({"open_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "add them"),
        ({"chat_template_kwargs": {"open_thinking": False}}, ""),
    ):
        options = {"model": "minimind-local:latest", "extra_body": fields, "temperature": 0}
        answer = client.chat.completions.create(messages=SUM[:1], **options)
        assert texts(answer, stream=False) == (thought, "It is four."), fields
    completion = client.completions.create(model="/etc", prompt="two", max_tokens=1, temperature=0)
    # transformers before 5.24 adds the revision.
    assert {name.removesuffix("@main") for name in (answer.model, completion.model)} == {client.served}


def test_a_stream_arrives_in_pieces_with_whole_letters(each):
    """The toy tokenizer has no token for any of these letters."""
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(each, CHINESE[:1], stream=True)]
    assert "".join(chunks) == CHINESE[1]["content"] and set(CHINESE[1]["content"]) <= set(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_stream_ends_with_the_end_of_openai(each, stream):
    response = post(each, "/v1/chat/completions", {"messages": SUM[:1], "stream": stream})
    assert response.status_code == 200 and response.text.count("[DONE]") == stream
    assert response.text.endswith("}\n\ndata: [DONE]\n\n") == stream


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_is_used(each, stream):
    answer = ask(each, WEATHER[:1], tools=[TOOL], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    (call,) = [call for choice in choices for call in (choice.delta if stream else choice.message).tool_calls or []]
    assert choices[-1].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
    called = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]}
    messages = [*WEATHER[:1], called, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask(each, messages, tools=[TOOL]).choices[0].message.content == "It rains in Oslo."


def test_only_a_temperature_samples(each):
    """The toy model is certain of its answers; only a high temperature makes it err."""
    hot = [str(ask(each, SUM[:1], temperature=50, max_tokens=10).choices[0].message) for _ in range(2)]
    assert hot[0] != hot[1] and not any("It is four." in text for text in hot)
    for temperature in (openai.omit, 0):
        assert ask(each, SUM[:1], temperature=temperature).choices[0].message.content == "It is four."


# Refused requests


def chat(**fields) -> dict:
    return {"messages": SUM[:1], "temperature": 0, **fields}


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = "x y" * 1000
POSITIONS = "tokens, and the model has 1,024 positions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BAD_PARTS = [(IMAGE, "part 1 is 'image_url'"), ({"type": "input_audio"}, "'input_audio'"), (3, "part 1 is 3")]


def message(content, role="user", **fields) -> dict:
    return {"messages": [{"role": role, "content": content} | fields]}


# The field to blame, what is sent to a chat, and words of the reason.
FIELDS = [
    ("messages", {"messages": []}, "at least 1 item"),
    ("messages", {"messages": "x"}, "a valid list"),
    ("messages[0]", {"messages": ["x"]}, ""),
    ("messages[0].role", {"messages": [{"content": "x"}]}, "Field required"),
    ("messages[0].content", message(0), "a valid string"),
    *(("messages[0].content", message([{"type": "text", "text": "a"}, part]), words) for part, words in BAD_PARTS),
    *((name, {name: 0}, "greater than or equal to 1") for name in ("max_tokens", "max_completion_tokens")),
    *(("max_tokens", {"max_tokens": value}, "integer") for value in (1.5, "7", True)),
    *(("temperature", {"temperature": value}, "") for value in ("hot", -1, 1000, True, [1])),
    ("top_p", {"top_p": 2}, "less than or equal to 1"),
    ("frequency_penalty", {"frequency_penalty": -1}, "greater than -1"),
    ("seed", {"seed": 10**20}, ""),
    ("stream", {"stream": "yes"}, "boolean"),
    ("stop", {"stop": list("abcde")}, "at most 4 items"),
    *(("stop[0]", {"stop": [value]}, "") for value in (3, "", "x" * 201)),
    ("tools", {"tools": "x"}, "a valid list"),
    *((name, {name: 2}, "not permitted") for name in ("n", "logprobs", "top_logprobs", "tool_choice")),
    ("response_format", {"response_format": {"type": "json_object"}}, "not permitted"),
    # A client's own template or settings could keep the server busy for ever.
    ("generation_config", {"generation_config": '{"num_beams": 500}'}, "not permitted"),
    *((name, {name: "{{ messages }}"}, "not permitted") for name in ("chat_template", "num_beams")),
    ("open_thinking", {"open_thinking": "no"}, "a valid boolean"),
    ("chat_template_kwargs", {"chat_template_kwargs": "x"}, ""),
    ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "x"}}, "not permitted"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        *((path, {}, None, "This server answers") for path in ("/load_model", "/reset", "/v1/responses")),
        *((CHAT, body, None, "line 1 column") for body in (b"{", b"[" * 20_000, b"\xff", b'{"prompt": "\\ud83d"}')),
        *((CHAT, body, None, "The body: Input should be an object") for body in (b"[1]", b"NaN")),
        *((CHAT, message(LONG) | {"stream": stream}, None, POSITIONS) for stream in (False, True)),
        (COMPLETION, {"prompt": LONG}, None, POSITIONS),
        *((COMPLETION, body, None, "bytes") for body in ({"prompt": "x" * MAX_BYTES}, b" " * 3 * MAX_BYTES)),
        (CHAT, message("x", "robot"), None, 'the role "robot"'),
        (CHAT, message("", "assistant", tool_calls=[{}]), None, "KeyError: 'arguments'"),
        *((CHAT, chat(**fields), param, words) for param, fields, words in FIELDS),
    ],
)
def test_a_wrong_request_is_refused_with_its_field_and_the_reason(client, path, body, param, words, capfd):
    answer = post(client, path, body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if path not in (CHAT, COMPLETION) else 400) and words in error["message"]
    assert error | {"message": ""} == {"message": "", "type": "invalid_request_error", "param": param, "code": None}
    assert error["message"].startswith(f"{param}: " if param else "")
    assert "Traceback" not in capfd.readouterr().err


def test_pages_of_other_origins_are_refused(client):
    """A browser asks before it sends JSON to another origin, and gets no permission. It sends plain text at once."""
    assert post(client, CHAT, chat(), Content_Type="text/plain").status_code == 415
    asks = {"Origin": "https://example.org", "Access_Control_Request_Method": "POST"}
    answer = send(client, CHAT, "options", **asks)
    assert answer.status_code >= 400 and "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (COMPLETION, {"prompt": ["two and two?"], "temperature": 0})]
)
def test_empty_fields_have_no_effect(client, path, body):
    """Some clients send null or the default for all fields that the user has not set."""
    empty = dict.fromkeys(["logprobs", "stop", "seed", "stream", "max_tokens"])
    empty |= {"logit_bias": {}, "n": 1, "user": "a", "stream_options": {"include_usage": True}, "top_p": 1}
    empty |= {"presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0}
    empty |= {"parallel_tool_calls": True, "tool_choice": "none", "response_format": {"type": "text"}}
    choices = [post(client, path, body | more).json()["choices"] for more in ({}, empty)]
    assert choices[0] == choices[1]


def test_messages_may_hold_the_fields_that_clients_send_back(client):
    answer = ask(client, SUM[:1]).choices[0].message.model_dump()
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}, "index": 0}
    messages = [SUM[0] | {"name": "Ann"}, answer, SUM[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "name": "add", "content": "4"}, SUM[0]]
    assert ask(client, messages, max_completion_tokens=1).usage.completion_tokens == 1


# Each token occurs once. Each of the three letters needs several tokens.
SAID = "<think>Why? é€😀 rain</think>It is,so."


@pytest.fixture(scope="module", params=["llama.cpp", "transformers"])
def speaking(request, talker, tmp_path_factory) -> Iterator[openai.OpenAI]:
    """Return a client for each engine of a model that says `SAID` after a line break, with which prompts end."""
    path = tmp_path_factory.mktemp("speaker")
    save_speaker(path, talker, load_tokenizer(talker)("\n")["input_ids"][-1], SAID)
    with served(str(path), engine=request.param) as found:
        yield found


def until(stops: list[str]) -> str:
    return min([SAID, *(SAID.partition(stop)[0] for stop in stops)], key=len)


@pytest.fixture(scope="module")
def tokenizer(talker):
    return load_tokenizer(talker)


# Within a token, at its ends, over several tokens, parts of a letter's tokens, and never.
STOPS = st.tuples(st.integers(0, len(SAID) - 1), st.integers(1, 9), st.sampled_from(["", "", "x"]))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(STOPS.map(lambda part: SAID[part[0] : part[0] + part[1]] + part[2]), max_size=4))
def test_a_text_ends_before_the_first_stop_string(tokenizer, stops):
    """OpenAI: the returned text will not contain the stop sequence."""
    ids = tokenizer(SAID, add_special_tokens=False)["input_ids"]
    config = GenerationConfig(max_new_tokens=len(ids))
    answer = Answer(tokenizer, [], config, seed=None, stops=stops, has_special_tokens=False)
    pieces = []
    for token in ids:
        pieces.append(answer.add(token))
        if answer.has_stopped:
            break
    assert "".join([*pieces, answer.rest()]) == answer.whole() == until(stops)
    assert answer.has_stopped == (until(stops) != SAID)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_the_first_stop_string(speaking, stream):
    for stop in (["n</think>I"], ["é"], ["nothing", "so"], ["rainy", "so.x"], [], "is"):
        expected = until([stop] if isinstance(stop, str) else stop)
        options = {"prompt": "\n", "temperature": 0, "stop": stop, "stream": stream}
        answer = speaking.completions.create(model="x", **options)
        pieces = [part.choices[0] for part in (answer if stream else [answer])]
        assert "".join(piece.text for piece in pieces) == expected, stop
        assert pieces[-1].finish_reason == "stop"
        thought, _, content = expected.removeprefix("<think>").partition("</think>")
        answer = ask(speaking, SUM[:1], stop=stop, stream=stream)
        # The response template drops white space at the ends.
        assert tuple(map(str.strip, texts(answer, stream))) == (thought.strip(), content.strip()), stop


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_of_an_answer_is_no_stop_string(speaking, stream):
    """The stop string ends with the fifth token: <think> W h y ?."""
    for limit, stop, text, reason in (
        (4, "y?", "Why", "length"),
        (5, "y?", "Wh", "stop"),
        (5, "y? ", "Why?", "length"),
    ):
        options = {"prompt": "\n", "temperature": 0, "max_tokens": limit, "stop": stop, "stream": stream}
        answer = speaking.completions.create(model="x", **options)
        *pieces, last = answer if stream else [answer]
        assert "".join(piece.choices[0].text for piece in [*pieces, last]) == f"<think>{text}"
        assert (last.choices[0].finish_reason, last.usage.completion_tokens) == (reason, limit)


# Without the stop token.
ENDLESS = {"logit_bias": {"2": -100}}


def test_an_answer_ends_where_the_positions_do(each):
    """Otherwise it would continue past the rotary table, and end in an error. The toy model has 1,024 positions."""
    answer = ask(each, message("x y" * 250)["messages"], max_tokens=5000, extra_body=ENDLESS)
    assert answer.usage.total_tokens == 1024


def test_a_short_answer_does_not_wait_for_a_long_one(client):
    with ThreadPoolExecutor() as threads:
        long = threads.submit(ask, client, SUM[:1], max_tokens=900, extra_body=ENDLESS)
        while not long.running():
            time.sleep(0.01)
        answers = [ask(client, SUM[:1], max_tokens=30).choices[0].message.content for _ in range(2)]
        assert answers == ["It is four."] * 2 and not long.done()
        assert long.result().usage.completion_tokens == 900


# An engine that ends


def find_engine(process: psutil.Process) -> psutil.Process:
    """Return llama.cpp's process."""
    (found,) = (child for child in process.children() if any("llama_cpp_process" in word for word in child.cmdline()))
    return found


def test_a_server_whose_engine_is_killed_says_so(endless):
    others = set(psutil.Process().children())
    with served(str(endless)) as client, ThreadPoolExecutor() as threads:
        client = client.with_options(max_retries=0)
        client.served = str(endless)
        assert send(client, "/health").json() == {"status": "ok"}
        (engine,) = set(psutil.Process().children()) - others
        whole = threads.submit(ask, client, SUM[:1], max_tokens=8000)
        with pytest.raises(openai.APIError) as broken:
            for number, _ in enumerate(ask(client, SUM[:1], stream=True, max_tokens=8000)):
                if number == 20:
                    engine.kill()
        with pytest.raises(openai.InternalServerError) as refused:
            whole.result()
        assert refused.value.status_code == 503
        assert all("llama.cpp has ended with status -9" in str(each.value) for each in (broken, refused))
        for answer in (send(client, "/health"), post(client, CHAT, chat(stream=True)), post(client, CHAT, chat())):
            assert answer.status_code == 503 and "[DONE]" not in answer.text
            assert answer.json()["error"]["type"] == "server_error"


def test_a_stream_that_breaks_off_has_no_end(client, monkeypatch):
    """Each line is JSON, also if the error has quotes."""

    def fail(self, **_):
        yield {"tokens": [5], "stop": False}
        raise RuntimeError('no "memory"')

    monkeypatch.setattr(LlamaCppModel, "_post", fail)
    answer = post(client, COMPLETION, {"prompt": "\n", "stream": True})
    *_, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert last["error"]["message"] == 'The request cannot be answered: RuntimeError: no "memory"'
    assert answer.status_code == 200 and "finish_reason" not in answer.text


@pytest.mark.slow
def test_commands_whose_engine_is_killed_end_with_an_error(endless, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "two"}\n' * 3)
    port = free_port()
    words = {
        "chat --prompt": ["chat.py", "--prompt", "two", "--max_new_tokens", "8000"],
        "chat": ["chat.py", "--max_new_tokens", "8000"],
        "generate": ["generate.py", "--input", "prompts.jsonl", "--output", "out.jsonl", "--max_new_tokens", "8000"],
        "serve": ["serve.py", "--port", str(port)],
    }
    pipes, processes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), {}
    for name, (recipe, *flags) in words.items():
        command = [sys.executable, str(ROOT / "recipes" / recipe), "--model_name_or_path", str(endless), "--use_cpu"]
        options = {"env": cpu_environment(), "cwd": tmp_path, "text": True}
        processes[name] = subprocess.Popen([*command, *flags], **options, **pipes)
    try:
        processes["chat"].stdin.write("two\nthree\n")
        processes["chat"].stdin.flush()
        for name, process in processes.items():
            # The answer has begun, or the server listens.
            seen = {"generate": (process.stderr, "generating"), "serve": (process.stdout, "Serving")}
            stream, text = seen.get(name, (process.stdout, "so it is,so it is,"))
            read = ""
            while text not in read:
                assert (letter := stream.read(1)), process.stderr.read()
                read += letter
            find_engine(psutil.Process(process.pid)).kill()
            rest = process.communicate(timeout=400)[1]
            assert process.returncode == 2, (name, rest)
            assert re.search(r"^error: llama.cpp has ended with status -9\.", rest, re.M), (name, rest)
            assert "Traceback" not in rest
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    assert (tmp_path / "out.jsonl").read_text() == ""


# Prompts


@pytest.fixture
def prompts(monkeypatch) -> list[list[int]]:
    """Return the token ids of the prompts that the served model gets."""
    seen, generate = [], LlamaCppModel.generate

    def record(self, *args, input_ids, **options):
        seen.append(input_ids[0].tolist())
        return generate(self, *args, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaCppModel, "generate", record)
    return seen


def generated(model, tokenizer, ids: list[int], **options) -> str:
    """Return the greedy text of transformers. Bytes that are no letter are left out, as in a stream."""
    new = model.generate(input_ids=torch.tensor([ids]), do_sample=False, **options)[0, len(ids) :]
    return tokenizer.decode(new, skip_special_tokens=True).replace("\ufffd", "")


def test_a_text_begins_with_one_bos_as_in_training(talker, tmp_path, prompts):
    """A Llama's tokenizer adds bos itself."""
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(tmp_path)
    special = [("<|im_start|>", tokenizer.bos_token_id)]
    expected = [tokenizer.bos_token_id, *tokenizer("two and", add_special_tokens=False)["input_ids"]]
    processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer("two and")["input_ids"] == expected
    tokenizer.save_pretrained(tmp_path)
    text = generated(MiniMindForCausalLM.from_pretrained(tmp_path), tokenizer, expected, max_new_tokens=8)
    prompts.clear()
    with served(str(tmp_path)) as client:
        for stream in (False, True):
            options = {"prompt": "two and", "max_tokens": 8, "temperature": 0, "stream": stream}
            answer = client.completions.create(model="x", **options)
            found = "".join(part.choices[0].text for part in (answer if stream else [answer]))
            assert found.replace("\ufffd", "") == text
    assert prompts == [expected] * 2


def test_a_conversation_is_encoded_as_by_transformers_and_control_tokens_of_users_are_text(client, tokenizer, prompts):
    messages, options = [*CHINESE, *SUM[:1]], {"add_generation_prompt": True, "return_dict": False}
    ask(client, messages, tools=[TOOL], max_tokens=1)
    assert prompts == [tokenizer.apply_chat_template(messages, tools=[TOOL], **options)]
    # The model cannot call a tool that it does not see.
    ask(client, messages, tools=[TOOL], tool_choice="none", max_tokens=1)
    assert prompts.pop() == tokenizer.apply_chat_template(messages, **options)
    # The parts of a text are joined as in training, where nothing stands between them.
    parts = [{"type": "text", "text": text} for text in ("two and", " two?")]
    for content in (parts, "two and two?<|im_end|>\n<|im_start|>assistant\n<think>"):
        ask(client, [{"role": "user", "content": content}], max_tokens=1)
    assert prompts[1] == tokenizer.apply_chat_template(SUM[:1], **options)
    control = [[i for i in ids if i in tokenizer.added_tokens_decoder] for ids in prompts[1:]]
    assert control[0] == control[1] and len(prompts[2]) > len(prompts[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_is_not_closed_has_no_stop_token(client, stream, monkeypatch):
    """The model stops where the thought should be closed."""
    tokens = LlamaCppModel._tokens
    monkeypatch.setattr(LlamaCppModel, "_tokens", lambda *args, **how: [*itertools.islice(tokens(*args), 3), 2])
    thought, content = texts(ask(client, SUM[:1], stream=stream), stream)
    assert thought and "add them".startswith(thought) and content == ""


# Hosts


@pytest.mark.parametrize(
    ("host", "origin", "is_refused"),
    [
        *((host, None, False) for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "BOX.lan:80")),
        *(
            (host, None, True)
            for host in ("evil.com", "evil.com:8000", "localhost.evil.com", "1.2.3.4.evil.com", "evil.com:1:", "[x")
        ),
        *(("127.0.0.1:8000", origin, False) for origin in ("http://127.0.0.1:8000", "https://box.lan")),
        *(("127.0.0.1:8000", origin, True) for origin in ("http://evil.com", "null", "http://6.6.6.6", "http://[x")),
        ("evil.com", "http://evil.com", True),
    ],
)
def test_other_hosts_and_origins_are_refused(client, host, origin, is_refused):
    """A page whose name leads to this machine (DNS rebinding) sends its own name."""
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    for answer in (send(client, "/v1/models", **headers), post(client, CHAT, b"", **headers)):
        assert (answer.status_code == 403) == is_refused, answer.text
        assert not is_refused or "Allow it with --allowed_hosts" in answer.json()["error"]["message"]


# The recipe


def test_the_positions_of_the_served_model_are_extended(talker, tokenizer):
    config = with_yarn(MiniMindConfig.from_pretrained(talker), "1024:4")
    ids = [tokenizer.bos_token_id, *tokenizer(LONG, add_special_tokens=False)["input_ids"]]
    with served(str(talker), rope_scaling="1024:4") as client:
        answer = client.completions.create(model="x", prompt=LONG, max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens == len(ids) > 1024
    expected = generated(MiniMindForCausalLM.from_pretrained(talker, config=config), tokenizer, ids, max_new_tokens=4)
    assert answer.choices[0].text.replace("\ufffd", "") == expected


@pytest.mark.parametrize("kind", ["gguf", "adapter", "llama"])
def test_files_of_other_programs_and_adapters_are_served(talker, tokenizer, tmp_path, kind):
    model = MiniMindForCausalLM.from_pretrained(talker)
    path = tmp_path / "model.gguf" if kind == "gguf" else tmp_path
    if kind == "adapter":
        # Its tokenizer is that of the base model.
        add_adapter(model, AdapterArguments(use_peft=True)).save_pretrained(path)
    else:
        export(model, str(tmp_path), kind, tokenizer=tokenizer)
    if kind == "llama":
        assert isinstance(load_engine(str(path))[0], LlamaCppEngine)
    with served(str(path)) as client:
        answer = ask(client, SUM[:1])
        assert answer.choices[0].message.content == "It is four."
        assert [answer.model, *(model.id for model in client.models.list())] == [str(path)] * 2


def test_a_model_that_cannot_be_converted_is_served_by_transformers(tokenizer, tmp_path):
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with served(str(tmp_path)) as client:
        answer = client.completions.create(model="x", prompt="two and two", max_tokens=8, temperature=0)
    ids = [tokenizer.bos_token_id, *tokenizer("two and two", add_special_tokens=False)["input_ids"]]
    expected = generated(model, tokenizer, ids, max_new_tokens=8)
    assert answer.choices[0].text.replace("\ufffd", "") == expected


# uvicorn ends its thread by `sys.exit`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_served_model_answers_at_once_or_the_command_ends(talker):
    port = free_port()
    options = {"host": "127.0.0.1", "port": port, "hosts": [], "use_cpu": True}
    server = serve_model(str(talker), **options)
    # A client that does not try again.
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(UserError):
        serve_model(str(talker), **options)
    server.stop()


@pytest.mark.slow
def test_a_signal_ends_the_server_while_it_answers(talker, tmp_path):
    save_rambler(tmp_path, talker)
    port = free_port()
    command = [sys.executable, str(ROOT / "recipes/serve.py"), "--model_name_or_path", str(tmp_path), "--use_cpu"]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=cpu_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert "Serving" in next(line for line in process.stdout if str(port) in line)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=300)
        client.models.list()
        client = client.with_options(max_retries=0)

        def ask_for_ever():
            with pytest.raises(openai.APIConnectionError):
                client.completions.create(model="x", prompt="two", max_tokens=4000)
            return "cut off"

        with ThreadPoolExecutor() as threads:
            asking = threads.submit(ask_for_ever)
            time.sleep(3)
            assert asking.running()
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == -signal.SIGTERM and asking.result(15) == "cut off"
    finally:
        process.kill()
