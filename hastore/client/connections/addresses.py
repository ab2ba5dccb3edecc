"""The addresses that a client starts from."""

import os
from collections.abc import Iterable, Sequence

from hastore.addresses import is_group_address, parse_group_address
from hastore.client.arguments import refusal
from hastore.errors import UsageError

ENVIRONMENT = "HASTORE_BOOTSTRAP"
_SCHEMES = ("tcp", "zmq+tcp")
DEFAULT = ("tcp://127.0.0.1:10911", "tcp://127.0.0.1:10921")  # the addresses in conf/


def parse_bootstrap(bootstrap: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the checked API addresses to start from; raises UsageError.

    `bootstrap` is a list of "tcp://HOST:PORT", or one str with commas. "tcp://" may be left out;
    "zmq+tcp://" connects through libzmq (the extra `zmq`). One "zk://HOST:PORT[,...]/CLUSTER/GROUP"
    stands for the nodes that the group has in ZooKeeper (the extra `zk`). None means the addresses
    in the environment variable HASTORE_BOOTSTRAP or, if that is not set, those of `conf/`.
    """
    if bootstrap is None:
        bootstrap = os.environ.get(ENVIRONMENT) or DEFAULT
    expected = 'a list of "tcp://HOST:PORT", or one str with commas'
    if isinstance(bootstrap, bytes | bytearray) or not isinstance(bootstrap, Iterable):
        raise refusal("bootstrap", bootstrap, expected)
    pieces = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    for piece in pieces:
        if not isinstance(piece, str):
            raise refusal("bootstrap", bootstrap, expected)
    if pieces and is_group_address(pieces[0]):
        try:
            return (str(parse_group_address(",".join(pieces))),)
        except UsageError as wrong:
            raise UsageError(f"bootstrap: {wrong}") from wrong
    found = tuple(dict.fromkeys(_address(piece.strip()) for piece in pieces if piece.strip()))
    if not found:
        raise UsageError('no address to start from: give bootstrap=["tcp://HOST:PORT", ...]')
    return found


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


def _address(text: str) -> str:
    address = text if "://" in text else f"tcp://{text}"
    scheme, _, rest = address.partition("://")
    host, separator, port = rest.rpartition(":")
    known = scheme in _SCHEMES and separator and host.isprintable() and " " not in host and host
    if not known or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"bootstrap: expected tcp://HOST:PORT of a node's API, got {text!r}")
    return address
