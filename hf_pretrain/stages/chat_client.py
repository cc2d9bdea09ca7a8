"""
A client of OpenAI-compatible servers, for the chat page: the messages of a chat, and the answers of several models at
the same time.

A history is a list of messages as a server expects them. An answer in it may also have `reasoning_content`, `error`
(the reason why it ended early) and `is_running` (it still grows).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openai import APIStatusError, AsyncOpenAI, OpenAIError

from ..runtime.errors import UserError
from ..tokenizer.encoding import thinking_variables


Message = dict[str, Any]
History = list[Message]


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

    @cached_property
    def client(self) -> Any:
        """The client of the server. To build one takes a tenth of a second, in which a page would stand still."""
        # The typed variants of its methods do not know that messages and tools come from a page.
        client: Any = AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0)
        # Load the part of the library that a chat needs.
        client.chat.completions  # noqa: B018
        return client


@dataclass(frozen=True)
class Sampling:
    """
    Settings of a request.

    Args:
        system (`str`): the system message; empty for none.
        temperature (`float`): divisor of the logits; 0 always takes the most probable token.
        top_p (`float`): sample from the likeliest tokens that together have this probability.
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


def add_text(histories: list[History], text: str) -> list[History]:
    """
    Return the histories with the user's text: as a question, or as the result of a tool call if a model waits for one.
    A result goes only to the models that wait.
    """
    if not any(map(waiting_calls, histories)):
        return [[*history, {"role": "user", "content": text}] for history in histories]
    added = []
    for history in histories:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in waiting_calls(history)]
        # Each text is the result of one call.
        added.append([*history, *results[:1]])
    return added


def waiting_calls(history: History) -> list[Message]:
    """Return the tool calls of the last answer that have no result yet."""
    results = 0
    for message in reversed(history):
        if message["role"] != "tool":
            return message.get("tool_calls", [])[results:]
        results += 1
    return []


def drop_answers(histories: list[History]) -> list[History]:
    """Return the histories without their last answers."""
    return [history[:-1] if history and history[-1]["role"] == "assistant" else history for history in histories]


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
    try:
        json.loads(call["function"]["arguments"])
        return call
    except ValueError:
        return call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}


async def stream_answer(endpoint: Endpoint, history: History, sampling: Sampling) -> AsyncIterator[Message]:
    """
    Yield the growing answer of a model. If its consumer stops, the connection closes and the server ends the answer.
    An error becomes an answer with the key `error`.
    """
    answer: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    system = [{"role": "system", "content": sampling.system}] if sampling.system else []
    try:
        tools = {"tools": _read_tools(sampling.tools)} if sampling.tools.strip() else {}
        request = endpoint.client.chat.completions.create(
            model=endpoint.model,
            messages=[*system, *to_request(history)],
            stream=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=int(sampling.max_tokens),
            extra_body={"chat_template_kwargs": thinking_variables(sampling.thinking)},
            **tools,
        )
        async with await request as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    _add_delta(answer, choice.delta)
                yield answer
    except Exception as error:
        # Any error that ended the task silently would leave the question without an answer.
        yield answer | {"error": f"{endpoint.base_url}: {_reason(error)}"}


def _read_tools(text: str) -> list[Any]:
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise UserError(f"The tools in the settings are not JSON: {error}.") from None
    if not isinstance(tools, list):
        raise UserError('The tools in the settings must be a list: [{"type": "function", "function": {...}}, ...].')
    return tools


def _reason(error: Exception) -> str:
    """Return the server's own words, if it has sent some."""
    if isinstance(error, APIStatusError) and isinstance(error.body, dict) and error.body.get("detail"):
        return str(error.body["detail"])
    return str(error) if isinstance(error, (OpenAIError, ValueError)) else f"{type(error).__name__}: {error}"


def _add_delta(answer: Message, delta: Any) -> None:
    """Add a piece of a stream to an answer."""
    answer["content"] += delta.content or ""
    # The openai package does not know this field, and keeps it among the extra ones.
    answer["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content") or ""
    for call in delta.tool_calls or []:
        calls = answer["tool_calls"]
        if call.index >= len(calls):
            function = {"name": "", "arguments": ""}
            calls.append({"id": call.id or f"call_{call.index}", "type": "function", "function": function})
        function = calls[call.index]["function"]
        function["name"] += call.function.name or ""
        function["arguments"] += call.function.arguments or ""


class Answers:
    """
    Growing answers of several models, which answer at the same time. A model whose tool calls wait for results is not
    asked.

    Args:
        endpoints (`list[Endpoint]`): the models.
        histories (`list[History]`): the chat of each.
        sampling ([`Sampling`]): the settings of all requests.
    """

    def __init__(self, endpoints: list[Endpoint], histories: list[History], sampling: Sampling):
        self.histories = histories
        self._has_news = asyncio.Event()
        self._answers: dict[int, Message] = {}
        self._tasks = {
            number: asyncio.create_task(self._ask(number, endpoint, history, sampling))
            for number, (endpoint, history) in enumerate(zip(endpoints, histories, strict=True))
            if history and history[-1]["role"] != "assistant" and not waiting_calls(history)
        }
        for task in self._tasks.values():
            task.add_done_callback(lambda _: self._has_news.set())

    async def _ask(self, number: int, endpoint: Endpoint, history: History, sampling: Sampling) -> None:
        async for answer in stream_answer(endpoint, history, sampling):
            self._answers[number] = answer
            self._has_news.set()

    def stop(self) -> None:
        """End all answers where they are. This closes the connections, so that the servers stop generating."""
        for task in self._tasks.values():
            task.cancel()

    async def stream(self) -> AsyncGenerator[list[History]]:
        """Yield the histories with their growing answers: at once, whenever there is news, and at the end."""
        try:
            yield self._join()
            while not all(task.done() for task in self._tasks.values()):
                # Several pieces may have come meanwhile. The page needs only the newest state.
                await self._has_news.wait()
                self._has_news.clear()
                yield self._join()
            yield self._join()
        finally:
            # The page was closed, if not all answers have ended.
            self.stop()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _join(self) -> list[History]:
        joined = []
        for number, history in enumerate(self.histories):
            answer = self._answers.get(number)
            is_running = number in self._tasks and not self._tasks[number].done()
            joined.append([*history, answer | ({"is_running": True} if is_running else {})] if answer else history)
        return joined


__all__ = [
    "Answers",
    "Endpoint",
    "History",
    "Message",
    "Sampling",
    "add_text",
    "drop_answers",
    "stream_answer",
    "to_request",
    "waiting_calls",
]
