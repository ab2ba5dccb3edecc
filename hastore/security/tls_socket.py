"""TlsSocket: a connected socket with TLS over it, with the methods that the links of nodes use.

One thread reads; several may write. An OpenSSL object must not be used by two threads at once, so
the engine has a lock. The socket itself is read and written outside of that lock: a reader that
waits keeps no writer waiting. `_send_lock` keeps the ciphertext in the order of the encryption.

Timeouts are those of the socket (CoveredSocket).
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import AuthenticationError
from hastore.security.sealed_socket import Bytes, CoveredSocket, SealedSocket
from hastore.security.tls_engine import SLICE_BYTES, PeerCertificate, TlsEngine

log = logging.getLogger(__name__)

RECEIVE_BYTES = 256 * 1024
_SMALL_BYTES = 16 * 1024


class TlsSocket(CoveredSocket):
    """A socket under TLS; make it by `TlsSocket.over`, which does the handshake."""

    def __init__(self, sock: socket.socket, engine: TlsEngine) -> None:
        super().__init__(sock)
        self._engine = engine
        self._engine_lock = threading.Lock()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._at_end = False

    @classmethod
    def over(
        cls,
        sock: socket.socket,
        engine: TlsEngine,
        left_s: Callable[[], float],
        *,
        received: bytes = b"",
    ) -> "TlsSocket":
        """Do the handshake and return the socket under TLS; the caller still owns `sock`.

        `left_s` returns the seconds that are left and raises TimeoutError after the deadline.
        `received` are bytes that were read already. Raises AuthenticationError, whose text says
        what to do, when the other end is not who it should be or does not speak TLS.
        """
        engine.feed(received)
        while True:
            out = engine.take_outgoing()
            if out:
                sock.settimeout(left_s())
                try:
                    sock.sendall(out)
                except (BrokenPipeError, ConnectionResetError):
                    if engine.failure is None:
                        raise
            if engine.failure is not None:
                raise AuthenticationError(engine.failure)
            if engine.open:
                return cls(sock, engine)
            sock.settimeout(left_s())
            data = sock.recv(RECEIVE_BYTES)
            if data:
                engine.feed(data)
            else:
                engine.feed_eof()

    @property
    def peer(self) -> PeerCertificate | None:
        """The other end's verified certificate."""
        return self._engine.peer

    # -- in: one thread ----------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview) -> int:
        """Fill the buffer with what is there, at least one byte; 0 at the end.

        Raises what `socket.recv_into` raises, and AuthenticationError when the other end refuses
        this one or breaks TLS.
        """
        engine = self._engine
        begun_ms: float | None = None  # when the first bytes came that completed no record
        while True:
            with self._engine_lock:
                size = engine.read_into(buffer)
                failure = engine.failure
            if size:
                return size
            if self._at_end or engine.ended:
                return 0
            if failure is not None:
                self._send_pending()  # the alert
                raise AuthenticationError(failure)
            if begun_ms is not None:
                self._check_receive_time(begun_ms)
            got = self._sock.recv_into(self._received)
            if not got:
                # The protocols above TLS know where their messages end, so a connection that is cut
                # is an end like any other.
                self._at_end = True
                return 0
            with self._engine_lock:
                engine.feed(self._received[:got])
                size = engine.read_into(buffer)
                answers = engine.has_outgoing
            if answers:
                self._send_pending()
            if size:
                return size
            begun_ms = begun_ms or SYSTEM_CLOCK.monotonic_ms()

    def _send_pending(self) -> None:
        """Send what TLS itself has to say, unless a writer is at it and will send it next."""
        if self._send_lock.acquire(blocking=False):
            try:
                with self._engine_lock:
                    self._unsent += self._engine.take_outgoing()
                if self._unsent:
                    self._send_unsent()
            except (BrokenPipeError, ConnectionResetError) as error:
                log.debug("nothing can be sent any more: %s", error)  # the reader meets the end
            finally:
                self._send_lock.release()

    # -- out: any thread ---------------------------------------------------------------------------

    def _send_all(self, view: memoryview, _flags: int) -> None:
        while len(view):
            self._encrypt((view[:SLICE_BYTES],))
            view = view[SLICE_BYTES:]
            self._flush()

    def _send_some(self, views: list[memoryview], total: int, _flags: int) -> None:
        if total <= _SMALL_BYTES:  # one TLS record instead of one per part
            self._encrypt((b"".join(views),))
        else:
            self._encrypt(views)
        self._send_unsent()

    def _encrypt(self, parts: Iterable[Bytes]) -> None:
        """Add the ciphertext of the parts to `_unsent`. Called under `_send_lock`.

        Raises OSError after a failure of TLS, as for any broken connection; the reader gets the
        AuthenticationError.
        """
        with self._engine_lock:
            for part in parts:
                self._engine.write(part)
            out = self._engine.take_outgoing()
            failure = self._engine.failure
        self._unsent = self._unsent + out if self._unsent else out
        if failure is not None:
            raise ConnectionAbortedError(failure)

    def _send_unsent(self) -> None:
        """Send of `_unsent` what the kernel takes now. Called under `_send_lock`."""
        try:
            sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        self._unsent = self._unsent[sent:]


# What carries a link; `isinstance(link, socket.socket)` tells a bare one.
LinkSocket = socket.socket | TlsSocket | SealedSocket
