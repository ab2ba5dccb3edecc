"""The transport of a client that was given `zk://HOST:PORT/CLUSTER/GROUP` instead of addresses.

It connects to the nodes that the group has in ZooKeeper, and to new ones as soon as they are
there. It keeps those that it knows, whatever happens to ZooKeeper. Who is master, the nodes
themselves say. When ZooKeeper names other addresses, those that it does not name and that have no
connection are forgotten.

A module of its own: only such a client loads kazoo and ssl, and only it needs the extra `zk`.
"""

from __future__ import annotations

from hastore.addresses import GroupAddress
from hastore.client.connections.proving import Prover
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import AddressSource, Arrival
from hastore.clock import Clock
from hastore.registry.group_watch import MAX_NODES, watch_group
from hastore.registry.session import registry_contexts


class RegistryTransport(SocketTransport):
    """Connections to the nodes that ZooKeeper names; see `Transport`."""

    def __init__(self, clock: Clock, group: GroupAddress, prover: Prover | None = None) -> None:
        """Raises ConfigError for the files of TLS to ZooKeeper."""
        tls = None
        if prover is not None:
            own = prover.security
            tls = registry_contexts(own.registry_ca, own.registry_certificate, own.registry_key)
        super().__init__(clock, prover)
        self._group = group
        self._watch = watch_group(group, tls, self.wake)
        self._taken: tuple[str, ...] = ()
        self._next_timer_ms = 0.0  # the watch may know addresses already

    @property
    def source(self) -> AddressSource:
        """This transport: it follows what ZooKeeper names."""
        return self

    @property
    def group_names(self) -> tuple[str, str]:
        """The names of the cluster and of the group whose nodes they are."""
        return self._group.cluster, self._group.group

    def problem(self) -> str:
        """Say why no address is known."""
        return f"{self._group}: {self._watch.problem or 'no node has answered'}"

    def collect(self) -> list[Arrival]:
        """Return what has arrived; connect to the nodes that are new in ZooKeeper."""
        found = self._watch.addresses
        left: list[Arrival] = []
        if found is not self._taken and not self._closed:
            left = self._forget_all_but(found)
            known = set(self._connections)
            self.open([one for one in found if one in known or len(self._connections) < MAX_NODES])
            self._taken = found
        return left + super().collect()

    def _forget_all_but(self, found: tuple[str, ...]) -> list[Arrival]:
        """Forget the other addresses that have no connection: their nodes may have moved."""
        left = [one for one in self._connections if one not in found and not self.is_up(one)]
        for address in left:
            self._disconnect(self._connections.pop(address))
        return [Arrival(address, None, up=False, gone=True) for address in left]

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections; ZooKeeper is not followed any more."""
        self._watch.close()
        super().close(linger_s)

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the session is the parent's."""
        self._watch.close()
        super().abandon()
