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
from contextlib import ExitStack
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerFast

from ..model.configuration_minimind import MiniMindConfig
from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.command_line import is_quiet
from ..runtime.errors import UserError, needing_extra
from ..runtime.package_models import find_gguf
from ..tokenizer.control_tokens import encode_documents, encode_prompt, set_stop_tokens
from ..weights.adapters import adapter_base
from ..weights.model_arguments import with_yarn
from .guards import MISTAKES, HostGuard, RequestGuard, refuse
from .inference_arguments import load_for_server, with_engine
from .llama_cpp import NUM_SEQUENCES, LlamaCppModel


with needing_extra("serve", "Serving needs FastAPI"):
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager

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
        rope_scaling (`str`, *optional*): as for [`~weights.model_arguments.with_yarn`].
        engine (`str`, *optional*): as for [`~inference.inference_arguments.with_engine`].
        **options: other arguments of transformers' `Serve`.
    """
    if is_quiet():
        # NOTE: transformers' server makes uvicorn log each start and request.
        std_logging.disable(std_logging.INFO)
    _bound_answers()
    # NOTE: the server looks up the class that config.json names in its own reference to the module `transformers`.
    # This is not the module in `sys.modules`, because transformers replaces that one during its own import.
    load: Callable[..., Any] = MiniMindForCausalLM.from_pretrained
    files = None
    if adapter_base(name) is not None or find_gguf(name) is not None:
        files, load = load_for_server(name, rope_scaling)
    elif rope_scaling is not None:
        load = partial(load, config=with_yarn(MiniMindConfig.from_pretrained(name), rope_scaling))

    def load_engine(*args: Any, **kwargs: Any) -> Any:
        return with_engine(load(*args, **kwargs).eval(), engine, num_sequences=NUM_SEQUENCES)

    model_manager.transformers.MiniMindForCausalLM = SimpleNamespace(from_pretrained=load_engine)
    # NOTE: the server has no limits, and no options to set any.
    server.build_server = partial(_build_guarded, name, f"http://{host}:{port}/v1", hosts)
    # Not in the main thread: there, uvicorn would let SIGTERM wait for the end of all answers.
    path = name if files is None else files.name
    serve = Serve(path, host=host, port=port, non_blocking=True, log_level="warning", **options)
    if files is not None:
        # The server has read them.
        files.cleanup()
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
    # The server reads tools and tool calls unchecked.
    for kind in (HTTPException, *MISTAKES, Exception):
        app.add_exception_handler(kind, refuse)
    print(f"Serving {name} at {url} (Ctrl+C stops it)", flush=True)
    return app


class _Threads:
    """Threads in place of the single one in which transformers' server generates."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(NUM_SEQUENCES)
        self.submit = self.pool.submit

    def async_submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self.pool, partial(function, *args, **kwargs))


_THREADS = _Threads()


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
        if isinstance(model, LlamaCppModel):
            # NOTE: transformers' server answers one request at a time.
            self.submit, self.async_submit = _THREADS.submit, _THREADS.async_submit
        # A longer answer would run past the rotary table, which raises.
        config.max_new_tokens = min(config.max_new_tokens or num_left, num_left)
        # transformers looks for stop strings with the tokenizer's own encoding.
        return generate(self, model, processor.original, inputs, config, *args, **more)

    return bounded


@cache
def _bound_answers() -> None:
    """Bound what all servers of this process generate, once."""
    GenerateManager.generate_streaming = _bounded(GenerateManager.generate_streaming)
    GenerateManager.generate_non_streaming = _bounded(GenerateManager.generate_non_streaming)
