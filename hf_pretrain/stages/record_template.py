"""A chat template that renders each prompt with the tools and the draw of its own record."""

from collections import deque
from typing import Any

from transformers import PreTrainedTokenizerFast

from ..inference.tools import read_schemas
from ..rows.draws import draw
from ..tokenizer.control_tokens import encode_chat, thinking_variables


# More prompts than a process renders between two generations.
MAX_RECENT = 4096


def tools_of(prompt: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the tools that the first message of a prompt holds, as in MiniMind's files; `None` without any."""
    tools = prompt[0].get("tools")
    return read_schemas(tools) if tools else None


class RecordTemplate:
    """
    Replace `apply_chat_template` of a tokenizer: TRL renders all prompts with the same tools and variables, and would
    make control tokens of texts that spell them.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer.
        thinking_ratio (`float`, *optional*): share of the prompts that ask for a thought; by default the caller's
            variables decide.
        seed (`int`): seed of this share.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, thinking_ratio: float | None, seed: int):
        self.tokenizer, self.thinking_ratio, self.seed = tokenizer, thinking_ratio, seed
        self.render = tokenizer.apply_chat_template
        # The last prompts, and the variables of each.
        self.recent: deque[tuple[list[dict[str, Any]], dict[str, bool]]] = deque(maxlen=MAX_RECENT)

    def __call__(self, conversation: list[Any], *, tools: Any = None, tokenize: bool = True, **options: Any) -> Any:
        """Encode a batch of prompts record by record, or one conversation; render text and masks as the tokenizer."""
        if not tokenize or "return_assistant_tokens_mask" in options:
            return self.render(conversation, tools=tools, tokenize=tokenize, **options)
        # TRL asks for a dictionary with a batch only.
        options.pop("return_dict", None)
        if isinstance(conversation[0], dict):
            return self._encode_one(conversation, tools=tools, **options)
        encoded, ratio = [], self.thinking_ratio
        for prompt in conversation:
            variables = {} if ratio is None else thinking_variables(draw(self.seed, "thinking", prompt) < ratio)
            self.recent.append((prompt, variables))
            encoded.append(encode_chat(self.tokenizer, prompt, tools_of(prompt) or tools, **options | variables))
        return {"input_ids": encoded}

    def _encode_one(self, conversation: list[dict[str, Any]], **options: Any) -> list[int]:
        """
        Encode a conversation. After a tool's result, the generation prompt keeps the draw of the rollout's prompt.

        NOTE: TRL renders the result after a made-up call, which must not depend on the draw: TRL compares its tokens.
        TRL appends the same message object to the prompt, which tells whose result it is.
        """
        variables = next((found for prompt, found in self.recent if prompt[-1] is conversation[-1]), {})
        if not variables:
            return encode_chat(self.tokenizer, conversation, **options)
        options["add_generation_prompt"] = False
        whole, start = (
            encode_chat(self.tokenizer, conversation, **options | variables | {"add_generation_prompt": asks})
            for asks in (True, False)
        )
        return encode_chat(self.tokenizer, conversation, **options) + whole[len(start) :]
