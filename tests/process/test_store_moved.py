"""A node whose store folder is moved or removed ends, with the reason last on stderr."""

import shutil

import pytest

from tests.cli.kit import hastore


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_moved_folder_ends_its_node_and_no_data_is_lost(make_group, number):
    group = make_group().start()
    stdin = b"one\ntwo\nthree\n"
    addresses = ",".join(group.bootstrap)
    assert hastore("produce", "t", "--bootstrap", addresses, stdin=stdin).returncode == 0
    group.wait_equal()
    node, aside = group[number], group.folder / "aside"
    node.store.rename(aside)
    assert node.exit_code() == 3
    last = node.log.strip().splitlines()[-1]
    assert last.startswith(f"error: {node.store}/lock "), last
    assert "moved, replaced or removed" in last and "start the node again" in last
    assert not node.store.exists(), "the folder was created again"
    aside.rename(node.store)  # as the error line advises
    node.start()
    group[1].wait_writable()
    group[1].wait_in_sync(2)
    done = hastore("consume", "t", "--bootstrap", node.api)
    assert sorted(done.stdout.split()) == ["one", "three", "two"], done.stderr


@pytest.mark.full
def test_a_folder_removed_under_the_slave_does_not_stop_the_master(make_group):
    group = make_group().start()
    # The node may renew its reserve while the folder goes, as beside an operator's rm -rf.
    shutil.rmtree(group[2].store, ignore_errors=True)
    assert group[2].exit_code() == 3
    left = [one for one in group[2].store.rglob("*") if one.is_file()]
    assert {one.parent.name for one in left} <= {"reserve"}
    assert group[1].status()["writable"]
