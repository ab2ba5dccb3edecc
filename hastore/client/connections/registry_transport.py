"""The transport of a client that was given `zk://HOST:PORT/CLUSTER/GROUP` instead of addresses.

It connects to the nodes that the group has in ZooKeeper; see `FollowingTransport`. A module of its
own: only such a client loads kazoo and ssl, and only it needs the extra `zk`.
"""

from __future__ import annotations

from hastore.addresses import GroupAddress
from hastore.client.connections.following_transport import FollowingTransport
from hastore.client.connections.proving import Prover
from hastore.clock import Clock
from hastore.registry.group_watch import watch_group
from hastore.registry.session import registry_contexts


class RegistryTransport(FollowingTransport):
    """Connections to the nodes that ZooKeeper names; see `Transport`."""

    def __init__(self, clock: Clock, group: GroupAddress, prover: Prover | None = None) -> None:
        """Raises ConfigError for the files of TLS to ZooKeeper."""
        tls = None
        if prover is not None:
            own = prover.security
            tls = registry_contexts(own.registry_ca, own.registry_certificate, own.registry_key)
        super().__init__(clock, (group.cluster, group.group), self._addresses_there, prover)
        self._group = group
        self._watch = watch_group(group, tls, self.wake)

    def _addresses_there(self) -> tuple[str, ...]:
        return self._watch.addresses

    def problem(self) -> str:
        """Say why no address is known."""
        return f"{self._group}: {self._watch.problem or 'no node has answered'}"

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections; ZooKeeper is not followed any more."""
        self._watch.close()
        super().close(linger_s)

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the session is the parent's."""
        self._watch.close()
        super().abandon()
