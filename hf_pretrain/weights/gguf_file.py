"""
Read GGUF files, by their specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

NOTE: the reader of the `gguf` package makes a NumPy array of each piece of the vocabulary, which takes six seconds for
a small model; this one takes 0.1.
"""

import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runtime.errors import UserError


# `struct` formats of the types of values. 8 is a string, 9 an array.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """A tensor of a file: its type in `gguf.GGMLQuantizationType`, its shape, and the file from its first byte on."""

    type: int
    shape: tuple[int, ...]
    data: np.ndarray


class GGUFFile(NamedTuple):
    """The fields of a file's metadata, and its tensors by their names."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{format}", self.data, self.position)
        self.position += struct.calcsize(f"<{format}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        return self.take(f"{length}s")[0].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.take(_FORMATS[kind])[0]
        kind, count = self.take("IQ")
        if kind in _FORMATS:
            return list(self.take(f"{count}{_FORMATS[kind]}"))
        return [self.value(kind) for _ in range(count)]


# A run reads the tokenizer first, then the model.
@lru_cache(maxsize=1)
def read_gguf_file(path: Path) -> GGUFFile:
    """Map a file into memory. Raise `UserError` if it is no GGUF file of version 2 or 3, or damaged."""
    try:
        with path.open("rb") as file:
            cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        magic, version, num_tensors, num_fields = cursor.take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise UserError(f"{path} is no GGUF file of version 2 or 3.")
        fields = {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(num_fields)}
        places = {}
        for _ in range(num_tensors):
            name, (num_dims,) = cursor.text(), cursor.take("I")
            # The fastest dimension comes first.
            places[name] = (cursor.take(f"{num_dims}Q")[::-1], *cursor.take("IQ"))
        tokens = fields.get("tokenizer.ggml.tokens")
        for name, value in fields.items():
            if tokens is not None and name.endswith("_token_id") and value not in range(len(tokens)):
                raise UserError(f"{path} is damaged: {name} is {value}, and there are {len(tokens):,} tokens.")
        alignment = fields.get("general.alignment", 32)
        start = -(-cursor.position // alignment) * alignment
        tensors = {
            name: GGUFTensor(kind, shape, np.frombuffer(cursor.data, np.uint8, offset=start + offset))
            for name, (shape, kind, offset) in places.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error, ZeroDivisionError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, FileNotFoundError):
            raise UserError(f"There is no file {path}. Check the name.") from error
        raise UserError(f"{path} is damaged, or no GGUF file: {error}. Download it again.") from error
    return GGUFFile(fields, tensors)
