"""send_file: a header and a range of a log file to a socket; the bytes stay in the kernel."""

import os
import socket
from typing import Protocol, TypeGuard

from hastore.security.tls_socket import LinkSocket, TlsSocket

SENDFILE_BYTES_MIN = 64 * 1024


class FileRange(Protocol):
    """A range of a log file."""

    @property
    def fd(self) -> int:
        """The descriptor."""
        ...

    @property
    def position(self) -> int:
        """Where the range begins in the file."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...


def takes_file(sock: LinkSocket, size: int) -> TypeGuard[socket.socket]:
    """Whether `send_file` is the way to send so many bytes: under TLS they must be encrypted."""
    return size >= SENDFILE_BYTES_MIN and not isinstance(sock, TlsSocket)


def send_file(sock: socket.socket, head: bytes, place: FileRange) -> None:
    """Send `head`, then the range. Raises OSError, also if the file ends before the range."""
    sock.sendall(head, socket.MSG_MORE)
    position, left = place.position, place.size
    while left:
        sent = os.sendfile(sock.fileno(), place.fd, position, left)
        if not sent:
            raise OSError("the log's file ends before the range that is being sent")
        position += sent
        left -= sent
