"""
A chat with a model in the terminal: its history, its `/commands`, and answers that appear while they are generated.

User input never becomes a control token ([`~tokenizer.encoding.encode_prompt`]). The tokenizer's response template
splits an answer into reasoning, tool calls and content. Without such a template, the whole answer is content.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

from ..tokenizer.encoding import encode_prompt


HELP = """\
/system TEXT    set the system message; without TEXT, remove it
/think on|off   answer with or without reasoning
/tools FILE     offer the tools in a JSON list of schemas; without FILE, offer none
/reset          forget the conversation
/save FILE      append the conversation to a JSONL file that SFT can read
/help           show this help
/exit, /quit    leave"""


class Chat:
    """
    A conversation with a model.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): a tokenizer with a chat template.
        system (`str`, *optional*): the system message.
        enable_thinking (`bool`, *optional*): whether the model reasons first; by default the chat template decides.
        tools (`str`, *optional*): a JSON file with the schemas of the offered tools.
        **generation_kwargs: arguments of `generate`. `max_new_tokens` is limited to the positions that the prompt
            leaves.

    Raises:
        `ValueError`: if the tokenizer has no chat template, or `tools` is not a JSON list of schemas.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        system: str | None = None,
        enable_thinking: bool | None = None,
        tools: str | None = None,
        **generation_kwargs: Any,
    ):
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path} has no chat template. Use a tokenizer of "
                "recipes/tokenizer.py, or put a chat_template.jinja beside it."
            )
        # The system message comes from the command line, which may contain any bytes.
        _check_text(system or "")
        self.model, self.tokenizer = model, tokenizer
        self.system, self.enable_thinking = system, enable_thinking
        self.tools = _read_tools(tools) if tools else None
        self.generation_kwargs = {"max_new_tokens": 512} | generation_kwargs
        self.history: list[dict[str, Any]] = []
        # Tool calls of the last answer that still wait for their results.
        self.pending_calls: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation with its system message, in the form that a chat template expects."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.history

    @property
    def prompt(self) -> str:
        """Text that asks the user for the next line."""
        return f"{self.pending_calls[0]['function']['name']} returns: " if self.pending_calls else "> "

    def say(self, text: str) -> None:
        """
        Add the user's text to the history, as the result of a pending tool call or else as a user message.

        Raises:
            `ValueError`: for text that is not UTF-8.
        """
        _check_text(text)
        if self.pending_calls:
            self.history.append(
                {"role": "tool", "name": self.pending_calls.pop(0)["function"]["name"], "content": text}
            )
        else:
            self.history.append({"role": "user", "content": text})

    def answer(self, write: Callable[[str], Any]) -> dict[str, Any]:
        """
        Generate an answer and add it to the history. Ctrl-C ends it early.

        Args:
            write (`Callable`): receives the text to show, piece by piece.

        Returns:
            `dict`: the answer as a message, with `reasoning_content` and `tool_calls` if it has them.

        Raises:
            `ValueError`: if the conversation fills the model's positions.
        """
        # Encode the whole conversation again, because /system, /tools and /think change its beginning.
        ids = encode_prompt(self.tokenizer, self.messages, self.tools, self.enable_thinking)
        # A position past the end of the rotary table would raise within `generate`.
        room = self.model.config.max_position_embeddings - len(ids)
        if room <= 0:
            raise ValueError(
                f"The conversation has {len(ids)} tokens, and the model sees {len(ids) + room}: /reset it to go on."
            )
        streamer = _AnswerStreamer(self.tokenizer, ids, self.tools, write)
        input_ids = torch.tensor([ids], device=self.model.device)
        try:
            self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=streamer,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                **self.generation_kwargs | {"max_new_tokens": min(room, self.generation_kwargs["max_new_tokens"])},
            )
        except KeyboardInterrupt:
            # Show the text that the streamer still holds back.
            streamer.end()
        # The history keeps the part of an interrupted answer that the user has seen.
        self.history.append(streamer.message)
        # Each of the next lines of the user is the result of one call.
        self.pending_calls = list(streamer.message.get("tool_calls", []))
        return streamer.message

    def run_command(self, line: str) -> str:
        """
        Run a line that begins with a slash, and return the reply to the user.

        Raises:
            `ValueError`: for an unknown command, or a value or file that it cannot use.
        """
        _check_text(line)
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/system":
            self.system = value or None
            return f"system: {value}" if value else "no system message"
        if name == "/think" and value in ("on", "off"):
            self.enable_thinking = value == "on"
            return f"thinking is {value}"
        if name == "/tools":
            self.tools = _read_tools(value) if value else None
            return f"tools: {', '.join(tool['function']['name'] for tool in self.tools or []) or 'none'}"
        if name == "/reset":
            self.history, self.pending_calls = [], []
            return "the conversation is empty"
        if name == "/save" and value:
            # Write one line per conversation, the format of data files for SFT.
            conversation = {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
            try:
                with open(value, "a", encoding="utf-8") as file:
                    file.write(json.dumps(conversation, ensure_ascii=False) + "\n")
            except OSError as error:
                raise ValueError(f"/save: {error}") from error
            return f"{len(self.messages)} messages are in {value}"
        if name == "/help":
            return HELP
        raise ValueError(f"{line!r} is not a command.\n{HELP}")


def _check_text(text: str) -> None:
    """
    Raise `ValueError` for text that is not UTF-8. Python reads such bytes as lone surrogates, which no tokenizer
    accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not UTF-8. Type it again, or set the terminal to UTF-8.") from None


def _read_tools(path: str) -> list[dict[str, Any]]:
    """Return the tool schemas of a JSON file, each in the form `{"type": "function", "function": {...}}`."""
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(tools, list):
            raise TypeError("not a list")
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        if all(isinstance(tool["function"]["name"], str) for tool in tools):
            return tools
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"Tools from {path}: {type(error).__name__}: {error}. {_TOOLS_FORM}") from error
    raise ValueError(f"Tools from {path}: a name is not text. {_TOOLS_FORM}")


_TOOLS_FORM = 'A file of tools holds [{"type": "function", "function": {"name": ..., "parameters": ...}}, ...].'


class _AnswerStreamer(TextStreamer):
    """Streamer that splits an answer into its parts, shows them at once, and collects them in `message`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt_ids: list[int],
        tools: list[dict[str, Any]] | None,
        write: Callable[[str], Any],
    ):
        self.parser = None
        if tokenizer.response_template is not None:
            # The prompt may already open the reasoning, so the parser must see the prompt, too.
            self.parser = tokenizer.get_response_parser(prefix=tokenizer.decode(prompt_ids), tools=tools)
        # The parser needs the special tokens, such as the stop token.
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=self.parser is None)
        self.write = write
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._shown: str | None = None

    def on_finalized_text(self, text: str, stream_end: bool = False):
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

    def _show(self, field: str, text: str):
        """Write a piece of text. Write a label first if another part of the answer begins."""
        if field != self._shown or field == "tool_calls":
            label = {"reasoning_content": "(thinking) ", "tool_calls": "(calls) "}.get(field, "")
            self.write(("\n" if self._shown else "") + label)
            self._shown = field
        self.write(text)


__all__ = ["HELP", "Chat"]
