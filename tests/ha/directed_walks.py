"""Walks of the simulated group for mistakes that random walks hardly ever meet.

Each plays one story, and raises Violation where the story ends with a broken promise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hastore.errors import HastoreError, PromotionRefused
from tests.ha.simulation import Crash, SimNode, Violation, World, installed
from tests.ha.test_flips import Flips


@contextlib.contextmanager
def a_group(*, flushed: bool = False) -> Iterator[Flips]:
    """Yield three nodes without faults of their own."""
    world = World(7, nodes=3, crash_rate=0.0, flushed=flushed)
    group = Flips(7, world=world)
    with installed(world):
        yield group


def lose_power(node: SimNode) -> None:
    """End a node with all that it has not synced, and start it again."""
    node.die()
    node.store._cut(node.store.flushed_offset)
    node.files.boot += 1
    node.start()


def confirmed_bytes(node: SimNode) -> bytes:
    """Return what this node takes for confirmed."""
    return bytes(node.store.data[: node.store.confirmed_offset])


def must_keep(group: Flips, number: int, confirmed: bytes) -> None:
    """Promote a node: if that opens, its log must have what was confirmed."""
    try:
        with contextlib.suppress(Crash):
            group.promote(number)
    except PromotionRefused:
        return
    node = group.node(number)
    if node.open and bytes(node.store.data[: len(confirmed)]) != confirmed:
        raise Violation(f"node {number} leads without what was confirmed")


def follow(group: Flips, master: SimNode, number: int) -> SimNode:
    """Let a node follow until it has all, or is refused."""
    node = group.node(number)
    node.end_stream()
    with contextlib.suppress(HastoreError, OSError):
        node.client._follow_once()
        for _ in range(500):
            if node.stream is None or node.store.max_offset >= master.store.max_offset:
                break
            group.world.do_send(master)
            group.world.do_receive(node)
    return node


def report(group: Flips, master: SimNode) -> None:
    """Let the master take all reports that are in flight."""
    for _ in range(20):
        group.world.do_report(master)


def a_master_counts_what_it_has_not_synced() -> None:
    """At ack point flushed a master confirms nothing that it has not synced itself."""
    with a_group(flushed=True) as group:
        master = group.promote(1)
        group.put(master)
        two = follow(group, master, 2)
        group.world.do_flush(two)
        report(group, master)
        confirmed = confirmed_bytes(master)
        lose_power(master)
        two.end_stream()
        group.world.cut_off = {2}
        must_keep(group, 3, confirmed)


def a_node_restarts_twice_after_a_power_loss() -> None:
    """A second start in the same boot does not make a node clean that may have lost records."""
    with a_group() as group:
        master = group.promote(1)
        group.put(master)
        two = follow(group, master, 2)
        report(group, master)
        confirmed = confirmed_bytes(master)
        assert confirmed
        lose_power(two)
        two.die()
        two.start()
        master.die()
        must_keep(group, 3, confirmed)
