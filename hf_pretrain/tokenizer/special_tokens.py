"""The control tokens of MiniMind's tokenizers, and the paths of its chat and response templates."""

from pathlib import Path


PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


# Added tokens that are not special, so that `skip_special_tokens=True` keeps them in decoded text for tool parsers and
# users.
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


# Reserved ids, so that a new control token does not move the ids of text.
RESERVED_TOKENS = [f"<|reserved_{index}|>" for index in range(27)]


SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *MARKS, *RESERVED_TOKENS]


CHAT_TEMPLATE_PATH = Path(__file__).parent / "templates" / "minimind.jinja"


# The response template parses an answer into reasoning, tool calls and content. A call whose arguments are not JSON
# keeps them as text, and a malformed call becomes content, because a small model writes both.
RESPONSE_TEMPLATE_PATH = Path(__file__).parent / "templates" / "response.json"
