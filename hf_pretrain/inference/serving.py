"""
transformers' own server, restricted to one model by two ASGI middlewares. Before any work, [`HostGuard`] and
[`RequestGuard`] refuse requests that do harm, keep the server busy, or ask for what it cannot do:

| request | answer |
|---|---|
| to another host name than the allowed ones, or from a page of another one | 403 |
| to another address than `ROUTES`, such as `/load_model` or `/reset` | 404 |
| without the content type JSON, as pages of other origins may send them | 415 |
| with more than `MAX_BYTES` | 400 |
| with a field or a value that `ChatFields` or `CompletionFields` does not allow | 400 |
| with more tokens than the model has positions | 400 |

All refusals have the form of OpenAI's API. Requests may name any model: the served one answers. `open_thinking`, as
MiniMind's clients send it, switches the reasoning. The prompt is encoded as in training.
"""

import copy
import json
import logging as std_logging
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import SimpleNamespace
from typing import Annotated, Any

from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerFast

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError, needing_extra
from ..runtime.package_models import find_gguf
from ..tokenizer.control_tokens import encode_documents, encode_prompt, set_stop_tokens, thinking_variables
from ..weights.adapters import adapter_base
from ..weights.model_arguments import with_yarn
from .inference_arguments import load_for_server


with needing_extra("serve", "Serving needs FastAPI"):
    from fastapi import FastAPI
    from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager

MAX_BYTES = 2**20
_build_server = server.build_server


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


def check_ports(host: str, ports: list[int]) -> None:
    """Raise `UserError` for a port that cannot be used, or is needed twice, before models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as listeners:
        for port in ports:
            try:
                listeners.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                advice = "Choose another --port (--compare takes the next one, too) or --web_port."
                raise UserError(f"Port {port} of {host} cannot be used: {error}. {advice}") from None


def serve_model(
    name: str, *, host: str, port: int, hosts: list[str], rope_scaling: str | None = None, **options: Any
) -> Serve:
    """
    Load a model and serve it in another thread.

    Args:
        name (`str`): a directory or Hub id, of an adapter, too; a GGUF file; a model of the package index.
        host (`str`), port (`int`): where to listen.
        hosts (`list[str]`): the names of this machine, for [`HostGuard`].
        rope_scaling (`str`, *optional*): as for [`~weights.model_arguments.with_yarn`].
        **options: other arguments of transformers' `Serve`.
    """
    if is_quiet():
        # NOTE: transformers' server makes uvicorn log each start and request.
        std_logging.disable(std_logging.INFO)
    # NOTE: the server looks up the class that config.json names in its own reference to the module `transformers`.
    # This is not the module in `sys.modules`, because transformers replaces that one during its own import.
    load: Callable[..., Any] = MiniMindForCausalLM.from_pretrained
    files = None
    if adapter_base(name) is not None or find_gguf(name) is not None:
        files, load = load_for_server(name, rope_scaling)
    elif rope_scaling is not None:
        load = partial(load, config=with_yarn(MiniMindConfig.from_pretrained(name), rope_scaling))
    model_manager.transformers.MiniMindForCausalLM = SimpleNamespace(from_pretrained=load)
    # NOTE: the server has no limits, and no options to set any.
    server.build_server = partial(_build_guarded, name, f"http://{host}:{port}/v1", hosts)
    # Not in the main thread: there, uvicorn would let SIGTERM wait for the end of all answers.
    path = name if files is None else files.name
    serve = Serve(path, host=host, port=port, non_blocking=True, log_level="warning", **options)
    # The directory lives as long as the server.
    serve.files = files
    return serve


def wait_for_server() -> None:
    """Wait until Ctrl-C or a signal ends this process."""
    while any(thread.name == "uvicorn-thread" for thread in threading.enumerate()):
        time.sleep(0.5)
    raise UserError("The server has ended. Its message stands above.")


def stop_servers(servers: list[Serve]) -> None:
    """Stop servers that run in threads, without waiting for the end of their answers, which may be long."""
    for server in servers:
        server.server.force_exit = True
        server.kill_server()


class _TrainedEncoding(PreTrainedTokenizerFast):
    """
    Tokenizer of the server that encodes prompts as training does: a text begins with bos, and no text becomes a
    control token. NOTE: the server itself calls the tokenizer, which must have this base class.
    """

    original: PreTrainedTokenizerFast

    def __call__(self, text: Any, **_: Any) -> BatchEncoding:  # type: ignore[override]
        # Leave out the eos, which would end the text.
        return _as_batch(encode_documents([text], self.original)[0][:-1])

    def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return _as_batch(encode_prompt(self.original, conversation, tools, options.get("enable_thinking")))


def _as_batch(ids: list[int]) -> BatchEncoding:
    """Return token ids as a batch of one sequence, `(1, seq_len)`."""
    return BatchEncoding({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}, tensor_type="pt")


def _build_guarded(name: str, url: str, hosts: list[str], manager: ModelManager, *args: Any, **kwargs: Any) -> FastAPI:
    """Return transformers' app behind the guards. The server has loaded the model before."""
    # NOTE: the server of transformers 5.23 lists the models in the Hub's cache, and fails without one. Clients look up
    # the model in this list. From 5.24 on, the server lists only what it serves, and does not call this method.
    served = {"id": name, "object": "model", "owned_by": "hf_pretrain", "created": int(time.time())}
    manager.get_gen_models = lambda cache_dir=None: [served]
    (loaded,) = manager.loaded_models.values()
    set_stop_tokens(loaded.model, loaded.processor)
    original, loaded.processor = loaded.processor, copy.copy(loaded.processor)
    loaded.processor.__class__ = type("Served", (_TrainedEncoding, type(original)), {"original": original})
    config = loaded.model.generation_config
    # NOTE: the server takes the temperature of a request, but samples only if the model's own config says so. So let
    # the config say it, and let the guard set the temperature of requests without one.
    samples, config.do_sample = bool(config.do_sample), True
    app = _build_server(manager, *args, **kwargs)
    app.add_middleware(RequestGuard, samples=samples)
    app.add_middleware(HostGuard, hosts=hosts)
    # The server reads tools and tool calls unchecked.
    for kind in (HTTPException, *_MISTAKES, Exception):
        app.add_exception_handler(kind, _refuse)
    print(f"Serving {name} at {url} (Ctrl+C stops it)", flush=True)
    return app


# The errors that wrong fields raise. All others are ours.
_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, TemplateError)


def _refuse(_: Any, error: Exception) -> JSONResponse:
    """Return the response to a request that raises an error, in the form of OpenAI's API."""
    status, param = 400 if isinstance(error, _MISTAKES) else 500, None
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


def _bounded(generate: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wrap a method that generates: refuse prompts longer than the model's positions, and limit the answer to the rest.
    """

    @wraps(generate)
    def bounded(self: Any, model: Any, processor: Any, inputs: Any, config: Any, *args: Any, **more: Any) -> Any:
        num_tokens = inputs["input_ids"].shape[-1]
        num_left = model.config.max_position_embeddings - num_tokens
        if num_left < 1:
            raise HTTPException(
                400,
                f"The prompt has {num_tokens:,} tokens, and the model has {model.config.max_position_embeddings:,} "
                "positions for prompt and answer. Shorten the prompt.",
            )
        # A longer answer would run past the rotary table, which raises.
        config.max_new_tokens = min(config.max_new_tokens or num_left, num_left)
        # transformers looks for stop strings with the tokenizer's own encoding.
        return generate(self, model, processor.original, inputs, config, *args, **more)

    return bounded


GenerateManager.generate_streaming = _bounded(GenerateManager.generate_streaming)
GenerateManager.generate_non_streaming = _bounded(GenerateManager.generate_non_streaming)


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
        await _refuse(None, error)(scope, receive, send)


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
            await _refuse(None, error)(scope, receive, send)
            return
        # The checks have consumed the body, so replay it to the application.
        checked: list[Message] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]

        async def replay() -> Message:
            # Later calls wait for the client to disconnect, as the application expects.
            return checked.pop() if checked else await receive()

        await self.app(scope, replay, send)

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


async def _read(request: Request) -> bytes:
    """Return the body. Read one that is too long to its end, but keep only its beginning."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk[: MAX_BYTES + 1 - len(body)]
    if len(body) > MAX_BYTES:
        raise HTTPException(400, f"The request has more than {MAX_BYTES:,} bytes.")
    return bytes(body)
