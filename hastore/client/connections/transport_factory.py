"""Choose the transport by the scheme of a client's addresses.

The transport of a client that was given `zk://HOST:PORT/CLUSTER/GROUP` instead of addresses.

It connects to the nodes that the group has in ZooKeeper, and to new ones as soon as they are
there. It keeps those that it knows, whatever happens to ZooKeeper. Who is master, the nodes
themselves say. When ZooKeeper names other addresses, those that it does not name and that have no
connection are forgotten.

Chooses the transport by the scheme of a client's addresses.
"""

from __future__ import annotations

from hastore.addresses import KAZOO_MISSING, GroupAddress, is_group_address, parse_group_address
from hastore.client.connections.proving import Prover, make_prover
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import AddressSource, Arrival, Transport
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import UsageError
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


ZMQ_SCHEME = "zmq+tcp://"
SCHEME = "tcp://"


def make_transport(
    addresses: tuple[str, ...],
    clock: Clock = SYSTEM_CLOCK,
    security: SecurityLike | Prover = None,
) -> tuple[tuple[str, ...], Transport]:
    """Return the addresses as `tcp://HOST:PORT`, and a transport for them.

    `zk://` selects the nodes that a group has in ZooKeeper (the extra `zk`); their addresses come
    later, from the transport. `zmq+tcp://` selects libzmq (the extra `zmq`), which cannot speak
    TLS. Raises UsageError for mixed schemes, or if kazoo or pyzmq is needed and not installed, and
    ConfigError for files of `security`.
    """
    prover = make_prover(security)
    if len(addresses) == 1 and is_group_address(addresses[0]):
        return (), _by_registry(addresses[0], clock, prover)
    by_zmq = [address.startswith(ZMQ_SCHEME) for address in addresses]
    if not any(by_zmq):
        return addresses, SocketTransport(clock, prover)
    if not all(by_zmq):
        raise UsageError(f"{', '.join(addresses)}: either all addresses begin with {ZMQ_SCHEME}, "
                         "or none")  # fmt: skip
    if prover is not None and prover.has_tls:
        raise UsageError(f"{ZMQ_SCHEME} cannot speak TLS: write tcp:// to use security.tls_ca")
    try:
        from hastore.client.connections.zmq_transport import ZmqTransport
    except ImportError as missing:
        raise UsageError(f"{ZMQ_SCHEME} needs pyzmq: pip install 'hastore[zmq]'") from missing
    plain = tuple(SCHEME + address.removeprefix(ZMQ_SCHEME) for address in addresses)
    return plain, ZmqTransport(prover)


def _by_registry(address: str, clock: Clock, prover: Prover | None) -> Transport:
    try:
        pass  # MERGED
    except ImportError as missing:
        raise UsageError(KAZOO_MISSING) from missing
    return RegistryTransport(clock, parse_group_address(address), prover)
