"""A chat template that renders each prompt with the tools and the draw of its own record."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ..data.draws import draw
from ..tokenizer.control_tokens import thinking_variables
from .tools import read_schemas


# More prompts than a process renders between two generations.
MAX_RECENT = 4096


def tools_of(prompt: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the tools that the first message of a prompt holds, as in MiniMind's files; `None` without any."""
    tools = prompt[0].get("tools")
    return read_schemas(tools) if tools else None


class RecordTemplate:
    """
    Replace `apply_chat_template` of a tokenizer: TRL renders all prompts with the same tools and variables.

    Args:
        render (`Callable`): the method that this object replaces.
        thinking_ratio (`float`, *optional*): share of the prompts that ask for a thought; by default the caller's
            variables decide.
        seed (`int`): seed of this share.
    """

    def __init__(self, render: Callable[..., Any], *, thinking_ratio: float | None, seed: int):
        self.render, self.thinking_ratio, self.seed = render, thinking_ratio, seed
        # The last prompts, and the variables of each.
        self.recent: deque[tuple[list[dict[str, Any]], dict[str, bool]]] = deque(maxlen=MAX_RECENT)

    def __call__(self, conversation: list[Any], *, tools: Any = None, **how: Any) -> Any:
        """Render a batch of prompts record by record, and everything else as the tokenizer does."""
        if isinstance(conversation[0], dict):
            return self._render_one(conversation, tools=tools, **how)
        rows = []
        for prompt in conversation:
            variables = self._variables(prompt)
            self.recent.append((prompt, variables))
            rows.append(self.render(prompt, tools=tools_of(prompt) or tools, **how | variables))
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _variables(self, prompt: list[dict[str, Any]]) -> dict[str, bool]:
        """Return the variables of the template for a prompt."""
        if self.thinking_ratio is None:
            return {}
        return thinking_variables(draw(self.seed, "thinking", prompt) < self.thinking_ratio)

    def _render_one(self, conversation: list[dict[str, Any]], **how: Any) -> Any:
        """
        Render a conversation. After a tool's result, the generation prompt keeps the draw of the rollout's prompt.

        NOTE: TRL renders the result after a made-up call, which must not depend on the draw: TRL compares its tokens.
        TRL appends the same message object to the prompt, which tells whose result it is.
        """
        variables = next((found for prompt, found in self.recent if prompt[-1] is conversation[-1]), {})
        if not variables:
            return self.render(conversation, **how)
        how["add_generation_prompt"] = False
        whole, start = (
            self.render(conversation, **how | variables | {"add_generation_prompt": asks}) for asks in (True, False)
        )
        return self.render(conversation, **how) + whole[len(start) :]
