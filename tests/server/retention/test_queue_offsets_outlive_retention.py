"""The next offset of a quiet queue survives the removal of its messages; whole nodes."""

from __future__ import annotations

import shutil

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.config.model import Role
from hastore.record.codec import NO_HOST, build_record
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.server.retention.kit import FILES, Make, Nodes, fill, wait_gone

QUIET = 10  # messages in the quiet queue


def put_quiet(node: Node, count: int) -> list[int | None]:
    """Put messages to the quiet queue; return their queue offsets."""
    record = build_record(
        "quiet", b"q", queue_id=0, properties=(), born_timestamp_ms=1, born_host=NO_HOST
    )
    results = node.backend.put_encoded([record * count])
    return [result.queue_offset for result in results[0]]


def flip(nodes: Nodes, old: int, new: int) -> None:
    """Make another node the master."""
    nodes.changed[old] = nodes.config(old, Role.SLAVE)
    wait_for(lambda: nodes.running[old].roles.role == "SLAVE")
    nodes.changed[new] = nodes.config(new, Role.ASYNC_MASTER)
    wait_for(lambda: nodes.running[new].backend.writable_reason() is None)


def without_the_quiet_messages(make_nodes: Make) -> Nodes:
    """Start nodes 1, the master, and 2; retention has removed the quiet queue's messages."""
    nodes = make_nodes(3, acks=1)
    master = nodes.start(1, Role.ASYNC_MASTER)
    nodes.start(2, Role.SLAVE)
    wait_for(lambda: master.ha.slaves())
    assert put_quiet(master, QUIET) == list(range(QUIET))
    end = master.store.max_offset
    fill(master, FILES + 3)
    wait_gone(master, end)
    return nodes


def join(nodes: Nodes, number: int) -> Node:
    """Start a node as a slave of node 1, and wait until it has the log and has replayed it."""
    master, node = nodes.running[1], nodes.start(number, Role.SLAVE)
    wait_for(lambda: node.store.confirmed_offset == master.store.max_offset)
    wait_for(lambda: node.store.dispatched_offset == node.store.max_offset)
    return node


@pytest.mark.parametrize("number", [3, 2], ids=["with nothing", "after the loss of its queues"])
def test_a_node_that_has_only_the_log_goes_on_with_the_offsets(
    make_nodes: Make, number: int
) -> None:
    nodes = without_the_quiet_messages(make_nodes)
    old = nodes.running[1]
    with nodes.positions(1) as client:
        client.commit("g", "quiet", {0: QUIET})
    if number == 2:
        nodes.stop(2)
        shutil.rmtree(nodes.root / "node2" / "consumequeue")
    new = join(nodes, number)
    flip(nodes, 1, number)
    assert put_quiet(new, 3) == [QUIET, QUIET + 1, QUIET + 2]
    wait_for(lambda: old.store.dispatched_offset == new.store.max_offset)
    for node in (old, new):
        assert node.store.queues.queue_range("quiet", 0) == (QUIET, QUIET + 3)
    with Consumer("quiet", nodes.addresses[number].api, group="g") as consumer:
        got: list[int] = []
        while len(got) < 3:
            got += [message.queue_offset for message in consumer.poll(max_messages=10)]
    assert got == [QUIET, QUIET + 1, QUIET + 2]


def test_a_restart_after_the_statement_was_replayed_keeps_the_offsets(make_nodes: Make) -> None:
    nodes = without_the_quiet_messages(make_nodes)
    new = join(nodes, 3)
    stated = new.store.stated.since(new.store.max_offset)
    assert stated is not None
    nodes.stop(3)
    new = join(nodes, 3)
    assert new.store.stated.since(new.store.max_offset) == stated
    assert new.store.queues.queue_range("quiet", 0) == (QUIET, QUIET)
    flip(nodes, 1, 3)
    assert put_quiet(new, 1) == [QUIET]
