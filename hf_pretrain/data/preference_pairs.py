"""Tokenize preferences into the columns of ids that TRL's preference trainers expect."""

import json
import os
from functools import partial

from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerFast, TrainingArguments

from ..runtime.errors import UserError
from ..tokenizer.chat_template import mark_template
from .caching import cache_key, count_processes
from .data_arguments import SourceArguments
from .encoding import encode_conversation
from .preparation import PreparedData, print_report


PAIR_FEATURES = Features({name: List(Value("int64")) for name in ("prompt_ids", "chosen_ids", "rejected_ids")})


def load_pairs(
    data_args: SourceArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerFast,
    *,
    are_whole: bool = False,
) -> PreparedData:
    """
    Return preferences as rows of token ids. The main process prepares them, and the other ranks read its cache.

    Args:
        data_args ([`~data.data_arguments.SourceArguments`]): the data.
        training_args ([`~stages.dpo.DPOTrainingArguments`]): gives the ranks, the seed, `max_length`, and the
            directory of `rejected.jsonl`.
        tokenizer ([`PreTrainedTokenizerFast`]): a chat template that does not mark assistant tokens gets the marks.
        are_whole (`bool`): see [`prepare_pairs`].

    Raises:
        `ValueError`: in the cases of [`~data.documents.load_documents`], [`prepare_pairs`] and
            [`~tokenizer.chat_template.mark_template`].
    """
    # The loss compares only the text that the template marks.
    mark_template(tokenizer)
    with training_args.main_process_first(desc="preparing the data"):
        documents, eval_sets = data_args.load_documents(training_args, schema="preference")
        prepare = partial(
            prepare_pairs,
            tokenizer=tokenizer,
            max_length=training_args.max_length,
            num_proc=data_args.num_proc,
            are_whole=are_whole,
        )
        train, train_report = prepare(documents)
        validation = {name: prepare(part) for name, part in eval_sets.items()}
    report = [f"Training: {train_report}"]
    report += [f"Validation{name and ' '}{name}: {text}" for name, (_, text) in validation.items()]
    print_report(report, training_args)
    return PreparedData(
        tokenizer,
        report,
        data_args.dataset_name,
        "preferences",
        train,
        {name: pairs for name, (pairs, _) in validation.items()},
        data_args.eval_dataset_name or [],
        # A reward model answers no questions.
        conversations=None if are_whole else next(iter(eval_sets.values())),
    )


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
        tokenizer ([`PreTrainedTokenizerFast`]): with a marked chat template.
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
        `ValueError`: if no pair is left, or the template cannot render a pair.
    """
    # NOTE: `datasets` would hash the pickled tokenizer, whose state depends on earlier calls, and miss its cache.
    key = (
        documents._fingerprint,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        max_length,
        are_whole,
    )
    pairs = documents.map(
        _encode_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "are_whole": are_whole},
        remove_columns=["text"],
        # Give the types, because `datasets` cannot infer them from a batch that drops every pair.
        features=PAIR_FEATURES,
        num_proc=count_processes(len(documents), num_proc),
        new_fingerprint=cache_key(key),
        desc="tokenizing",
    )
    if len(documents) and len(pairs) == 0:
        raise UserError(
            f"No prompt of {len(documents)} pairs leaves room for an answer. Raise --max_length {max_length}."
        )
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
        # The prompt may hold earlier answers, which the template marks too.
        num_turns = sum(message["role"] == "assistant" for message in prompt)
        sequences, starts = {}, []
        for name in ("chosen", "rejected"):
            ids, is_generated = encode_conversation(
                tokenizer, prompt + preference[name], preference.get("tools"), **kwargs
            )
            start, end = (0, len(ids)) if are_whole else _last_answer(is_generated, num_turns)
            sequences[f"{name}_ids"] = ids[:end]
            starts.append(start)
        # Some templates write text before an answer that depends on the answer, for example an empty <think> block. So
        # the prompt ends where the two sequences differ, at the latest.
        start = min(*starts, len(os.path.commonprefix(list(sequences.values()))))
        row = {"prompt_ids": sequences["chosen_ids"][:start]}
        row |= {name: ids[start:] for name, ids in sequences.items()}
        # The collator truncates at `max_length`, so training would never see a difference beyond it.
        room = max_length - len(row["prompt_ids"])
        is_cut = are_whole and max(map(len, sequences.values())) > max_length
        if room > 0 and not is_cut and row["chosen_ids"][:room] != row["rejected_ids"][:room]:
            for name in PAIR_FEATURES:
                columns[name].append(row[name])
    return columns


def _last_answer(is_generated: list[bool], num_turns: int) -> tuple[int, int]:
    """Return the range `[start, end)` of the answer that follows `num_turns` earlier answers."""
    # The first token is bos, which is never generated. So the index -1 at i = 0 cannot hide a start.
    starts = [i for i, flag in enumerate(is_generated) if flag and not is_generated[i - 1]]
    start = starts[num_turns]
    end = next((i for i in range(start, len(is_generated)) if not is_generated[i]), len(is_generated))
    return start, end
