"""The server, tested with the official `openai` client and with raw requests."""

import itertools
import json
import re
import runpy
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
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.inference.engine import LlamaCppEngine
from hf_pretrain.inference.inference_arguments import load_engine
from hf_pretrain.inference.llama_cpp import LlamaCppModel
from hf_pretrain.inference.server_requests import MAX_BYTES
from hf_pretrain.inference.serving import check_ports, serve_model
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
    assert texts(ask(each, SUM[:1], stream=stream), stream) == ("add them", "It is four.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert texts(ask(each, SUM[:1], stream=stream, extra_body=off), stream) == ("", "It is four.")


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


def test_a_stream_arrives_in_pieces_with_whole_letters(each):
    """The toy tokenizer has no token for any of these letters."""
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(each, CHINESE[:1], stream=True)]
    assert "".join(chunks) == CHINESE[1]["content"] and set(CHINESE[1]["content"]) <= set(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_stream_ends_with_the_end_of_openai(each, stream):
    response = post(each, "/v1/chat/completions", {"messages": SUM[:1], "stream": stream})
    assert response.status_code == 200 and response.text.count("[DONE]") == stream
    assert response.text.endswith("}\n\ndata: [DONE]\n\n") == stream


@pytest.mark.parametrize("options", [{}, {"stream": True}])
def test_a_tool_is_called_and_its_result_is_used(each, options):
    answer = ask(each, WEATHER[:1], tools=[TOOL], **options)
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


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        *((path, {}, 404, "This server answers") for path in ("/load_model", "/reset", "/v1/responses")),
        *((CHAT, body, 400, "line 1 column") for body in (b"{", b"[" * 20_000, b"\xff", b'{"prompt": "\\ud83d"}')),
        *((CHAT, body, 400, "The body: Input should be an object") for body in (b"[1]", b"NaN")),
        (CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400, "tokens, and the model has 1,024 positions"),
        (CHAT, chat(messages=[{"role": "user", "content": LONG}], stream=True), 400, "the model has 1,024 positions"),
        (COMPLETION, {"prompt": LONG}, 400, "tokens, and the model has 1,024 positions"),
        (COMPLETION, {"prompt": "x" * MAX_BYTES}, 400, "bytes"),
        (COMPLETION, b" " * 3 * MAX_BYTES, 400, "bytes"),
        (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, 'the role "robot"'),
        (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), 400, "KeyError: 'arguments'"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(client, path, body, status, words, capfd):
    answer = post(client, path, body)
    error = answer.json()["error"]
    assert answer.status_code == status and words in error["message"], answer.text
    assert error | {"message": ""} == {"message": "", "type": "invalid_request_error", "param": None, "code": None}
    assert "Traceback" not in capfd.readouterr().err


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
BAD_PARTS = [(IMAGE, "part 1 is 'image_url'"), ({"type": "input_audio"}, "'input_audio'"), (3, "part 1 is 3")]


def in_parts(*parts) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("param", "fields", "words"),
    [
        ("messages", {"messages": []}, "at least 1 item"),
        ("messages", {"messages": "x"}, "a valid list"),
        ("messages[0]", {"messages": ["x"]}, ""),
        ("messages[0].role", {"messages": [{"content": "x"}]}, "Field required"),
        ("messages[0].content", {"messages": [{"role": "user", "content": 0}]}, "a valid string"),
        *(("messages[0].content", in_parts({"type": "text", "text": "a"}, part), words) for part, words in BAD_PARTS),
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
    ],
)
def test_a_field_that_the_server_cannot_honour_is_named(client, param, fields, words, capfd):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", extra_body=fields, messages=SUM[:1])
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.body["message"].startswith(f"{param}: ") and words in caught.value.body["message"]
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


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_the_first_stop_string(speaking, stream):
    """OpenAI: the returned text will not contain the stop sequence."""
    # Within a token, at its ends, over several tokens, parts of a letter's tokens, never, and all but the last letter.
    stops = [
        ["hy"],
        ["rain"],
        ["W"],
        ["n</think>I"],
        [" is,s"],
        ["é"],
        ["€😀"],
        ["😀 ", "y?"],
        ["."],
        ["nothing", "so"],
    ]
    for stop in [*stops, ["nothing"], ["rainy", "It isn't"], [".."], ["so.x"], [], "is", ["s", " is"]]:
        expected = min(
            [SAID, *(SAID.partition(each)[0] for each in ([stop] if isinstance(stop, str) else stop))], key=len
        )
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
    for limit, stop, text, reason in [
        (4, "y?", "Why", "length"),
        (5, "y?", "Wh", "stop"),
        (5, "y? ", "Why?", "length"),
    ]:
        options = {"prompt": "\n", "temperature": 0, "max_tokens": limit, "stop": stop, "stream": stream}
        answer = speaking.completions.create(model="x", **options)
        *pieces, last = answer if stream else [answer]
        assert "".join(piece.choices[0].text for piece in [*pieces, last]) == f"<think>{text}"
        assert (last.choices[0].finish_reason, last.usage.completion_tokens) == (reason, limit)


def test_an_answer_ends_where_the_positions_do(each):
    """Otherwise it would continue past the rotary table, and end in an error. The toy model has 1,024 positions."""
    body = {"prompt": "x y" * 300, "temperature": 50, "max_tokens": 5000}
    lengths = [post(each, COMPLETION, body).json()["usage"]["total_tokens"] for _ in range(3)]
    assert max(lengths) <= 1024


def test_a_short_answer_does_not_wait_for_a_long_one(client):
    endless = {"max_tokens": 900, "extra_body": {"logit_bias": {"2": -100}}}
    with ThreadPoolExecutor() as threads:
        long = threads.submit(ask, client, SUM[:1], **endless)
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
        with pytest.raises(openai.APIError, match="llama.cpp has ended with status -9"):
            for number, _ in enumerate(ask(client, SUM[:1], stream=True, max_tokens=8000)):
                if number == 20:
                    engine.kill()
        with pytest.raises(openai.InternalServerError, match="llama.cpp has ended with status -9") as caught:
            whole.result()
        assert caught.value.status_code == 503
        for answer in (send(client, "/health"), post(client, CHAT, chat(stream=True)), post(client, CHAT, chat())):
            assert answer.status_code == 503 and "[DONE]" not in answer.text
            assert answer.json()["error"]["type"] == "server_error"


def test_a_stream_that_breaks_off_has_no_end(endless, monkeypatch):
    """Each line is JSON, also if the error has quotes."""

    def fail(self, **_):
        yield {"tokens": [5], "stop": False}
        raise RuntimeError('no "memory"')

    with served(str(endless)) as client:
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


@pytest.mark.parametrize("kind", ["bos", "no bos", "bos of its own"])
def test_a_text_begins_as_in_training(talker, tmp_path, prompts, kind):
    """A Llama's tokenizer adds bos itself, a Qwen's has none."""
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("two and", add_special_tokens=False)["input_ids"]
    expected = ids if kind == "no bos" else [tokenizer.bos_token_id, *ids]
    if kind == "no bos":
        tokenizer.bos_token = None
    elif kind == "bos of its own":
        special = [("<|im_start|>", tokenizer.bos_token_id)]
        processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = processor
        assert tokenizer("two and")["input_ids"] == expected
    tokenizer.save_pretrained(tmp_path)
    model = MiniMindForCausalLM.from_pretrained(tmp_path)
    new = model.generate(input_ids=torch.tensor([expected]), max_new_tokens=8, do_sample=False)[0, len(expected) :]
    prompts.clear()
    with served(str(tmp_path)) as client:
        for stream in (False, True):
            options = {"prompt": "two and", "max_tokens": 8, "temperature": 0, "stream": stream}
            answer = client.completions.create(model="x", **options)
            text = "".join(part.choices[0].text for part in (answer if stream else [answer]))
            # Bytes that are no letter are left out of a stream.
            assert text.replace("\ufffd", "") == tokenizer.decode(new, skip_special_tokens=True).replace("\ufffd", "")
    assert prompts == [expected] * 2


def test_a_conversation_is_encoded_as_by_transformers_and_control_tokens_of_users_are_text(client, talker, prompts):
    tokenizer = load_tokenizer(talker)
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


def test_the_positions_of_the_served_model_are_extended(talker):
    config, tokenizer = with_yarn(MiniMindConfig.from_pretrained(talker), "1024:4"), load_tokenizer(talker)
    model = MiniMindForCausalLM.from_pretrained(talker, config=config)
    ids = [tokenizer.bos_token_id, *tokenizer("x y" * 1000, add_special_tokens=False)["input_ids"]]
    new = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
    with served(str(talker), rope_scaling="1024:4") as client:
        answer = client.completions.create(model="x", prompt="x y" * 1000, max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens == len(ids) > 1024
    expected = tokenizer.decode(new, skip_special_tokens=True).replace("\ufffd", "")
    assert answer.choices[0].text.replace("\ufffd", "") == expected


@pytest.mark.parametrize("kind", ["gguf", "adapter", "llama"])
def test_files_of_other_programs_and_adapters_are_served(talker, tmp_path, kind):
    model, tokenizer = MiniMindForCausalLM.from_pretrained(talker), load_tokenizer(talker)
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


def test_a_model_that_cannot_be_converted_is_served_by_transformers(talker, tmp_path):
    tokenizer = load_tokenizer(talker)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with served(str(tmp_path)) as client:
        answer = client.completions.create(model="x", prompt="two and two", max_tokens=8, temperature=0)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("two and two", add_special_tokens=False)["input_ids"]]])
    new = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert answer.choices[0].text == tokenizer.decode(new, skip_special_tokens=True)
    for options in ({"engine": "llama.cpp"}, {"rope_scaling": "1024:4"}):
        with pytest.raises(UserError, match="cannot be converted|no generation of MiniMind has these names"):
            load_engine(str(tmp_path), **options)


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
            (["--tools", "calculator"], "--tools needs the chat page"),
            ([*name, "--port", port], f"error: Port {port} of 127.0.0.1 cannot be used"),
            (["--web", *name, "--web_port", port], f"error: Port {port} of 127.0.0.1 cannot be used"),
            (["--web", *name, "--port", "8031", "--web_port", "8031"], "error: Port 8031 of"),
            (["--web", "--model_name_or_path", str(tmp_path)], "has no chat template"),
        ):
            monkeypatch.setattr(sys, "argv", ["serve.py", *words])
            with pytest.raises(SystemExit):
                runpy.run_path(str(ROOT / "recipes/serve.py"), run_name="__main__")
            assert message in capsys.readouterr().err, words
    with pytest.raises(UserError, match="Port 8033 of localhost cannot be used"):
        check_ports("localhost", [8033, 8033])


# uvicorn ends its thread by `sys.exit`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_served_model_answers_at_once_or_the_command_ends(talker):
    port = free_port()
    options = {"host": "127.0.0.1", "port": port, "hosts": [], "use_cpu": True}
    server = serve_model(str(talker), **options)
    # A client that does not try again.
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(UserError, match="The server has ended. Its message stands above"):
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
