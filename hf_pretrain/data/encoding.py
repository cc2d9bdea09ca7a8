"""Encode conversations as token ids with one weight per token."""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..runtime.errors import UserError
from ..tokenizer.chat_template import check_is_whole
from ..tokenizer.control_tokens import encode_rendered, render_guarded, thinking_variables
from .draws import add_system_message, draw


# How chat templates write an empty thought. In a rendered conversation, guards tell a message with this text apart.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ConversationEncoder:
    """
    Encoder of conversations that uses the chat template of a tokenizer.

    The template's `{% generation %}` marks enclose the text that the assistant writes and its stop token.

    Args:
        train_on (`str`, defaults to `"assistant"`): train on these tokens only; with `last_turn`, only on the ones
            after the last answered message of the user; with `all`, on all tokens.
        chat_template_kwargs (`tuple` of pairs): variables of the template, such as `("enable_thinking", False)`. A
            conversation's own values override them.
        add_system_ratio (`float`, defaults to 0.0): share of the conversations that get a random system message.
        empty_think_ratio (`float`, *optional*): share of the conversations in which an answer without a thought begins
            with an empty one; by default the template decides.
        seed (`int`, *optional*): seed of these shares; without it, neither applies.
    """

    train_on: str = "assistant"
    chat_template_kwargs: tuple[tuple[str, Any], ...] = ()
    add_system_ratio: float = 0.0
    empty_think_ratio: float | None = None
    seed: int | None = None

    def __call__(
        self, texts: list[str], tokenizer: PreTrainedTokenizerFast, *, max_length: int
    ) -> dict[str, list[list[int]] | list[list[float]] | list[int]]:
        """
        Encode conversations. One without a trained token gives no tokens.

        Args:
            texts (`list[str]`): conversations in the internal form.
            tokenizer ([`PreTrainedTokenizerFast`]): with a marked chat template, see [`mark_template`].
            max_length (`int`): number of tokens after which a conversation is cut off.

        Returns:
            `dict`: `input_ids`, `loss_mask` (a weight for each of them) and `num_tokens_cut`, one entry per
            conversation. The loss ignores the weight of the first token, because no token comes before it.

        Raises:
            `UserError`: if the template cannot render a conversation.
        """
        encoded: dict[str, list] = {"input_ids": [], "loss_mask": [], "num_tokens_cut": []}
        for text in texts:
            conversation = json.loads(text)
            kwargs = {**dict(self.chat_template_kwargs), **conversation.get("chat_template_kwargs", {})}
            messages, tools = conversation["messages"], conversation.get("tools")
            if self.seed is not None:
                kwargs |= self._draw_empty_thought(text, messages, kwargs)
                messages = add_system_message(messages, tools, seed=self.seed, ratio=self.add_system_ratio)
            ids, is_generated = encode_conversation(tokenizer, messages, tools, **kwargs)
            weights = _weigh_answers(np.array(is_generated), self._answer_weights(conversation))[:max_length]
            # Tokens that the assistant does not generate get weight 0.
            weights = weights if self.train_on == "all" else weights * is_generated[:max_length]
            # Without a trained token, for example because it is cut off before its first answer, nothing is left.
            end = max_length if weights[1:].any() else 0
            encoded["input_ids"].append(ids[:end])
            encoded["loss_mask"].append(weights[:end])
            encoded["num_tokens_cut"].append(max(len(ids) - max_length, 0) if end else 0)
        return encoded

    def _answer_weights(self, conversation: dict[str, Any]) -> list[float] | None:
        """Return a loss weight for each message of the assistant; `None` if all are 1."""
        weights = conversation.get("weights")
        if self.train_on != "last_turn":
            return weights
        roles = [message["role"] for message in conversation["messages"]]
        answers = [place for place, role in enumerate(roles) if role == "assistant"]
        turn = max((place for place, role in enumerate(roles[: answers[-1]]) if role == "user"), default=-1)
        pairs = zip(answers, weights or [1.0] * len(answers), strict=True)
        return [weight if place > turn else 0.0 for place, weight in pairs]

    def _draw_empty_thought(self, text: str, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of [`encode_conversation`] that keep or remove the empty thoughts of a conversation."""
        # A conversation's own variable wins over the share.
        if self.empty_think_ratio is None or "enable_thinking" in kwargs:
            return {}
        if draw(self.seed, "empty thought", text) >= self.empty_think_ratio:
            return {"empty_thoughts": False}
        # This variable would leave out the thoughts of a conversation that has some.
        has_thought = any("reasoning_content" in message for message in messages)
        return {"empty_thoughts": True} if has_thought else thinking_variables(False)


def _weigh_answers(is_generated: np.ndarray, answer_weights: list[float] | None) -> np.ndarray:
    """
    Return a factor for the weight of each token: the weight of its answer, and 1 outside of answers.

    Args:
        is_generated (`np.ndarray`): for each token whether the assistant generates it.
        answer_weights (`list[float]`, *optional*): a weight for each message of the assistant.

    Raises:
        `UserError`: if the template does not mark one text for each of these messages.
    """
    if answer_weights is None:
        return np.ones(len(is_generated), np.float32)
    starts = np.diff(is_generated.astype(np.int8), prepend=0) == 1
    if starts.sum() != len(answer_weights):
        raise UserError(
            f"The chat template marks {starts.sum()} texts of the assistant in a conversation with "
            f"{len(answer_weights)} messages. Mark each by {{% generation %}}, or remove the weights of messages."
        )
    return np.where(is_generated, np.array(answer_weights, np.float32)[np.cumsum(starts) - 1], np.float32(1))


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    empty_thoughts: bool | None = None,
    **chat_template_kwargs: Any,
) -> tuple[list[int], list[bool]]:
    """
    Encode a whole conversation. A message that contains the text of a control token does not produce that token.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a marked chat template.
        messages (`list[dict]`): the conversation in the internal form.
        tools (`list[dict]`, *optional*): JSON schemas of the available tools.
        empty_thoughts (`bool`, *optional*): remove the empty thoughts that the template writes, or put one in front of
            each answer without a thought; by default the template decides.
        chat_template_kwargs: further variables of the template.

    Returns:
        `tuple[list[int], list[bool]]`: token ids, and for each id whether the assistant generates it.

    Raises:
        `UserError`: if the template fails, or leaves out a part of the conversation.
    """
    rendered, spans = render_guarded(tokenizer, messages, tools, **chat_template_kwargs)
    has_thoughts = bool(chat_template_kwargs.get("enable_thinking", True))
    check_is_whole(tokenizer, rendered, messages, has_thoughts=has_thoughts)
    # (num_spans, 2): start and end of each text that the assistant generates, in characters
    # Without spans, the array is empty, and only `reshape` gives it two columns.
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    if empty_thoughts is not None:
        # Each edge moves by the empty thoughts before it.
        starts = [match.start() for match in re.finditer(EMPTY_THOUGHT, rendered)]
        edges -= len(EMPTY_THOUGHT) * np.searchsorted(starts, edges)
        rendered = rendered.replace(EMPTY_THOUGHT, "")
    if empty_thoughts:
        starts = [start for start, _ in edges.tolist() if not rendered.startswith("<think>", start)]
        edges += len(EMPTY_THOUGHT) * np.searchsorted(starts, edges, side="right")
        for start in reversed(starts):
            rendered = rendered[:start] + EMPTY_THOUGHT + rendered[start:]
    ids, starts = encode_rendered(tokenizer, rendered, edges[:, 0].tolist())
    # A token belongs to the span that contains its first character.
    span = np.searchsorted(edges[:, 0], starts, side="right") - 1
    ends = np.append(edges[:, 1], 0)  # index -1: before the first span, where nothing is generated
    return ids, (np.array(starts) < ends[span]).tolist()
