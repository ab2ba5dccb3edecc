"""A running ApiServer over a fake node, and a client of it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from hastore.config.model import ApiConfig
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client
from tests.server.api.secured import Secured


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def config() -> ApiConfig:
    return ApiConfig()


@pytest.fixture
def server(backend: FakeBackend, config: ApiConfig) -> Iterator[ApiServer]:
    running = ApiServer("tcp://127.0.0.1:0", backend, config, on_failure=raise_failure)
    running.start()
    yield running
    assert running.alive, running.failure
    assert running.stop(60)
    assert running.failure is None


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    found = Client(server.endpoint)
    yield found
    found.close()


@pytest.fixture
def secured(tmp_path: pathlib.Path) -> Secured:
    return Secured(tmp_path)
