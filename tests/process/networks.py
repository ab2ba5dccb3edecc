"""The network between the nodes of a group, for tests that break it.

    with open_network(3) as network:
        group = Group(tmp_path, 3, network=network)
        network.cut(1, 2)               # bytes from node 1 to node 2 are lost, not the other way
        network.heal()

There are two implementations. `Namespaces` gives each node a network namespace, and needs root.
`LinkProxies` forwards each link between two nodes, and works everywhere. Clients always reach every
node.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

Addresses = dict[int, dict[str, str]]


class Network:
    """The links between the nodes 1 to `count`, at first without faults; a context manager."""

    name = ""

    def __init__(self, count: int) -> None:
        self.count = count
        self.addresses: Addresses = {}
        # (source, target) -> the share of packets that is lost; 1.0 is all of them.
        self._lost: dict[tuple[int, int], float] = {}
        self._slow: set[int] = set()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything that the network consists of."""
        raise NotImplementedError

    def settings(self, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
        """Return the settings that a node's file needs for these addresses, by section."""
        del folder
        return {}

    def seen_by(self, number: int) -> Addresses:
        """Return the addresses of all nodes for the file of node `number`."""
        del number
        return self.addresses

    def namespace(self, number: int) -> str | None:
        """Return the path of the network namespace of node `number`; None: that of this process."""
        del number
        return None

    # ---- the faults

    def lose(self, source: int, target: int, share: float) -> None:
        """Lose a share of the packets from `source` to `target`, in this direction only."""
        self._lost[source, target] = share
        self._changed(source)

    def cut(self, source: int, target: int) -> None:
        """Lose all packets from `source` to `target`, in this direction only."""
        self.lose(source, target, 1.0)

    def restore(self, source: int, target: int) -> None:
        """End the loss of packets from `source` to `target`."""
        if self._lost.pop((source, target), None) is not None:
            self._changed(source)

    def slow(self, number: int) -> None:
        """Reduce the bandwidth of node `number`'s link, and delay its packets."""
        self._slow.add(number)
        self._paced(number)

    def unplug(self, number: int) -> None:
        """Interrupt all links of a node, as if its cable were pulled."""
        raise NotImplementedError

    def plug(self, number: int) -> None:
        """Undo `unplug`."""
        raise NotImplementedError

    def heal(self) -> None:
        """End all faults."""
        for source, target in list(self._lost):
            self.restore(source, target)
        for number in sorted(self._slow):
            self._slow.discard(number)
            self._paced(number)

    def _changed(self, source: int) -> None:
        """Apply the losses of the packets that `source` sends."""
        raise NotImplementedError

    def _paced(self, number: int) -> None:
        """Apply the bandwidth of the link of node `number`."""
        raise NotImplementedError


def open_network(count: int, kind: str = "") -> Network:
    """Return a network of namespaces if they are allowed, else of proxies; print why.

    `kind`, or else HASTORE_TEST_NETWORK, asks for "namespaces" or "proxies".
    """
    from tests.process.link_proxy import LinkProxies
    from tests.process.namespaces import Namespaces

    kind = kind or os.environ.get("HASTORE_TEST_NETWORK", "")
    if kind == "proxies":
        return LinkProxies(count)
    try:
        return Namespaces(count)
    except OSError as refusal:
        if kind == "namespaces":
            raise
        print(f"no network namespaces here, using proxies instead: {refusal}", flush=True)
        return LinkProxies(count)
