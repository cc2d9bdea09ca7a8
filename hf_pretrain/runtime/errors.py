"""The errors of this package for mistakes of the user. All other exceptions are bugs, or come from libraries."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError


class UserError(ValueError):
    """
    A mistake of the user. Its message says what happened, where, and what to do.

    The command prints the message as one line; every other exception keeps its traceback.
    """


class MissingExtraError(UserError, ImportError):
    """An extra of this package is not installed. The message gives the command that installs it."""


@contextmanager
def as_user_errors() -> Iterator[None]:
    """
    Raise each `ValueError` of a block, and each wrong type in a config, as a `UserError`, for code that cannot import
    this module: the model, whose files travel without the package, and the argument classes of libraries.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, StrictDataclassError) as error:
        raise UserError(str(error)) from error
