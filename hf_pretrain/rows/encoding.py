"""Encode conversations as token ids with one weight per token."""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..runtime.errors import UserError
from ..tokenizer.chat_template import check_is_whole, has_marks
from ..tokenizer.control_tokens import encode_rendered, thinking_variables
from ..tokenizer.rendering import render_answers
from .draws import add_system_message, draw


# How chat templates write an empty thought. In a rendered conversation, guards tell a message with this text apart.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ConversationEncoder:
    """
    Encoder of conversations that uses the chat template of a tokenizer.

    [`~tokenizer.rendering.render_answers`] finds the text that the assistant writes, with its stop token.

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
            tokenizer ([`PreTrainedTokenizerFast`]): with a chat template, see [`set_template`].
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
            ids, numbers = encode_conversation(tokenizer, messages, tools, **kwargs)
            answers = np.array(numbers)
            weights = _weigh_answers(answers, self._answer_weights(conversation))[:max_length]
            # Tokens that the assistant does not generate get weight 0.
            weights = weights if self.train_on == "all" else weights * (answers[:max_length] != 0)
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


def _weigh_answers(answers: np.ndarray, answer_weights: list[float] | None) -> np.ndarray:
    """
    Return a factor for the weight of each token: the weight of its answer, and 1 outside of answers.

    Args:
        answers (`np.ndarray`): the number of each token's answer, as [`encode_conversation`] returns it.
        answer_weights (`list[float]`, *optional*): a weight for each message of the assistant.

    Raises:
        `UserError`: if the template does not mark one text for each of these messages.
    """
    if answer_weights is None:
        return np.ones(len(answers), np.float32)
    if (answers < 0).any():
        raise UserError(
            f"The chat template does not mark one text for each of {len(answer_weights)} messages of the assistant. "
            "Mark each by {% generation %}, or remove the weights of messages."
        )
    return np.array([1, *answer_weights], np.float32)[answers]


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    empty_thoughts: bool | None = None,
    **chat_template_kwargs: Any,
) -> tuple[list[int], list[int]]:
    """
    Encode a whole conversation. A message that contains the text of a control token does not produce that token.

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        messages (`list[dict]`): the conversation in the internal form.
        tools (`list[dict]`, *optional*): JSON schemas of the available tools.
        empty_thoughts (`bool`, *optional*): remove the empty thoughts that the template writes, or put one in front of
            each answer without a thought; by default the template decides.
        chat_template_kwargs: further variables of the template.

    Returns:
        `tuple[list[int], list[int]]`: token ids, and for each id the number of the assistant's message that it belongs
        to, from 1; 0 if the assistant does not generate it, and -1 if the template marks other texts than messages.

    Raises:
        `UserError`: if the template fails, or leaves out a part of the conversation.
    """
    is_marked = has_marks(tokenizer.get_chat_template(tools=tools))
    if not is_marked:
        # Templates such as Qwen3's change an answer when a message of the user follows. What follows trains nothing.
        messages = messages[: max(place for place, m in enumerate(messages) if m["role"] == "assistant") + 1]
    rendered, spans = render_answers(tokenizer, messages, tools, **chat_template_kwargs)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    numbers = range(1, len(spans) + 1) if len(spans) == len(places) else [-1] * len(spans)
    if not is_marked:
        # Such templates may drop a thought of an answer that is not trained.
        untrained = {place for place, (start, end) in zip(places, spans, strict=True) if start == end}
        messages = [{**m, "reasoning_content": ""} if i in untrained else m for i, m in enumerate(messages)]
    has_thoughts = bool(chat_template_kwargs.get("enable_thinking", True))
    check_is_whole(tokenizer, rendered, messages, has_thoughts=has_thoughts)
    found = [(start, end, number) for (start, end), number in zip(spans, numbers, strict=True) if start < end]
    # (num_answers, 2): start and end of each text that the assistant generates, in characters
    # Without answers, the array is empty, and only `reshape` gives it two columns.
    edges = np.array([span[:2] for span in found], dtype=np.int64).reshape(-1, 2)
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
    # A token belongs to the answer that contains its first character.
    answer = np.searchsorted(edges[:, 0], starts, side="right") - 1
    ends = np.append(edges[:, 1], 0)  # index -1: before the first answer, where nothing is generated
    number = np.append(np.array([number for *_, number in found], dtype=np.int64), 0)
    return ids, np.where(np.array(starts) < ends[answer], number[answer], 0).tolist()
