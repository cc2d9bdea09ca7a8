"""
The chat page of `recipes/serve.py --web`: gradio's chat components, as a client of OpenAI-compatible servers.

With two servers, the page shows both answers beside each other. Each model has a history: a list of messages as a
server expects them. An answer in it may also have `reasoning_content`, `error` (why it ended early) and `is_running`
(it still grows).
"""

import asyncio
import html
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from ..runtime.errors import needing_extra
from ..runtime.texts import LANGUAGES, TEXTS, Translation, preferred_language, translation
from ..tokenizer.control_tokens import thinking_variables
from .guards import HostGuard
from .terminal_chat import last_turns
from .tools import MAX_TOOL_ROUNDS, call_tool


with needing_extra("web", "The chat page needs gradio"):
    import gradio as gr
    from openai import APIError, AsyncOpenAI, omit
    from starlette.middleware import Middleware

Message = dict[str, Any]
History = list[Message]
Functions = dict[str, Callable[..., Any]]

# Seconds between two updates of a growing answer: a fast model would otherwise be ahead of the page.
_UPDATE_SECONDS = 0.05
# Number of growing answers, and of stopped questions, by browser session.
_growing: Counter[str | None] = Counter()
_stops: Counter[str | None] = Counter()
# The default theme would load its fonts from another host.
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
# An answer may contain links to pictures. To load them would tell their hosts about the chat.
HEAD = """<meta http-equiv="Content-Security-Policy" content="img-src 'self' data:; media-src 'self'">"""
# On a phone, two chats and the text box share the height of the screen.
_CSS = "@media (max-width: 700px) { .row:has(#chat-1) > * { height: 38vh !important; min-height: 0 !important } }"


class Endpoint(NamedTuple):
    """
    A model behind a server.

    Args:
        model (`str`): its name in requests, and on the page.
        base_url (`str`): such as `http://127.0.0.1:8000/v1`.
    """

    model: str
    base_url: str


def begin_answer(history: History, text: str, num_stops: int = 0) -> History:
    """Return a history with the user's question and an empty answer, which is running unless it was stopped since."""
    answer = {"role": "assistant", "content": "", "is_running": True, "num_stops": num_stops}
    return [*history, {"role": "user", "content": text}, answer]


def to_request(history: History) -> list[Message]:
    """Return the messages of a history that a request sends: without errors, reasoning and empty answers."""
    kept = []
    for message in history:
        fields = {name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name)}
        if message.get("tool_calls"):
            fields["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
        if message["role"] != "assistant" or {"content", "tool_calls"} & fields.keys():
            kept.append(fields)
    return kept


def _with_json_arguments(call: Message) -> Message:
    """Return a tool call with arguments in JSON. A server fails on anything else, so other arguments become a text."""
    function = call["function"]
    try:
        json.loads(function["arguments"])
        return call
    except ValueError:
        return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


async def stream_answer(
    endpoint: Endpoint, history: History, schemas: list[Message] | None, *settings: Any
) -> AsyncGenerator[Message]:
    """
    Yield the growing answer of a model, with the settings of [`_make_settings`]. If its consumer stops, the connection
    closes and the server ends the answer. Any error becomes the `error` of the answer.
    """
    answer: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    system, temperature, top_p, max_tokens, thinking, num_turns = settings
    opening = [{"role": "system", "content": system}] if system else []
    shown = 0.0
    try:
        client: Any = AsyncOpenAI(base_url=endpoint.base_url, api_key="none", max_retries=0)
        request = client.chat.completions.create(
            model=endpoint.model,
            messages=opening + to_request(last_turns(history, num_turns)),
            stream=True,
            temperature=temperature,
            top_p=top_p,
            max_tokens=int(max_tokens),
            extra_body={"chat_template_kwargs": thinking_variables(thinking)},
            tools=schemas or omit,
        )
        async with await request as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    _add_delta(answer, choice.delta)
                if time.monotonic() > shown + _UPDATE_SECONDS:
                    yield answer | {"is_running": True}
                    shown = time.monotonic()
    except Exception as error:
        # The server's own words, without the JSON around them.
        body = error.body if isinstance(error, APIError) and isinstance(error.body, dict) else {}
        answer["error"] = f"{endpoint.base_url}: {body.get('message', error)}"
    yield answer


def _add_delta(answer: Message, delta: Any) -> None:
    """Add a piece of a stream to an answer. The server sends each tool call whole."""
    answer["content"] += delta.content or ""
    # The openai package does not know this field, and keeps it among the extra ones.
    answer["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content") or ""
    for call in delta.tool_calls or []:
        function = {"name": call.function.name, "arguments": call.function.arguments}
        answer["tool_calls"].append({"id": call.id, "type": "function", "function": function})


def show(history: History, t: Translation = str) -> list[Message]:
    """Return a history as messages of gradio's chat component, with titles in the language of `t`."""
    shown = []
    for message in history:
        parts = _parts(message, t) if message["role"] == "assistant" else [(_escape_tags(message["content"]), {})]
        # The component knows no role for the result of a tool.
        role = "assistant" if message["role"] == "assistant" else "user"
        shown += [{"role": role, "content": content, "metadata": metadata} for content, metadata in parts]
    return shown


def _escape_tags(text: str) -> str:
    """Return the user's text as Markdown that shows `<b>` as it was typed. Code does so by itself."""
    return re.sub(r"(`+).*?\1|[<&]", lambda found: found[0] if found[1] else html.escape(found[0]), text, flags=re.S)


def _parts(answer: Message, t: Translation) -> list[tuple[str, Any]]:
    """Return the texts of an answer with gradio's metadata: its reasoning, content, tool calls and error."""
    parts: list[tuple[str, Any]] = []
    if answer.get("reasoning_content"):
        # The component folds what is done.
        thinks = answer.get("is_running") and not answer["content"]
        parts.append(
            (answer["reasoning_content"], {"title": t("Thinking"), "status": "pending" if thinks else "done"})
        )
    if answer["content"]:
        parts.append((answer["content"], {}))
    for call in answer.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        # The server escapes all letters outside of ASCII. What the model wrote wrongly is no JSON, and stays as it is.
        with suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
        parts.append((f"```json\n{arguments}\n```", {"title": f"{t('Call of the tool')} {call['function']['name']}"}))
    if answer.get("error"):
        parts.append((answer["error"], {"title": t("Error")}))
    if not parts and not answer.get("is_running"):
        parts.append((f"*{t('The answer is empty.')}*", {}))
    return parts


async def _run_tools(history: History, functions: Functions) -> History:
    """Return a history with the results of the tools that the last answer calls."""
    for call in history[-1].get("tool_calls", []) if functions else []:
        result = await asyncio.to_thread(call_tool, functions, call)
        history = [*history, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    return history


def _make_settings(thinking: bool, t: gr.I18n) -> list[gr.components.Component]:
    """Return the settings of the page, in the order in which [`stream_answer`] takes them."""
    return [
        gr.Textbox("", label=t("System message")),
        gr.Slider(0.0, 2.0, 0.8, step=0.05, label=t("Temperature")),
        gr.Slider(0.05, 1.0, 0.9, step=0.05, label=t("Top p")),
        gr.Slider(1, 2048, 256, step=1, label=t("Longest answer in tokens")),
        gr.Checkbox(thinking, label=t("Thinking")),
        gr.Slider(0, 32, 32, step=1, label=t("Earlier questions that the model sees")),
    ]


def make_page(
    endpoints: list[Endpoint],
    *,
    t: gr.I18n,
    language: str | None = None,
    thinking: bool = True,
    tools: tuple[list[Message] | None, Functions],
) -> gr.Blocks:
    """
    Return the page for one or two models. `page.launch(i18n=t)` serves it.

    Args:
        endpoints (`list[Endpoint]`): the models.
        t ([`~gradio.I18n`]): the texts, which each browser gets in its language.
        language (`str`, *optional*): the language of messages; by default the browser's.
        thinking (`bool`): the initial setting.
        tools (`tuple`): the result of [`~inference.tools.offer_tools`].
    """
    with gr.Blocks(title="hf_pretrain chat", analytics_enabled=False, fill_height=True) as page:
        histories, spoken = [gr.State([]) for _ in endpoints], gr.State(language)
        with gr.Row():
            chats = [
                # Two of them stand below each other on a phone.
                gr.Chatbot(
                    label=endpoint.model, height="60vh", min_width=320, elem_id=f"chat-{number}", buttons=["copy"]
                )
                for number, endpoint in enumerate(endpoints)
            ]
        question = gr.Textbox(placeholder=t("Type a message"), show_label=False, elem_id="question")
        with gr.Row():
            send = gr.Button(t("Send"), variant="primary", elem_id="send", min_width=130)
            stop = gr.Button(t("Stop"), elem_id="stop", min_width=130)
            clear = gr.Button(t("New chat"), elem_id="clear", min_width=130)
        with gr.Accordion(t("Settings"), open=False, elem_id="settings"):
            settings = _make_settings(thinking, t)
        everything, quiet = [*chats, *histories], {"show_progress": "hidden"}
        begun = gr.on([question.submit, send.click], _ask, [spoken, question, *histories], [question, *everything])
        running = [
            begun.success(_answering(endpoint, tools, language), [history, *settings], [chat, history], **quiet)
            for endpoint, chat, history in zip(endpoints, chats, histories, strict=True)
        ]
        # A question whose answers have not begun is stopped, too.
        stop.click(None, cancels=[begun, *running]).then(_wait_for_end).then(_end, [spoken, *histories], everything)
        # Each chat has a button to clear it, which must not leave its history behind.
        cleared = gr.on([clear.click, *(chat.clear for chat in chats)], None, cancels=running)
        cleared.then(_wait_for_end).then(lambda: [[] for _ in everything], None, everything)
    # Several browsers may ask at the same time.
    return page.queue(default_concurrency_limit=None)


def _language_of(request: gr.Request, language: str | None) -> Translation:
    return translation(language or preferred_language(request.headers.get("accept-language", "")))


def _both(histories: list[History], t: Translation) -> list[Any]:
    """Return histories as the chat components show them, and as the page keeps them."""
    return [*(show(history, t) for history in histories), *histories]


def _ask(request: gr.Request, language: str | None, text: str, *histories: History) -> list[Any]:
    """Begin the answers to a question."""
    t = _language_of(request, language)
    if any(history and history[-1].get("is_running") for history in histories):
        # The page shows the error, and keeps the typed text.
        raise gr.Error(t("Wait for the end of the answer, or press Stop."), print_exception=False)
    if not text.strip():
        raise gr.Error(t("Type a message first."), print_exception=False)
    num_stops = _stops[request.session_hash]
    return ["", *_both([begin_answer(history, text, num_stops) for history in histories], t)]


def _answering(endpoint: Endpoint, tools: tuple[list[Message] | None, Functions], language: str | None) -> Any:
    """Return the handler that lets a model write the answer that [`begin_answer`] has begun, and runs the tools."""
    schemas, functions = tools

    async def answer(request: gr.Request, history: History, *settings: Any) -> AsyncGenerator[tuple[Any, Any]]:
        session = request.session_hash
        num_stops = history[-1].get("num_stops") if history else None
        if num_stops != _stops[session]:
            # NOTE: gradio does not cancel a handler that has not begun, and on a busy machine it begins late.
            return
        _growing[session] += 1
        t = _language_of(request, language)
        try:
            now = history[:-1]
            for _ in range(MAX_TOOL_ROUNDS):
                async with aclosing(stream_answer(endpoint, past := now, schemas, *settings)) as messages:
                    async for message in messages:
                        if num_stops != _stops[session]:
                            return
                        yield show(now := [*past, message], t), now
                answered, now = now, await _run_tools(now, functions)
                if now == answered:
                    break
        finally:
            _growing[session] -= 1

    return answer


async def _wait_for_end(request: gr.Request) -> None:
    """
    Wait until the cancelled answers have ended. NOTE: gradio cancels them while the next handler begins. The page does
    not wait longer than two seconds for an answer that gradio has not ended.
    """
    _stops[request.session_hash] += 1
    with suppress(TimeoutError):
        async with asyncio.timeout(2):
            while _growing[request.session_hash]:
                await asyncio.sleep(0.02)


def _end(request: gr.Request, language: str | None, *histories: History) -> list[Any]:
    """End the answers that were cancelled. The server ends with the connection."""
    ended = [[*history[:-1], history[-1] | {"is_running": False}] if history else [] for history in histories]
    return _both(ended, _language_of(request, language))


def open_page(
    endpoints: list[Endpoint], *, host: str, port: int, hosts: list[str], language: str | None, **options: Any
) -> None:
    """
    Serve the page of [`make_page`] for models that are served already, in another thread. It answers under the names
    `hosts` ([`~inference.serving.HostGuard`]).
    """
    # A proxy for the internet knows no servers of this machine.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "localhost", "127.0.0.1", host]))
    print(f"The chat page is at http://{host}:{port}", flush=True)
    t = gr.I18n(**{key: {text: translation(language or key)(text) for text in TEXTS} for key in LANGUAGES})
    make_page(endpoints, t=t, language=language, **options).launch(
        i18n=t,
        server_name=host,
        server_port=port,
        quiet=True,
        # The main thread waits for the models' servers.
        prevent_thread_lock=True,
        inbrowser=sys.stdout.isatty(),
        theme=THEME,
        css=_CSS,
        head=HEAD,
        footer_links=[],
        # The page has no files. gradio would take them from everyone.
        max_file_size=1,
        app_kwargs={"middleware": [Middleware(HostGuard, hosts=hosts)]},
    )
