"""A group of mode dledger as processes, with the operations that the benchmarks need.

    with QuorumGroup(folder) as group:
        group.start()
        leader = group.leader()
"""

import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.bare import BODY
from benchmarks.common import START_S, Group, Node, loopback_addresses, wait_until
from hastore.config.model import StoreConfig
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.record.codec import Host, build_record

SETTLE_S = 120.0
BATCH = 100


class QuorumGroup(Group):
    """Three nodes that elect their leader."""

    def __init__(
        self,
        folder: pathlib.Path,
        count: int = 3,
        *,
        store: Mapping[str, Any] | None = None,
        dledger: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        addresses = loopback_addresses(count)
        self._nodes = {}
        for number in addresses:
            settings: dict[str, Any] = {
                "cluster": "bench",
                "group": "g0",
                "node": number,
                "mode": "dledger",
                "nodes": {key: dict(value) for key, value in addresses.items()},
                "store": {"root": str(folder / f"store{number}"), **(store or {})},
                "dledger": dict(dledger or {}),
            }
            self._nodes[number] = Node(number, folder, settings)

    def start(self, limit_s: float = START_S) -> None:
        """Start all nodes at the same time; return when one takes puts and all are in sync."""
        self.launch(*self._nodes)
        self.wait_in_sync(limit_s)

    def launch(self, *numbers: int) -> None:
        """Start nodes at the same time, and wait for their ready lines."""
        for number in numbers:
            self._nodes[number].launch()
        for number in numbers:
            self._nodes[number].wait_ready()

    def leader(self) -> Node:
        """Wait until a node takes puts, and return it."""

        def found() -> Node | None:
            for node in self.running():
                node.check_alive()
                if node.status()["writable"]:
                    return node
            return None

        node: Node = wait_until(found, SETTLE_S, "the group elects no leader")
        return node

    def wait_in_sync(self, limit_s: float = SETTLE_S) -> None:
        """Wait until all running nodes have the same log, committed."""

        def right() -> bool:
            states = [node.status() for node in self.running()]
            ends = {state["ledger_end_index"] for state in states}
            committed = {state["committed_index"] for state in states}
            leads = any(state["writable"] for state in states)
            return leads and ends == committed and len(ends) == 1

        wait_until(right, limit_s, "the nodes do not get in sync")

    def costs(self) -> dict[str, Any]:
        """Return what the leader and each follower have used."""
        leader = self.leader()
        return {
            "leader" if node is leader else f"node {node.number}": node.cost()
            for node in self.running()
        }

    # ---- what the benchmarks of failover and rejoin do

    def fail_over(self, put: Callable[[], None]) -> float:
        """Kill the leader; return the seconds to the next acknowledged put. The node comes back."""
        leader = self.leader()
        began = time.perf_counter()
        leader.kill()
        put()
        seconds = time.perf_counter() - began
        leader.start()
        self.wait_in_sync()
        return seconds

    def catch_up(self, fill: Callable[[], None]) -> float:
        """Return the seconds in which a follower gets what `fill` put while it was down.

        They count from the moment at which it has a link to the leader.
        """
        leader = self.leader()
        late = next(node for node in self.running() if node is not leader)
        late.stop()
        fill()
        end = leader.status()["ledger_end_index"]
        late.launch()

        def reported() -> bool:
            late.check_alive()
            found = leader.status()["slaves"]
            return any(one["node"] == late.number and one["ack_index"] >= end for one in found)

        wait_until(reported, SETTLE_S, "the follower does not catch up", poll_s=0.004)
        seconds = time.time() - linked_at(late, leader)
        late.wait_ready()
        self.wait_in_sync()
        return seconds

    def compare(self, count: int, fill: Callable[[], None]) -> float:
        """Return the seconds in which the leader finds and cuts a follower's divergent tail.

        The follower was the leader: its last `count` entries are of its term, and nobody else has
        them. `fill` puts others in the next term. They count from the moment at which it has a
        link to the leader.
        """
        old = self.leader()
        for node in self.running():
            node.stop()
        append_alone(old, count)
        self.launch(*(number for number in self._nodes if number != old.number))
        fill()
        leader = self.leader()
        began = time.time()
        old.start()

        def cut() -> float | None:
            at = old.said("were cut")
            return at if at is not None and at >= began else None

        at: float = wait_until(cut, SETTLE_S, "no divergent entry was cut")
        seconds = at - linked_at(old, leader)
        self.wait_in_sync()
        return seconds


def linked_at(node: Node, leader: Node) -> float:
    """Return when a node that was started last got its link to the leader, in s since 1970."""
    at = wait_until(
        lambda: node.said(f"linked with node {leader.number}"), SETTLE_S, "no link to the leader"
    )
    return float(at)


def append_alone(node: Node, count: int) -> None:
    """Append entries of its last term to the log of a node that does not run."""
    file_size = node.settings["store"].get("commitlog_file_size", 2**30)
    store = DLedgerMmapFileStore(
        StoreConfig(root=str(node.store), commitlog_file_size=file_size),
        node=node.number,
        store_host=Host.parse("127.0.0.1:10911"),
    )
    store.open()
    try:
        host = store.messages.store_host
        record = build_record(
            "alone", BODY, queue_id=0, born_timestamp_ms=0, born_host=host
        )
        for _ in range(0, count, BATCH):
            if store.put(store.end_term, [record] * BATCH).count != BATCH:
                raise RuntimeError(f"node {node.number} did not store its divergent entries")
        store.flush()
    finally:
        store.close()
