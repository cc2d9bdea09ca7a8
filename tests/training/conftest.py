"""Fixtures of the training tests."""

import signal

import pytest

from hf_pretrain.runtime.signals import SIGNALS


@pytest.fixture
def restored():
    """Restore the signal handlers that a run which ends leaves ignored."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
