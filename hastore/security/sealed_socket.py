"""SealedSocket: a plain link on which nobody can change, repeat, leave out or reorder bytes.

    | length: uint32, 1 to 256 KiB | MAC: 16 bytes | payload |

The MAC is a keyed BLAKE2b of the frame's number in its direction (uint64), the length and the
payload. The key is that of the session and of the direction, so a frame of another session, or of
the other end, does not fit either. Bytes are handed on only once the MAC of their frame is right.
So frames are sent with at most 64 KiB: who reads then hears from a slow link as often as from one
without MACs (PROGRESS_BYTES of dledger/links/channel.py). Nothing is encrypted. How the ends agree
on the keys is in protocol/hello.py.

BLAKE2b is what such a link's frames cost least with: 0.5 us for a put of 200 bytes, where an
HMAC-SHA-256 takes 1.5 us; it needs no copy of a frame, and no instructions for SHA. On processors
that have them, HMAC-SHA-256 is quicker from 4 KiB on (1.8 GB/s instead of 1.05).

One thread reads; several may write. Timeouts are those of the socket (CoveredSocket).
"""

import errno
import fcntl
import hashlib
import hmac
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import TamperedError

Bytes = bytes | bytearray | memoryview

PAYLOAD_BYTES_MAX = 256 * 1024  # of a frame that is taken
SEND_BYTES_MAX = 64 * 1024  # of one that is sent
MAC_BYTES = 16
KEY_BYTES = 32
_LENGTH = struct.Struct(">I")
_NUMBER_AND_LENGTH = struct.Struct(">QI")
HEAD_BYTES = _LENGTH.size + MAC_BYTES
_SMALL_BYTES = 16 * 1024
_TIMEVAL = struct.Struct("@ll")
_SIOCOUTQ = termios.TIOCOUTQ  # its number on every processor: linux/sockios.h
_INT = struct.Struct("=i")


def while_taken(sock: socket.socket, send: Callable[[], int]) -> int:
    """Call `send`, and again while SO_SNDTIMEO ends it although the other end has taken bytes.

    The kernel wakes who waits for room once a third of its buffer is free. At a link that was fast,
    and is slow now, that may take longer.
    """
    while True:
        kept = _kept(sock)
        try:
            return send()
        except BlockingIOError:
            if _kept(sock) >= kept:
                raise


def send_whole(sock: "socket.socket | CoveredSocket", data: Bytes, flags: int = 0) -> None:
    """Do what `sendall` does, and go on while the other end takes bytes: see `while_taken`."""
    if isinstance(sock, CoveredSocket) or sock.gettimeout() is not None:
        sock.sendall(data, flags)
        return
    sent = 0
    with memoryview(data) as given, given.cast("B") as view:  # released also if it fails
        while sent < len(view):
            with view[sent:] as rest:
                sent += while_taken(sock, partial(sock.send, rest, flags))


def _kept(sock: socket.socket) -> int:
    """Return how many bytes the kernel has that the other end's has not taken."""
    (kept,) = _INT.unpack(fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(_INT.size)))
    return int(kept)


class CoveredSocket:
    """A socket under another layer, which protects the bytes in `recv_into` and the two `_send_*`.

    Timeouts are those of the socket: `settimeout`, and SO_RCVTIMEO and SO_SNDTIMEO by `setsockopt`.
    A read times out too when only a part of a frame arrives in that time; its bytes are kept.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._receive_s: float | None = None  # SO_RCVTIMEO
        self._send_lock = threading.Lock()
        self._unsent = b""  # protected bytes that the kernel has not taken yet
        self._owed = 0  # bytes of callers that are protected, but were reported as not sent

    def recv_into(self, buffer: memoryview) -> int:
        """Fill the buffer with what is there, at least one byte; 0 at the end."""
        raise NotImplementedError

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; empty at the end. Raises what `socket.recv` raises."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def sendall(self, data: Bytes, flags: int = 0) -> None:
        """Send all of `data`; blocks as the socket does. Raises OSError when the link is broken.

        After a short `sendmsg`, the next data must begin with the bytes that it did not send.
        """
        view = memoryview(data).cast("B")
        with self._send_lock:
            skip = min(self._owed, len(view))
            self._owed -= skip
            self._flush()
            self._send_all(view[skip:], flags)

    def sendmsg(self, parts: Iterable[Bytes], _ancillary: Any = (), flags: int = 0) -> int:
        """Send what the kernel takes at once; return how many bytes, as `socket.sendmsg` does.

        All parts are protected even if the kernel does not take them: the caller must offer the
        bytes that were not sent again, before others. Raises BlockingIOError if earlier bytes wait.
        """
        if not flags & socket.MSG_DONTWAIT:
            raise ValueError("only a send that does not wait may be short; use sendall")
        views = [memoryview(part).cast("B") for part in parts]
        with self._send_lock:
            if self._unsent or self._owed:
                raise BlockingIOError("earlier bytes wait")
            total = sum(map(len, views))
            self._send_some(views, total, flags)
            self._owed = min(total, len(self._unsent))
            return total - self._owed

    def _flush(self) -> None:
        """Send `_unsent`, waiting as the socket does. Called under `_send_lock`."""
        if self._unsent:
            data, self._unsent = self._unsent, b""
            send_whole(self._sock, data)

    def _send_all(self, view: memoryview, flags: int) -> None:
        """Protect and send bytes, waiting as the socket does. Called under `_send_lock`."""
        raise NotImplementedError

    def _send_some(self, views: list[memoryview], total: int, flags: int) -> None:
        """Protect `total` bytes; what the kernel does not take goes to `_unsent`.

        Called under `_send_lock`.
        """
        raise NotImplementedError

    def _check_receive_time(self, begun_ms: float) -> None:
        """Raise what the socket raises at its timeout if an unfinished frame is that old."""
        limit_s = self._sock.gettimeout()
        by_kernel = limit_s is None
        if limit_s is None:
            limit_s = self._receive_s
        if not limit_s or SYSTEM_CLOCK.monotonic_ms() - begun_ms < limit_s * 1000.0:
            return
        if by_kernel:
            raise BlockingIOError(errno.EAGAIN, "a frame of the link is not complete yet")
        raise TimeoutError("timed out")

    def settimeout(self, seconds: float | None) -> None:
        """Set the socket's timeout."""
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            assert isinstance(value, bytes)
            seconds, microseconds = _TIMEVAL.unpack(value)
            self._receive_s = seconds + microseconds / 1e6
        self._sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the socket's descriptor; its bytes are those of the layer."""
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        """Break the connection, from any thread."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class SealedSocket(CoveredSocket):
    """A socket whose frames have a MAC, with the methods that the links of nodes use.

    `send_key` and `receive_key`: those of the two directions, as this end sees them.
    """

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        super().__init__(sock)
        self._send_mac = hashlib.blake2b(key=send_key, digest_size=MAC_BYTES)
        self._sent = 0  # frames
        self._receive_mac = hashlib.blake2b(key=receive_key, digest_size=MAC_BYTES)
        self._received = 0  # frames
        # Two frames of full size, so that the bytes of the next one are seldom moved to the front.
        self._buffer = memoryview(bytearray(2 * (HEAD_BYTES + PAYLOAD_BYTES_MAX)))
        self._start = 0  # bytes between _start and _end are not checked yet
        self._end = 0
        self._checked = self._buffer[:0]  # payload that was checked and not handed on yet

    # -- in: one thread ----------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview) -> int:
        """Fill the buffer with what is there, at least one byte; 0 at the end.

        Raises what `socket.recv_into` raises, and TamperedError when a frame is not the next one
        that the other end has sent; the link must then be closed.
        """
        begun_ms: float | None = None  # when the first bytes came that completed no frame
        while True:
            size = self._hand_on(buffer)
            if size:
                return size
            if begun_ms is not None:
                self._check_receive_time(begun_ms)
            self._make_room()
            got = self._sock.recv_into(self._buffer[self._end :])
            if not got:
                # Whoever reads knows where its messages end, so a cut link is an end like any other
                # and what is left of a frame counts for nothing.
                return 0
            self._end += got
            begun_ms = begun_ms or SYSTEM_CLOCK.monotonic_ms()

    def _hand_on(self, buffer: memoryview) -> int:
        """Move checked payload into the buffer, of as many whole frames as are there."""
        filled = 0
        while filled < len(buffer) and (self._checked or self._check_frame()):
            piece = self._checked[: len(buffer) - filled]
            buffer[filled : filled + len(piece)] = piece
            self._checked = self._checked[len(piece) :]
            filled += len(piece)
        return filled

    def _check_frame(self) -> bool:
        """Check the next frame if all of it is there. Raises TamperedError."""
        at = self._start + HEAD_BYTES
        if self._end < at:
            return False
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if not 0 < length <= PAYLOAD_BYTES_MAX:
            raise self._tampered(f"a frame of {length} bytes, which no node sends")
        if self._end < at + length:
            return False
        payload = self._buffer[at : at + length]
        mac = self._receive_mac.copy()
        mac.update(_NUMBER_AND_LENGTH.pack(self._received, length))
        mac.update(payload)
        if not hmac.compare_digest(mac.digest(), self._buffer[at - MAC_BYTES : at]):
            raise self._tampered(f"frame {self._received} is not what the other end sent next")
        self._received += 1
        self._start = at + length
        self._checked = payload
        return True

    def _make_room(self) -> None:
        """Leave room for the rest of a whole frame; nothing that was checked waits then."""
        left = self._end - self._start
        if left and self._start + HEAD_BYTES + PAYLOAD_BYTES_MAX <= len(self._buffer):
            return
        if self._start and left:
            self._buffer[:left] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, left

    def _tampered(self, what: str) -> TamperedError:
        return TamperedError(
            f"bytes were changed between both nodes: {what}. Nothing of it was used. Look for who "
            "or what changes bytes on this network, and set security.ha: tls on every node"
        )

    # -- out: any thread ---------------------------------------------------------------------------

    def _send_all(self, view: memoryview, flags: int) -> None:
        while len(view):
            piece, view = view[:SEND_BYTES_MAX], view[SEND_BYTES_MAX:]
            head = self._seal((piece,), len(piece))
            if len(piece) <= _SMALL_BYTES:
                send_whole(self._sock, head + piece, flags)
            else:
                send_whole(self._sock, head, socket.MSG_MORE)
                send_whole(self._sock, piece, flags)

    def _send_some(self, views: list[memoryview], total: int, flags: int) -> None:
        sealed: list[Bytes] = []
        if total <= SEND_BYTES_MAX:
            sealed = [self._seal(views, total), *views]
        else:
            whole = memoryview(b"".join(views))
            for at in range(0, total, SEND_BYTES_MAX):
                piece = whole[at : at + SEND_BYTES_MAX]
                sealed += (self._seal((piece,), len(piece)), piece)
        try:
            sent = self._sock.sendmsg(sealed, [], flags)
        except BlockingIOError:
            sent = 0
        if sent < sum(map(len, sealed)):
            self._unsent = b"".join(sealed)[sent:]

    def _seal(self, views: Iterable[memoryview], size: int) -> bytes:
        """Return the head of the next frame, with the MAC of its payload of `size` bytes.

        Called under `_send_lock`.
        """
        mac = self._send_mac.copy()
        mac.update(_NUMBER_AND_LENGTH.pack(self._sent, size))
        for view in views:
            mac.update(view)
        self._sent += 1
        return _LENGTH.pack(size) + mac.digest()
