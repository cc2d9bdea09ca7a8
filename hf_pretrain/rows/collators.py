"""Collate packed sequences into a batch of tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..runtime.errors import UserError


# Columns with one value per token.
TOKEN_COLUMNS = ("input_ids", "labels", "loss_mask", "attention_mask")


@dataclass
class DataCollatorForPackedRows:
    """
    Collator of packed sequences; it pads on the right.

    The batch has no attention mask. Instead, `position_ids` restart at 0 in each document and so separate the
    documents. The padding of a row acts as one more document, without labels. The collator also accepts rows that
    other programs prepared: a row without `seq_lengths` is one document, and the collator removes tokens that its
    `attention_mask` hides.

    Args:
        pad_token_id (`int`): id of the padding.
        max_length (`int`, *optional*): length of every batch in tokens. The default is the length of its longest row.
    """

    pad_token_id: int
    max_length: int | None = None

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Collate rows into a batch.

        Args:
            features (`list[dict]`): rows with `input_ids` and optionally `seq_lengths` (lengths of the documents in
                the row), `labels` (by default `input_ids`), `attention_mask` and, in all rows or none, `loss_mask`
                (one weight per token).

        Returns:
            `dict`: `input_ids`, `labels` and `position_ids`, `torch.int64` of shape `(batch_size, seq_len)`. Labels
            are -100 at the first token of each document, in the padding, where the weight is 0, and where they were
            -100 before. If the rows have a `loss_mask`, also `loss_mask`, `torch.float32` of the same shape, 0 where
            labels are -100. `cu_seq_lens_q`, `torch.int32` of shape `(num_documents + 1,)`: start of each document
            (padding is one) in the flattened batch, and its end. `max_length_q`, `int`: length of the longest
            document in tokens.

        Raises:
            `UserError`: if a row is longer than `max_length`, if the lengths of its documents do not add up to its
                length, or if its columns differ in length.
        """
        features = [_without_padding(feature) for feature in features]
        lengths = [len(feature["input_ids"]) for feature in features]
        seq_len = self.max_length or max(lengths)
        if max(lengths) > seq_len:
            raise UserError(f"A row of {max(lengths)} tokens is longer than max_length={seq_len}. Make rows shorter.")
        shape = (len(features), seq_len)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, -100, dtype=np.int64)
        position_ids = np.tile(np.arange(seq_len), (len(features), 1))
        loss_mask = np.zeros(shape, dtype=np.float32)
        for row, (feature, length) in enumerate(zip(features, lengths, strict=True)):
            seq_lengths = feature.get("seq_lengths", np.array([length]))
            if seq_lengths.sum() != length:
                raise UserError(f"seq_lengths {seq_lengths.tolist()} do not sum to the row's {length} tokens.")
            # (num_documents,): start of each document in the row
            starts = np.cumsum(seq_lengths) - seq_lengths
            position_ids[row, :length] -= np.repeat(starts, seq_lengths)
            # Positions restart in the padding, too, which makes it a separate document.
            position_ids[row, length:] -= length
            input_ids[row, :length] = feature["input_ids"]
            labels[row, :length] = feature.get("labels", feature["input_ids"])
            # No token comes before the first token of a document, so the model never predicts it.
            labels[row, starts] = -100
            loss_mask[row, :length] = feature.get("loss_mask", 1.0)
        # Labels and weights must agree: Trainer counts labels, the loss sums weights.
        labels[loss_mask == 0] = -100
        loss_mask[labels == -100] = 0
        arrays: dict[str, np.ndarray] = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        # Either all rows have weights or none has.
        if "loss_mask" in features[0]:
            arrays["loss_mask"] = loss_mask
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | _find_documents(position_ids)


def _find_documents(position_ids: np.ndarray) -> dict[str, Any]:
    """
    Return the bounds of the documents in a batch, and the length of the longest one.

    Without them, the model would have to wait for the GPU in each forward pass.
    """
    starts = np.flatnonzero(position_ids == 0)
    # The kernel of GPUs leaves tokens before the first document uninitialised. Here the check waits for no GPU.
    assert starts[0] == 0 and (position_ids[:, 0] == 0).all(), position_ids
    cu_seq_lens = np.append(starts, position_ids.size).astype(np.int32)
    longest = int(np.diff(cu_seq_lens).max())
    return {"cu_seq_lens_q": torch.from_numpy(cu_seq_lens), "max_length_q": longest}


def _without_padding(feature: dict[str, Any]) -> dict[str, Any]:
    """Return a row as arrays, without the tokens that its `attention_mask` hides on either side."""
    row = {name: np.asarray(feature[name]) for name in TOKEN_COLUMNS if feature.get(name) is not None}
    shapes = {name: column.shape for name, column in row.items()}
    if set(shapes.values()) != {(len(row["input_ids"]),)}:
        raise UserError(f"A row's columns must be lists of equal length, and these have the shapes {shapes}.")
    if "attention_mask" in row:
        is_token = row.pop("attention_mask") != 0
        row = {name: column[is_token] for name, column in row.items()}
    # `seq_lengths` does not count the hidden tokens.
    if feature.get("seq_lengths") is not None:
        row["seq_lengths"] = np.asarray(feature["seq_lengths"])
    return row
