"""
transformers' own server, restricted to one model by an ASGI middleware. Before any work, [`RequestGuard`] refuses
requests that would keep the server busy or fill its memory:

| request | answer |
|---|---|
| to another address than `ROUTES`, such as `/load_model` or `/reset` | 404 |
| without the content type JSON, as pages of other origins may send them | 415 |
| with more than `MAX_BYTES` | 400 |
| with more tokens than the model has positions, or fields that raise an error while they are read | 400 |

Requests may name any model: the served one answers. `open_thinking`, as MiniMind's clients send it, switches the
reasoning.
"""

import json
import logging as std_logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError, needing_extra
from ..tokenizer.control_tokens import thinking_variables
from ..weights.models import extend_positions


with needing_extra("serve", "Serving needs FastAPI"):
    from fastapi import FastAPI, HTTPException
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager

logger = logging.get_logger(__name__)

MAX_BYTES = 2**20
# The addresses that answer.
ROUTES = ("/v1/chat/completions", "/v1/completions")
_SWITCHES = thinking_variables(True).keys()
_build_server = server.build_server


def check_ports(host: str, ports: list[int]) -> None:
    """Raise `UserError` for a port that cannot be used, or is needed twice, before models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as listeners:
        for port in ports:
            try:
                listeners.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                raise UserError(
                    f"Port {port} of {host} cannot be used: {error}. Choose another one with --port (with --compare, "
                    "the second model gets the next one) or, for the chat page, --web_port."
                ) from None


def serve_model(
    name: str, *, host: str, port: int, non_blocking: bool = False, rope_scaling: str | None = None, **options: Any
) -> Serve:
    """
    Load a model and serve it until the user stops it, or in another thread.

    Args:
        name (`str`): a directory or Hub id.
        host (`str`), port (`int`): where to listen.
        non_blocking (`bool`): return when the server has started in a thread.
        rope_scaling (`str`, *optional*): as for [`~weights.models.extend_positions`].
        **options: other arguments of transformers' `Serve`.
    """
    if is_quiet():
        # NOTE: transformers' server makes uvicorn log each start and request.
        std_logging.disable(std_logging.INFO)
    # NOTE: the server looks up the class that config.json names in its own reference to the module `transformers`.
    # This is not the module in `sys.modules`, because transformers replaces that one during its own import.
    load: Callable[..., Any] = MiniMindForCausalLM.from_pretrained
    if rope_scaling is not None:
        load = partial(load, config=extend_positions(MiniMindConfig.from_pretrained(name), rope_scaling))
    model_manager.transformers.MiniMindForCausalLM = SimpleNamespace(from_pretrained=load)
    # NOTE: the server has no limits, and no options to set any.
    server.build_server = partial(_build_guarded, name, f"http://{host}:{port}/v1")
    return Serve(name, host=host, port=port, non_blocking=non_blocking, log_level="warning", **options)


def stop_servers(servers: list[Serve]) -> None:
    """Stop servers that run in threads, without waiting for the end of their answers, which may be long."""
    for server in servers:
        server.server.force_exit = True
        server.kill_server()


def _build_guarded(name: str, url: str, manager: ModelManager, *args: Any, **kwargs: Any) -> FastAPI:
    """Return transformers' app behind a [`RequestGuard`]. The server has loaded the model before."""
    # NOTE: the server lists the models in the Hub's cache, and fails without a cache. Clients request this list to
    # find a model, so return only the served one.
    served = {"id": name, "object": "model", "owned_by": "hf_pretrain", "created": int(time.time())}
    manager.get_gen_models = lambda cache_dir=None: [served]
    (loaded,) = manager.loaded_models.values()
    config = loaded.model.generation_config
    # NOTE: the server takes the temperature of a request, but samples only if the model's own config says so. So let
    # the config say it, and let the guard set the temperature of requests without one.
    samples, config.do_sample = bool(config.do_sample), True
    app = _build_server(manager, *args, **kwargs)
    app.add_middleware(RequestGuard, samples=samples)
    # The server reads most fields unchecked. These are the errors that wrong ones raise.
    for kind in (ValueError, TypeError, LookupError, AttributeError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    print(f"Serving {name} at {url} (Ctrl+C stops it)", flush=True)
    return app


def _refuse(_: Request, error: Exception) -> JSONResponse:
    """Return the response to a request whose fields raise an error."""
    logger.warning("A request was refused.", exc_info=error)
    return JSONResponse({"detail": f"The request cannot be answered: {type(error).__name__}: {error}"}, 400)


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
        **more: Any,
    ) -> Any:
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
        return generate(self, model, processor, inputs, config, *args, **more)

    return bounded


GenerateManager.generate_streaming = _bounded(GenerateManager.generate_streaming)
GenerateManager.generate_non_streaming = _bounded(GenerateManager.generate_non_streaming)


class RequestGuard:
    """
    ASGI middleware that refuses requests by their address, headers, size and fields.

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
            body = await _read(receive)
            # Without the server's permission, a browser sends no JSON to another origin. This server permits nothing.
            if not Headers(scope=scope).get("content-type", "").lower().startswith("application/json"):
                raise HTTPException(415, "Send JSON, with the header Content-Type: application/json.")
            fields = self._check_fields(scope["path"], body)
        except HTTPException as error:
            await JSONResponse({"detail": error.detail}, error.status_code)(scope, receive, send)
            return
        # The checks have consumed the body, so replay it to the application.
        request: list[Message] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]

        async def replay() -> Message:
            # Later calls wait for the client to disconnect, as the application expects.
            return request.pop() if request else await receive()

        await self.app(scope, replay, send)

    def _check_fields(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the fields of a request without the empty ones."""
        if path not in ROUTES:
            raise HTTPException(404, f"This server answers {' and '.join(ROUTES)}, not {path:.100}.")
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"The body is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise HTTPException(400, "The body is not a JSON object.")
        # Some clients send all fields, with null for the absent ones. transformers fails on empty ones.
        fields = {name: value for name, value in content.items() if value not in (None, [], {})}
        variables = fields.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise HTTPException(400, f"chat_template_kwargs: {variables!r:.100} must be an object.")
        # MiniMind's clients send `open_thinking` at the top or among the variables. One of them suffices.
        asked = [source[name] for source in (variables, fields) for name in _SWITCHES & source.keys()]
        if not all(isinstance(value, bool) for value in asked):
            raise HTTPException(400, f"open_thinking: {json.dumps(asked):.100} must be true or false.")
        if asked:
            fields["chat_template_kwargs"] = variables | thinking_variables(any(asked))
        # Without a name, transformers takes the served model.
        fields = {name: value for name, value in fields.items() if name not in ("model", *_SWITCHES)}
        # OpenAI's API gives no stream unless asked for one.
        defaults = {"stream": False} | ({} if self.samples else {"temperature": 0})
        return defaults | fields


async def _read(receive: Receive) -> bytes:
    """Return the body. If it is too long, read it to its end without keeping it."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= MAX_BYTES:
            parts.append(part)
    if size > MAX_BYTES:
        raise HTTPException(400, f"The request has {size:,} bytes; {MAX_BYTES:,} are allowed.")
    return b"".join(parts)
