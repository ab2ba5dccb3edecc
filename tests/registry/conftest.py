"""ZooKeeper servers and groups of nodes; all end with their test."""

import contextlib

import pytest

from tests.process.conftest import make_group, pytest_runtest_makereport  # noqa: F401
from tests.process.harness import Group
from tests.registry.servers import Servers, registered

SHORT_SESSIONS = "maxSessionTimeout=3000\n"  # a silent server is noticed in 2 s, not in 4


@pytest.fixture
def make_servers(tmp_path):
    """Return a function that starts ZooKeeper servers."""
    made = []

    def make(count=1, settings=SHORT_SESSIONS):
        made.append(Servers(tmp_path, count, settings))
        return made[-1].start()

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory):
    """One running server for all tests that leave it alone."""
    one = Servers(tmp_path_factory.mktemp("zookeeper"))
    try:
        yield one.start()
    finally:
        one.close()


@pytest.fixture
def servers(shared_servers):
    """The shared server, emptied."""
    shared_servers.empty()
    return shared_servers


@pytest.fixture
def mortal(make_servers):
    """One running server of the test's own, to be killed and paused."""
    return make_servers()


@pytest.fixture
def pair(make_group, servers):  # noqa: F811
    """A running pair with a registry: node 1 SYNC_MASTER, node 2 SLAVE."""
    return registered(make_group(), servers)


@pytest.fixture
def mortal_pair(make_group, mortal):  # noqa: F811
    """The same, with a server of the test's own."""
    return registered(make_group(), mortal)


@pytest.fixture
def two_groups(tmp_path, servers):
    """Two running groups of one cluster, g0 and g1, of one node each."""
    groups = []
    with contextlib.ExitStack() as ends:
        for name in ("g0", "g1"):
            (tmp_path / name).mkdir()
            group = Group(tmp_path / name, 1, master_role="ASYNC_MASTER", acks=0)
            group[1].write(group=name)
            groups.append(registered(ends.enter_context(group), servers))
        yield groups
