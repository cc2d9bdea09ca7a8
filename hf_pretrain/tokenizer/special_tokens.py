"""The control tokens of MiniMind's tokenizers, and the files of its chat template."""

from pathlib import Path


PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


# They show in decoded text even with `skip_special_tokens=True`, because tool parsers and users read them there.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


RESERVED_TOKENS = [f"<|reserved_{index}|>" for index in range(27)]


SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *MARKS, *RESERVED_TOKENS]


CHAT_TEMPLATE_PATH = Path(__file__).parent / "templates" / "minimind.jinja"


# Reads back what the assistant writes in that template: reasoning, tool calls and the rest. A call whose arguments are
# not JSON keeps them as text, and what is no call at all is text as well, because a small model writes both.
RESPONSE_TEMPLATE_PATH = Path(__file__).parent / "templates" / "response.json"


__all__ = [
    "BOS_TOKEN",
    "CHAT_TEMPLATE_PATH",
    "EOS_TOKEN",
    "MARKS",
    "PAD_TOKEN",
    "RESERVED_TOKENS",
    "RESPONSE_TEMPLATE_PATH",
    "SPECIAL_TOKENS",
]
