"""The sockets on which a node listens: at an address, or at a name's first that can be bound."""

import errno
import socket


def listen(
    host: str, port: int, backlog: int | None, *, ipv4_first: bool = False
) -> socket.socket:
    """Return a blocking socket that listens; raises OSError, also for a name that is not known.

    Without a backlog it is bound, and does not listen. `::` takes IPv4 as well, whatever the
    system's default is. With `ipv4_first` the IPv4 addresses of a name are tried before those of
    IPv6.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    if ipv4_first:
        infos.sort(key=lambda info: info[0] != socket.AF_INET)
    refused: OSError | None = None
    for family, kind, _, _, target in infos:
        try:
            listener = socket.socket(family, kind)
        except OSError as failure:  # "localhost" may resolve to ::1 on a system without IPv6
            refused = failure
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(target)
            if backlog is not None:
                listener.listen(backlog)
        except OSError as failure:
            listener.close()
            refused = failure
            continue
        return listener
    raise refused or OSError(errno.EADDRNOTAVAIL, "no address is known for it")
