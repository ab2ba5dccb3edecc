"""A group of mode dledger as real processes, built from the harness of mode classic."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.process import faulty_node
from tests.process.harness import (
    NO_OWN_RECORDS,
    SETTLE_S,
    SMALL_FILES,
    START_S,
    Group,
    Node,
    Ports,
    Status,
    wait_until,
)

if TYPE_CHECKING:
    from tests.process.networks import Network


class DLedgerGroup(Group):
    """Nodes that elect their leader; its end leaves no process running.

    `nodes` of a node's file lists the nodes up to `listed`; the others are started later. With
    `network`, the nodes are in it. With `faulty`, `faults` has the clock and the disk of each node.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        count: int = 3,
        *,
        listed: int | None = None,
        store: Mapping[str, Any] | None = None,
        retention: Mapping[str, Any] = NO_OWN_RECORDS,
        dledger: Mapping[str, Any] | None = None,
        network: Network | None = None,
        faulty: bool = False,
        cold: bool = False,
    ) -> None:
        self.folder = folder
        self._ports = Ports()
        addresses = network.addresses if network else self._ports.addresses(count)
        beyond = network.settings(folder) if network else {}
        self.addresses = addresses
        self.nodes: dict[int, Node] = {}
        self.faults: dict[int, faulty_node.Faults] = {}
        for number in addresses:
            seen = network.seen_by(number) if network else addresses
            known = {n: dict(a) for n, a in seen.items() if n <= (listed or count)}
            settings = {
                **beyond,
                "cluster": "test",
                "group": "g0",
                "node": number,
                "mode": "dledger",
                "nodes": {**known, number: dict(addresses[number])},
                "store": {
                    "root": str(folder / f"store{number}"),
                    **SMALL_FILES,
                    **(store or {}),
                },
                "retention": dict(retention),
                "dledger": dict(dledger or {}),
            }
            namespace = network.namespace(number) if network else None
            node = self.nodes[number] = Node(number, folder, settings, namespace)
            node.cold = cold
            if faulty:
                control = folder / f"node{number}.faults"
                self.faults[number] = faulty_node.Faults(control)
                node.launcher = [str(faulty_node.__file__), str(control)]

    def start(self, *numbers: int) -> DLedgerGroup:
        """Start nodes (all that do not run) at the same time; wait until one takes puts."""
        started = [node for node in self if node.process is None]
        if numbers:
            started = [self[number] for number in numbers]
        for node in started:
            node.start("dledger", wait=False)
        for node in started:
            node.wait_ready()
        self.wait_leader()
        return self

    def wait_leader(self, *, but: Node | None = None, timeout_s: float = START_S) -> Node:
        """Return the node that takes puts; `but` is not asked, because it is stopped or paused."""

        def look() -> Node | None:
            for node in self:
                if node.running and node is not but:
                    status = node.status()
                    if status is not None and status["writable"]:
                        return node
            return None

        found: Node = wait_until(
            look, timeout_s, lambda: f"no leader: {[node.last_words(4) for node in self]}"
        )
        return found

    def followers(self, leader: Node) -> list[Node]:
        """Return the other nodes that run."""
        return [node for node in self if node is not leader and node.running]

    def wait_same(self, timeout_s: float = SETTLE_S) -> Status:
        """Wait until all running nodes have the same committed and replayed log; return a status.

        The data files of all nodes are then the same, byte for byte.
        """

        def look() -> Status | None:
            statuses = [node.status() for node in self if node.running]
            if any(status is None for status in statuses):
                return None
            ends = {
                status[key]
                for status in statuses
                if status is not None
                for key in (
                    "max_offset",
                    "confirmed_offset",
                    "readable_offset",
                    "dispatched_offset",
                )
            }
            same = len(ends) == 1 and len({s["ledger_end_index"] for s in statuses if s}) == 1
            return statuses[0] if same else None

        status: Status = wait_until(
            look, timeout_s, lambda: f"the nodes differ: {[node.status() for node in self]}"
        )
        return status

    def log_bytes(self, node: Node, end: int) -> bytes:
        """Return the log of a node from its first file up to `end`."""
        (folder,) = node.store.glob("dledger-*/data")
        files = sorted(folder.iterdir())
        data = b"".join(file.read_bytes() for file in files)
        return data[: end - int(files[0].name)]
