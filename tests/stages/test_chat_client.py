"""The histories of the chat page, and its connections to servers."""

import asyncio
import json

from hf_pretrain.stages.chat_client import (
    Answers,
    Endpoint,
    Sampling,
    add_text,
    drop_answers,
    stream_answer,
    to_request,
    waiting_calls,
)
from tests.invariants.launching import free_port


QUESTION = {"role": "user", "content": "weather?"}


def call(name: str, arguments: str = "{}") -> dict:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*names: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [call(name) for name in names]}


def result(name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": text}


def test_a_text_is_the_result_of_the_first_call_that_waits():
    histories = [[QUESTION, called("a", "b")], [QUESTION, {"role": "assistant", "content": "dry"}]]
    first = add_text(histories, "1")
    assert first == [[*histories[0], result("a", "1")], histories[1]]
    assert waiting_calls(first[0]) == [call("b")]
    second = add_text(first, "2")
    assert second == [[*first[0], result("b", "2")], histories[1]]
    # All calls have their results, so the next text is a question for both models.
    assert [history[-1] for history in add_text(second, "3")] == [{"role": "user", "content": "3"}] * 2


def test_only_the_last_answers_are_dropped():
    answered = [QUESTION, called("a"), result("a", "1"), {"role": "assistant", "content": "dry"}]
    assert drop_answers([answered, answered[:3], []]) == [answered[:3], answered[:3], []]


def test_a_request_has_neither_reasoning_nor_errors_nor_empty_answers():
    history = [
        QUESTION,
        {"role": "assistant", "content": "dry", "reasoning_content": "I see.", "tool_calls": [], "is_running": True},
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "", "error": "gone"},
        QUESTION,
        called("a"),
        result("a", ""),
    ]
    kept = [{"role": "assistant", "tool_calls": [call("a")]}, {"role": "tool", "tool_call_id": "call-a"}]
    assert to_request(history) == [QUESTION, {"role": "assistant", "content": "dry"}, QUESTION, QUESTION, *kept]


def test_arguments_that_are_no_json_are_sent_as_text():
    """A server reads the arguments as JSON, and would fail on all requests that follow."""
    (message,) = to_request([{"role": "assistant", "content": "", "tool_calls": [call("a", '{"city')]}])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == '{"city'


def test_a_server_that_is_gone_is_an_answer_and_not_a_crash():
    async def ask() -> list[dict]:
        return [answer async for answer in stream_answer(Endpoint("m", url), [QUESTION], Sampling())]

    url = f"http://127.0.0.1:{free_port()}/v1"
    (answer,) = asyncio.run(ask())
    assert url in answer["error"] and "Connection error" in answer["error"]


def test_any_other_error_is_an_answer_too():
    async def ask() -> list:
        answers = Answers([Endpoint("m", "http://127.0.0.1:1/v1")], [[QUESTION]], Sampling(max_tokens=None))
        return [histories async for histories in answers.stream()]

    ((question, answer),) = asyncio.run(ask())[-1]
    assert question == QUESTION and "TypeError: int() argument must be" in answer["error"]


def test_stop_closes_the_connection_of_a_server_that_is_silent():
    """A model may need long for a prompt, and sends nothing until then."""

    async def run() -> list:
        is_asked, rest = asyncio.Event(), asyncio.Future()

        async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            is_asked.set()
            # Ends when the client closes the connection.
            rest.set_result(await reader.read())
            writer.close()

        server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        answers = Answers([Endpoint("m", f"http://127.0.0.1:{port}/v1")], [[QUESTION]], Sampling())
        stream = answers.stream()
        first = await anext(stream)
        await is_asked.wait()
        answers.stop()
        async with asyncio.timeout(30):
            states = [first, *[state async for state in stream]]
            await rest
        server.close()
        return states

    assert all(state == [[QUESTION]] for state in asyncio.run(run()))
