"""
The engines of the server: they generate answers in threads, token by token. transformers generates on every device,
llama.cpp on a CPU.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from .answers import Answer
from .llama_cpp import NUM_SEQUENCES, LlamaCppModel


class Engine:
    """
    An engine that generates with transformers, one answer after the other.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode.
    """

    num_answers = 1

    def __init__(self, model: PreTrainedModel | LlamaCppModel):
        self.model = model
        self._threads = ThreadPoolExecutor(self.num_answers)

    @property
    def num_positions(self) -> int:
        """The number of tokens that a prompt and its answer may have together."""
        return self.model.config.max_position_embeddings

    def check(self) -> None:
        """Raise [`~inference.llama_cpp.EngineEnded`] if the engine is dead."""

    async def stream(self, answer: Answer) -> AsyncGenerator[str]:
        """Yield the new texts of an answer. If the generator is closed, the answer ends with its next token."""
        loop, texts, is_cancelled = asyncio.get_running_loop(), asyncio.Queue[str | None](), threading.Event()

        def send(text: str | None) -> None:
            loop.call_soon_threadsafe(texts.put_nowait, text)

        running = self._begin(answer, _Texts(answer, send, is_cancelled))
        running.add_done_callback(lambda _: None if is_cancelled.is_set() else send(None))
        try:
            while (text := await texts.get()) is not None:
                yield text
            # Raises what the thread has raised.
            running.result()
            yield answer.rest()
        finally:
            is_cancelled.set()
            running.cancel()

    async def complete(self, answer: Answer) -> None:
        """Generate a whole answer."""
        async for _ in self.stream(answer):
            pass

    def _begin(self, answer: Answer, streamer: BaseStreamer | None = None) -> Future[list[int]]:
        """Begin an answer in a thread, which returns its tokens unless they end early."""

        def generate() -> list[int]:
            if answer.seed is not None:
                torch.manual_seed(answer.seed)
            ids = torch.tensor([answer.prompt], device=self.model.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "streamer": streamer}
            with suppress(_Ended):
                output = self.model.generate(**inputs, generation_config=answer.config)
                return output[0, len(answer.prompt) :].tolist()
            return []

        return self._threads.submit(generate)


class LlamaCppEngine(Engine):
    """An engine that generates `NUM_SEQUENCES` answers at once with llama.cpp."""

    model: LlamaCppModel
    num_answers = NUM_SEQUENCES

    def check(self) -> None:
        self.model.check_process()

    async def complete(self, answer: Answer) -> None:
        if answer.stops:
            await super().complete(answer)
        else:
            # llama.cpp is faster without a stream.
            answer.tokens = await asyncio.wrap_future(self._begin(answer))


class _Ended(Exception):
    """An answer ends before its last token: with a stop string, or because nobody waits for the rest."""


class _Texts(BaseStreamer):
    """Streamer that adds new tokens to an answer, and sends their texts."""

    def __init__(self, answer: Answer, send: Callable[[str], None], is_cancelled: threading.Event):
        self.answer, self.send_text, self.is_cancelled = answer, send, is_cancelled

    def put(self, value: torch.Tensor) -> None:
        """Add a new token, `(1,)`. transformers calls this with the prompt first, `(1, seq_len)`."""
        for token in value.tolist() if value.dim() == 1 else []:
            self.send_text(self.answer.add(token))
        if self.answer.has_stopped or self.is_cancelled.is_set():
            raise _Ended

    def end(self) -> None:
        """The end of the thread ends the stream."""
