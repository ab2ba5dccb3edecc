"""ZooKeeper servers and groups of nodes; all end with their test."""

import pytest

from tests.process.conftest import make_group, pytest_runtest_makereport  # noqa: F401
from tests.registry.servers import Servers, registered


@pytest.fixture
def make_servers(tmp_path):
    """Return a function that starts ZooKeeper servers."""
    made = []

    def make(count=1):
        made.append(Servers(tmp_path, count))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


@pytest.fixture
def servers(make_servers):
    """One running server."""
    return make_servers()


@pytest.fixture
def pair(make_group, servers):  # noqa: F811
    """A running pair with a registry: node 1 SYNC_MASTER, node 2 SLAVE."""
    return registered(make_group(), servers)
