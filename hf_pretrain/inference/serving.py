"""
transformers' own server, restricted to one model and behind two guards ([`~inference.guards`]). On a CPU, llama.cpp
generates in it.

Requests may name any model: the served one answers. `open_thinking`, as MiniMind's clients send it, switches the
reasoning. The prompt is encoded as in training.
"""

import asyncio
import copy
import logging as std_logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import BatchEncoding, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from ..loading.adapters import adapter_base
from ..loading.model_arguments import with_yarn
from ..loading.native import load_native_checkpoint
from ..model.configuration_minimind import MiniMindConfig
from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError, needing_extra
from ..runtime.names import is_gguf
from ..tokenizer.control_tokens import encode_documents, encode_prompt, set_stop_tokens
from .guards import MISTAKES, HostGuard, RequestGuard, refuse
from .inference_arguments import load_for_server, with_engine
from .llama_cpp import NUM_SEQUENCES, EngineEnded, LlamaCppModel


with needing_extra("serve", "Serving needs FastAPI"):
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager, response_events_to_chunks

_build_server = server.build_server


def check_ports(host: str, ports: list[int]) -> None:
    """Raise `UserError` for a port that cannot be used, or is needed twice, before models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as listeners:
        for port in ports:
            try:
                listeners.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                raise UserError(f"Port {port} of {host} cannot be used: {error}. Choose another port.") from None


def serve_model(
    name: str,
    *,
    host: str,
    port: int,
    hosts: list[str],
    rope_scaling: str | None = None,
    engine: str | None = None,
    **options: Any,
) -> Serve:
    """
    Load a model and serve it in another thread.

    Args:
        name (`str`): a directory or Hub id, of an adapter, too; a GGUF file; a model of the package index.
        host (`str`), port (`int`): where to listen.
        hosts (`list[str]`): the names of this machine, for [`HostGuard`].
        rope_scaling (`str`, *optional*): as for [`~loading.model_arguments.with_yarn`].
        engine (`str`, *optional*): as for [`~inference.inference_arguments.with_engine`].
        **options: other arguments of transformers' `Serve`.
    """
    if is_quiet():
        # NOTE: transformers' server makes uvicorn log each start and request.
        std_logging.disable(std_logging.INFO)
    GenerateManager.generate_streaming = _stream
    GenerateManager.generate_non_streaming = _answer
    # NOTE: the server looks up the class that config.json names in its own reference to the module `transformers`.
    # This is not the module in `sys.modules`, because transformers replaces that one during its own import.
    load: Callable[..., Any] = load_native_checkpoint
    files = None
    if adapter_base(name) is not None or is_gguf(name):
        files, load = load_for_server(name, rope_scaling)
    elif rope_scaling is not None:
        load = partial(load, config=with_yarn(MiniMindConfig.from_pretrained(name), rope_scaling))

    engines: list[Any] = []

    def load_engine(*args: Any, **kwargs: Any) -> Any:
        engines.append(with_engine(load(*args, **kwargs).eval(), engine, num_sequences=NUM_SEQUENCES))
        return engines[-1]

    model_manager.transformers.MiniMindForCausalLM = SimpleNamespace(from_pretrained=load_engine)
    # NOTE: the server has no limits, and no options to set any.
    server.build_server = partial(_build_guarded, name, f"http://{host}:{port}/v1", hosts)
    # Not in the main thread: there, uvicorn would let SIGTERM wait for the end of all answers.
    path = name if files is None else files.name
    serve = Serve(path, host=host, port=port, non_blocking=True, log_level="warning", **options)
    # The server itself loads a model of another class.
    serve.engine = engines[-1] if engines else None
    if files is not None:
        # The server has read them.
        files.cleanup()
    return serve


def wait_for_servers(servers: list[Serve]) -> None:
    """Wait until Ctrl-C or a signal ends this process. If llama.cpp ends, end the servers and raise `EngineEnded`."""
    try:
        while any(thread.name == "uvicorn-thread" for thread in threading.enumerate()):
            for server in servers:
                _check_engine(server.engine)
            time.sleep(0.5)
    except EngineEnded:
        for server in servers:
            # The clients of running answers get the error within its two seconds.
            server.kill_server()
            server.server.force_exit = True
        raise
    raise UserError("The server has ended. Its message stands above.")


def _check_engine(model: Any) -> None:
    """Raise `EngineEnded` if llama.cpp generates and has ended."""
    if isinstance(model, LlamaCppModel):
        model.check_process()


class _TrainedEncoding(PreTrainedTokenizerFast):
    """
    Tokenizer of the server that encodes prompts as training does: a text begins with bos, and no text becomes a
    control token. NOTE: the server itself calls the tokenizer, which must have this base class.
    """

    original: PreTrainedTokenizerFast

    def __call__(self, text: Any, **_: Any) -> BatchEncoding:  # type: ignore[override]
        # Leave out the eos, which would end the text.
        return _as_batch(encode_documents([text], self.original)[0][:-1])

    def parse_response(self, response: Any, *args: Any, **options: Any) -> Any:
        return super().parse_response(response.cut(self.decode(response.token_ids)), *args, **options)

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
    # NOTE: clients would see the directory of a model that `load_for_server` has prepared.
    manager.force_model, manager.loaded_models = name, {name: loaded}
    manager.process_model_name = lambda model: model
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

    def report_health(_: Request) -> JSONResponse:
        _check_engine(loaded.model)
        return JSONResponse({"status": "ok"})

    # Before the server's own.
    app.router.routes.insert(0, Route("/health", report_health))
    # The server reads tools and tool calls unchecked.
    for kind in (HTTPException, *MISTAKES, Exception):
        app.add_exception_handler(kind, refuse)
    print(f"Serving {name} at {url} (Ctrl+C stops it)", flush=True)
    return app


# NOTE: transformers' server generates in a single thread.
_THREADS = ThreadPoolExecutor(NUM_SEQUENCES)


class _Pieces(asyncio.Queue):
    """The pieces of an answer, and an error instead of the rest, which the reader gets as an exception."""

    def get_nowait(self) -> Any:
        piece = super().get_nowait()
        if isinstance(piece, Exception):
            raise piece
        return piece


class _Ended(Exception):
    """An answer has ended before its last token."""


class _Answer(BaseStreamer):
    """
    Streamer of an answer, which ends before the first of its stop strings. It sends the pieces of the answer to the
    server, and holds back a text that may be the beginning of a stop string.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): decodes the tokens.
        config (`GenerationConfig`): that of the request. The server asks it whether the answer has reached its limit.
        parser (`ResponseParser` of transformers, *optional*): finds the parts of the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: GenerationConfig, parser: Any = None):
        # The parser needs the special tokens.
        self.tokenizer, self.decoder = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=parser is None)
        self.config, self.parser = config, parser
        # NOTE: transformers looks for them in the texts of single tokens, so it misses letters of several ones.
        self.stops, config.stop_strings = config.stop_strings or [], None
        self.loop, self.queue = asyncio.get_running_loop(), _Pieces()
        self.token_ids: list[int] = []
        self.held, self.is_cancelled = "", False
        self.send([] if parser is None else response_events_to_chunks(parser.initial_events))

    def __len__(self) -> int:
        return len(self.token_ids)

    total_tokens = property(__len__)

    def cut(self, text: str) -> str:
        """Return a text up to the first stop string."""
        return text[: min((text.find(stop) for stop in self.stops if stop in text), default=None)]

    def generate(self, model: Any, inputs: BatchEncoding) -> None:
        """Let a model write the answer."""
        try:
            model.generate(**inputs, streamer=self, generation_config=self.config)
        except _Ended:
            self.end()

    def cancel(self) -> None:
        """End the answer with its next token, because the client has gone."""
        self.is_cancelled = True

    def put(self, value: torch.Tensor) -> None:
        """Send the text of a new token, `(1,)`. transformers calls this with the prompt first, `(1, seq_len)`."""
        if self.is_cancelled:
            raise _Ended
        if value.dim() > 1:
            return
        self.token_ids += value.tolist()
        text = self.held + (self.decoder.step(self.tokenizer, self.token_ids[-1]) or "")
        if (shown := self.cut(text)) != text:
            # It has not reached the limit.
            self.held, self.config.max_new_tokens = "", None
            self.show(shown)
            raise _Ended
        beginnings = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        num_shown = len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)
        self.held = text[num_shown:]
        self.show(text[:num_shown])

    def end(self) -> None:
        self.show(self.held)
        if self.parser is not None:
            # The parser refuses an answer that ends within a tool call.
            with suppress(ValueError, RuntimeError):
                self.send(response_events_to_chunks(self.parser.finalize()[1]))

    def show(self, text: str) -> None:
        if text:
            self.send([text] if self.parser is None else response_events_to_chunks(self.parser.feed(text)))

    def send(self, pieces: list[Any]) -> None:
        for piece in pieces:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)


def _prepare(manager: GenerateManager, model: Any, inputs: BatchEncoding, config: GenerationConfig) -> Any:
    """
    Refuse prompts longer than the model's positions, and limit the answer to the rest. Return the function that starts
    another one in a thread for answers.
    """
    num_tokens = inputs["input_ids"].shape[-1]
    num_left = model.config.max_position_embeddings - num_tokens
    if num_left < 1:
        raise HTTPException(
            400,
            f"The prompt has {num_tokens:,} tokens, and the model has {model.config.max_position_embeddings:,} "
            "positions for prompt and answer. Shorten the prompt.",
        )
    _check_engine(model)
    # A longer answer would run past the rotary table, which raises.
    config.max_new_tokens = min(config.max_new_tokens or num_left, num_left)
    return (_THREADS if isinstance(model, LlamaCppModel) else manager).submit


def _stream(
    self: Any, model: Any, processor: Any, inputs: Any, config: Any, request_id: str, response_parser: Any = None
) -> tuple[asyncio.Queue, _Answer]:
    """Begin a streamed answer. Return its pieces, which end with `None` or an error, and its streamer."""
    submit, answer = _prepare(self, model, inputs, config), _Answer(processor.original, config, response_parser)
    submit(answer.generate, model, inputs).add_done_callback(lambda done: answer.send([done.exception()]))
    return answer.queue, answer


async def _answer(self: Any, model: Any, processor: Any, inputs: Any, config: Any, request_id: str) -> Any:
    """Return the text of a whole answer, the length of its prompt, and its streamer, which has the tokens."""
    submit, answer = _prepare(self, model, inputs, config), _Answer(processor.original, config)
    if answer.stops:
        await asyncio.wrap_future(submit(answer.generate, model, inputs))
    else:
        # llama.cpp is faster without a stream.
        output = await asyncio.wrap_future(submit(model.generate, **inputs, generation_config=config))
        answer.token_ids = output[0, inputs["input_ids"].shape[-1] :].tolist()
    text = processor.decode(answer.token_ids, skip_special_tokens=True)
    return answer.cut(text), inputs["input_ids"].shape[-1], answer
