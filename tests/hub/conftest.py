"""The loopback Hub of these tests."""

import os
from collections.abc import Iterator

import pytest

from tests.hub_server import HubServer


# ModelScope's client reads them at its import. It would wait seconds between its attempts.
os.environ |= {"MODELSCOPE_API_MAX_RETRIES": "1", "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "1"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server
