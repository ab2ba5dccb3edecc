"""Groups of nodes that are stopped at the end of each test."""

import pytest

from hastore.ha.hello import peer
from tests.ha.nodes import Group


@pytest.fixture(autouse=True)
def patience():
    """Give nodes on a busy machine 30 s to answer each other; the product gives them one."""
    # Not the tests' own monkeypatch: its patches are undone before the nodes stop.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(peer.ask_all.__kwdefaults__, "timeout_ms", 30_000.0)
        yield


@pytest.fixture
def make_group(tmp_path):
    """Make a Group; all its nodes are stopped at the end."""
    made = []

    def make(count=1, **settings):
        group = Group(tmp_path / f"group{len(made)}", count, **settings)
        made.append(group)
        return group

    yield make
    for group in made:
        group.stop()
