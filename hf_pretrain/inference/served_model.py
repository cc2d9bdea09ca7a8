"""
A model behind an address of OpenAI's API, such as `hf-pretrain serve`, Ollama or vLLM: a source of answers for a chat.
"""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from ..runtime.errors import UserError
from ..runtime.names import public_name


Message = dict[str, Any]


class ServerError(UserError, ConnectionError):
    """The server does not answer, or not in the form of OpenAI's API."""


@dataclass
class ServedModel:
    """
    A model that another program serves.

    Args:
        url (`str`): the address of its API, such as `http://127.0.0.1:8000/v1`.
        name (`str`): its name there.
        key (`str`): the key that the server asks for.
    """

    url: str
    name: str
    key: str

    def answer(self, messages: list[Message], tools: list[Message] | None, sampling: dict[str, Any]) -> Message:
        """
        Return the answer to a conversation, as the local chat would remember it.

        Raises:
            `ServerError`: if there is none.
            `UserError`: if the server refuses a conversation that has grown by results of tools.
        """
        body = {"model": self.name, "messages": to_request(messages, with_reasoning=True), "tools": tools} | sampling
        body["max_tokens"] = body.pop("max_new_tokens")
        target, headers = f"{self.url.rstrip('/')}/chat/completions", {"Authorization": f"Bearer {self.key}"}
        shown = public_name(target)
        try:
            # On a CPU, a server that answers others first may need minutes.
            response = httpx.post(target, json=body, headers=headers, timeout=600)
            reason = f"{response.status_code} {' '.join(response.text.split()):.300}"
            if response.is_success:
                parts = response.json()["choices"][0]["message"].items()
                return {"role": "assistant", "content": ""} | {name: part for name, part in parts if part}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason.startswith("400") and messages[-1]["role"] == "tool":
            # The conversation has more tokens than the model has positions, for example.
            raise UserError(f"{shown}: {reason}")
        raise ServerError(f"{shown}: {reason}. Start the server, or check --api_base_url, --api_model and --api_key.")


def to_request(messages: list[Message], *, with_reasoning: bool = False) -> list[Message]:
    """Return the messages that a request sends: without errors and empty answers, and by default without reasoning."""
    names = ("role", "content", "tool_call_id", "reasoning_content")[: 3 + with_reasoning]
    kept = []
    for message in messages:
        fields = {name: message[name] for name in names if message.get(name)}
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
    except (ValueError, TypeError):
        return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}
