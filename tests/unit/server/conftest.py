"""A running fake server and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tests.unit.server.fakes import Fake, make_fake


@pytest.fixture
def fake() -> Fake:
    return make_fake()


@pytest.fixture
def client(fake: Fake) -> Iterator[TestClient]:
    with TestClient(fake.app, raise_server_exceptions=False) as client:
        client.portal.call(fake.service.bridge.booted)
        yield client
