"""
llama.cpp as the engine of answers on a CPU: several times as fast as `generate` of transformers.

The weights go into a GGUF file in float16, and llama.cpp's server runs it in a process of its own. Only token ids go
in and out: prompts are those of the tokenizer and its chat template, whatever llama.cpp knows about them.
"""

import copy
import itertools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..model.modeling_minimind import MiniMindForCausalLM
from ..runtime.errors import UserError
from ..runtime.signals import SignalListener
from ..weights.exporting import choose_format
from ..weights.gguf import id_text, write_gguf


_PROCESS = Path(__file__).with_name("llama_cpp_process.py")
# Bytes of keys and values, which llama.cpp allocates at once: for all sequences, and at most for a single one. The
# second limits the positions of large models.
_CACHE_BYTES, _SEQUENCE_BYTES = 2**29, 2**31
# Answers at once in `generate` and `serve`.
NUM_SEQUENCES = 16
# The largest difference of a log-probability from that of transformers. Rounding to float16 gives about a tenth of it.
_TOLERANCE = 0.05
# Fields of a generation config that are read here, or change no answer.
_KNOWN_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "do_sample"}
_KNOWN_FIELDS |= {"temperature", "top_k", "top_p", "repetition_penalty", "sequence_bias", "stop_strings", "use_cache"}
_KNOWN_FIELDS |= {"transformers_version", "_from_model_config", "output_attentions", "output_hidden_states"}


class EngineEnded(UserError, ConnectionError):
    """llama.cpp has ended, or has broken off an answer."""


class _Room:
    """The positions of the cache. Who finds too few waits until others leave theirs."""

    def __init__(self, size: int):
        self.size = self.free = size
        self._turn, self._changed = threading.Lock(), threading.Condition()

    @contextmanager
    def taken(self, number: int) -> Iterator[None]:
        number = min(number, self.size)
        # Who comes first is served first, also if it needs more than the others.
        with self._turn, self._changed:
            self._changed.wait_for(lambda: number <= self.free)
            self.free -= number
        try:
            yield
        finally:
            with self._changed:
                self.free += number
                self._changed.notify_all()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    # Without it, the process would stay in the table of processes.
    process.wait()


class LlamaCppModel:
    """
    A model that generates with llama.cpp, and has what [`~inference.terminal_chat.Chat`] and
    [`~inference.batch_answers.write_answers`] use of a `PreTrainedModel`.

    Args:
        model ([`MiniMindForCausalLM`]): the model, in eval mode. It is not needed any more afterwards.
        num_sequences (`int`, defaults to 1): answers at once. Others wait for their end.

    Attributes:
        config ([`MiniMindConfig`]): that of the model, with the positions that the cache has room for.

    Raises:
        `UserError`: if llama.cpp is not installed, cannot hold or start the model, or computes other logits, or if the
            generation config has fields that only transformers knows.
        `OSError`: if the disk for temporary files refuses the weights.
    """

    device = torch.device("cpu")

    def __init__(self, model: MiniMindForCausalLM, *, num_sequences: int = 1):
        if find_spec("xllamacpp") is None:
            raise UserError("llama.cpp is not installed; pip install xllamacpp.")
        choose_format(model.config, "gguf", dtype="float16")
        self.config, self.generation_config = copy.deepcopy(model.config), model.generation_config
        self.name_or_path = model.name_or_path
        if unknown := model.generation_config.to_diff_dict().keys() - _KNOWN_FIELDS:
            raise UserError(f"llama.cpp does not know {', '.join(sorted(unknown))} of the generation config.")
        # Bytes of keys and values in float16.
        position = 4 * self.config.num_hidden_layers * self.config.num_key_value_heads * self.config.head_dim
        length = min(self.config.max_position_embeddings, _SEQUENCE_BYTES // position)
        self.config.max_position_embeddings = length
        self._num_sequences = num_sequences
        self._room = _Room(max(length, min(num_sequences * length, _CACHE_BYTES // position)))
        numbers = (self._room.size, num_sequences, torch.get_num_threads())
        # Other programs of this machine, and web pages, do not know the key.
        self._key = secrets.token_hex()
        listener = SignalListener()
        # A signal that ended this process here would leave the file behind.
        with listener.listening(), TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            path = write_gguf(model, Path(directory), name="MiniMind", tokenizer="ids", dtype="float16")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROCESS), str(path), *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"LLAMA_CPP_KEY": self._key},
            )
            self._stop = weakref.finalize(self, _end, self._process)
            assert self._process.stdout is not None
            self._address = next((line.strip() for line in self._process.stdout if line.startswith("http")), None)
        if listener.number:
            signal.raise_signal(listener.number)
        if self._address is None:
            raise UserError(f"llama.cpp did not start: its process ended with status {self._process.wait()}.")
        self._check(model)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """
        Continue prompts as `generate` of transformers does with the same arguments, except for the random numbers.
        Several threads may generate at once.

        Args:
            input_ids, attention_mask (`torch.LongTensor` of shape `(batch_size, seq_len)`): the prompts, padded on the
                left; with a `streamer` a single one.
            generation_config (`GenerationConfig`, *optional*), options: the length of the answers and the sampling; by
                default those of the model.

        Returns:
            `torch.LongTensor` of shape `(batch_size, seq_len + num_new_tokens)`, padded on the right.

        Raises:
            `EngineEnded`: if llama.cpp ends before the answers do. A streamer has got their beginning.
        """
        config = copy.deepcopy(generation_config or self.generation_config)
        config.update(**options)
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        answers: list[list[int]] = [[]]
        if streamer is not None:
            streamer.put(input_ids)
            for token in self._tokens(prompts[0], seeds[0], config, is_stream=True):
                answers[0].append(token)
                streamer.put(torch.tensor([token]))
            streamer.end()
        else:
            with ThreadPoolExecutor(NUM_SEQUENCES) as pool:
                try:
                    runs = pool.map(lambda ids, seed: [*self._tokens(ids, seed, config)], prompts, seeds)
                    answers = list(runs)
                except KeyboardInterrupt:
                    # The threads end with the process.
                    self._stop()
                    raise
        width = max(map(len, answers))
        padded = [answer + [config.pad_token_id or 0] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long)], dim=1)

    def _tokens(
        self, prompt: list[int], seed: int, config: GenerationConfig, *, is_stream: bool = False
    ) -> Iterator[int]:
        """Yield the tokens of an answer, the stop token included. A stream ends with the iterator."""
        length = config.max_new_tokens or self.config.max_position_embeddings - len(prompt)
        options: dict[str, Any] = {"n_predict": length, "seed": seed}
        # The rounding depends on what the cache holds from other answers.
        options["cache_prompt"] = self._num_sequences == 1
        # The order of transformers, whose penalty sees the whole text.
        options |= {"samplers": ["penalties", "temperature", "top_k", "top_p"]}
        options |= {"repeat_last_n": self.config.max_position_embeddings}
        given = {"temperature": config.temperature if config.do_sample else 0.0, "top_k": config.top_k}
        given |= {"top_p": config.top_p, "repeat_penalty": config.repetition_penalty}
        given["logit_bias"] = [[ids[0], bias] for ids, bias in (config.sequence_bias or {}).items()]
        # The defaults of transformers.
        default = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repeat_penalty": 1.0}
        options |= default | {name: value for name, value in given.items() if value is not None}
        stop = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        options["stop"] = [id_text(token) for token in stop if token is not None]
        options |= {"stream": is_stream, "return_tokens": True}
        with self._room.taken(len(prompt) + length):
            yield from itertools.chain.from_iterable(c.get("tokens", ()) for c in self._post(prompt=prompt, **options))

    def _post(self, **content: Any) -> Iterator[dict[str, Any]]:
        """Yield the parts of the server's response; the whole response if it is no stream."""
        assert self._address is not None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection = HTTPConnection(self._address.removeprefix("http://"))
        part: dict[str, Any] = {}
        try:
            connection.request("POST", "/completion", json.dumps(content), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama.cpp refused a request: {response.read().decode()}")
            for line in response:
                if line.startswith((b"data: {", b"{")):
                    part = json.loads(line.removeprefix(b"data: "))
                    yield part
        except (OSError, HTTPException, ValueError) as error:
            # A line that breaks off is no JSON.
            part = {"error": repr(error)}
        finally:
            connection.close()
        # NOTE: `http.client` takes the end of a connection for the end of the response.
        if not part.get("stop"):
            # The process may still be ending.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self.check_process()
            raise EngineEnded(f"llama.cpp broke off an answer: {part}. Start this command again.")

    def check_process(self) -> None:
        """Raise `EngineEnded` if llama.cpp's process has ended."""
        if (status := self._process.poll()) is not None:
            advice = "Start this command again. If memory has run out (status -9), use a smaller model."
            raise EngineEnded(f"llama.cpp has ended with status {status}. {advice}")

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        """Compare the probabilities of the next token with those of the model."""
        ids = torch.arange(min(256, self.config.max_position_embeddings - 1)) % self.config.vocab_size
        expected = model(ids[None].to(model.device)).logits[0, -1].float().log_softmax(-1)
        (first, *_) = self._post(prompt=ids.tolist(), n_predict=1, temperature=0.0, n_probs=10, stream=True)
        found = first["completion_probabilities"][0]["top_logprobs"]
        # JSON has no NaN.
        ours = [math.nan if entry["logprob"] is None else entry["logprob"] for entry in found]
        difference = (expected[[entry["id"] for entry in found]] - torch.tensor(ours)).abs().max().item()
        # NaN is not smaller, either.
        if not difference <= _TOLERANCE:
            raise UserError(f"llama.cpp computes other probabilities of tokens: they differ by {difference:.2g} nats.")
