"""Groups of nodes for the tests of retention."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from tests.server.retention.kit import Make, Nodes


@pytest.fixture
def make_nodes(tmp_path: pathlib.Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(count: int, acks: int | None = None) -> Nodes:
            nodes = Nodes(tmp_path, count, acks)
            stack.callback(nodes.stop)
            return nodes

        yield make
