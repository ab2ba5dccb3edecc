"""HOST:PORT of nodes, zk://... of ZooKeeper and file:/... of folders, as users write them.

Pure: no host name is looked up. The addresses that a client starts from, "tcp://HOST:PORT", are
checked in client/connections/bootstrap.py.
"""

import ipaddress
import re
from typing import NamedTuple

from hastore.errors import UsageError

# A label of more than 63 characters, or an empty one, is refused by the codec of Python's sockets
# with an error that is no OSError.
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9][A-Za-z0-9-]{0,62}(\.[A-Za-z0-9-]{1,63})*\.?")
_FOLDER_URL = re.compile(r"^file:(//(localhost)?)?(?=/(?!/))", re.IGNORECASE)


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`; None when `text` is neither."""
    host, colon, port_text = text.rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5:
        return None
    port = int(port_text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return None
    elif re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return None
    elif not _HOST.fullmatch(host):
        return None
    return (host, port) if port <= 65_535 else None


def address_text(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`; False for other names."""
    if host == "localhost":
        return True
    try:  # Python before 3.13 does not take a mapped 127.0.0.1 for loopback
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False


def plain_host(host: str) -> str:
    """Return a numeric address; that of an IPv4 host as itself, also from a socket of IPv6.

    Raises ValueError for what looks like an IPv6 address and is none.
    """
    if ":" not in host:
        return host
    mapped = ipaddress.IPv6Address(host).ipv4_mapped
    return host if mapped is None else str(mapped)


def is_numeric(host: str) -> bool:
    """Return whether a host is an address, and not a name that must be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def folder_of_url(text: str) -> str:
    """Return the path that file:/FOLDER or file:///FOLDER names; all else as it is.

    Percent-escapes are not decoded.
    """
    return _FOLDER_URL.sub("", text)


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for all addresses of a machine, to bind: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


SCHEME = "zk://"
ROOT = "/hastore"
MAX_SERVERS = 16
KAZOO_MISSING = "zk:// needs kazoo: pip install 'hastore[zk]'"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}")
_SERVERS_FORM = "zk://HOST:PORT[,HOST:PORT...]"
_GROUP_FORM = f"{_SERVERS_FORM}/CLUSTER/GROUP"
_CLUSTER_FORM = f"{_SERVERS_FORM}/CLUSTER"


class GroupAddress(NamedTuple):
    """Where clients find a group: `servers` as "HOST:PORT,HOST:PORT"."""

    servers: str
    cluster: str
    group: str

    @property
    def path(self) -> str:
        """The znode whose children are the group's nodes."""
        return group_path(self.cluster, self.group)

    def __str__(self) -> str:
        return f"{SCHEME}{self.servers}/{self.cluster}/{self.group}"


class ClusterAddress(NamedTuple):
    """Where clients find all groups of a cluster: `servers` as "HOST:PORT,HOST:PORT"."""

    servers: str
    cluster: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.servers}/{self.cluster}"


def group_path(cluster: str, group: str) -> str:
    """Return the znode whose children are the nodes of a group."""
    return f"{ROOT}/{cluster}/{group}"


def node_path(cluster: str, group: str, node: int) -> str:
    """Return the znode of a node."""
    return f"{group_path(cluster, group)}/{node}"


def node_number(name: str) -> int | None:
    """Return the number of a node whose znode has this name; None if it is no node's."""
    if name.isascii() and name.isdigit() and len(name) <= 5 and str(int(name)) == name:
        return int(name)
    return None


def is_group_address(text: str) -> bool:
    """Whether a client's address names ZooKeeper instead of nodes."""
    return text.strip().startswith(SCHEME)


def parse_servers(text: str) -> str:
    """Return the checked "HOST:PORT,HOST:PORT" of `zk://HOST:PORT[,HOST:PORT...]`.

    Raises UsageError.
    """
    rest = text.strip().removeprefix(SCHEME)
    if rest == text.strip():
        raise UsageError(f"{text!r} does not begin with {SCHEME}; write {_SERVERS_FORM}")
    if "/" in rest:
        raise UsageError(
            f"{text!r} has a path, but cluster and group are keys of their own; write "
            f"{_SERVERS_FORM}"
        )
    return _checked_servers(text, rest, _SERVERS_FORM)


def parse_group_address(text: str) -> GroupAddress:
    """Return the parts of `zk://HOST:PORT[,HOST:PORT...]/CLUSTER/GROUP`; raises UsageError."""
    rest = text.strip().removeprefix(SCHEME)
    servers, _, path = rest.partition("/")
    names = path.split("/")
    if not is_group_address(text) or len(names) != 2 or not all(map(_NAME.fullmatch, names)):
        raise UsageError(f"{text!r} does not name a group in ZooKeeper; write {_GROUP_FORM}")
    return GroupAddress(_checked_servers(text, servers, _GROUP_FORM), names[0], names[1])


def is_cluster_address(text: str) -> bool:
    """Whether a client's address names a cluster in ZooKeeper, and no group of it."""
    rest = text.strip().removeprefix(SCHEME)
    return is_group_address(text) and rest.count("/") == 1 and not rest.endswith("/")


def parse_cluster_address(text: str) -> ClusterAddress:
    """Return the parts of `zk://HOST:PORT[,HOST:PORT...]/CLUSTER`; raises UsageError."""
    servers, _, cluster = text.strip().removeprefix(SCHEME).partition("/")
    if not is_group_address(text) or not _NAME.fullmatch(cluster):
        raise UsageError(f"{text!r} does not name a cluster in ZooKeeper; write {_CLUSTER_FORM}")
    return ClusterAddress(_checked_servers(text, servers, _CLUSTER_FORM), cluster)


def _checked_servers(text: str, servers: str, form: str) -> str:
    found = [one.strip() for one in servers.split(",")]
    if len(found) > MAX_SERVERS:
        raise UsageError(f"{text!r} names more than {MAX_SERVERS} servers; write {form}")
    for one in found:
        endpoint = parse_address(one)
        if endpoint is None or not endpoint[1]:
            raise UsageError(f"{one!r} in {text!r} is not HOST:PORT of ZooKeeper; write {form}")
    return ",".join(dict.fromkeys(found))
