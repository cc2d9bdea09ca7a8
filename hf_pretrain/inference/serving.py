"""
The OpenAI-compatible server of one model: its addresses, over an [`~inference.engine.Engine`].

Requests may name any model: the served one answers. `open_thinking`, as MiniMind's clients send it, switches the
reasoning. The prompt is encoded as in training.
"""

import copy
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError, needing_extra
from ..tokenizer.control_tokens import encode_documents, encode_prompt
from .answers import Answer, ChatForm, CompletionForm
from .engine import Engine
from .guards import MISTAKES, HostGuard, refuse
from .inference_arguments import load_engine
from .llama_cpp import EngineEnded
from .server_requests import ChatFields, CompletionFields, read_fields


with needing_extra("serve", "Serving needs FastAPI"):
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect

# Tokens of an answer without a limit.
_MAX_NEW_TOKENS = 1024


def check_ports(host: str, ports: list[int]) -> None:
    """Raise `UserError` for a port that cannot be used, or is needed twice, before models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as listeners:
        for port in ports:
            try:
                listeners.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                raise UserError(f"Port {port} of {host} cannot be used: {error}. Choose another port.") from None


class Endpoints:
    """
    The addresses of a server.

    Args:
        name (`str`): the name of the model in answers.
        engine ([`Engine`]): generates.
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the model.
        thinking (`bool`, *optional*): whether the model reasons where a request leaves it open; by default the chat
            template decides.
    """

    def __init__(self, name: str, engine: Engine, tokenizer: PreTrainedTokenizerFast, *, thinking: bool | None = None):
        self.name, self.engine, self.tokenizer, self.thinking = name, engine, tokenizer, thinking

    def make_app(self, hosts: list[str]) -> FastAPI:
        """Return the application, which answers under `hosts`, the names of this machine."""
        # Tools and tool calls are read unchecked.
        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ClientDisconnect, *MISTAKES, Exception), refuse)
        app = FastAPI(
            openapi_url=None,
            middleware=[Middleware(HostGuard, hosts=hosts)],
            exception_handlers=handlers | {404: self._refuse_address},
        )
        app.get("/health")(self.report_health)
        app.get("/v1/models")(self.list_models)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        return app

    @staticmethod
    def _refuse_address(request: Request, error: Exception) -> JSONResponse:
        known = "/v1/chat/completions and /v1/completions"
        return refuse(request, HTTPException(404, f"This server answers {known}, not {request.url.path:.100}."))

    async def report_health(self) -> dict[str, Any]:
        self.engine.check()
        return {"status": "ok"}

    async def list_models(self) -> dict[str, Any]:
        """List the served model. Clients look it up here."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0, "owned_by": "local"}]}

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        fields, parser = await read_fields(request, ChatFields), None
        thinking = self.thinking if fields.thinking is None else fields.thinking
        messages, tools = [message.for_template() for message in fields.messages], fields.tools or None
        prompt = encode_prompt(self.tokenizer, messages, tools, thinking)
        if self.tokenizer.response_template is not None:
            # The prompt may already open the reasoning.
            parser = self.tokenizer.get_response_parser(prefix=self.tokenizer.decode(prompt), tools=tools)
        return await self._respond(fields, prompt, ChatForm(_request_id(request), self.name, parser))

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        fields = await read_fields(request, CompletionFields)
        # A document begins with bos. Leave out its eos, which would end it.
        prompt = encode_documents([fields.prompt], self.tokenizer)[0][:-1]
        return await self._respond(fields, prompt, CompletionForm(_request_id(request), self.name))

    async def _respond(
        self, fields: ChatFields | CompletionFields, prompt: list[int], form: CompletionForm
    ) -> Response:
        """Return an answer, whole or as a stream."""
        config, options = self._make_config(fields, len(prompt)), {"has_special_tokens": form.has_special_tokens}
        answer = Answer(self.tokenizer, prompt, config, seed=fields.seed, stops=fields.stop, **options)
        self.engine.check()
        headers = {"x-request-id": form.request_id}
        if fields.stream:
            return StreamingResponse(self._stream(answer, form), media_type="text/event-stream", headers=headers)
        await self.engine.complete(answer)
        choice = form.whole(answer.whole(), answer.finish_reason)
        return JSONResponse(form.fill(choice, form.kind, usage=answer.usage), headers=headers)

    def _make_config(self, fields: ChatFields | CompletionFields, num_tokens: int) -> GenerationConfig:
        """
        Return the length and the sampling that a request with a prompt of `num_tokens` asks for. The answer ends where
        the positions of the model do; raise `HTTPException` if the prompt takes all of them.
        """
        num_left = self.engine.num_positions - num_tokens
        if num_left < 1:
            raise HTTPException(
                400,
                f"The prompt has {num_tokens:,} tokens, and the model has {self.engine.num_positions:,} positions for "
                "prompt and answer. Shorten the prompt.",
            )
        config = copy.deepcopy(self.engine.model.generation_config)
        limit = fields.max_tokens or max(config.max_new_tokens or 0, _MAX_NEW_TOKENS)
        if isinstance(fields, ChatFields):
            limit = fields.max_completion_tokens or limit
            if fields.logit_bias:
                config.sequence_bias = {(int(token),): bias for token, bias in fields.logit_bias.items()}
        config.max_new_tokens = min(limit, num_left)
        if fields.temperature is not None:
            config.temperature, config.do_sample = fields.temperature, fields.temperature > 0
        if fields.top_p is not None:
            config.top_p = fields.top_p
        if fields.frequency_penalty:
            config.repetition_penalty = 1 + fields.frequency_penalty
        return config

    async def _stream(self, answer: Answer, form: CompletionForm) -> AsyncGenerator[bytes]:
        """Yield the events of a streamed answer. If the client leaves, the answer ends."""

        def event(choice: dict[str, Any], **more: Any) -> bytes:
            content = form.fill(choice, form.chunk_kind, **more)
            return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

        try:
            yield b"".join(map(event, form.opening))
            async with aclosing(self.engine.stream(answer)) as texts:
                async for text in texts:
                    yield b"".join(map(event, form.add(text) if text else []))
            *pieces, last = form.ending(answer.finish_reason)
            # As OpenAI's streams end, which some clients wait for.
            yield b"".join(map(event, pieces)) + event(last, usage=answer.usage) + b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: " + bytes(refuse(None, error).body) + b"\n\n"


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or str(uuid.uuid4())


class ModelServer:
    """
    A server in a thread of its own.

    Args:
        app (`FastAPI`): the application.
        engine ([`Engine`]): generates in it.
        host (`str`), port (`int`): where to listen.
    """

    def __init__(self, app: FastAPI, engine: Engine, *, host: str, port: int):
        self.engine = engine
        log_level = "warning" if is_quiet() else "info"
        self._server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level=log_level))
        # Not in the main thread: there, uvicorn would let SIGTERM wait for the end of all answers.
        self.thread = threading.Thread(target=self._server.run, daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise `EngineEnded` if the engine has ended, and `UserError` if the server has."""
        self.engine.check()
        if not self.thread.is_alive():
            raise UserError("The server has ended. Its message stands above.")

    def wait_for_start(self) -> None:
        """Wait until the server answers."""
        while not self._server.started:
            self.check()
            time.sleep(0.05)

    def wait_for_end(self) -> None:
        """Wait until Ctrl-C or a signal ends this process. If the engine ends, end the server and raise the error."""
        try:
            while True:
                self.check()
                time.sleep(0.5)
        except EngineEnded:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server. The clients of running answers have two seconds to get an error."""
        self._server.should_exit = True
        self.thread.join(2)
        self._server.force_exit = True


def serve_model(
    name: str,
    *,
    host: str,
    port: int,
    hosts: list[str],
    thinking: bool | None = None,
    seed: int | None = None,
    **options: Any,
) -> ModelServer:
    """
    Load a model, serve it in another thread, and return when the server answers.

    Args:
        name (`str`): a directory or Hub id, of an adapter, too; a GGUF file; a model of the package index.
        host (`str`), port (`int`): where to listen.
        hosts (`list[str]`): the names of this machine, for [`HostGuard`].
        thinking (`bool`, *optional*): as for [`Endpoints`].
        seed (`int`, *optional*): seed of the sampling.
        **options: for [`~inference.inference_arguments.load_engine`].
    """
    engine, tokenizer = load_engine(name, **options)
    if seed is not None:
        torch.manual_seed(seed)
    app = Endpoints(name, engine, tokenizer, thinking=thinking).make_app(hosts)
    server = ModelServer(app, engine, host=host, port=port)
    server.wait_for_start()
    print(f"Serving {name} at http://{host}:{port}/v1 (Ctrl+C stops it)", flush=True)
    return server
