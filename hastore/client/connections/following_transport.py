"""A transport that connects to the nodes that something else names: ZooKeeper, by a watch of it.

It connects to new ones as soon as they are named, and keeps those that it knows, whatever happens
to ZooKeeper. When other addresses are named, those that are not and that have no connection are
forgotten. Who is master, the nodes themselves say.
"""

from __future__ import annotations

from collections.abc import Callable

from hastore.client.connections.cluster import MAX_ADDRESSES
from hastore.client.connections.proving import Prover
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import AddressSource, Arrival
from hastore.clock import Clock


class FollowingTransport(SocketTransport):
    """Connections to the nodes of a group that are named; see `Transport`."""

    def __init__(
        self,
        clock: Clock,
        group_names: tuple[str, str],
        named: Callable[[], tuple[str, ...]],
        prover: Prover | None = None,
    ) -> None:
        """`named` is asked in each `collect`: the same object as long as nothing is new.

        `group_names` are those of the cluster and of the group whose nodes they are.
        """
        super().__init__(clock, prover)
        self.group_names = group_names
        self._named = named
        self._taken: tuple[str, ...] = ()
        self._next_timer_ms = 0.0  # addresses may be named already

    @property
    def source(self) -> AddressSource:
        """This transport: it follows what is named."""
        return self

    def problem(self) -> str:
        """Say why no address is known."""
        return f"no node of the group {'/'.join(self.group_names)} is known"

    def collect(self) -> list[Arrival]:
        """Return what has arrived; connect to the nodes that are newly named."""
        found = self._named()
        left: list[Arrival] = []
        if found is not self._taken and not self._closed:
            left = self._forget_all_but(found)
            known = set(self._connections)
            room = len(self._connections) < MAX_ADDRESSES
            self.open([one for one in found if one in known or room])
            self._taken = found
        return left + super().collect()

    def _forget_all_but(self, found: tuple[str, ...]) -> list[Arrival]:
        """Forget the other addresses that have no connection: their nodes may have moved."""
        left = [one for one in self._connections if one not in found and not self.is_up(one)]
        return [self.forget(address) for address in left]
