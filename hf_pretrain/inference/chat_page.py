"""
The chat page of `recipes/serve.py --web`: gradio's `ChatInterface` as a client of an OpenAI-compatible server.

gradio keeps the messages that the page shows. The messages that requests send are kept beside them, in one list per
question: the question, answers, and the results of tools. An answer may also have `reasoning_content` and `error` (why
it ended early).
"""

import asyncio
import html
import json
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any

from ..loading.native import DEFAULT_SAMPLING
from ..runtime.errors import needing_extra
from ..runtime.texts import LANGUAGES, TEXTS, Translation, preferred_language, translation
from ..tokenizer.control_tokens import thinking_variables
from .guards import HostGuard
from .served_model import Message, to_request
from .terminal_chat import last_turns
from .tools import MAX_TOOL_ROUNDS, call_tool


with needing_extra("web", "The chat page needs gradio"):
    import gradio as gr
    import httpx
    from starlette.middleware import Middleware

Tools = tuple[list[Message] | None, dict[str, Callable[..., Any]]]

# Seconds between two updates of a growing answer: a fast model would otherwise be ahead of the page.
_UPDATE_SECONDS = 0.05
# The default theme would load its fonts from another host.
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
# An answer may contain links to pictures. To load them would tell their hosts about the chat.
HEAD = """<meta http-equiv="Content-Security-Policy" content="img-src 'self' data:; media-src 'self'">"""
# gradio would clear the page while an answer grows, and then show the rest of the answer.
_CSS = "body:has(#question .stop-button) #chat .top-panel { display: none }"


async def stream_answer(url: str, request: Message) -> AsyncGenerator[Message]:
    """
    Yield the growing answer to a request. If its consumer stops, the connection closes and the server ends the answer.
    Any error becomes the `error` of the answer.
    """
    answer: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    shown, target = 0.0, f"{url}/chat/completions"
    try:
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("POST", target, json=request | {"stream": True}) as response,
        ):
            if response.is_error and "json" not in response.headers.get("content-type", ""):
                raise ValueError(f"{response.status_code} {(await response.aread()).decode(errors='replace'):.200}")
            async for line in response.aiter_lines():
                # A refusal is a line of JSON without a prefix.
                if (text := line.removeprefix("data: ")) not in ("", "[DONE]"):
                    _add_piece(answer, json.loads(text))
                    if time.monotonic() > shown + _UPDATE_SECONDS:
                        yield answer.copy()
                        shown = time.monotonic()
    # Another server may answer in any form.
    except Exception as error:
        answer["error"] = f"{url}: {str(error) or type(error).__name__}"
    yield answer


def _add_piece(answer: Message, piece: Message) -> None:
    """Add a piece of a stream to an answer. The server sends each tool call whole."""
    if "error" in piece:
        raise ValueError(piece["error"]["message"])
    for choice in piece["choices"]:
        for name in ("content", "reasoning_content", "tool_calls"):
            answer[name] += choice["delta"].get(name) or type(answer[name])()


async def answer_question(url: str, messages: list[Message], request: Message, tools: Tools) -> AsyncGenerator[Any]:
    """Yield the growing messages that answer the last one: answers, and the results of the tools that they call."""
    request, functions, turn = request | {"tools": tools[0]}, tools[1], list[Message]()
    for _ in range(MAX_TOOL_ROUNDS):
        begun = turn
        async with aclosing(stream_answer(url, request | {"messages": to_request(messages + turn)})) as answers:
            async for answer in answers:
                yield (turn := [*begun, answer])
        if not functions or not turn[-1]["tool_calls"]:
            return
        for call in turn[-1]["tool_calls"]:
            result = await asyncio.to_thread(call_tool, functions, call)
            turn = [*turn, {"role": "tool", "tool_call_id": call["id"], "content": result}]


def show(turn: list[Message], t: Translation = str) -> list[Message]:
    """Return the messages that answer a question as messages of gradio, with titles in the language of `t`."""
    parts = [part for message in turn for part in _parts(message, t)]
    return [{"role": "assistant", "content": content, "metadata": metadata} for content, metadata in parts]


def _parts(message: Message, t: Translation) -> Iterator[tuple[str, Any]]:
    """Yield the texts of a message with gradio's metadata: a tool's result; reasoning, content, calls and error."""
    if message["role"] == "tool":
        yield escape_tags(message["content"]), {"title": t("Result of the tool")}
        return
    if message["reasoning_content"]:
        # The page folds what is done.
        done = {"status": "done"} if message["content"] or message["tool_calls"] else {}
        yield message["reasoning_content"], {"title": t("Thinking")} | done
    if message["content"]:
        yield message["content"], {}
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        # The server escapes all letters outside of ASCII. What the model wrote wrongly is no JSON, and stays as it is.
        with suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
        yield f"```json\n{arguments}\n```", {"title": f"{t('Call of the tool')} {call['function']['name']}"}
    if message.get("error"):
        yield message["error"], {"title": t("Error")}


def escape_tags(text: str) -> str:
    """Return a text as Markdown that shows `<b>` as it was typed. Code does so by itself."""
    return _outside_of_code("[<&]", html.escape, text)


def unescape_tags(text: str) -> str:
    """Return the text that [`escape_tags`] has escaped."""
    return _outside_of_code("&(?:lt|amp);", html.unescape, text)


def _outside_of_code(pattern: str, change: Callable[[str], str], text: str) -> str:
    found = re.compile(rf"(`+).*?\1|{pattern}", re.S)
    return found.sub(lambda match: match[0] if match[1] else change(match[0]), text)


def _make_settings(thinking: bool, sampling: dict[str, float], t: gr.I18n) -> list[gr.components.Component]:
    """Return the settings of the page, in the order in which [`_answering`] takes them."""
    return [
        gr.Textbox("", label=t("System message"), render=False),
        gr.Slider(0.0, 2.0, sampling["temperature"], step=0.05, label=t("Temperature"), render=False),
        gr.Slider(0.05, 1.0, sampling["top_p"], step=0.05, label=t("Top p"), render=False),
        gr.Slider(1, 2048, 256, step=1, label=t("Longest answer in tokens"), render=False),
        gr.Checkbox(thinking, label=t("Thinking"), render=False),
        gr.Slider(0, 32, 32, step=1, label=t("Earlier questions that the model sees"), render=False),
    ]


def make_page(
    name: str,
    url: str,
    *,
    t: gr.I18n,
    language: str | None = None,
    thinking: bool = True,
    sampling: dict[str, float] = DEFAULT_SAMPLING,
    tools: Tools,
) -> gr.ChatInterface:
    """
    Return the page for a model. `page.launch(i18n=t)` serves it.

    Args:
        name (`str`): the name of the model.
        url (`str`): the address of its server, such as `http://127.0.0.1:8000/v1`.
        t ([`~gradio.I18n`]): the texts, which each browser gets in its language.
        language (`str`, *optional*): the language of messages; by default the browser's.
        thinking (`bool`), sampling (`dict`): the initial settings; `sampling` has a `temperature` and a `top_p`.
        tools (`tuple`): the result of [`~inference.tools.offer_tools`].
    """

    def check(text: str, request: gr.Request) -> Any:
        return gr.validate(bool(text.strip()), _language_of(request, language)("Type a message first."))

    label = t("Type a message")
    question = gr.Textbox(
        label=label, placeholder=label, submit_btn=True, stop_btn=True, elem_id="question", render=False
    )
    turns = gr.State([], render=False)
    page = gr.ChatInterface(
        _answering(name, url, tools, language),
        chatbot=_make_chat(name),
        textbox=question,
        additional_inputs=[turns, *_make_settings(thinking, sampling, t)],
        additional_inputs_accordion=gr.Accordion(t("Settings"), open=False, elem_id="settings", render=False),
        additional_outputs=turns,
        validator=check,
        analytics_enabled=False,
        # Several browsers may ask at the same time.
        concurrency_limit=None,
        show_progress="hidden",
        api_visibility="private",
    )
    page.title = "hf_pretrain chat"
    return page


def _answering(name: str, url: str, tools: Tools, language: str | None) -> Callable[..., Any]:
    """Return the function that answers a question in gradio's `ChatInterface`."""

    async def answer(
        text: str, history: list[Message], request: gr.Request, turns: list[list[Message]], *settings: Any
    ) -> AsyncGenerator[Any]:
        system, temperature, top_p, max_tokens, thinking, num_turns = settings
        spoken = _language_of(request, language)
        # gradio removes messages to answer a question again. A question that was stopped early has no turn.
        num_questions = sum(message["role"] == "user" for message in history)
        past = [*turns, *[[]] * num_questions][:num_questions]
        question = {"role": "user", "content": text}
        messages = last_turns([*chain(*past), question], num_turns)
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        body = {"model": name, "temperature": temperature, "top_p": top_p, "max_tokens": int(max_tokens)}
        body["chat_template_kwargs"] = thinking_variables(thinking)
        yield [], [*past, [question]]
        async with aclosing(answer_question(url, messages, body, tools)) as answers:
            async for turn in answers:
                yield show(turn, spoken), [*past, [question, *turn]]
        if not show(turn):
            yield f"*{spoken('The answer is empty.')}*", [*past, [question]]

    return answer


def _make_chat(name: str) -> gr.Chatbot:
    """Return the messages of the page, which show tags in questions as they were typed."""
    chat = gr.Chatbot(label=name, height="70vh", elem_id="chat", buttons=["copy"], render=False)
    read, write = chat.preprocess, chat.postprocess

    def change_questions(data: Any, change: Callable[[str], str]) -> Any:
        for message in data.root if data else ():
            for part in message.content if message.role == "user" else ():
                part.text = change(part.text)
        return data

    # NOTE: gradio takes a question for Markdown with HTML.
    chat.preprocess = lambda payload: read(change_questions(payload, unescape_tags))  # type: ignore[method-assign]
    chat.postprocess = lambda value: change_questions(write(value), escape_tags)  # type: ignore[method-assign]
    return chat


def _language_of(request: gr.Request, language: str | None) -> Translation:
    return translation(language or preferred_language(request.headers.get("accept-language", "")))


def open_page(
    name: str, url: str, *, host: str, port: int, hosts: list[str], language: str | None, **options: Any
) -> None:
    """
    Serve the page of [`make_page`] for a model that is served already, in another thread. It answers under the names
    `hosts` ([`~inference.serving.HostGuard`]).
    """
    # A proxy for the internet knows no servers of this machine.
    for variable in ("NO_PROXY", "no_proxy"):
        os.environ[variable] = ",".join(filter(None, [os.environ.get(variable), "localhost", "127.0.0.1", host]))
    print(f"The chat page is at http://{host}:{port}", flush=True)
    t = gr.I18n(**{key: {text: translation(language or key)(text) for text in TEXTS} for key in LANGUAGES})
    make_page(name, url, t=t, language=language, **options).launch(
        i18n=t,
        server_name=host,
        server_port=port,
        quiet=True,
        # The main thread waits for the model's server.
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
