"""Generate text in the terminal: the settings of the sampling, the streamed text, its speed, and Ctrl-C."""

import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer
from transformers.utils.chat_parsing import ResponseParser

from ..runtime.errors import UserError


COMMON_HELP = """\
/temperature N  divide the logits by N; 0 always takes the most probable token
/help           show this help
/exit, /quit    leave"""

# Below this temperature, the most probable token has all the probability, and the divided logits could overflow.
MIN_TEMPERATURE = 1e-5


class Generator:
    """
    Generates one text after another, with a temperature that may change in between.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer.
        temperature (`float`): divisor of the logits; 0 always takes the most probable token.
        max_new_tokens (`int`): limit of one text. The positions that the prompt leaves are another limit.
        **generation_kwargs: other arguments of `generate`. Without sampling, `top_p` and `top_k` have no effect.

    Raises:
        `ValueError`: if `temperature` is negative or not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        temperature: float = 1.0,
        max_new_tokens: int = 512,
        **generation_kwargs: Any,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.generation_kwargs = max_new_tokens, generation_kwargs
        self.set_temperature(temperature)
        self.num_tokens, self.seconds = 0, 0.0

    @property
    def speed(self) -> str:
        """The length and the speed of the last text, the time of its prompt included."""
        per_second = self.num_tokens / self.seconds if self.seconds else 0.0
        return f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}, {per_second:.1f} tokens/s"

    def set_temperature(self, value: float | str) -> str:
        """Set the temperature, and return the reply to the user."""
        try:
            temperature = float(value)
        except ValueError:
            temperature = math.nan
        # Comparisons with NaN are false.
        if not 0 <= temperature < math.inf:
            raise UserError(f"The temperature {value!r} must be 0 or a positive number, e.g. 0.8.")
        self.temperature = temperature
        return f"temperature: {temperature:g}"

    def run(self, ids: list[int], streamer: "PartsStreamer") -> None:
        """
        Continue a prompt. Ctrl-C ends the text early.

        Args:
            ids (`list[int]`): token ids of the prompt.
            streamer ([`PartsStreamer`]): shows and collects the text.

        Raises:
            `ValueError`: if the prompt fills the model's positions.
        """
        # A position past the end of the rotary table would raise within `generate`.
        room = self.model.config.max_position_embeddings - len(ids)
        if room <= 0:
            raise UserError(
                f"The text so far has {len(ids)} tokens, and the model sees {len(ids) + room}: /reset it to go on."
            )
        options = self.generation_kwargs | {"do_sample": self.temperature >= MIN_TEMPERATURE}
        if options["do_sample"]:
            options["temperature"] = self.temperature
        else:
            # transformers warns about settings that have no effect.
            options = {name: value for name, value in options.items() if name not in ("top_p", "top_k")}
        input_ids = torch.tensor([ids], device=self.model.device)
        start = time.perf_counter()
        try:
            self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=streamer,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                max_new_tokens=min(room, self.max_new_tokens),
                **options,
            )
        except KeyboardInterrupt:
            # Show the text that the streamer still holds back.
            streamer.end()
        self.num_tokens, self.seconds = streamer.num_tokens, time.perf_counter() - start


class PartsStreamer(TextStreamer):
    """
    Streamer that splits a text into its parts, shows them at once, and collects them in `message`.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): decodes the tokens.
        write (`Callable`): receives the text to show, piece by piece.
        parser ([`ResponseParser`], *optional*): finds the parts. Without it, the whole text is content.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        write: Callable[[str], Any],
        parser: ResponseParser | None = None,
    ):
        # The parser needs the special tokens, such as the stop token.
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=parser is None)
        self.write, self.parser = write, parser
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.num_tokens = 0
        self._shown: str | None = None

    def put(self, value: torch.Tensor) -> None:
        """Count and decode new tokens. transformers calls this with the prompt first."""
        if not self.next_tokens_are_prompt:
            self.num_tokens += value.numel()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Show the parts that the new text completes. transformers calls this with every decoded piece."""
        if self.parser is None:
            self.message["content"] += text
            self.write(text)
            return
        events = self.parser.feed(text)
        if stream_end:
            # Close an answer that ends inside a region, for example after max_new_tokens.
            message, last_events = self.parser.finalize()
            self.message |= message
            events += last_events
        for event in events:
            # A dirty chunk may be the beginning of a marker such as </think>, so wait for the next piece.
            if event["type"] == "region_chunk" and not event["dirty"]:
                self._show(event["field"], event["text"])
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                call = event["value"]["function"]
                arguments = call["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                self._show("tool_calls", f"{call['name']} {arguments}")

    def _show(self, field: str, text: str) -> None:
        """Write a piece of text. Write a label first if another part of the answer begins."""
        if field != self._shown or field == "tool_calls":
            label = {"reasoning_content": "(thinking) ", "tool_calls": "(calls) "}.get(field, "")
            self.write(("\n" if self._shown else "") + label)
            self._shown = field
        self.write(text)


def check_text(text: str) -> None:
    """
    Raise `ValueError` for text that is not UTF-8. Python reads such bytes as lone surrogates, which no tokenizer
    accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!r} is not UTF-8. Type it again, or set the terminal to UTF-8.") from None


def append_record(path: str, record: dict[str, Any]) -> None:
    """Append a line to a JSONL file. Raise `ValueError` if that fails."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"/save: {error}") from error


__all__ = ["COMMON_HELP", "MIN_TEMPERATURE", "Generator", "PartsStreamer", "append_record", "check_text"]
