"""Groups of nodes that are always stopped."""

import pytest

from tests.ha.nodes import Group


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
