"""Conversations, and what the chat template of this package renders."""

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


# The assistant writes the text between [[ and ]].
CONVERSATIONS = [
    (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "  hello \n"}],
        {},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[hello \n<|im_end|>]]\n",
    ),
    (
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "reasoning_content": "\nadd them\n", "content": "2"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "yes"},
        ],
        {},
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\nadd them\n</think>\n\n2<|im_end|>]]\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
        "[[yes<|im_end|>]]\n",
    ),
    (
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "reasoning_content": "add them", "content": "2"},
        ],
        {"enable_thinking": False},
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[2<|im_end|>]]\n",
    ),
    (
        [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL["function"] | {"arguments": '{"a":2}'}]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "done"},
        ],
        {},
        '<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n[[<tool_call>\n{"name": "add", "arguments": '
        '{"a": 1, "b": "é"}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a":2}}\n</tool_call>'
        "<|im_end|>]]\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n[[done<|im_end|>]]\n",
    ),
]
