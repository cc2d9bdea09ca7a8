"""A mistake of a user and the words of its message. The file `mistakes.py` of each folder of tests lists some."""

from collections.abc import Callable
from typing import NamedTuple

from hf_pretrain.runtime.errors import UserError


class Mistake(NamedTuple):
    """
    One row of the table that `tests/test_messages.py` runs.

    Args:
        says: A pattern of the message: the offending value or place, then what to do.
        make: A function that makes the mistake. Its parameters are names of fixtures.
        error: The type of the exception.
    """

    says: str
    make: Callable[..., object]
    error: type[Exception] = UserError
