"""The loopback Hub of these tests."""

from collections.abc import Iterator

import pytest

from tests.hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
