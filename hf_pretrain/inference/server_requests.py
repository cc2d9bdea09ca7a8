"""
The requests of the server: their fields and bounds. A request that does harm, keeps the server busy, or asks for what
it cannot do is refused:

| request | answer |
|---|---|
| without the content type JSON, as pages of other origins may send them | 415 |
| with more than `MAX_BYTES` | 400 |
| with a field or a value that `ChatFields` or `CompletionFields` does not allow | 400 |
"""

import json
from typing import Annotated, Any, TypeVar

from ..runtime.errors import needing_extra


with needing_extra("serve", "Serving needs FastAPI"):
    from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

MAX_BYTES = 2**20
# Fields that change no answer: the served model is the only one. MiniMind's clients send `reasoning_effort`.
_IGNORED = {"model", "user", "metadata", "stream_options", "reasoning_effort", "prompt_cache_key", "safety_identifier"}
# Values that change no answer. Some clients send them in all fields that the user has not set.
_NEUTRAL = {
    **{"n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "echo": False, "suffix": "", "store": False},
    **{"presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "service_tier": "auto", "tool_choice": "auto"},
    **{"parallel_tool_calls": True, "response_format": {"type": "text"}, "stop": [], "tools": [], "logit_bias": {}},
}


class _Fields(BaseModel, strict=True, allow_inf_nan=False, extra="forbid"):
    """The fields of requests to both addresses, with their bounds. The server cannot honour any other."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    frequency_penalty: float = Field(0, gt=-1, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    # OpenAI's API takes four, too.
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field([], max_length=4)
    stream: bool = False


class CompletionFields(_Fields):
    """The fields of `/v1/completions`."""

    prompt: str = Field(min_length=1)


class _Thinking(BaseModel, strict=True, extra="forbid"):
    """The switches of the reasoning. Other variables of a template could replace the template itself."""

    enable_thinking: bool | None = None
    open_thinking: bool | None = None


def _join_parts(content: Any) -> Any:
    """Return a text that may be given in parts. Join them as training does, without anything between them."""
    if not isinstance(content, list):
        return "" if content is None else content
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"part {number} is {kind!r:.60}; the model reads only parts of the type 'text'")
    return "".join(part["text"] for part in content)


class _Message(BaseModel, strict=True):
    role: str
    content: Annotated[str, BeforeValidator(_join_parts)] = ""
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it, with the arguments of tool calls as objects."""
        # MiniMind's clients spell the tool calls in the content, too.
        content = self.content if not self.tool_calls or "<tool_call>" not in self.content else ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [_read_call(call) for call in self.tool_calls]
        return message


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"type": "function", "function": function | {"arguments": arguments}}


class ChatFields(_Fields, _Thinking):
    """The fields of `/v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: _Thinking = _Thinking()
    max_completion_tokens: int | None = Field(None, ge=1)
    logit_bias: dict[str, float] = Field({}, max_length=1024)

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason. MiniMind's clients send `open_thinking`. One of the switches suffices."""
        given = (
            each for part in (self, self.chat_template_kwargs) for each in (part.enable_thinking, part.open_thinking)
        )
        asked = [each for each in given if each is not None]
        return any(asked) if asked else None


Fields = TypeVar("Fields", bound=_Fields)


async def read_fields(request: Request, kind: type[Fields]) -> Fields:
    """Return the fields of a request. Leave out those that change nothing."""
    # Clients read a response only after they have sent everything.
    body = await _read(request)
    # Without the server's permission, a browser sends no JSON to another origin. This server permits nothing.
    if not request.headers.get("content-type", "").lower().startswith("application/json"):
        raise HTTPException(415, "Send JSON, with the header Content-Type: application/json.")
    content = TypeAdapter(dict[str, Any]).validate_json(body)
    # Some clients send all fields, with null for the absent ones.
    kept = (name for name in content if name not in _IGNORED and content[name] not in (None, _NEUTRAL.get(name)))
    given = {name: content[name] for name in kept}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    # LangChain sends a list of prompts.
    if isinstance(given.get("prompt"), list) and len(given["prompt"]) == 1:
        given["prompt"] = given["prompt"][0]
    if given.get("tool_choice") == "none":
        # The model calls no tool that it does not see.
        given = {name: value for name, value in given.items() if name not in ("tool_choice", "tools")}
    return kind.model_validate(given)


async def _read(request: Request) -> bytes:
    """Return the body. Read one that is too long to its end, but keep only its beginning."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk[: MAX_BYTES + 1 - len(body)]
    if len(body) > MAX_BYTES:
        raise HTTPException(400, f"The request has more than {MAX_BYTES:,} bytes.")
    return bytes(body)
