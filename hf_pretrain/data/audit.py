"""Check how conversations are trained: which tokens, which answers are cut, and which prompts differ in inference."""

import heapq
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from jinja2 import Environment
from transformers import PreTrainedTokenizerFast

from ..rows.encoding import encode_conversation
from ..runtime.errors import UserError
from ..tokenizer.control_tokens import encode_prompt
from ..tokenizer.rendering import set_template
from .conversations import ANSWERS, GENERATED, QUESTIONS
from .records import Record


# Number of rows in each list of rows to look at.
NUM_ROWS = 10
# Number of conversations that a run checks before it trains: about a second.
NUM_CHECKED = 500
# Tokens of a row on the page.
MAX_SHOWN = 2000
# Fields of records and messages that are read.
_READ = {"messages", "conversations", "history", "system", GENERATED, *QUESTIONS, *ANSWERS}
_READ |= {"tools", "weight", "loss", "chat_template_kwargs", "role", "from", "content", "value", "tool_calls"}
_READ |= {"reasoning_content", "reasoning", "thinking"}
NOTHING = "train nothing: the model would not generate their answers so, or their weights are 0"
NO_ANSWER = "train nothing: no answer begins within --max_length"
CUT = "have an answer that --max_length cuts"
EARLIER = "have answers that are not trained, because the model would not generate them so"
PROMPT = "have another prompt in inference than in training"
NO_STOP = "end an answer without a special token, so the model would not stop"
DOUBLE_BOS = "begin with two bos tokens"


@dataclass
class Audit:
    """
    What training does with conversations, counted over all that pass through [`~Audit.watch`].

    Args:
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the model, with a chat template.
        max_length (`int`): number of tokens after which training cuts a conversation.
        variables (`dict`): variables of the chat template.
        num_rows (`int`): number of conversations.
        tokens (`Counter`): number of tokens by role, and of the trained ones by answer. `template` counts the others.
        faults (`Counter`): number of conversations with each fault; `first` has the place of the first one.
        fields (`Counter`): number of conversations with each field that is not read.
        longest, oddest (`list`): conversations with the most tokens, and with the most tokens per byte.
    """

    tokenizer: PreTrainedTokenizerFast
    max_length: int
    variables: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    num_rows: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    fields: Counter[str] = field(default_factory=Counter)
    longest: list[tuple[float, int, Record]] = field(default_factory=list)
    oddest: list[tuple[float, int, Record]] = field(default_factory=list)

    def watch(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield all records, and count the conversations among them."""
        for record in records:
            if record.kind == "conversation" and not record.reason:
                self.add(record)
            yield record

    def add(self, record: Record) -> None:
        """Count a conversation."""
        if self.num_rows == 0:
            self.note = set_template(self.tokenizer)
        self.num_rows += 1
        conversation = json.loads(record.text)
        try:
            ids, numbers = self._encode(conversation)
            faults = list(self._find_faults(conversation, ids, numbers))
        except UserError as error:
            ids, numbers, faults = [], [], [f"cannot be trained: {error}"]
        for fault in faults:
            self.faults[fault] += 1
            self.first.setdefault(fault, f"{record.source}:{record.line}")
        self._count_tokens(conversation["messages"], numbers[: self.max_length])
        self.fields.update(_field_names(record.content) - _READ)
        # As in `describe`, whose mean the largest ones stand beside.
        odd = len(ids) / max(1, len(self.tokenizer.decode(ids, skip_special_tokens=True).encode()))
        for rows, value in ((self.longest, len(ids)), (self.oddest, odd)):
            # The negative number prefers earlier rows.
            heapq.heappush(rows, (value, -self.num_rows, record))
            if len(rows) > NUM_ROWS:
                heapq.heappop(rows)

    def _count_tokens(self, messages: list[dict[str, Any]], numbers: list[int]) -> None:
        texts = [(message["role"], message["content"]) for message in messages if message["role"] != "assistant"]
        for role, text in texts:
            self.tokens[role] += (num_tokens := len(self.tokenizer.tokenize(text)))
            self.tokens["template"] -= num_tokens
        for number, count in Counter(numbers).items():
            answer = f"answer {number}" if 0 < number < 4 else "answers 4 and later" if number > 0 else "answers"
            self.tokens[answer if number else "template"] += count

    def _find_faults(self, conversation: dict[str, Any], ids: list[int], numbers: list[int]) -> Iterator[str]:
        messages = conversation["messages"]
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [place for place, number in enumerate(numbers) if number]
        if not trained:
            yield NOTHING
        elif trained[0] >= self.max_length:
            yield NO_ANSWER
        elif trained[-1] >= self.max_length:
            yield CUT
        weights = conversation.get("weights") or [1] * len(places)
        if trained and -1 not in numbers and len({*numbers} - {0}) < sum(weight != 0 for weight in weights):
            yield EARLIER
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        # White space may follow the stop token.
        if trained and not special.intersection(ids[place] for place in trained[-3:]):
            yield NO_STOP
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            yield DOUBLE_BOS
        # Without thinking, for an answer without a thought.
        variables = self.variables | conversation.get("chat_template_kwargs", {})
        modes = [variables.get("enable_thinking"), False]
        prompts = (encode_prompt(self.tokenizer, messages[: places[-1]], conversation.get("tools"), m) for m in modes)
        if places[-1] and not any(ids[: len(prompt)] == prompt for prompt in prompts):
            yield PROMPT

    def _encode(self, conversation: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and for each the number of the answer that it trains; 0 for others."""
        variables = self.variables | conversation.get("chat_template_kwargs", {})
        messages, tools = conversation["messages"], conversation.get("tools")
        ids, numbers = encode_conversation(self.tokenizer, messages, tools, **variables)
        left_out = {number for number, weight in enumerate(conversation.get("weights", ()), start=1) if weight == 0}
        return ids, [0 if number in left_out else number for number in numbers]

    def worst(self, number: int) -> list[str]:
        """Return the most frequent faults as lines, with the place of the first conversation that has each."""
        return [
            f"{count / self.num_rows:.1%} of {self.num_rows:,} conversations {fault} (first: {self.first[fault]})"
            for fault, count in self.faults.most_common(number)
        ]

    def describe(self) -> list[tuple[str, str]]:
        """Return the findings as pairs of label and text."""
        total = max(1, self.tokens.total())
        names = ", ".join(f"{name} ({count:,})" for name, count in self.fields.most_common(NUM_ROWS))
        lines = [("Conversations", f"{self.num_rows:,}, {self.tokens.total():,} tokens")]
        lines += [("", self.note)] if self.note else []
        for role, count in sorted(self.tokens.items()):
            state = "trained" if role.startswith("answer") else "context"
            lines.append((f"Tokens, {state}", f"{count / total:.1%}: {role}"))
        lines += [("Fault", line) for line in self.worst(len(self.faults)) or ["none"]]
        lines.append(("Fields not read", names or "none"))
        for label, rows in (("Most tokens", self.longest), ("Most tokens per byte", self.oddest)):
            lines += [(label, f"{value:,.4g}: {r.source}:{r.line}") for value, _, r in sorted(rows, reverse=True)]
        return lines

    def write_page(self, path: str | Path, records: Iterable[Record]) -> None:
        """
        Write a page with the findings, and with conversations in which trained tokens have a colour.

        Args:
            path (`str` or `Path`): the HTML file.
            records (`Iterable[Record]`): conversations to show beside the longest and the oddest ones.
        """
        parts = {
            "Most tokens": [record for *_, record in sorted(self.longest, reverse=True)],
            "Most tokens per byte": [record for *_, record in sorted(self.oddest, reverse=True)],
            "Drawn at random": [record for record in records if record.kind == "conversation"],
        }
        shown = {title: [self._runs(record) for record in rows] for title, rows in parts.items()}
        template = Path(__file__).with_name("audit.html.jinja").read_text(encoding="utf-8")
        page = Environment(autoescape=True).from_string(template).render(lines=self.describe(), parts=shown)
        Path(path).write_text(page, encoding="utf-8")

    def _runs(self, record: Record) -> tuple[str, list[tuple[str, str]]]:
        """Return the place of a conversation, and its text in pieces with `trained`, `cut` or neither."""
        try:
            ids, numbers = self._encode(json.loads(record.text))
        except UserError as error:
            return f"{record.source}:{record.line}", [("cut", str(error))]
        states = [("trained" if number else "") if i < self.max_length else "cut" for i, number in enumerate(numbers)]
        runs = itertools.groupby(zip(states[:MAX_SHOWN], ids, strict=False), key=lambda pair: pair[0])
        pieces = [(state, self.tokenizer.decode([index for _, index in run])) for state, run in runs]
        return f"{record.source}:{record.line}", pieces + ([("", " …")] if len(ids) > MAX_SHOWN else [])


def find_worst(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    number: int = 2,
    variables: dict[str, Any] | None = None,
) -> list[str]:
    """
    Return the most frequent faults of conversations as lines, from the first [`NUM_CHECKED`] of them.

    Args:
        documents ([`Dataset`]): with the single column `text`: conversations in the internal form.
        tokenizer, max_length, variables: as for [`Audit`].
    """
    audit = Audit(tokenizer, max_length, variables or {})
    for place, text in enumerate(documents[:NUM_CHECKED]["text"], start=1):
        audit.add(Record("conversation", place, None, text, kind="conversation"))
    return audit.worst(number)


def _field_names(record: Any) -> set[str]:
    """Return the names of the fields of a record and of its messages."""
    names = set(record) if isinstance(record, dict) else set()
    for key in ("messages", "conversations"):
        turns = record.get(key) if isinstance(record, dict) else None
        names |= (
            {name for turn in turns if isinstance(turn, dict) for name in turn} if isinstance(turns, list) else set()
        )
    return names
