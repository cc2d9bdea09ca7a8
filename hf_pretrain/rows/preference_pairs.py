"""Tokenize preferences into the columns of ids that TRL's preference trainers expect."""

import json
import os

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerFast

from .caching import cache_key, count_processes, encoding_key
from .encoding import encode_conversation


PAIR_FEATURES = Features({name: List(Value("int64")) for name in ("prompt_ids", "chosen_ids", "rejected_ids")})


def prepare_pairs(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    num_proc: int | None = None,
    are_whole: bool = False,
) -> tuple[Dataset, str]:
    """
    Tokenize preferences. The result is cached by content.

    Args:
        documents ([`Dataset`]): with the single column `text`: preferences in the internal form.
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template.
        max_length (`int`): maximum number of tokens in a row. The collator truncates longer answers. A pair is
            dropped if its prompt leaves no room for an answer, or if the answers are equal within `max_length`.
        num_proc (`int`, *optional*): number of processes that tokenize.
        are_whole (`bool`): give whole conversations as `chosen_ids` and `rejected_ids`, as the chat template renders
            them, and drop a pair with a longer one. A reward model reads its score at the end.

    Returns:
        `tuple`: a [`Dataset`] with `prompt_ids`, `chosen_ids` and `rejected_ids`, and a report for the user. An answer
        begins at the first token that the assistant generates, or where the two sequences differ if that is earlier.
        It ends with the stop token.

    Raises:
        `UserError`: if the template cannot render a pair.
    """
    key = encoding_key(tokenizer, tokenizer.chat_template, max_length, are_whole)
    # Give the types, because `datasets` cannot infer them from a batch that drops every pair.
    options = {"features": PAIR_FEATURES, "num_proc": count_processes(len(documents), num_proc), "desc": "tokenizing"}
    options["fn_kwargs"] = {"tokenizer": tokenizer, "max_length": max_length, "are_whole": are_whole}
    options["new_fingerprint"] = cache_key(documents._fingerprint, key)
    pairs = documents.map(_encode_batch, batched=True, remove_columns=["text"], **options)
    report = f"{len(pairs):,} pairs, {len(documents) - len(pairs):,} dropped at {max_length} tokens"
    return pairs, "; ".join(filter(None, [report, documents.info.description]))


def _encode_batch(
    batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerFast, max_length: int, are_whole: bool
) -> dict[str, list[list[int]]]:
    """Tokenize a batch of preferences. Drop those that leave no room for an answer or have equal answers."""
    columns: dict[str, list[list[int]]] = {name: [] for name in PAIR_FEATURES}
    for text in batch["text"]:
        preference = json.loads(text)
        prompt, kwargs = preference["prompt"], preference.get("chat_template_kwargs", {})
        encoded = [
            encode_conversation(tokenizer, prompt + preference[name], preference.get("tools"), **kwargs)
            for name in ("chosen", "rejected")
        ]
        ranges = [(0, len(ids)) if are_whole else _last_answer(numbers) for ids, numbers in encoded]
        chosen, rejected = (ids[:end] for (ids, _), (_, end) in zip(encoded, ranges, strict=True))
        # Some templates write text before an answer that depends on the answer, for example an empty <think> block. So
        # the prompt ends where the two sequences differ, at the latest.
        start = min(*(start for start, _ in ranges), len(os.path.commonprefix([chosen, rejected])))
        # The collator truncates at `max_length`, so training would never see a difference beyond it.
        is_cut = are_whole and max(len(chosen), len(rejected)) > max_length
        if start < max_length and not is_cut and chosen[start:max_length] != rejected[start:max_length]:
            for name, ids in zip(PAIR_FEATURES, (chosen[:start], chosen[start:], rejected[start:]), strict=True):
                columns[name].append(ids)
    return columns


def _last_answer(numbers: list[int]) -> tuple[int, int]:
    """Return the range `[start, end)` of the last text that the assistant generates, which is the answer."""
    end = max((i + 1 for i, number in enumerate(numbers) if number), default=len(numbers))
    start = max((i for i in range(end) if not numbers[i]), default=-1) + 1
    return start, end
