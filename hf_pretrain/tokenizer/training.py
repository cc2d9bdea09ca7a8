"""Train byte-level BPE tokenizers, and cache them by the content of their training data."""

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers
from datasets import Dataset, IterableDataset
from huggingface_hub.constants import HF_HOME
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..runtime.command_line import announce
from ..runtime.errors import UserError
from .control_tokens import BOS_TOKEN, CHAT_TEMPLATE, EOS_TOKEN, MARKS, PAD_TOKEN, RESPONSE_TEMPLATE, SPECIAL_TOKENS
from .pretrained import load_tokenizer, save_tokenizer


# More text takes longer, and hardly changes the tokenizer.
MAX_TRAINING_CHARS = 50_000_000


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 6400) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer. The same texts in the same order give the same tokenizer.

    Args:
        texts (`Iterable[str]`): text to learn from.
        vocab_size (`int`, defaults to 6400): number of entries in total, `SPECIAL_TOKENS` and the 256 bytes included.
            The result has fewer if the text is short.

    Returns:
        [`PreTrainedTokenizerFast`]: with `<|endoftext|>` 0 (pad), `<|im_start|>` 1 (bos), `<|im_end|>` 2 (eos) and the
        chat and response templates. `tokenizer(text)` adds neither bos nor eos; [`encode_documents`] does.

    Raises:
        `UserError`: if `vocab_size` is less than the number of special tokens plus 256.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        need = f"{len(SPECIAL_TOKENS)} special tokens and 256 bytes need at least {smallest}"
        raise UserError(f"vocab_size={vocab_size} is too small: {need}.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        # All 256 bytes, so that text outside the training data needs no unknown token.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    announce("training a tokenizer")
    backend.train_from_iterator(texts, trainer)
    # NOTE: the trainer makes them all special, so `skip_special_tokens=True` would leave the marks out. A change holds
    # only for a loaded copy. `normalized=False`: a normalizer must not change how a mark is spelled.
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    backend = Tokenizer.from_str(backend.to_str())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        response_template=json.loads(RESPONSE_TEMPLATE),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def load_or_train_tokenizer(documents: Dataset | IterableDataset, *, vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Train a tokenizer on documents, or load the one that an earlier run trained on the same documents, from `HF_HOME`.

    Args:
        documents ([`Dataset`] or [`IterableDataset`]): with a column `text`.
        vocab_size (`int`): number of entries of the tokenizer in total.

    Raises:
        `UserError`: if `vocab_size` is too small.
    """
    texts = _sample_texts(documents)
    # The key covers all inputs of the result: text, settings, templates, code and library version.
    inputs = [
        vocab_size,
        SPECIAL_TOKENS,
        CHAT_TEMPLATE,
        RESPONSE_TEMPLATE,
        _TRAINING_CODE,
        tokenizers.__version__,
        texts,
    ]
    digest = hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16).hexdigest()
    directory = Path(HF_HOME, "hf_pretrain", "tokenizers", digest)
    if directory.is_dir():
        return load_tokenizer(directory)
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Rename a whole directory, so that no other process sees half a tokenizer. If another process was faster, the
    # rename fails, and this process uses the other tokenizer, which is equal.
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        save_tokenizer(tokenizer, Path(scratch, "tokenizer"))
        with suppress(OSError):
            os.rename(Path(scratch, "tokenizer"), directory)
    return load_tokenizer(directory)


def _sample_texts(documents: Dataset | IterableDataset) -> list[str]:
    """Return texts of up to about `MAX_TRAINING_CHARS` characters: evenly spaced, or the first ones of a stream."""
    if isinstance(documents, Dataset):
        # Estimate the mean length from 1,000 documents. Reading all documents of a large dataset would take minutes.
        probe = documents.select(np.linspace(0, len(documents) - 1, min(len(documents), 1000), dtype=np.int64))
        mean_chars = sum(map(len, probe["text"][:])) / max(len(probe), 1)
        if mean_chars * len(documents) > MAX_TRAINING_CHARS:
            count = max(1, int(MAX_TRAINING_CHARS / mean_chars))
            documents = documents.select(np.linspace(0, len(documents) - 1, count, dtype=np.int64))
        # `[:]` reads the column at once. Iterating over it reads row by row and takes ten times as long.
        return documents["text"][:]
    texts, num_chars = [], 0
    for document in documents:
        texts.append(document["text"])
        num_chars += len(texts[-1])
        if num_chars >= MAX_TRAINING_CHARS:
            break
    return texts


# Part of the cache key: newer code must not use a tokenizer that older code trained.
_TRAINING_CODE = inspect.getsource(train_tokenizer)
