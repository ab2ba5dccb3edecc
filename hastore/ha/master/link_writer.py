"""LinkWriter: the sending end of a link that carries the log, and the thread that waits for it.

    _rest    the end of a frame that the kernel did not take at once; the thread sends it first

WriteSocketService (the stream to a slave) and PeerChannel (a DLedger link) share it: whoever has
something small hands it to the kernel itself, without waiting; the thread sends everything else.
Ranges of the log go out by sendfile, small ones from the mapped file. Under TLS, or with MACs,
large ones are read by pread: a bad sector is then an error of this link, not the end of the
process. A send that fails leaves its bytes in `_rest`, so the thread meets the failure too, and
ends the link.

Where the two differ: a slave's stream has no queue. Its next byte is always `sent_offset`, so the
log itself is what waits. A DLedger link carries messages of many kinds in order: they wait in a
bounded queue, in which an append names its range of the log.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from hastore.clock import Clock
from hastore.ha.node.replica_log import FileRange
from hastore.security.sealed_socket import send_whole, while_taken
from hastore.security.tls_socket import LinkSocket
from hastore.service import OnFailure, Service

PUSH_BYTES_MAX = 128 * 1024  # longer bodies go through the thread
SENDFILE_BYTES_MIN = 64 * 1024
READ_BYTES = 256 * 1024  # at once


class LogBytes(Protocol):
    """The log from which ranges are sent."""

    @property
    def view(self) -> Callable[[int, int], AbstractContextManager[memoryview]]:
        """Lend the bytes from an offset on, at most so many, up to a file's end."""
        ...

    @property
    def file_range(self) -> Callable[[int, int], FileRange | None]:
        """Return the same bytes as a range of a file, for sendfile; None without a file."""
        ...


class LinkWriter(Service):
    """What the writers of both modes do with their socket; `_lock` guards all that is sent."""

    def __init__(
        self, sock: LinkSocket, source: LogBytes, clock: Clock, *, name: str, on_failure: OnFailure
    ) -> None:
        super().__init__(name, on_failure=on_failure)
        self._sock = sock
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._rest = b""
        self._broken = False
        self._last_send_ms = clock.monotonic_ms()

    def _hand_over(self, parts: list[bytes | bytearray | memoryview], size: int) -> bool:
        """Hand a frame of `size` bytes to the kernel without waiting; nothing may wait before it.

        Return False if the thread must send the rest. The caller holds `_lock`.
        """
        self._last_send_ms = self._clock.monotonic_ms()
        try:
            sent = self._sock.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._broken = True
            sent = 0
        if sent == size:
            return True
        self._rest = b"".join(parts)[sent:]
        return False

    def _send_range(self, offset: int, size: int, head: Callable[[int], bytes]) -> int:
        """Send the log from `offset` on, up to a file's end, after `head(its size)`.

        Blocks; returns the size. Raises OSError, also if the file ends before the range.
        """
        sock = self._sock
        if size >= SENDFILE_BYTES_MIN:
            place = self._source.file_range(offset, size)
            if place is not None:
                send_whole(sock, head(place.size), socket.MSG_MORE)
                if isinstance(sock, socket.socket):
                    _send_file(sock, place)
                else:
                    self._read_and_send(place)
                return place.size
        with self._source.view(offset, size) as view:
            send_whole(sock, head(len(view)), socket.MSG_MORE)
            send_whole(sock, view)
            return len(view)

    def _read_and_send(self, place: FileRange) -> None:
        """Send a range of a file through the layer above the socket, which needs its bytes."""
        buffer = memoryview(bytearray(min(READ_BYTES, place.size)))
        position, left = place.position, place.size
        while left:
            got = os.preadv(place.fd, [buffer[:left]], position)
            if not got:
                raise _cut_short(place)
            self._sock.sendall(buffer[:got])
            position += got
            left -= got


def _send_file(sock: socket.socket, place: FileRange) -> None:
    position, left = place.position, place.size
    while left:
        send = partial(os.sendfile, sock.fileno(), place.fd, position, left)
        sent = while_taken(sock, send)
        if not sent:
            raise _cut_short(place)
        position += sent
        left -= sent


def _cut_short(place: FileRange) -> OSError:
    return OSError(f"the log's file ends before the range of {place.size} bytes that is to be sent")
