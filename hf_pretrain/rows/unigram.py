"""The unigram model of packed rows, the baseline that a language model has to beat."""

import datasets
import numpy as np


def unigram_loss(train_rows: datasets.Dataset, eval_rows: datasets.Dataset, *, vocab_size: int) -> float:
    """
    Return the validation loss in nats per token of a unigram model, the baseline that a language model has to beat.

    The unigram model predicts each token by its frequency in the training rows, with add-one smoothing. As in
    training, the first token of a document is not predicted.

    Args:
        train_rows, eval_rows ([`~datasets.Dataset`]): packed rows with `input_ids` and `seq_lengths`.
        vocab_size (`int`): number of tokens in the vocabulary.
    """
    # Delete the first token of each document.
    train_tokens, eval_tokens = (np.delete(*tokens_and_starts(rows)) for rows in (train_rows, eval_rows))
    counts = 1 + np.bincount(train_tokens, minlength=vocab_size)
    return float(-np.log(counts / counts.sum())[eval_tokens].mean())


def tokens_and_starts(rows: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens of packed rows, shape `(num_tokens,)`, and the index of each document's first token."""
    # Arrow columns flatten without a Python object per token.
    table = rows.with_format("arrow")[:]
    tokens, lengths = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "seq_lengths"))
    return tokens, np.cumsum(lengths, dtype=np.int64) - lengths
