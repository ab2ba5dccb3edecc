"""Joining: a new node that ends before each of its writes, and new nodes without the old ones."""

import errno
import os
import shutil

import pytest

from hastore.dledger.core.events import HardState
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.fs.filesystem import REAL
from tests.dledger.driver.groups import HOST, STORE, DriverGroup, running_group
from tests.dledger.links.groups import make_config
from tests.ha.nodes import wait_for

# What a new node saves: its id; whom it was told of; term and votes; that it has joined.
SAVES = ["node.json", "node.json", "currterm", "votes.json", "node.json"]
LOST = ["node.json", "node.json", "votes.json", "currterm", "node.json"]
STEPS = range(1, 6)


class FullAt:
    """A file system that refuses the `step`-th file that a node saves while it joins, once."""

    def __init__(self, step):
        self.step = step
        self.saves = []

    def __getattr__(self, name):
        return getattr(REAL, name)

    def replace_bytes(self, path, data):
        name = path.rpartition("/")[2]
        if name in SAVES:
            self.saves.append(name)
            if len(self.saves) == self.step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        REAL.replace_bytes(path, data)


def ended_at(group, number, step):
    """Start a node that ends before its `step`-th save, as by kill -9, and return what it saved."""
    fs = FullAt(step)
    (node,) = group.start(number, fs=fs)
    wait_for(lambda: node.failures, "the node ends")
    assert not node.state.data.joined
    node.kill()
    return fs.saves


def started(group, *numbers):
    """Start nodes, and wait until they have joined."""
    nodes = group.start(*numbers)
    has_joined(*nodes)
    return nodes


def has_joined(*nodes):
    wait_for(lambda: all(node.driver.core is not None for node in nodes), "the cores")
    assert all(node.state.data.joined for node in nodes)


@pytest.fixture
def of_one(tmp_path):
    """A group that began with node 1 alone, which is stopped; the files have six nodes now."""
    group = DriverGroup(tmp_path, 6)
    (one,) = group.start(1, ports={1: group.ports[1]})
    group.put(b"acknowledged by node 1")
    wait_for(lambda: one.state.data.group_id, "the id")
    one.stop()
    yield group
    group.stop()


def only(group, *numbers):
    """Let the files have these nodes only."""
    group.ports = {n: group.ports[n] for n in numbers}


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_ends_while_it_joins_a_group_of_one_does_not_begin_another(of_one, step):
    """Nodes 2 and 3 are the majority of the files, and node 1 is the whole group."""
    only(of_one, 1, 2, 3)
    _, three = of_one.start(1, 3)
    assert ended_at(of_one, 2, step) == SAVES[:step]
    (two,) = of_one.start(2)
    has_joined(two, three)
    assert two.driver.core.members == three.driver.core.members == (1,)
    assert two.driver.core.remembers
    assert of_one.put(b"by node 1").number == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_has_lost_its_disk_knows_it_though_it_ends_while_it_joins(tmp_path, step):
    with running_group(tmp_path) as group:
        group.put(b"kept")
        group.settled()
        node = group.nodes[3]
        others = [group.nodes[1], group.nodes[2]]
        wait_for(lambda: all(3 in one.state.data.known_stores for one in others), "the store")
        node.kill()
        shutil.rmtree(node.config.store.root)
        assert ended_at(group, 3, step) == LOST[:step]
        group.nodes[2].kill()  # nobody brings the node in line
        (node,) = started(group, 3)
        assert not node.driver.core.remembers and node.state.data.lost_disk
        group.start(2)
        group.put(b"with all")
        wait_for(lambda: node.driver.core.remembers, "the leader brings the node in line")
        assert b"kept" in group.settled()[0].log()


def vote_without_entries(group, number, *, votes):
    """Make a store with term 7 and no entry, as RocketMQ leaves it (`votes`: as a crash did)."""
    config = make_config(group.root, number, group.ports, store=STORE)
    store = DLedgerMmapFileStore(
        config.store, node=number, store_host=HOST, index_file_bytes=32 * 4096
    )
    store.open()
    store.save_hard_state(HardState(7, 1), remembers=True)
    store.close()
    if not votes:
        shutil.rmtree(f"{config.store.root}/hastore")


@pytest.mark.parametrize("votes", [True, False])
def test_a_store_with_a_term_and_no_entry_asks_who_the_members_are(of_one, votes):
    """RocketMQ leaves it, and a version before this one whose node ended while it joined."""
    only(of_one, 1, 2)
    of_one.start(1)
    vote_without_entries(of_one, 2, votes=votes)
    (two,) = started(of_one, 2)
    assert two.driver.core.members == (1,)
    assert two.driver.core.remembers and two.store.hard_state == HardState(7, 1)


@pytest.mark.parametrize("votes", [True, False])
@pytest.mark.parametrize("step", range(1, 5))
def test_a_store_with_a_term_that_replaces_a_lost_one_knows_it_after_each_end(of_one, votes, step):
    """Else `currterm` alone says that the votes are known. No `currterm` is to be written here."""
    only(of_one, 1, 2)
    (one,) = of_one.start(1)
    one.state.save(known_stores={2: "ab" * 16})
    vote_without_entries(of_one, 2, votes=votes)
    assert ended_at(of_one, 2, step) == [one for one in LOST if one != "currterm"][:step]
    (two,) = started(of_one, 2)
    assert not two.driver.core.remembers and two.state.data.lost_disk
    two.kill()
    (two,) = started(of_one, 2)
    assert not two.driver.core.remembers


@pytest.mark.parametrize("count", [4, 5, 6])
def test_new_nodes_begin_no_group_while_a_node_of_their_files_is_silent(of_one, count):
    """It may be the only member of a group that has begun: nobody else would name it."""
    only(of_one, *range(1, count + 1))
    new = of_one.start(*range(2, count + 1))
    says = "waits for node 1 to say"
    wait_for(lambda: all(says in (node.driver.waits or "") for node in new), "all wait for node 1")
    of_one.start(1)
    has_joined(*new)
    assert all(node.driver.core.members == (1,) for node in new)
    assert of_one.put(b"by node 1").number == 1


def test_a_node_that_is_not_there_yet_is_taken_out_of_the_files(tmp_path):
    group = DriverGroup(tmp_path, 4)
    try:
        nodes = group.start(1, 2, 3)
        says = "which was never started, out of `nodes` in every file"
        wait_for(lambda: all(says in (node.driver.waits or "") for node in nodes), "they wait")
        for node in nodes:  # as GroupService does when a file has changed
            node.driver.set_addresses({n: f"127.0.0.1:{group.ports[n]}" for n in (1, 2, 3)})
        has_joined(*nodes)
        group.put(b"without node 4")
        assert {node.driver.core.members for node in nodes} == {(1, 2, 3)}
    finally:
        group.stop()
