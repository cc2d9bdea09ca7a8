"""Describe data before training: bad lines, lengths, duplicates, languages, and tokens per parameter of a preset."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..model.presets import PRESETS
from ..tokenizer.encoding import encode_documents, encode_rendered, guard_control_tokens
from .cleaning import DuplicateFinder, plain_text
from .records import Record


# The slow figures come from a random sample of this many records.
SAMPLE_SIZE = 5_000
# Below this many characters, no library can tell the language.
_MIN_LANGUAGE_CHARS = 20
_PERCENTILES = (1, 10, 50, 90, 99, 100)
# Compute-optimal number of tokens per parameter (Chinchilla, https://huggingface.co/papers/2203.15556).
TOKENS_PER_PARAMETER = 20


@dataclass
class Survey:
    """
    Counts over all records of some data, and a random sample of the records.

    Args:
        num_records (`int`): number of records that can be trained on.
        num_bytes (`int`): UTF-8 bytes of their texts.
        reasons (`Counter`): number of bad lines for each reason.
        sample (`list[Record]`): up to `SAMPLE_SIZE` records, drawn at random.
    """

    num_records: int = 0
    num_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sample: list[Record] = field(default_factory=list)


def survey_records(records: Iterable[Record], *, seed: int = 0) -> Survey:
    """Count records, and draw a sample in which each record is equally likely (reservoir sampling)."""
    survey, generator = Survey(), random.Random(seed)
    for record in records:
        if record.reason:
            survey.reasons[record.reason] += 1
            continue
        survey.num_records += 1
        survey.num_bytes += len(record.text.encode("utf-8", "surrogatepass"))
        if len(survey.sample) < SAMPLE_SIZE:
            survey.sample.append(record)
        elif (place := generator.randrange(survey.num_records)) < SAMPLE_SIZE:
            survey.sample[place] = record
    return survey


def render(record: Record, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens on which a run trains: a document, or a conversation in the form of the chat template."""
    messages = _messages(record)
    if messages is None:
        return encode_documents([record.text], tokenizer)[0]
    rendered = tokenizer.apply_chat_template(guard_control_tokens(tokenizer, messages), tokenize=False)
    return encode_rendered(tokenizer, rendered)[0]


def _messages(record: Record) -> list[dict[str, Any]] | None:
    """Return the messages of a conversation, or prompt and chosen answer of a preference; `None` for text."""
    if not isinstance(record.content, dict) or not record.text.startswith("{"):
        return None
    parts = json.loads(record.text)
    if not isinstance(parts, dict) or not parts.keys() & {"messages", "prompt"}:
        return None
    return [*(parts.get("prompt") or []), *(parts.get("messages") or parts.get("chosen") or [])]


def describe(survey: Survey, tokenizer: PreTrainedTokenizerFast, *, max_length: int = 512) -> list[tuple[str, str]]:
    """
    Return the findings as pairs of label and text.

    Args:
        survey ([`Survey`]): the counts and the sample.
        tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the model to train.
        max_length (`int`): tokens per packed sequence.

    Raises:
        `ImportError`: if datasketch or py3langid is not installed.
    """
    sample = survey.sample
    lengths = np.array([len(render(record, tokenizer)) for record in sample])
    sizes = np.array([len(record.text.encode("utf-8", "surrogatepass")) for record in sample])
    tokens_per_byte = lengths.sum() / sizes.sum()
    tokens = int(lengths.mean() * survey.num_records)
    places = ", ".join(f"{percentile}%: {np.percentile(lengths, percentile):,.0f}" for percentile in _PERCENTILES)
    finder = DuplicateFinder(0.85)
    duplicates = Counter(finder.add(plain_text(record)) for record in sample)
    languages = Counter(map(find_language, map(plain_text, sample)))
    rows = [
        ("Records", f"{survey.num_records:,}, {survey.num_bytes / 1e6:,.1f} MB of text"),
        ("Bad lines", f"{survey.reasons.total():,}"),
        *(("", f"{number:,}: {reason}") for reason, number in survey.reasons.most_common(3)),
        ("Tokens", f"about {tokens:,}; {tokens_per_byte:.3f} per byte"),
        ("Tokens per record", places),
        ("Over --max_length", f"{(lengths > max_length).mean():.1%} of the records exceed {max_length} tokens"),
        ("Exact duplicates", f"{duplicates['exact duplicate'] / len(sample):.1%} of {len(sample):,} sampled records"),
        ("Near duplicates", f"{duplicates['near duplicate'] / len(sample):.1%}"),
        ("Languages", ", ".join(f"{name} {n / len(sample):.0%}" for name, n in languages.most_common(6))),
        ("Packed sequences", f"about {tokens / max_length:,.0f} of {max_length} tokens"),
    ]
    for preset in PRESETS:
        number = _num_parameters(preset)
        passes = TOKENS_PER_PARAMETER * number / max(1, tokens)
        ratio = f"{tokens / number:,.2f} tokens per parameter in one pass"
        rows.append((f"For {preset}", f"{ratio}, {TOKENS_PER_PARAMETER} in {passes:,.1f} passes"))
    return rows


def find_language(text: str) -> str:
    """Return the ISO code of the language of a text; `?` if the text is too short to tell."""
    try:
        from py3langid import classify
    except ImportError as error:
        raise ImportError('Languages need py3langid: pip install "hf_pretrain[data]"') from error
    return str(classify(text[:2000])[0]) if len(text) >= _MIN_LANGUAGE_CHARS else "?"


def _num_parameters(preset: str) -> int:
    import torch

    from ..model import MiniMindConfig, MiniMindForCausalLM

    with torch.device("meta"):
        model = MiniMindForCausalLM(MiniMindConfig(**PRESETS[preset]))
    return sum(parameter.numel() for parameter in model.parameters())


__all__ = ["SAMPLE_SIZE", "Survey", "describe", "find_language", "render", "survey_records"]
