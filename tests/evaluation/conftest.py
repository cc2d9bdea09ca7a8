"""The toy model of a chat, which the tests evaluate."""

from tests.inference.conftest import model, tokenizer  # noqa: F401
