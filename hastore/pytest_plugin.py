"""pytest's fixtures; pytest finds them by itself where hastore is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hastore.testing import Group


@pytest.fixture
def hastore_group() -> Iterator[Group]:
    """Return a real pair for one test: node 1 SYNC_MASTER, node 2 SLAVE."""
    from hastore.testing import group  # here: other tests do not pay for its imports

    with group(cuttable=True) as made:
        yield made


@pytest.fixture
def hastore_dledger() -> Iterator[Group]:
    """Return a real group of three nodes that elect their leader, for one test."""
    from hastore.testing import group

    with group("dledger", cuttable=True) as made:
        yield made
