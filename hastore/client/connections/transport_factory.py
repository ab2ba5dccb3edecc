"""Choose the transport by the scheme of a client's addresses."""

from __future__ import annotations

import select
import sys

from hastore.addresses import KAZOO_MISSING, is_group_address, parse_group_address
from hastore.client.connections.proving import Prover, make_prover
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import Transport
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import UsageError

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
    TLS. Raises UsageError for mixed schemes, without select.epoll, or if kazoo or pyzmq is needed
    and not installed, and ConfigError for files of `security`.
    """
    if not hasattr(select, "epoll"):
        raise UsageError(
            "this process has no select.epoll: a client needs Linux, and where gevent patches the "
            "process, gevent.monkey.patch_all(select=False, thread=False)"
        )
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


def check_threads() -> None:
    """Raise UsageError if gevent has replaced the threads: one that waits would stop them all."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise UsageError(
            "gevent has replaced this process's threads, and a producer that waits in one of them "
            "would stop them all: call gevent.monkey.patch_all(select=False, thread=False)"
        )


def _by_registry(address: str, clock: Clock, prover: Prover | None) -> Transport:
    try:
        from hastore.client.connections.registry_transport import RegistryTransport
    except ImportError as missing:
        raise UsageError(KAZOO_MISSING) from missing
    return RegistryTransport(clock, parse_group_address(address), prover)
