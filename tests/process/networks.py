"""The network between the nodes of a group, for tests that break it.

    with open_network(3) as network:
        group = Group(tmp_path, 3, network=network)
        network.cut(1, 2)               # what node 1 sends to node 2 is lost; the other way works
        network.heal()

Two kinds do the same: `Namespaces` makes each node a host of its own, which wants root;
`LinkProxies` forwards each link between two nodes, anywhere. Clients reach every node all along.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

Addresses = dict[int, dict[str, str]]


class Network:
    """Links between the nodes 1 to `count`, all well at first; a context manager."""

    name = ""

    def __init__(self, count: int) -> None:
        self.count = count
        self.addresses: Addresses = {}
        # What is lost on the way from a node to another: a share, 1.0 is all of it.
        self._lost: dict[tuple[int, int], float] = {}
        self._slow: set[int] = set()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing behind."""
        raise NotImplementedError

    def settings(self, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
        """Return what these addresses want in a node's file, by section."""
        del folder
        return {}

    def seen_by(self, number: int) -> Addresses:
        """Return the addresses of all as node `number` has them in its file."""
        del number
        return self.addresses

    def command(self, number: int) -> list[str]:
        """Return what executes a program on the host of node `number`."""
        del number
        return []

    # ---- the faults

    def lose(self, source: int, target: int, share: float) -> None:
        """Lose a share of what `source` sends to `target`, in this direction alone."""
        self._lost[source, target] = share
        self._changed(source)

    def cut(self, source: int, target: int) -> None:
        """Lose all that `source` sends to `target`, in this direction alone."""
        self.lose(source, target, 1.0)

    def mend(self, source: int, target: int) -> None:
        """Let what `source` sends to `target` arrive again."""
        if self._lost.pop((source, target), None) is not None:
            self._changed(source)

    def slow(self, number: int) -> None:
        """Let the link of node `number` carry little, and that late."""
        self._slow.add(number)
        self._paced(number)

    def unplug(self, number: int) -> None:
        """End the links of a node at once, as somebody would who pulls its cable."""
        raise NotImplementedError

    def plug(self, number: int) -> None:
        """Undo `unplug`."""
        raise NotImplementedError

    def heal(self) -> None:
        """End all faults."""
        for source, target in list(self._lost):
            self.mend(source, target)
        for number in sorted(self._slow):
            self._slow.discard(number)
            self._paced(number)

    def _changed(self, source: int) -> None:
        """Put into force what is lost of what `source` sends."""
        raise NotImplementedError

    def _paced(self, number: int) -> None:
        """Put into force how fast the link of `number` is."""
        raise NotImplementedError


def open_network(count: int, kind: str = "") -> Network:
    """Return a network of namespaces where that is allowed, else of proxies; say which, and why.

    `kind`, or HASTORE_TEST_NETWORK, asks for "namespaces" or "proxies"; proxies work everywhere.
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
        print(f"network namespaces are not to be had, proxies stand in: {refusal}", flush=True)
        return LinkProxies(count)
