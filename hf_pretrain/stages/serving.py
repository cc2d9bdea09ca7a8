"""
transformers' own server, restricted to one model. Before any work, it refuses requests that would keep it busy or fill
its memory.

| request | answer |
|---|---|
| for another model, `/load_model` included | 400, without asking the Hub |
| from a web page of another origin, or without the content type JSON | 403, 415: no page can unload the model |
| with more bytes or tokens than the model has positions, or more stop strings than `MAX_STOP_STRINGS` | 400 |
| with a chat template, or another argument of the rendering, in `chat_template_kwargs` | 400 |
| with fields that raise an error while they are read, or that `generate` refuses | 400, with the error |
| with fields of OpenAI's API that the server cannot honour, such as `n`, unless they ask for nothing | 400 |
"""

import inspect
import json
import logging as std_logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any
from urllib.parse import urlsplit

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.command_line import is_quiet
from ..runtime.errors import MissingExtraError, UserError
from ..runtime.installation import install_command
from ..tokenizer.encoding import thinking_variables
from .generating import MIN_TEMPERATURE
from .stop_strings import StopCutter


try:
    from fastapi import FastAPI, HTTPException
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from transformers.cli.serve import ReasoningMode, Serve
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager
except ImportError as error:
    raise MissingExtraError(f"Serving needs FastAPI: {install_command('serve')}") from error

logger = logging.get_logger(__name__)

# transformers compares each stop string with the whole vocabulary: 1,000 of them take 20 seconds.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 64
# Maximum number of bytes of a request in addition to the prompt.
_MAX_OTHER_BYTES = 2**16
# Fields of OpenAI's API that would change an answer, and that the server ignores, with their values that ask for
# nothing. All other fields take effect, or only keep records, such as `user`.
_NEVER_HONOURED = (
    *("access_programs", "audio", "background_options", "context_management", "conversation", "image"),
    *("max_tool_calls", "moderation", "prediction", "previous_response_id", "reasoning_effort", "web_search_options"),
)
_IGNORED_FIELDS: dict[str, tuple[Any, ...]] = dict.fromkeys(_NEVER_HONOURED, ()) | {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
# The added fields take effect at other addresses.
_IGNORED_AT = {
    "/v1/chat/completions": _IGNORED_FIELDS,
    "/v1/completions": _IGNORED_FIELDS | {"logit_bias": ({},)},
    "/v1/responses": _IGNORED_FIELDS | {"prompt": ()},
}
# Names of the arguments of `apply_chat_template`. Other names in a request are variables of the template.
_RENDERING_ARGUMENTS = {
    name
    for name, parameter in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
}

# Whether the model generates the answer to the current request, so that all fields have been read.
_is_generating: ContextVar[bool] = ContextVar("is_generating", default=False)


def end_with_stdin() -> None:
    """End this process, as after SIGTERM, when its standard input ends."""

    def wait() -> None:
        # `sys.stdin` would hold a lock, on which Python fails if this process ends otherwise.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def check_ports(host: str, ports: list[int]) -> None:
    """Raise `ValueError` for a port that cannot be used, before models are loaded."""
    with ExitStack() as listeners:
        for port in ports:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = listeners.enter_context(socket.socket(family))
            # The connections of an earlier server may still be closing.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"Port {port} of {host} cannot be used: {error}. Choose another one with --port (with --compare, "
                    "the second model gets the next one) or, for the chat page, --web_port."
                ) from None


def announce(name: str, url: str) -> None:
    """
    Print one line when the server answers. Hide its lines per start and request, unless `--log_level info` or `debug`
    is on the command line.
    """

    def is_shown(record: std_logging.LogRecord) -> bool:
        if "running on" in str(record.msg):
            # Two servers may print at the same time: write the line break with the line.
            print(f"Serving {name} at {url} (Ctrl+C stops it)\n", end="", flush=True)
        return record.levelno >= std_logging.WARNING or not is_quiet()

    # NOTE: transformers' server sets uvicorn's log level to `info`.
    for logger_name in ("uvicorn.error", "uvicorn.access"):
        std_logging.getLogger(logger_name).addFilter(is_shown)


def adapt_server(name: str) -> None:
    """Prepare transformers' server in this process to serve the model `name`, and no other."""
    # NOTE: the server looks up the class that config.json names in its own reference to the module `transformers`.
    # This is not the module in `sys.modules`, because transformers replaces that one during its own import.
    model_manager.transformers.MiniMindForCausalLM = MiniMindForCausalLM
    # NOTE: the server lists the models in the Hub's cache, and fails without a cache. Clients request this list to
    # find a model, so return only the served one.
    served = {"id": name, "object": "model", "owned_by": "hf_pretrain", "created": int(time.time())}
    ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: [served])
    # NOTE: the server has no limits, and no options to set any.
    server.build_server = partial(_build_guarded, server.build_server, name)
    for manager in (GenerateManager, CBGenerateManager):
        for method in ("generate_streaming", "generate_non_streaming"):
            # Wrap all four paths: with and without continuous batching, streaming or not.
            setattr(manager, method, _bounded(getattr(manager, method)))
    BaseHandler._build_generation_config = _sampling(BaseHandler._build_generation_config)


def _build_guarded(
    build: Callable[..., FastAPI], name: str, manager: ModelManager, *args: Any, **kwargs: Any
) -> FastAPI:
    """Return transformers' app behind a [`RequestGuard`]. The model must be loaded already."""
    # The recipe preloads the model, and the server never loads a second one.
    (loaded,) = manager.loaded_models.values()
    # A prompt that fits into the positions has at most this many bytes per position.
    longest = max(len(token.encode()) for token in loaded.processor.get_vocab())
    # JSON usually writes a byte of text as at most two bytes.
    max_bytes = 2 * longest * loaded.model.config.max_position_embeddings + _MAX_OTHER_BYTES
    app = build(manager, *args, **kwargs)
    app.add_middleware(RequestGuard, name=name, max_bytes=max_bytes)
    # The server reads most fields unchecked. These are the errors that wrong ones raise.
    for kind in (ValueError, TypeError, LookupError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    return app


def _refuse(_: Request, error: Exception) -> JSONResponse:
    """
    Return the response to a request whose fields raise an error. Without it, the client would not learn the reason.

    Any other error becomes the server's general response 500, and stands in its log.
    """
    # `generate` checks the settings of a request, and raises ValueError for wrong ones.
    if _is_generating.get() and not isinstance(error, ValueError):
        raise error
    logger.warning("A request was refused.", exc_info=error)
    return JSONResponse({"detail": f"The request cannot be answered: {type(error).__name__}: {error}"}, 400)


def template_kwargs(text: str | None, reasoning: ReasoningMode) -> dict[str, Any]:
    """
    Return the variables of the chat template that the flags of the server set.

    Args:
        text (`str`, *optional*): JSON of `--chat_template_kwargs`.
        reasoning (`ReasoningMode`): `--reasoning`, which takes precedence.

    Raises:
        `ValueError`: if `text` is not a JSON object.
    """
    try:
        kwargs = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"--chat_template_kwargs {text!r} is not JSON: {error}.") from None
    if not isinstance(kwargs, dict):
        raise UserError(f'--chat_template_kwargs {text!r} must be a JSON object, e.g. {{"enable_thinking": false}}.')
    return kwargs | thinking_variables({ReasoningMode.ON: True, ReasoningMode.OFF: False}.get(reasoning))


def _bounded(generate: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wrap a method that generates: refuse prompts longer than the model's positions, and limit the answer to the rest.
    """

    @wraps(generate)
    def bounded(
        self: Any,
        model: PreTrainedModel,
        processor: Any,
        inputs: Any,
        config: GenerationConfig,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Continuous batching passes lists, the other path tensors with one row.
        ids = inputs["input_ids"]
        num_tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
        num_left = model.config.max_position_embeddings - num_tokens
        if num_left < 1:
            raise HTTPException(
                400,
                f"The prompt has {num_tokens:,} tokens, and the model has {model.config.max_position_embeddings:,} "
                "positions for prompt and answer. Shorten the prompt.",
            )
        _check_stop_strings(config.stop_strings)
        # Without this limit, transformers' default or the number in a request could run past the rotary table, which
        # raises.
        config.max_new_tokens = num_left if config.max_new_tokens is None else min(config.max_new_tokens, num_left)
        _is_generating.set(True)
        return generate(self, model, processor, inputs, config, *args, **kwargs)

    return bounded


def _sampling(build: Callable[..., GenerationConfig]) -> Callable[..., GenerationConfig]:
    """Wrap the method that builds the settings of a request, so that a temperature has an effect."""

    @wraps(build)
    def sampling(self: BaseHandler, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        config = build(self, body, *args, **kwargs)
        # NOTE: the server takes the temperature of a request, but samples only if the model's own config says so.
        if "do_sample" not in json.loads(body.get("generation_config") or "{}"):
            config.do_sample = bool(config.do_sample or config.temperature)
        # The server itself knows only 0.
        if config.temperature is not None and 0 <= config.temperature < MIN_TEMPERATURE:
            config.do_sample = False
        return config

    return sampling


def _check_stop_strings(given: Any) -> None:
    """Refuse stop strings that are too many, too long, or not text."""
    strings = [given] if isinstance(given, str) else given or []
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise HTTPException(400, f"stop: {given!r:.100} must be text, or a list of text.")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_CHARS for string in strings):
        raise HTTPException(
            400,
            f"stop: at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters are allowed; there are "
            f"{len(strings)}.",
        )


def _check_generation_config(text: Any) -> None:
    """Refuse a request's `generation_config` that asks for many answers at once, which could fill the memory."""
    try:
        config = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"generation_config is not JSON: {error}") from error
    for name in ("num_beams", "num_return_sequences"):
        if isinstance(config, dict) and config.get(name) not in (None, 1):
            raise HTTPException(400, f"{name} {config[name]!r:.100} is refused: a request gets one answer.")


def _drop_ignored(request: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a request without the fields that ask for nothing. Refuse fields that the server would ignore."""
    # Some clients send all fields, with null for the absent ones. OpenAI's API gives no stream unless asked for one.
    fields = {"stream": False} | {name: value for name, value in request.items() if value is not None}
    if fields.get("tool_choice") == "none":
        for name in ("tool_choice", "tools"):
            fields.pop(name, None)
    for name, neutral in _IGNORED_AT[path].items():
        if name not in fields:
            continue
        value = fields.pop(name)
        # In Python, `0 == False`, but `logprobs: 0` asks for the probability of each token.
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
            raise HTTPException(400, f"{name}: {json.dumps(value):.100} is not supported. Leave it out.")
    # transformers fails on empty ones.
    return {
        name: value for name, value in fields.items() if value not in ({}, []) or name not in ("stop", "logit_bias")
    }


class RequestGuard:
    """
    ASGI middleware that refuses requests by their headers, size and fields.

    Args:
        app (`ASGIApp`): the application that gets all other requests.
        name (`str`): the model that is served.
        max_bytes (`int`): the largest size of a body.
    """

    def __init__(self, app: ASGIApp, *, name: str, max_bytes: int):
        self.app = app
        self.name = name
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # GET requests change nothing and have no body.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(receive)
            self._check_headers(Headers(scope=scope))
            request = self._check_fields(body)
            if scope["path"] in _IGNORED_AT:
                request = _drop_ignored(request, scope["path"])
                _check_stop_strings(request.get("stop"))
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code)(scope, receive, send)
            return
        # The check has consumed the body, so replay it to the application.
        body = json.dumps(request).encode()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            # Later calls wait for the client to disconnect, as the application expects.
            return messages.pop() if messages else await receive()

        if stops := request.get("stop"):
            send = StopCutter(send, [stops] if isinstance(stops, str) else stops)
        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes:
        """
        Return the body. If it is too long, read it to its end without keeping it, because clients read the response
        only after they have sent everything.
        """
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            # If the server answered earlier, the client would see a broken connection instead of the reason.
            if size <= self.max_bytes:
                parts.append(part)
        if size > self.max_bytes:
            raise HTTPException(
                400, f"The request has {size:,} bytes. The model's positions hold {self.max_bytes:,} at most."
            )
        return b"".join(parts)

    def _check_headers(self, headers: Headers) -> None:
        """Refuse requests that a web page of another origin may have sent."""
        # Only browsers send Origin, with the requests of web pages.
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise HTTPException(403, f"A web page of {origin} may not use this server.")
        # Without the server's permission, a browser sends no JSON to another origin. This server does not permit it.
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "Send JSON, with the header Content-Type: application/json.")

    def _check_fields(self, body: bytes) -> dict[str, Any]:
        """Return the fields of a request. Refuse requests for another model, or with arguments of the rendering."""
        try:
            request = json.loads(body) if body else {}
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"The body is not JSON: {error}") from error
        if not isinstance(request, dict):
            raise HTTPException(400, "The body is not a JSON object.")
        if request.get("model") not in (None, self.name):
            raise HTTPException(400, f"This server serves {self.name} only, not {request['model']!r:.100}.")
        kwargs = request.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise HTTPException(400, "chat_template_kwargs must be an object.")
        if taken := kwargs.keys() & _RENDERING_ARGUMENTS:
            raise HTTPException(
                400,
                f"chat_template_kwargs may hold variables of the model's template, not {', '.join(sorted(taken))}.",
            )
        _check_generation_config(request.get("generation_config"))
        return request


__all__ = [
    "MAX_STOP_CHARS",
    "MAX_STOP_STRINGS",
    "ReasoningMode",
    "RequestGuard",
    "Serve",
    "adapt_server",
    "announce",
    "check_ports",
    "end_with_stdin",
    "template_kwargs",
]
