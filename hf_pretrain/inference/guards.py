"""
Two ASGI middlewares of a server with one model. Before any work, [`HostGuard`] and [`RequestGuard`] refuse requests
that do harm, keep the server busy, or ask for what it cannot do:

| request | answer |
|---|---|
| to another host name than the allowed ones, or from a page of another one | 403 |
| to another address than `ROUTES`, such as `/load_model` or `/reset` | 404 |
| without the content type JSON, as pages of other origins may send them | 415 |
| with more than `MAX_BYTES` | 400 |
| with a field or a value that `ChatFields` or `CompletionFields` does not allow | 400 |
| with more tokens than the model has positions | 400 |

All refusals have the form of OpenAI's API.
"""

import json
import re
from typing import Annotated, Any

from jinja2 import TemplateError

from ..runtime.errors import needing_extra
from ..tokenizer.control_tokens import thinking_variables


with needing_extra("serve", "Serving needs FastAPI"):
    from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """
    The fields of requests to both addresses, with their bounds. The server cannot honour any other. The defaults here
    have no effect.
    """

    temperature: float = Field(0, ge=0, le=100)
    top_p: float = Field(1, ge=0, le=1)
    max_tokens: int = Field(1, ge=1)
    frequency_penalty: float = Field(0, gt=-1, le=2)
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    # OpenAI's API takes four, too.
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field([], max_length=4)
    stream: bool = False


class CompletionFields(_Fields):
    """The fields of `/v1/completions`."""

    prompt: str = Field(min_length=1)


class _Thinking(BaseModel, strict=True, extra="forbid"):
    """The switches of the reasoning. Other variables of a template could replace the template itself."""

    enable_thinking: bool = False
    open_thinking: bool = False


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
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatFields(_Fields, _Thinking):
    """The fields of `/v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: _Thinking = _Thinking()
    max_completion_tokens: int = Field(1, ge=1)
    logit_bias: dict[str, float] = Field({}, max_length=1024)


# The addresses that answer.
ROUTES: dict[str, type[_Fields]] = {"/v1/chat/completions": ChatFields, "/v1/completions": CompletionFields}


# The errors that wrong fields raise. All others are ours.
MISTAKES = (ValueError, TypeError, LookupError, AttributeError, TemplateError)


def refuse(_: Any, error: BaseException) -> JSONResponse:
    """Return the response to a request that raises an error, in the form of OpenAI's API."""
    # A `ConnectionError` means that llama.cpp has ended.
    status = 503 if isinstance(error, ConnectionError) else 400 if isinstance(error, MISTAKES) else 500
    param = None
    message = f"The request cannot be answered: {type(error).__name__}: {error}"
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:] or None
        # NOTE: pydantic puts "Value error" before the text of a `ValueError`.
        text = first["msg"].removeprefix("Value error, ").replace("Extra inputs are", "This field is")
        message = f"{param or 'The body'}: {text}."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


class HostGuard:
    """
    ASGI middleware that refuses requests to and from foreign host names.

    A web page whose name leads to this machine (DNS rebinding) sends its own name as the host. Every IP address is
    allowed as a host: no page can make one lead elsewhere.

    Args:
        app (`ASGIApp`): the application that gets all other requests.
        hosts (`list[str]`): the names of this machine beside `localhost`.
    """

    def __init__(self, app: ASGIApp, *, hosts: list[str]):
        self.app = app
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers({"host": "localhost"})
        host, origin = (_host_name(headers.get(name, "")) for name in ("host", "origin"))
        is_own = host in self.hosts or re.fullmatch(r"[\d.]+|[\da-f.]*:[\da-f:.]+", host)
        if is_own and (not origin or origin in {host, *self.hosts}):
            await self.app(scope, receive, send)
            return
        name = origin if is_own else host
        error = HTTPException(403, f"{name!r:.200} is no name of this server. Allow it with --allowed_hosts.")
        await refuse(None, error)(scope, receive, send)


def _host_name(address: str) -> str:
    """Return the name or number in `localhost:8000` or `http://[::1]:8000`."""
    return re.sub(r":\d*$", "", address.rpartition("/")[2]).strip("[]").lower()


class RequestGuard:
    """
    ASGI middleware that refuses requests by their address, content type, size and fields.

    Args:
        app (`ASGIApp`): the application that gets all other requests.
        samples (`bool`): whether to sample answers to requests without a temperature.
    """

    def __init__(self, app: ASGIApp, *, samples: bool):
        self.app = app
        self.samples = samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # GET requests change nothing and have no body.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            # Clients read a response only after they have sent everything.
            body = await _read(request := Request(scope, receive))
            # Without the server's permission, a browser sends no JSON to another origin. This server permits nothing.
            if not request.headers.get("content-type", "").lower().startswith("application/json"):
                raise HTTPException(415, "Send JSON, with the header Content-Type: application/json.")
            fields = self._check_fields(scope["path"], body)
        except (HTTPException, ValueError, ClientDisconnect) as error:
            await refuse(None, error)(scope, receive, send)
            return
        # The checks have consumed the body, so replay it to the application.
        checked: list[Message] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]

        async def replay() -> Message:
            # Later calls wait for the client to disconnect, as the application expects.
            return checked.pop() if checked else await receive()

        stream, end = _OpenStream(send), b"[DONE]"
        try:
            await self.app(scope, replay, stream)
        except Exception as error:
            if not stream.has_begun:
                raise
            # NOTE: Starlette raises another error from one that comes after the first piece.
            end = bytes(refuse(None, error.__cause__ or error).body)
        if stream.has_begun:
            # As OpenAI's streams end, which some clients wait for.
            await send({"type": "http.response.body", "body": b"data: " + end + b"\n\n"})

    def _check_fields(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the fields of a request without those that change nothing."""
        if path not in ROUTES:
            raise HTTPException(404, f"This server answers {' and '.join(ROUTES)}, not {path:.100}.")
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
        fields = ROUTES[path].model_validate(given).model_dump(exclude_unset=True, exclude_none=True)
        # MiniMind's clients send `open_thinking` at the top or among the variables. One of them suffices.
        asked = [*fields.pop("chat_template_kwargs", {}).values()]
        asked += [fields.pop(name) for name in thinking_variables(True) if name in fields]
        if asked:
            fields["chat_template_kwargs"] = thinking_variables(any(asked))
        # OpenAI's API gives no stream unless asked for one.
        defaults = {"stream": False} | ({} if self.samples else {"temperature": 0})
        return defaults | fields


class _OpenStream:
    """Send messages of an ASGI application, but leave the end of a stream to the caller."""

    def __init__(self, send: Send):
        self.send, self.has_begun = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        elif self.has_begun:
            message = {**message, "more_body": True}
        await self.send(message)


async def _read(request: Request) -> bytes:
    """Return the body. Read one that is too long to its end, but keep only its beginning."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk[: MAX_BYTES + 1 - len(body)]
    if len(body) > MAX_BYTES:
        raise HTTPException(400, f"The request has more than {MAX_BYTES:,} bytes.")
    return bytes(body)
