"""The answers of the server: their texts, which end before stop strings, and their forms in OpenAI's API."""

import json
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig, PreTrainedTokenizerFast


# As some response templates on the Hub name the reasoning.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass
class Answer:
    """
    An answer that grows token by token, and ends before the first of its stop strings.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): decodes the tokens.
        prompt (`list[int]`): the token ids of the prompt.
        config (`GenerationConfig`): the length of the answer and the sampling.
        seed (`int`, *optional*): seed of the random numbers.
        stops (`list[str]`): the stop strings.
        has_special_tokens (`bool`): whether the text contains special tokens.

    Attributes:
        tokens (`list[int]`): the tokens of the answer, the stop token included.
        has_stopped (`bool`): whether a stop string has ended the answer.
    """

    tokenizer: PreTrainedTokenizerFast
    prompt: list[int]
    config: GenerationConfig
    _: KW_ONLY
    seed: int | None
    stops: list[str]
    has_special_tokens: bool
    tokens: list[int] = field(default_factory=list, init=False)
    has_stopped: bool = field(default=False, init=False)

    def __post_init__(self):
        self._decoder, self._held = DecodeStream(skip_special_tokens=not self.has_special_tokens), ""

    @property
    def finish_reason(self) -> str:
        is_full = not self.has_stopped and len(self.tokens) >= self.config.max_new_tokens
        return "length" if is_full else "stop"

    @property
    def usage(self) -> dict[str, int]:
        lengths = len(self.tokens), len(self.prompt)
        return {"completion_tokens": lengths[0], "prompt_tokens": lengths[1], "total_tokens": sum(lengths)}

    def add(self, token: int) -> str:
        """Add a token, and return the new text. Hold back what may be the beginning of a stop string."""
        self.tokens.append(token)
        text = self._held + (self._decoder.step(self.tokenizer.backend_tokenizer, token) or "")
        if (shown := self._cut(text)) != text:
            self._held, self.has_stopped = "", True
            return shown
        beginnings = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        num_shown = len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)
        self._held = text[num_shown:]
        return text[:num_shown]

    def rest(self) -> str:
        """Return the text that is still held back at the end of the answer."""
        return self._held

    def whole(self) -> str:
        """Return the whole text."""
        return self._cut(self.tokenizer.decode(self.tokens, skip_special_tokens=not self.has_special_tokens))

    def _cut(self, text: str) -> str:
        return text[: min((text.find(stop) for stop in self.stops if stop in text), default=None)]


class CompletionForm:
    """
    The form of the answers of `/v1/completions`.

    Args:
        request_id (`str`): the id of the request.
        model (`str`): the name of the model.
    """

    kind, chunk_kind = {"object": "text_completion"}, {"object": "text_completion"}
    has_special_tokens = False

    def __init__(self, request_id: str, model: str):
        self.request_id, self.model = request_id, model
        # The choices of a stream before its first token.
        self.opening: list[dict[str, Any]] = []

    def fill(self, choice: dict[str, Any], kind: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return a whole answer, or an event of a stream, with this choice."""
        head = {"id": self.request_id, "choices": [choice], "created": int(time.time()), "model": self.model}
        return head | kind | more

    def add(self, text: str) -> list[dict[str, Any]]:
        """Return the choices of a stream that a new text adds."""
        return [{"index": 0, "text": text}]

    def ending(self, reason: str) -> list[dict[str, Any]]:
        """Return the choices of a stream after its last token. The last one says why the answer has ended."""
        return [{"finish_reason": reason, "index": 0, "text": ""}]

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """Return the choice of an answer without a stream."""
        return {"finish_reason": reason, "index": 0, "text": text}


class ChatForm(CompletionForm):
    """
    The form of the answers of `/v1/chat/completions`: reasoning, content and tool calls.

    Args:
        request_id (`str`), model (`str`): as for [`CompletionForm`].
        parser (`ResponseParser` of transformers, *optional*): finds the parts. Without it, the whole text is content.
    """

    kind = {"object": "chat.completion"}
    chunk_kind = {"object": "chat.completion.chunk", "system_fingerprint": ""}

    def __init__(self, request_id: str, model: str, parser: Any = None):
        super().__init__(request_id, model)
        self.parser, self.num_calls = parser, 0
        # The parser needs them.
        self.has_special_tokens = parser is not None
        self.opening = [_piece(role="assistant"), *self._read([] if parser is None else parser.initial_events)]

    def add(self, text: str) -> list[dict[str, Any]]:
        return [_piece(content=text)] if self.parser is None else self._read(self.parser.feed(text))

    def ending(self, reason: str) -> list[dict[str, Any]]:
        pieces = []
        if self.parser is not None:
            # The parser refuses an answer that ends within a tool call.
            with suppress(ValueError, RuntimeError):
                pieces = self._read(self.parser.finalize()[1])
        return [*pieces, _piece() | {"finish_reason": "tool_calls" if self.num_calls else reason}]

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        parts: dict[str, Any] = {"content": text}
        if self.parser is not None:
            self.parser.feed(text)
            parts, _ = self.parser.finalize()
        message = {"content": parts.get("content", ""), "role": "assistant"}
        if parts.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in parts["tool_calls"]]
        reasoning = [parts[name] for name in _REASONING if parts.get(name) is not None]
        message |= {"reasoning_content": reasoning[0]} if reasoning else {}
        return {"finish_reason": "tool_calls" if self.num_calls else reason, "index": 0, "message": message}

    def _read(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the choices of a stream that events of the parser make."""
        choices = []
        for event in events:
            name = "reasoning_content" if event.get("field") in _REASONING else event.get("field")
            # A tool call comes as dirty text first, and as a value at its end.
            if event["type"] == "region_chunk" and not event.get("dirty") and event.get("text"):
                choices += [_piece(**{name: event["text"]})] if name in ("reasoning_content", "content") else []
            elif event["type"] == "region_close" and name == "tool_calls":
                choices.append(_piece(tool_calls=[{"index": self.num_calls} | self._call(event["value"])]))
        return choices

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the next tool call, with its arguments as text."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        number, self.num_calls = self.num_calls, self.num_calls + 1
        function = {"arguments": text, "name": name}
        return {"id": f"{self.request_id}_tool_call_{number}", "function": function, "type": "function"}


def _piece(**delta: Any) -> dict[str, Any]:
    """Return a choice of a streamed chat."""
    return {"delta": delta, "index": 0}
