"""
The chat page of `recipes/serve.py --web`: gradio's chat components as a client of OpenAI-compatible servers.

With two servers, the page shows both answers beside each other. Reasoning and tool calls fold away from the answer.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue
from typing import Any


try:
    import gradio as gr
    from openai import OpenAI, OpenAIError
except ImportError as error:
    raise ImportError('The chat page needs gradio: pip install "hf_pretrain[web]"') from error

Message = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """
    A model behind a server.

    Args:
        model (`str`): its name in requests, and on the page.
        base_url (`str`): such as `http://127.0.0.1:8000/v1`.
    """

    model: str
    base_url: str


@dataclass(frozen=True)
class Sampling:
    """
    Settings of a request.

    Args:
        system (`str`): the system message; empty for none.
        temperature (`float`), top_p (`float`): of the sampling.
        max_tokens (`int`): limit of the answer.
        thinking (`bool`): whether the model may think before it answers.
        tools (`str`): a JSON list of tool schemas; empty for none.
    """

    system: str = ""
    temperature: float = 0.8
    top_p: float = 0.9
    max_tokens: int = 256
    thinking: bool = True
    tools: str = ""


def stream_answer(endpoint: Endpoint, messages: list[Message], sampling: Sampling) -> Iterator[Message]:
    """
    Yield the growing answer of a model, as a message with `content`, `reasoning_content` and `tool_calls`. An error of
    the server becomes an answer with the key `error`.
    """
    answer: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    system = [{"role": "system", "content": sampling.system}] if sampling.system else []
    try:
        tools = {"tools": json.loads(sampling.tools)} if sampling.tools.strip() else {}
        # The typed variants of the method do not know that messages and tools come from a page.
        client: Any = OpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
        with client.chat.completions.create(
            model=endpoint.model,
            messages=[*system, *messages],
            stream=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=int(sampling.max_tokens),
            extra_body={"chat_template_kwargs": {"enable_thinking": sampling.thinking}},
            **tools,
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    _add_delta(answer, choice.delta)
                yield answer
    except (OpenAIError, ValueError) as error:
        yield answer | {"error": f"{endpoint.base_url}: {error}"}


def _add_delta(answer: Message, delta: Any) -> None:
    """Add a piece of a stream to an answer."""
    answer["content"] += delta.content or ""
    answer["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
    for call in delta.tool_calls or []:
        calls = answer["tool_calls"]
        if call.index >= len(calls):
            calls.append({"id": call.id or f"call_{call.index}", "type": "function", "function": {}})
        function = calls[call.index]["function"]
        for name in ("name", "arguments"):
            function[name] = function.get(name, "") + (getattr(call.function, name, None) or "")


def stream_answers(
    endpoints: list[Endpoint], histories: list[list[Message]], sampling: Sampling
) -> Iterator[list[list[Message]]]:
    """Yield the histories of all models with their growing answers. The models answer at the same time."""
    news: Queue[tuple[int, Message | None]] = Queue()
    is_over = threading.Event()

    def ask(number: int) -> None:
        for answer in stream_answer(endpoints[number], histories[number], sampling):
            if is_over.is_set():
                # Leaving the loop closes the connection, and the server stops generating.
                break
            news.put((number, dict(answer)))
        news.put((number, None))

    for number in range(len(endpoints)):
        threading.Thread(target=ask, args=(number,), daemon=True).start()
    answers: list[list[Message]] = [[] for _ in endpoints]
    num_running = len(endpoints)
    try:
        while num_running:
            number, answer = news.get()
            if answer is None:
                num_running -= 1
                continue
            answers[number] = [answer]
            # Several pieces may have come meanwhile. The page needs only the newest.
            if news.empty():
                yield [[*history, *answer] for history, answer in zip(histories, answers, strict=True)]
    finally:
        # Stop was pressed, or the page was closed.
        is_over.set()
    yield [[*history, *answer] for history, answer in zip(histories, answers, strict=True)]


def show(history: list[Message]) -> list[Any]:
    """Return a history as messages of gradio's chat component."""
    shown = []
    for message in history:
        if message["role"] == "user":
            shown.append(gr.ChatMessage(role="user", content=message["content"]))
            continue
        if message.get("reasoning_content"):
            status = "done" if message["content"] else "pending"
            metadata: Any = {"title": "Thinking", "status": status}
            shown.append(gr.ChatMessage(role="assistant", content=message["reasoning_content"], metadata=metadata))
        if message["content"]:
            shown.append(gr.ChatMessage(role="assistant", content=message["content"]))
        for call in message.get("tool_calls") or []:
            title = f"Call of the tool {call['function'].get('name')}"
            content = f"```json\n{call['function'].get('arguments')}\n```"
            shown.append(gr.ChatMessage(role="assistant", content=content, metadata={"title": title}))
        if message.get("error"):
            shown.append(gr.ChatMessage(role="assistant", content=message["error"], metadata={"title": "Error"}))
    return shown


def to_requests(history: list[Message]) -> list[Message]:
    """Return the messages of a history that a request sends: without errors, reasoning and empty fields."""
    kept = []
    for message in history:
        fields = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        if message["role"] == "user" or {"content", "tool_calls"} & fields.keys():
            kept.append(fields)
    return kept


def make_page(endpoints: list[Endpoint]) -> gr.Blocks:
    """Return the page for one or two models. `page.launch()` serves it."""

    def answer(question: str, histories: list[list[Message]], *settings: Any) -> Iterator[tuple[Any, ...]]:
        if not question.strip():
            yield "", *map(show, histories), histories
            return
        asked = [[*history, {"role": "user", "content": question}] for history in histories]
        # Show the question at once.
        yield "", *map(show, asked), asked
        yield from _stream(asked, settings)

    def answer_again(histories: list[list[Message]], *settings: Any) -> Iterator[tuple[Any, ...]]:
        asked = []
        for history in histories:
            # Drop everything after the last question.
            last = max((i for i, message in enumerate(history) if message["role"] == "user"), default=-1)
            asked.append(history[: last + 1])
        if any(asked):
            yield from _stream(asked, settings)

    def _stream(asked: list[list[Message]], settings: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        requests = [to_requests(history) for history in asked]
        for answered in stream_answers(endpoints, requests, Sampling(*settings)):
            whole = [
                [*history, *new[len(request) :]]
                for history, request, new in zip(asked, requests, answered, strict=True)
            ]
            yield "", *map(show, whole), whole

    default = Sampling()
    with gr.Blocks(title="hf_pretrain chat", analytics_enabled=False, fill_height=True) as page:
        histories = gr.State([[] for _ in endpoints])
        with gr.Row():
            chats = [
                gr.Chatbot(label=endpoint.model, height="65vh", elem_id=f"chat-{number}")
                for number, endpoint in enumerate(endpoints)
            ]
        with gr.Row():
            question = gr.Textbox(placeholder="Type a message", show_label=False, scale=8, elem_id="question")
            send = gr.Button("Send", variant="primary", elem_id="send")
            stop = gr.Button("Stop", elem_id="stop")
        with gr.Row():
            again = gr.Button("Regenerate", elem_id="regenerate")
            clear = gr.Button("New chat", elem_id="clear")
        with gr.Accordion("Settings", open=False):
            settings = [
                gr.Textbox(default.system, label="System message"),
                gr.Slider(0.0, 2.0, default.temperature, step=0.05, label="Temperature"),
                gr.Slider(0.05, 1.0, default.top_p, step=0.05, label="Top p"),
                gr.Slider(1, 2048, default.max_tokens, step=1, label="Longest answer in tokens"),
                gr.Checkbox(default.thinking, label="Thinking"),
                gr.Textbox(default.tools, label="Tools (JSON list of schemas)", lines=3),
            ]
        outputs = [question, *chats, histories]
        events: Any = [
            question.submit(answer, [question, histories, *settings], outputs),
            send.click(answer, [question, histories, *settings], outputs),
            again.click(answer_again, [histories, *settings], outputs),
        ]
        stop.click(None, cancels=events)
        empty: list[list[Message]] = [[] for _ in endpoints]
        clear.click(lambda: ("", *empty, empty), None, outputs, cancels=events)
    return page


def serve_page(recipe: str, flags: dict[str, Any], models: list[str]) -> None:
    """
    Serve models and the chat page until the user stops it.

    Args:
        recipe (`str`): the script that serves one model.
        flags (`dict`): its flags, with `host`, `port` (of the first server) and `web_port`.
        models (`list[str]`): names of one or two models.
    """
    host = "127.0.0.1" if flags["host"] == "0.0.0.0" else flags["host"]
    ports = range(flags["port"], flags["port"] + len(models))
    endpoints = [Endpoint(name, f"http://{host}:{port}/v1") for name, port in zip(models, ports, strict=True)]
    servers: list[subprocess.Popen] = []
    # A service manager stops programs by SIGTERM, and the servers must stop with the page.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name, port in zip(models, ports, strict=True):
            servers.append(_start_server(recipe, flags | {"model_name_or_path": name, "port": port}))
        for server, endpoint in zip(servers, endpoints, strict=True):
            _wait_until_ready(server, endpoint)
        print(f"The chat page is at http://{host}:{flags['web_port']}", flush=True)
        page = make_page(endpoints)
        page.launch(
            server_name=flags["host"], server_port=flags["web_port"], quiet=True, inbrowser=sys.stdout.isatty()
        )
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def _start_server(recipe: str, flags: dict[str, Any]) -> subprocess.Popen:
    words = [sys.executable, recipe]
    for flag, value in flags.items():
        # Leave out the flags of the page, those that were not given, and switches that are off.
        if flag not in ("web", "web_port", "compare") and value not in (None, False):
            words.append(f"--{flag}" if value is True else f"--{flag}={value}")
    return subprocess.Popen(words)


def _wait_until_ready(server: subprocess.Popen, endpoint: Endpoint) -> None:
    """Wait until the server of a model answers. End as it ended if it could not start."""
    while server.poll() is None:
        with suppress(OSError, ValueError), urllib.request.urlopen(f"{endpoint.base_url}/models") as response:
            # Another program may listen at this port.
            if [model["id"] for model in json.load(response)["data"]] == [endpoint.model]:
                return
        time.sleep(0.2)
    # The server has printed the reason.
    raise SystemExit(server.returncode)


__all__ = ["Endpoint", "Sampling", "make_page", "serve_page", "show", "stream_answer", "stream_answers", "to_requests"]
