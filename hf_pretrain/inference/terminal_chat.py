"""
Chat with a model in the terminal, or let a base model continue text: the state of the conversation, its `/commands`,
and answers that appear while they are generated.

User input never becomes a control token ([`~tokenizer.control_tokens.encode_prompt`]). The tokenizer's response
template splits an answer into reasoning, tool calls and content. Without such a template, the whole answer is content.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..run_directory.directory import RunDirectory
from ..run_directory.history import trained_on_text
from ..runtime.errors import UserError
from ..runtime.flags import check_number
from ..runtime.names import split_hub_name
from ..tokenizer.control_tokens import check_chat_template, encode_documents, encode_prompt
from .served_model import ServedModel
from .tools import MAX_TOOL_ROUNDS, call_tool


# They begin and end a text of several lines.
QUOTES = '"""'
COMMON_HELP = f"""\
{QUOTES}             begin and end a text of several lines
/temperature N  divide the logits by N; 0 always takes the most probable token
/help           show this help
/exit, /quit    leave"""
CHAT_HELP = f"""\
/system TEXT    set the system message; without TEXT, remove it
/think on|off   answer with or without reasoning
/reset          forget the conversation
{COMMON_HELP}"""
# Questions of `--auto`.
AUTO_PROMPTS = (
    *("你好，你能做什么？", "为什么海水是咸的？", "用Python写一个判断质数的函数。", "推荐三种适合夏天的水果。"),
    *("What is a neural network?", "Why do leaves turn red in autumn?"),
    *("Write a poem about rain.", "How do I boil eggs?"),
)
RAW_HELP = f"""\
The model continues each line that you type, as the beginning of a document. An empty line continues the last text.

/reset          forget the last text
{COMMON_HELP}"""


@dataclass
class Chat:
    """
    A conversation with a model, or a text that the user begins and the model continues.

    Args:
        model ([`PreTrainedModel`] or [`~inference.served_model.ServedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer, with a chat template unless `is_raw`; `None` for a
            served model.
        sampling (`dict`): the arguments of [`settle_sampling`]. Besides `max_new_tokens`, the positions that the
            prompt leaves limit an answer.
        is_raw (`bool`): continue a text instead of answering it.
        system (`str`, *optional*): the system message.
        enable_thinking (`bool`, *optional*): whether the model reasons first; by default the chat template decides.
        tools, functions: the offered tools, as [`~inference.tools.offer_tools`] returns them.
        num_turns (`int`, *optional*): earlier questions that the model still sees, with their answers; by default all.
        num_rounds (`int`): answers to one question that may call tools.

    Attributes:
        history (`list[dict]`): the messages of the conversation.
        text (`str`): the text that a base model continues.
        speed (`str`): the length and the speed of the last answer, the time of its prompt included.
    """

    model: Any
    tokenizer: PreTrainedTokenizerFast
    sampling: dict[str, Any]
    _: KW_ONLY
    is_raw: bool = False
    system: str | None = None
    enable_thinking: bool | None = None
    tools: list[dict[str, Any]] | None = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    num_turns: int | None = None
    num_rounds: int = MAX_TOOL_ROUNDS
    history: list[dict[str, Any]] = field(default_factory=list, init=False)
    text: str = field(default="", init=False)
    speed: str = field(default="", init=False)

    def __post_init__(self):
        if not self.is_raw and not isinstance(self.model, ServedModel):
            check_chat_template(self.tokenizer)

    def messages(self, num_turns: int | None = None) -> list[dict[str, Any]]:
        """Return the system message, if there is one, and the last turns (by default all)."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + last_turns(self.history, num_turns)

    def say(self, text: str) -> bool:
        """Add the user's text, as a message or as the text to continue. Return whether there is a text to answer."""
        if self.is_raw:
            # Keep the white space of a line: the model continues exactly this text.
            self.text = text or self.text
            return bool(self.text)
        if text := text.strip():
            self.history.append({"role": "user", "content": text})
        return bool(text)

    def respond(self, write: Callable[[str], Any]) -> dict[str, Any]:
        """Answer as [`answer`] does. While the answer calls tools, run them and answer again."""
        message = self.answer(write)
        for _ in range(self.num_rounds if self.functions else 0):
            if not (calls := message.get("tool_calls")):
                break
            for call in calls:
                result = call_tool(self.functions, call)
                # A served model knows its calls by their ids.
                known = {"tool_call_id": call["id"]} if "id" in call else {}
                self.history.append({"role": "tool", "name": call["function"]["name"], "content": result} | known)
                write(f"\n(result) {result}")
            write("\n")
            message = self.answer(write)
        return message

    def answer(self, write: Callable[[str], Any]) -> dict[str, Any]:
        """
        Generate an answer and remember it. Ctrl-C ends it early.

        Args:
            write (`Callable`): receives the text to show, piece by piece.

        Returns:
            `dict`: the answer as a message, with `reasoning_content` and `tool_calls` if it has them.
        """
        if isinstance(self.model, ServedModel):
            self.history.append(self.model.answer(self.messages(self.num_turns), self.tools, self.sampling))
            write(self.history[-1]["content"])
            return self.history[-1]
        parser = None
        if self.is_raw:
            # A document begins with bos. Leave out its eos, which would end it.
            ids = encode_documents([self.text], self.tokenizer)[0][:-1]
        else:
            # Encode the whole conversation again, because /system and /think change its beginning.
            ids = encode_prompt(self.tokenizer, self.messages(self.num_turns), self.tools, self.enable_thinking)
            if self.tokenizer.response_template is not None:
                # The prompt may already open the reasoning, so the parser must see the prompt, too.
                parser = self.tokenizer.get_response_parser(prefix=self.tokenizer.decode(ids), tools=self.tools)
        streamer = PartsStreamer(self.tokenizer, write, parser)
        start = time.perf_counter()
        self._generate(ids, streamer)
        per_second = streamer.num_tokens / (time.perf_counter() - start)
        self.speed = f"{streamer.num_tokens} tokens, {per_second:.1f} tokens/s"
        # An interrupted answer keeps the part that the user has seen.
        message = streamer.message
        if self.is_raw:
            self.text += message["content"]
        else:
            self.history.append(message)
        return message

    def _generate(self, ids: list[int], streamer: "PartsStreamer") -> None:
        # A position past the end of the rotary table would raise within `generate`.
        room = self.model.config.max_position_embeddings - len(ids)
        if room <= 0:
            raise UserError(
                f"The text so far has {len(ids)} tokens, and the model sees {len(ids) + room}: /reset it to go on."
            )
        options = settle_sampling(self.tokenizer, **self.sampling)
        options["max_new_tokens"] = min(room, options["max_new_tokens"])
        input_ids = torch.tensor([ids], device=self.model.device)
        try:
            self.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), streamer=streamer, **options)
        except KeyboardInterrupt:
            # Show the text that the streamer still holds back.
            streamer.end()
        except ConnectionError:
            # llama.cpp has ended. The message stands in a line of its own, below the beginning of the answer.
            streamer.end()
            streamer.write("\n")
            raise

    def run_command(self, line: str) -> str:
        """Run a line that begins with a slash, and return the reply to the user."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/temperature" and value:
            check_number("--temperature", temperature := float(value))
            self.sampling = self.sampling | {"temperature": temperature}
            return f"temperature: {temperature:g}"
        if name == "/reset":
            self.history, self.text = [], ""
            return "the conversation is empty"
        if name == "/help":
            return RAW_HELP if self.is_raw else CHAT_HELP
        if self.is_raw:
            raise UserError(f"{line!r} is not a command for raw continuation.\n{RAW_HELP}")
        if name == "/system":
            self.system = value or None
            return f"system: {value}" if value else "no system message"
        if name == "/think" and value in ("on", "off"):
            self.enable_thinking = value == "on"
            return f"thinking is {value}"
        raise UserError(f"{line!r} is not a command.\n{CHAT_HELP}")

    def ask(self, text: str) -> None:
        """Add the user's text, and print the answer and its speed."""
        if self.say(text):
            self.respond(partial(print, end="", flush=True))
            print(f"\n[{self.speed}]")

    def talk(self) -> None:
        """Answer the lines that the user types, until one of them ends the chat."""
        # Python would raise at a line that is not UTF-8.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if sys.stdin.isatty() and sys.stdout.isatty():
            _edit_lines()
        while True:
            try:
                line = _read_text()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line is None:
                continue
            if line.strip() in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/") and "\n" not in line:
                    print(self.run_command(line.strip()))
                else:
                    self.ask(line)
            except ConnectionError:
                raise
            except (ValueError, OSError) as error:
                print(error)


def _edit_lines() -> None:
    """Let `input` know arrow keys and earlier lines, and take a pasted text as one line, if Python has `readline`."""
    with suppress(ImportError):
        import readline

        # NOTE: Python turns this off, because its own prompt cannot handle it.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _read_text() -> str | None:
    """
    Return the line that the user types, or all lines between two `\"\"\"`; `None` after Ctrl-C, which clears them. In
    an empty line it raises.
    """
    text = ""
    try:
        text = input("> ")
        if not text.startswith(QUOTES):
            return text
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + input("... ")
    except KeyboardInterrupt:
        # Windows has no `readline`.
        if not text and not ("readline" in sys.modules and sys.modules["readline"].get_line_buffer()):
            raise
        print()
        return None
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def last_turns(history: list[dict[str, Any]], number: int | None) -> list[dict[str, Any]]:
    """Return the last question of a history with what follows it, and `number` earlier ones (by default all)."""
    questions = [place for place, message in enumerate(history) if message["role"] == "user"]
    return history if number is None or number >= len(questions) else history[questions[-1 - number] :]


class PartsStreamer(TextStreamer):
    """
    Streamer that splits a text into its parts, shows them at once, and collects them in `message`.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): decodes the tokens.
        write (`Callable`): receives the text to show, piece by piece.
        parser (`ResponseParser` of transformers, *optional*): finds the parts. Without it, the whole text is content.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, write: Callable[[str], Any], parser: Any = None):
        # The parser needs the special tokens, such as the stop token.
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=parser is None)
        self.write, self.parser = write, parser
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.num_tokens = 0
        self._shown: str | None = None

    def put(self, value: torch.Tensor) -> None:
        """Count and decode new tokens, `(1, seq_len)` or `(1,)`. transformers calls this with the prompt first."""
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


def settle_sampling(tokenizer: PreTrainedTokenizerFast, *, temperature: float, **sampling: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for a temperature, which may be 0, and other settings of the sampling."""
    # transformers warns about settings that have no effect.
    no_effect = ("top_p", "top_k") if temperature == 0 else ()
    settings = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    kept = {name: value for name, value in sampling.items() if name not in no_effect}
    return kept | settings | {"pad_token_id": tokenizer.pad_token_id}


def is_base_model(name_or_path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> bool:
    """
    Return whether a model has never seen a chat: its tokenizer has no chat template, or the last run in its directory
    trained on text. If there is no record of a run, as on the Hub, the generation config of a model that was trained
    on text turns sampling off.

    Args:
        name_or_path (`str`): a Hub id, or the directory of a model, a run or a checkpoint.
        model ([`PreTrainedModel`]): the model.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer.
    """
    if tokenizer.chat_template is None:
        return True
    path = Path(split_hub_name(os.path.expanduser(name_or_path))[0])
    # The record of a run lies beside its checkpoints.
    run = path.parent if path.name.startswith(PREFIX_CHECKPOINT_DIR) else path
    is_base = trained_on_text(RunDirectory(run).launches)
    if is_base is None:
        return model.generation_config is not None and model.generation_config.do_sample is False
    return is_base
