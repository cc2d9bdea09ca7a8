"""
A chat with a model in the terminal: its history, its `/commands`, and answers that appear while they are generated.

User input never becomes a control token ([`~tokenizer.encoding.encode_prompt`]). The tokenizer's response template
splits an answer into reasoning, tool calls and content. Without such a template, the whole answer is content.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..runtime.errors import UserError
from ..tokenizer.encoding import check_chat_template, encode_prompt
from .generating import COMMON_HELP, Generator, PartsStreamer, append_record, check_text


HELP = f"""\
/system TEXT    set the system message; without TEXT, remove it
/think on|off   answer with or without reasoning
/tools FILE     offer the tools in a JSON list of schemas; without FILE, offer none
/reset          forget the conversation
/save FILE      append the conversation to a JSONL file that SFT can read
{COMMON_HELP}"""


class Chat:
    """
    A conversation with a model.

    Args:
        generator ([`Generator`]): the model, with a tokenizer that has a chat template.
        system (`str`, *optional*): the system message.
        enable_thinking (`bool`, *optional*): whether the model reasons first; by default the chat template decides.
        tools (`str`, *optional*): a JSON file with the schemas of the offered tools.

    Raises:
        `ValueError`: if the tokenizer has no chat template, or `tools` is not a JSON list of schemas.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        system: str | None = None,
        enable_thinking: bool | None = None,
        tools: str | None = None,
    ):
        check_chat_template(generator.tokenizer)
        # The system message comes from the command line, which may contain any bytes.
        check_text(system or "")
        self.generator = generator
        self.system, self.enable_thinking = system, enable_thinking
        self.tools = _read_tools(tools) if tools else None
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

    def say(self, text: str) -> bool:
        """
        Add the user's text to the history, as the result of a pending tool call or else as a user message.

        Returns:
            `bool`: whether the model can answer now: there was some text, and no tool call waits for its result.

        Raises:
            `ValueError`: for text that is not UTF-8.
        """
        check_text(text)
        text = text.strip()
        if not text:
            return False
        if self.pending_calls:
            self.history.append(
                {"role": "tool", "name": self.pending_calls.pop(0)["function"]["name"], "content": text}
            )
        else:
            self.history.append({"role": "user", "content": text})
        return not self.pending_calls

    def answer(self, write: Callable[[str], Any]) -> dict[str, Any]:
        """
        Generate an answer and add it to the history. Ctrl-C ends it early.

        Args:
            write (`Callable`): receives the text to show, piece by piece.

        Returns:
            `dict`: the answer as a message, with `reasoning_content` and `tool_calls` if it has them.

        Raises:
            `ValueError`: if the conversation fills the model's positions, or the chat template cannot render it.
        """
        tokenizer = self.generator.tokenizer
        # Encode the whole conversation again, because /system, /tools and /think change its beginning.
        ids = encode_prompt(tokenizer, self.messages, self.tools, self.enable_thinking)
        parser = None
        if tokenizer.response_template is not None:
            # The prompt may already open the reasoning, so the parser must see the prompt, too.
            parser = tokenizer.get_response_parser(prefix=tokenizer.decode(ids), tools=self.tools)
        streamer = PartsStreamer(tokenizer, write, parser)
        self.generator.run(ids, streamer)
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
        check_text(line)
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
            append_record(value, {"messages": self.messages} | ({"tools": self.tools} if self.tools else {}))
            return f"{len(self.messages)} messages are in {value}"
        if name == "/temperature":
            return self.generator.set_temperature(value)
        if name == "/help":
            return HELP
        raise UserError(f"{line!r} is not a command.\n{HELP}")


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
        raise UserError(f"Tools from {path}: {type(error).__name__}: {error}. {_TOOLS_FORM}") from error
    raise UserError(f"Tools from {path}: a name is not text. {_TOOLS_FORM}")


_TOOLS_FORM = 'A file of tools holds [{"type": "function", "function": {"name": ..., "parameters": ...}}, ...].'


__all__ = ["HELP", "Chat"]
