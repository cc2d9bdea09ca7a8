"""
The chat page of `recipes/serve.py --web`: gradio's chat components, as a client of OpenAI-compatible servers.

With two servers, the page shows both answers beside each other. Reasoning stands apart from the answer, and is folded
when it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from http.client import HTTPException
from typing import Any

from ..runtime.errors import MissingExtraError, UserError
from ..runtime.installation import install_command
from .serving import check_ports


try:
    import gradio as gr

    from .chat_client import (
        Answers,
        Endpoint,
        History,
        Message,
        Sampling,
        add_text,
        drop_answers,
        waiting_calls,
    )
except ImportError as error:
    raise MissingExtraError(f"The chat page needs gradio: {install_command('web')}") from error

_PLACEHOLDER = "Type a message"
# Seconds that the servers get to end.
_GRACE_SECONDS = 5.0
# The default theme would load its fonts from another host.
_THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])

# An answer may contain links to pictures. To load them would tell their hosts about the chat.
_HEAD = """<meta http-equiv="Content-Security-Policy" content="img-src 'self' data:; media-src 'self'">"""
# On a phone, two chats and the text box share the height of the screen.
_CSS = "@media (max-width: 700px) { .row:has(#chat-1) > * { height: 38vh !important; min-height: 0 !important } }"


def show(history: History) -> list[Any]:
    """Return a history as messages of gradio's chat component."""
    shown = []
    for message in history:
        if message["role"] == "assistant":
            shown += _show_answer(message)
        else:
            shown.append(gr.ChatMessage(role="user", content=message["content"]))
    return shown


def _show_answer(message: Message) -> list[Any]:
    """Return the parts of an answer: its reasoning, text, tool calls and error."""
    parts: list[tuple[str, Any]] = []
    if message.get("reasoning_content"):
        # The component folds what is done.
        thinks = message.get("is_running") and not message["content"]
        parts.append((message["reasoning_content"], {"title": "Thinking", "status": "pending" if thinks else "done"}))
    if message["content"]:
        parts.append((message["content"], {}))
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        # The server escapes all letters outside of ASCII. What the model wrote wrongly is no JSON, and stays as it is.
        with suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
        parts.append((f"```json\n{arguments}\n```", {"title": f"Call of the tool {call['function']['name']}"}))
    if message.get("error"):
        parts.append((message["error"], {"title": "Error"}))
    if not parts and not message.get("is_running"):
        parts.append(("*The answer is empty.*", {}))
    return [gr.ChatMessage(role="assistant", content=content, metadata=metadata) for content, metadata in parts]


def make_page(endpoints: list[Endpoint], *, thinking: bool = True) -> gr.Blocks:
    """
    Return the page for one or two models. `page.launch()` serves it.

    Args:
        endpoints (`list[Endpoint]`): the models.
        thinking (`bool`): the initial setting.
    """

    # Running answers by browser session, and the sessions that asked for a new chat while an answer was running.
    # NOTE: gradio's `cancels` runs beside the handler of Stop, so the last pieces of an answer could come after it.
    running: dict[str | None, Answers] = {}
    cleared: set[str | None] = set()

    async def answer(
        event: gr.EventData, request: gr.Request, text: str, histories: list[History], *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        typed: Any = gr.skip()
        if event.target is again:
            histories = drop_answers(histories)
        elif text.strip():
            histories, typed = add_text(histories, text), ""
        else:
            return
        answers = running[request.session_hash] = Answers(endpoints, histories, Sampling(*settings))
        try:
            async with aclosing(answers.stream()) as stream:
                async for histories in stream:
                    yield gr.update(interactive=True), typed, *map(show, histories), histories
                    # Leave the text box to the user, who may type the next question.
                    typed = gr.skip()
            calls = [call["function"]["name"] for history in histories for call in waiting_calls(history)[:1]]
            typed = gr.update(placeholder=f"Type the result of {calls[0]}" if calls else _PLACEHOLDER)
            yield gr.update(interactive=False), typed, *map(show, histories), histories
            if request.session_hash in cleared:
                yield gr.update(interactive=False), *empty_page()
            # From here on, a new chat empties the page itself.
            running.pop(request.session_hash)
            # NOTE: when this generator ends, gradio sends its last output again, so this output must change nothing.
            yield gr.skip(), *skipped()
        finally:
            running.pop(request.session_hash, None)
            cleared.discard(request.session_hash)

    # Not a plain function: gradio would run it in another thread, from which tasks cannot be cancelled.
    async def end(request: gr.Request) -> None:
        if request.session_hash in running:
            running[request.session_hash].stop()

    async def begin_again(request: gr.Request) -> tuple[Any, ...]:
        if request.session_hash not in running:
            return empty_page()
        # The answer itself empties the page, so that none of its pieces can come later.
        cleared.add(request.session_hash)
        await end(request)
        return skipped()

    def skipped() -> tuple[Any, ...]:
        return tuple(gr.skip() for _ in empty_page())

    def empty_page() -> tuple[Any, ...]:
        # Keep the text that the user has typed.
        empty: list[History] = [[] for _ in endpoints]
        return gr.update(placeholder=_PLACEHOLDER), *empty, empty

    for endpoint in endpoints:
        endpoint.client  # noqa: B018
    default = Sampling(thinking=thinking)
    with gr.Blocks(title="hf_pretrain chat", analytics_enabled=False, fill_height=True) as page:
        histories = gr.State([[] for _ in endpoints])
        with gr.Row():
            chats = [
                # Two of them stand below each other on a phone.
                gr.Chatbot(
                    label=endpoint.model, height="60vh", min_width=320, elem_id=f"chat-{number}", buttons=["copy"]
                )
                for number, endpoint in enumerate(endpoints)
            ]
        question = gr.Textbox(placeholder=_PLACEHOLDER, show_label=False, elem_id="question")
        with gr.Row():
            send = gr.Button("Send", variant="primary", elem_id="send", min_width=130)
            stop = gr.Button("Stop", elem_id="stop", min_width=130, interactive=False)
            again = gr.Button("Regenerate", elem_id="regenerate", min_width=130)
            clear = gr.Button("New chat", elem_id="clear", min_width=130)
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            settings = [
                gr.Textbox(default.system, label="System message"),
                gr.Slider(0.0, 2.0, default.temperature, step=0.05, label="Temperature"),
                gr.Slider(0.05, 1.0, default.top_p, step=0.05, label="Top p"),
                gr.Slider(1, 2048, default.max_tokens, step=1, label="Longest answer in tokens"),
                gr.Checkbox(default.thinking, label="Thinking"),
                gr.Textbox(default.tools, label="Tools (JSON list of schemas)", lines=3),
            ]
        outputs = [question, *chats, histories]
        # One event for all of them: a browser starts no second one while the first runs, so no answer is lost.
        gr.on(
            [question.submit, send.click, again.click],
            answer,
            [question, histories, *settings],
            [stop, *outputs],
            show_progress="hidden",
        )
        stop.click(end, show_progress="hidden")
        # Each chat has a button to clear it, which must not leave its history behind.
        gr.on([clear.click, *(chat.clear for chat in chats)], begin_again, None, outputs, show_progress="hidden")
    # Several browsers may ask at the same time.
    return page.queue(default_concurrency_limit=None)


def serve_page(recipe: str, flags: dict[str, Any], models: list[str], *, thinking: bool) -> None:
    """
    Serve models and the chat page until the user stops it.

    Args:
        recipe (`str`): the script that serves one model.
        flags (`dict`): its flags, with `host`, `port` (of the first server) and `web_port`.
        models (`list[str]`): names of one or two models.
        thinking (`bool`): the initial setting.

    Raises:
        `ValueError`: if a port is in use, or needed twice.
    """
    host = "127.0.0.1" if flags["host"] == "0.0.0.0" else flags["host"]
    ports = range(flags["port"], flags["port"] + len(models))
    if flags["web_port"] in ports:
        raise UserError(
            f"--web_port {flags['web_port']} is the port of a model, too. The models use "
            f"{', '.join(map(str, ports))}: choose another --web_port or --port."
        )
    check_ports(flags["host"], [*ports, flags["web_port"]])
    endpoints = [Endpoint(name, f"http://{host}:{port}/v1") for name, port in zip(models, ports, strict=True)]
    servers: list[subprocess.Popen] = []
    # A service manager stops programs by SIGTERM, and the servers must stop with the page.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A proxy for the internet knows no servers of this machine.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "localhost", host]))
    try:
        for name, port in zip(models, ports, strict=True):
            servers.append(_start_server(recipe, flags | {"model_name_or_path": name, "port": port}))
        for server, endpoint in zip(servers, endpoints, strict=True):
            _wait_until_ready(server, endpoint)
        print(f"The chat page is at http://{host}:{flags['web_port']}", flush=True)
        page = make_page(endpoints, thinking=thinking)
        page.launch(
            server_name=flags["host"],
            server_port=flags["web_port"],
            quiet=True,
            inbrowser=sys.stdout.isatty(),
            theme=_THEME,
            css=_CSS,
            head=_HEAD,
            footer_links=[],
        )
    finally:
        _end(servers)


def _start_server(recipe: str, flags: dict[str, Any]) -> subprocess.Popen:
    words = [sys.executable, recipe]
    for flag, value in flags.items():
        # Leave out the flags of the page, those that were not given, and switches that are off.
        if flag not in ("web", "web_port", "compare") and value is not None and value is not False:
            words.append(f"--{flag}" if value is True else f"--{flag}={value}")
    # The pipe closes when this process ends in whatever way, and the server then ends as well.
    return subprocess.Popen([*words, "--end_with_stdin"], stdin=subprocess.PIPE)


def _wait_until_ready(server: subprocess.Popen, endpoint: Endpoint) -> None:
    """Wait until the server of a model answers. End as it ended if it could not start."""
    while server.poll() is None:
        with (
            suppress(OSError, HTTPException, ValueError, TypeError, LookupError),
            urllib.request.urlopen(f"{endpoint.base_url}/models", timeout=5) as response,
        ):
            # Another program may listen at this port, and answer anything, even without end.
            if [model["id"] for model in json.loads(response.read(1 << 16))["data"]] == [endpoint.model]:
                return
        time.sleep(0.2)
    # The server has printed the reason.
    raise SystemExit(server.returncode)


def _end(servers: list[subprocess.Popen]) -> None:
    """End the servers. A server waits for the end of its answers, which may be long."""
    for server in servers:
        server.terminate()
    for server in servers:
        try:
            server.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


__all__ = ["make_page", "serve_page", "show"]
