"""Groups of nodes that are always stopped."""

import pytest

from hastore.ha.hello import survey
from tests.ha.nodes import Group


@pytest.fixture(autouse=True)
def patience():
    """Let a busy machine's nodes answer each other late; the product's limit is a second."""
    # Not the tests' own monkeypatch: what they patch is undone before their nodes stop.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(survey.ask_all.__kwdefaults__, "timeout_ms", 30_000.0)
        yield


@pytest.fixture
def make_group(tmp_path):
    """Make a Group; all of its nodes are stopped at the end."""
    made = []

    def make(count=1, **settings):
        group = Group(tmp_path / f"group{len(made)}", count, **settings)
        made.append(group)
        return group

    yield make
    for group in made:
        group.stop()
