"""Where a client begins: the `bootstrap` argument as checked addresses, and their host names.

An address is "tcp://HOST:PORT" of a node's API; HOST:PORT itself, for nodes, servers and ZooKeeper,
is parsed in hastore/addresses.py. A host name is looked up in a thread of its own, because a
look-up may take seconds.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hastore.addresses import (
    ClusterAddress,
    is_cluster_address,
    is_group_address,
    parse_cluster_address,
    parse_group_address,
)
from hastore.client.arguments import refusal
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import UsageError

log = logging.getLogger(__name__)

ENVIRONMENT = "HASTORE_BOOTSTRAP"
_SCHEMES = ("tcp", "zmq+tcp")
DEFAULT = ("tcp://127.0.0.1:10911", "tcp://127.0.0.1:10921")  # the addresses in conf/
Targets = list[tuple[int, Any]]  # (address family, argument of `connect`)


def parse_bootstrap(bootstrap: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the checked API addresses to start from; raises UsageError.

    `bootstrap` is a list of "tcp://HOST:PORT", or one str with commas. "tcp://" may be left out;
    "zmq+tcp://" connects through libzmq (the extra `zmq`). One "zk://HOST:PORT[,...]/CLUSTER/GROUP"
    stands for the nodes that the group has in ZooKeeper (the extra `zk`). None means the addresses
    in the environment variable HASTORE_BOOTSTRAP or, if that is not set, those of `conf/`.
    """
    name = "bootstrap"  # where a wrong address is to be corrected
    if bootstrap is None:
        bootstrap, name = os.environ.get(ENVIRONMENT) or DEFAULT, ENVIRONMENT
    expected = 'a list of "tcp://HOST:PORT", or one str with commas'
    if isinstance(bootstrap, bytes | bytearray) or not isinstance(bootstrap, Iterable):
        raise refusal("bootstrap", bootstrap, expected)
    texts = [bootstrap] if isinstance(bootstrap, str) else list(bootstrap)
    for text in texts:
        if not isinstance(text, str):
            raise refusal("bootstrap", bootstrap, expected)
    pieces = ",".join(texts).split(",")  # a list may hold a text with commas
    if pieces and is_group_address(pieces[0]):
        try:
            return (str(parse_group_address(",".join(pieces))),)
        except UsageError as wrong:
            raise UsageError(f"{name}: {wrong}") from wrong
    found = tuple(dict.fromkeys(_address(piece.strip(), name) for piece in pieces if piece.strip()))
    if not found:
        raise UsageError('no address to start from: give bootstrap=["tcp://HOST:PORT", ...]')
    return found


def cluster_of(bootstrap: object) -> ClusterAddress | None:
    """Return the cluster that `bootstrap` names in ZooKeeper; None if it names something else.

    Raises UsageError for one that is written wrongly.
    """
    name = ENVIRONMENT if bootstrap is None else "bootstrap"
    if bootstrap is None:
        bootstrap = os.environ.get(ENVIRONMENT)
    if isinstance(bootstrap, list | tuple) and all(isinstance(one, str) for one in bootstrap):
        bootstrap = ",".join(bootstrap)
    if not isinstance(bootstrap, str) or not is_cluster_address(bootstrap):
        return None
    try:
        return parse_cluster_address(bootstrap)
    except UsageError as wrong:
        raise UsageError(f"{name}: {wrong}") from wrong


def is_connectable(address: str) -> bool:
    """Whether a client can connect to an address that a node has stated."""
    try:
        named = address.startswith("tcp://") and not address.endswith(":0")
        return named and _address(address) == address
    except UsageError:
        return False


def first_address(addresses: Sequence[str]) -> str:
    """Return an address to which this machine connects: a node's, or that of ZooKeeper."""
    if not is_group_address(addresses[0]):
        return addresses[0]
    return f"tcp://{parse_group_address(addresses[0]).servers.split(',')[0]}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host (IPv6 without brackets) and the port of a checked address."""
    host, _, port = address.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def _address(text: str, name: str = "bootstrap") -> str:
    address = text if "://" in text else f"tcp://{text}"
    scheme, _, rest = address.partition("://")
    host, separator, port = rest.rpartition(":")
    known = scheme in _SCHEMES and separator and _is_host(host)
    if not known or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{name}: expected tcp://HOST:PORT of a node's API, got {text!r}")
    return address


def _is_host(text: str) -> bool:
    if ":" in text:
        try:
            ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False  # such as HOST:PORT:PORT
    return bool(text) and text.isprintable() and not set(text) & set(" ,/@")


# -- host names


def numeric_targets(host: str, port: int) -> Targets:
    """Return the targets of an IPv4 or IPv6 address; empty when the host is a name."""
    try:
        return _targets(host, port, socket.AI_NUMERICHOST)
    except (OSError, ValueError):  # ValueError: the host cannot be a name
        return []


def look_up(host: str, port: int, found: Callable[[Targets], None]) -> None:
    """Look a name up in a new thread, which calls `found` with the targets, [] if unknown."""

    def run() -> None:
        targets: Targets = []
        try:
            targets = _targets(host, port, 0)
        except (OSError, ValueError) as failure:
            log.debug("client: %s: %s", host, failure)
        finally:  # also after any failure, so that no connection waits for ever
            found(targets)

    try:
        threading.Thread(target=run, name=f"lookup {host}", daemon=True).start()
    except RuntimeError as failure:
        if not threading.main_thread().is_alive():  # Python 3.12 begins none any more at its exit
            run()
            return
        log.debug("client: %s: %s", host, failure)
        found([])


def _targets(host: str, port: int, flags: int) -> Targets:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((int(family), target) for family, _, _, _, target in infos))


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connect a blocking socket to a checked address. Raises OSError, UnicodeError.

    The addresses of a name share the time, so that a dead one leaves some for the next.
    """
    end_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000.0
    targets = _targets(*host_and_port(address), 0)
    failure: OSError | None = None
    for place, (_, target) in enumerate(targets):
        left_s = (end_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0
        if left_s <= 0.0:
            break
        try:
            return socket.create_connection(target[:2], left_s / (len(targets) - place))
        except OSError as refused:
            failure = refused
    raise failure or TimeoutError(f"the look-up of its name took more than {timeout_s:g} s")
