"""The messages of the chat page: what it asks the server, and what it shows. Without a browser."""

import asyncio
import json
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pretrain.inference import chat_page
from hf_pretrain.inference.chat_page import escape_tags, make_page, show, to_request, unescape_tags
from tests.invariants.launching import free_port


QUESTION = {"role": "user", "content": "weather in Oslo?"}
SETTINGS = ("", 0, 0.9, 60, True, 32)


def call(name: str, arguments: str = "{}") -> dict:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", **fields) -> dict:
    return {"role": "assistant", "content": content, "reasoning_content": "", "tool_calls": []} | fields


def called(*names: str) -> dict:
    return answer(tool_calls=[call(name) for name in names])


def result(name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": text}


def test_a_request_has_neither_reasoning_nor_errors_nor_empty_answers():
    history = [
        QUESTION,
        answer("dry", reasoning_content="I see."),
        QUESTION,
        answer(error="gone"),
        QUESTION,
        called("a"),
        result("a", ""),
    ]
    kept = [{"role": "assistant", "tool_calls": [call("a")]}, {"role": "tool", "tool_call_id": "call-a"}]
    assert to_request(history) == [QUESTION, {"role": "assistant", "content": "dry"}, QUESTION, QUESTION, *kept]
    # A server reads the arguments as JSON, and would fail on all requests that follow.
    (message,) = to_request([{"role": "assistant", "content": "", "tool_calls": [call("a", '{"city')]}])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == '{"city'


def ask_page(url: str, *settings, tools: tuple = (None, {}), history: tuple = (), turns: tuple = ()) -> list[dict]:
    """Return the messages of a question and its answer, with the function of the page and without a browser."""
    page, session = make_page("m", url, t=str, tools=tools), SimpleNamespace(headers={})

    async def collect() -> list:
        return [now async for _, now in page.fn(QUESTION["content"], list(history), session, list(turns), *settings)]

    return asyncio.run(collect())[-1][-1]


def test_a_model_that_only_calls_tools_comes_to_an_end(monkeypatch):
    async def stream(*_):
        yield called("f", "f")

    monkeypatch.setattr(chat_page, "stream_answer", stream)
    messages = ask_page("", *SETTINGS, tools=(None, {"f": lambda: "rain"}))
    assert messages == [QUESTION, *[called("f", "f"), *[result("f", "rain")] * 2] * 15, called("f", "f")]


def test_a_request_holds_the_settings_and_the_questions_that_the_page_shows(monkeypatch):
    """gradio removes messages to clear the page, to take a question back, and to answer it again."""
    asked = []

    async def stream(_, request):
        asked.append(request)
        yield answer("dry")

    monkeypatch.setattr(chat_page, "stream_answer", stream)
    shown = [{"role": "user", "content": []}, {"role": "assistant", "content": []}]
    first, second = ([{"role": "user", "content": text}, answer(text.upper())] for text in ("a", "b"))
    given = {"turns": (first, second)}
    ask_page("", "Be short.", 0.5, 0.25, 7, False, 32, history=(*shown, *shown), **given)
    ask_page("", *SETTINGS, history=shown, **given)
    ask_page("", *SETTINGS, **given)
    ask_page("", *SETTINGS[:-1], 1, history=(*shown, *shown), **given)
    # Of two questions that the page shows, the second was stopped before its answer began.
    ask_page("", *SETTINGS, history=(*shown, shown[0]), turns=(first,))
    assert all(request["messages"][-1] == QUESTION for request in asked)
    past = [[message["content"] for message in request["messages"][:-1]] for request in asked]
    assert past == [["Be short.", "a", "A", "b", "B"], ["a", "A"], [], ["b", "B"], ["a", "A"]]
    assert asked[0]["messages"][0]["role"] == "system"
    assert [asked[0][name] for name in ("temperature", "top_p", "max_tokens")] == [0.5, 0.25, 7]
    assert [request["chat_template_kwargs"]["enable_thinking"] for request in asked[:2]] == [False, True]


def test_reasoning_and_tool_calls_stand_apart_from_the_answer():
    calls = [call("add", '{"\\u5317": 1}'), call("broken", "{")]
    turn = [answer("2", reasoning_content="I count.", tool_calls=calls), result("add", "<b>3")]
    thought, text, tool, broken, found = show(turn)
    assert (text["content"], text["metadata"]) == ("2", {})
    assert (thought["content"], thought["metadata"]) == ("I count.", {"title": "Thinking", "status": "done"})
    assert tool["metadata"]["title"] == "Call of the tool add" and '{\n  "北": 1\n}' in tool["content"]
    assert broken["content"] == "```json\n{\n```"
    assert (found["content"], found["metadata"]) == ("&lt;b>3", {"title": "Result of the tool"})
    # A thought that still grows is open.
    assert show([answer(reasoning_content="I")])[0]["metadata"] == {"title": "Thinking"}


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["`", "``", "<b>", "&", "&lt;", "&amp;", "\n", " x "])).map("".join))
def test_a_question_is_taken_back_as_it_was_typed(typed):
    assert unescape_tags(escape_tags(typed)) == typed


def test_tags_of_the_user_are_text():
    """Markdown itself shows the tags in code as they are."""
    for typed, shown in (
        ("is <b>x</b> & &lt; bold?", "is &lt;b&gt;x&lt;/b&gt; &amp; &amp;lt; bold?"),
        ("`<b>` or <b>\n```\n<i>&\n```", "`<b>` or &lt;b&gt;\n```\n<i>&\n```"),
        ("a ` <b>", "a ` &lt;b&gt;"),
    ):
        assert escape_tags(typed).replace(">", "&gt;") == shown.replace(">", "&gt;")


def test_an_error_is_an_answer_and_not_a_crash():
    url = f"http://127.0.0.1:{free_port()}/v1"
    _, message = ask_page(url, *SETTINGS)
    assert url in message["error"] and "All connection attempts failed" in message["error"]


def test_the_page_begins_with_the_sampling_of_the_model():
    page = make_page("m", "", t=str, sampling={"temperature": 0.2, "top_p": 1.0}, tools=(None, {}))
    values = {part.label: part.value for part in page.additional_inputs[1:]}
    assert (values["Temperature"], values["Top p"]) == (0.2, 1.0)
