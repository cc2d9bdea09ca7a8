"""Describe data before training: bad lines, lengths, duplicates, and the size of the model that they suffice for."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..rows.encoding import encode_conversation
from ..rows.reading import Reading
from ..runtime.command_line import announce
from ..runtime.errors import UserError
from ..tokenizer.control_tokens import encode_documents
from ..tokenizer.pretrained import load_tokenizer
from ..tokenizer.rendering import set_template
from ..tokenizer.training import train_tokenizer
from .audit import Audit
from .cleaning import text_digest
from .records import Record, plain_text, read_records


# The slow figures come from a random sample of this many records.
SAMPLE_SIZE = 5_000
# Compute-optimal number of tokens per parameter (Chinchilla, https://huggingface.co/papers/2203.15556).
TOKENS_PER_PARAMETER = 20
# Text that a run reads up to about this many times is nearly as good as new text
# (https://huggingface.co/papers/2305.16264).
MAX_PASSES = 4


@dataclass
class Survey:
    """
    Counts over all records of some data, and a random sample of the records.

    Args:
        kinds (`Counter`): number of records that can be trained on, by kind: `text`, `conversation` or `preference`.
        num_bytes (`int`): UTF-8 bytes of their plain texts. For a preference, they do not include the rejected answer.
        num_duplicates (`int`): number of records that equal an earlier one.
        reasons (`Counter`): number of bad lines for each reason.
        sample (`list[Record]`): up to `SAMPLE_SIZE` records, drawn at random.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_duplicates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sample: list[Record] = field(default_factory=list)

    @property
    def num_records(self) -> int:
        """Number of records that can be trained on."""
        return self.kinds.total()


def inspect_data(
    names: list[str],
    reading: Reading,
    *,
    tokenizer_name: str | None = None,
    max_length: int = 512,
    num_shown: int = 20,
    page: str | None = None,
) -> str:
    """
    Return the findings about some data, and random records as the model sees them, as text for the terminal.

    With a tokenizer, conversations are audited, too ([`~data.audit.Audit`]).

    Args:
        names (`list[str]`): the data, in the form of `--dataset_name`.
        reading ([`~rows.reading.Reading`]): how the user wants them to be read.
        tokenizer_name (`str`, *optional*): directory or Hub id; by default, a tokenizer is trained on the data.
        max_length (`int`): tokens per packed sequence.
        num_shown (`int`): number of records in the text.
        page (`str`, *optional*): HTML file to write the audit to.

    Raises:
        `UserError`: if a name leads to no data, no record is good, or there is nothing to write a page of.
    """
    records: Iterable[Record] = read_records(names, reading)
    audit = None
    if tokenizer_name is not None:
        tokenizer = load_tokenizer(tokenizer_name)
        audit = Audit(tokenizer, max_length)
        records = audit.watch(records)
    survey = survey_records(records)
    if not survey.sample:
        reasons = "; ".join(survey.reasons) or "there are none"
        raise UserError(f"No record of {', '.join(names)} can be trained on: {reasons}. Correct the data.")
    if audit is None:
        tokenizer = train_tokenizer([plain_text(record) for record in survey.sample])
    elif any(record.kind != "text" for record in survey.sample):
        set_template(tokenizer)
    announce("counting tokens")
    found = describe(survey, tokenizer, max_length=max_length)
    shown_records = random.Random(0).sample(survey.sample, min(num_shown, len(survey.sample)))
    if audit is not None and audit.num_rows:
        found += audit.describe()
        if page is not None:
            audit.write_page(page, shown_records)
    elif page is not None:
        raise UserError("--page shows conversations. Pass --tokenizer, and data with conversations.")
    lines = [f"{label:20} {text}" for label, text in found]
    lines.append(f"\n{len(shown_records)} records as the model sees them:")
    for record in shown_records:
        shown = tokenizer.decode(render(record, tokenizer))
        lines += [f"\n--- {record.source}:{record.line}", shown[:400] + " …" * (len(shown) > 400)]
    return "\n".join(lines)


def survey_records(records: Iterable[Record]) -> Survey:
    """
    Count records, and draw a sample in which each record is equally likely (reservoir sampling).
    """
    survey, generator = Survey(), random.Random(0)
    announce("reading")
    digests = set[bytes]()
    for record in records:
        if record.reason:
            survey.reasons[record.reason] += 1
            continue
        survey.kinds[record.kind] += 1
        survey.num_bytes += len(plain_text(record, chosen_only=True).encode())
        digests.add(text_digest(record.text))
        if len(survey.sample) < SAMPLE_SIZE:
            survey.sample.append(record)
        elif (place := generator.randrange(survey.num_records)) < SAMPLE_SIZE:
            survey.sample[place] = record
    survey.num_duplicates = survey.num_records - len(digests)
    return survey


def render(record: Record, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """
    Return the tokens of a record as training reads them: a document, or a conversation in the chat template.

    Args:
        record ([`Record`]): a good record. For a preference, the result is its prompt and its chosen answer.
        tokenizer ([`PreTrainedTokenizerFast`]): with a marked chat template, if the record is not a text.

    """
    if record.kind == "text":
        return encode_documents([record.text], tokenizer)[0]
    parts = json.loads(record.text)
    messages = parts["prompt"] + parts["chosen"] if record.kind == "preference" else parts["messages"]
    return encode_conversation(tokenizer, messages, parts.get("tools"), **parts.get("chat_template_kwargs", {}))[0]


def describe(survey: Survey, tokenizer: PreTrainedTokenizerFast, *, max_length: int = 512) -> list[tuple[str, str]]:
    """
    Return the findings as pairs of label and text.

    Args:
        survey ([`Survey`]): the counts and the sample.
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the model to train.
        max_length (`int`): tokens per packed sequence.
    """
    sample = survey.sample
    rendered = [render(record, tokenizer) for record in sample]
    lengths = np.array([len(ids) for ids in rendered])
    # The bytes of the rendered text: the tokens of a conversation include its roles and tools.
    num_bytes = sum(len(text.encode()) for text in tokenizer.batch_decode(rendered, skip_special_tokens=True))
    tokens = int(lengths.mean() * survey.num_records)
    places = ", ".join(f"{share}%: {np.percentile(lengths, share):,.0f}" for share in (1, 10, 50, 90, 99, 100))
    # Two digits: Chinchilla's number is a rule of thumb, and small data suffice for less than 0.1 M.
    size = float(f"{MAX_PASSES * tokens / TOKENS_PER_PARAMETER:.2g}")
    kinds = ", ".join(f"{number:,} {kind}s" for kind, number in survey.kinds.most_common())
    return [
        ("Records", f"{kinds}, {survey.num_bytes / 1e6:,.1f} MB of text"),
        ("Left out", f"{survey.reasons.total():,}"),
        *(("", f"{number:,}: {reason}") for reason, number in survey.reasons.most_common(10)),
        ("Tokens", f"about {tokens:,}; {lengths.sum() / max(1, num_bytes):.3f} per byte"),
        ("Tokens per record", places),
        ("Over --max_length", f"{(lengths > max_length).mean():.1%} of the records exceed {max_length} tokens"),
        ("Exact duplicates", f"{survey.num_duplicates / survey.num_records:.1%} of the records"),
        ("Packed sequences", f"about {tokens / max_length:,.0f} of {max_length} tokens"),
        (
            "Model size",
            f"up to {size:,.0f} parameters, at {TOKENS_PER_PARAMETER} tokens per parameter and at most {MAX_PASSES} "
            "passes",
        ),
    ]


def format_preview(rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> str:
    """
    Return rows as text for a terminal. Tokens of weight 1 are green, tokens of another positive weight are yellow, and
    tokens without loss have no colour.

    Args:
        rows (`Iterable[dict]`): packed sequences with `input_ids`, `seq_lengths` and optionally `loss_mask`; or
            preferences or tasks, whose columns appear as they are.
        num_rows (`int`): number of rows to show.
    """
    lines = []
    for row in itertools.islice(rows, num_rows):
        if "input_ids" not in row:
            # Preferences hold ids. Tasks hold messages, and what the rewards read.
            ids = ("prompt_ids", "chosen_ids", "rejected_ids")
            shown = {name: tokenizer.decode(each) if name in ids else each for name, each in row.items()}
            lines += ["--- a row", *(f"{name}: {each}" for name, each in shown.items() if each is not None)]
            continue
        lines.append(f"--- a row of {len(row['input_ids'])} tokens, {len(row['seq_lengths'])} documents\n")
        # An entry of `loss_mask` weighs the prediction of the token at the same index.
        weights = row.get("loss_mask", [1] * len(row["input_ids"]))
        runs = itertools.groupby(zip(weights, row["input_ids"], strict=True), key=lambda pair: pair[0])
        for weight, run in runs:
            text = tokenizer.decode([token for _, token in run])
            colour = "\033[32m" if weight == 1 else "\033[33m"
            lines[-1] += f"{colour}{text}\033[0m" if weight else text
    return "\n".join(lines)
