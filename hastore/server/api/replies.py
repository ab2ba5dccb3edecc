"""Replies of the client API: gathered during an iteration, sent together; failures of requests.

Replies of one iteration to one connection are normally sent by one system call. Bytes that the
kernel does not take stay in the connection's `unsent` and are sent when the epoll reports room; the
API never waits for a client that reads slowly. The API's lock is held in every call of `Replies`.

Unsent bytes are counted as memory: a reply that was sent in part counts with all that it still
keeps, which is twice what is left of it at most.

`Failures` says what the client of a failed request is told, and what the node logs:

    exception                             the client gets             the log gets
    the client's own fault (UsageError)   its type and text           nothing
    StoreError, damage                    its type and text           a line
    OSError: the disk cannot be read      `StoreError`, the text      a line
    anything else: a bug                  `InternalError`, its type   its traceback

MemoryError is not a failure of one request: it is raised again and ends the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

from hastore.clock import Clock
from hastore.errors import HastoreError, UsageError
from hastore.protocol import api
from hastore.protocol.zmtp import encode_front
from hastore.security.tls_engine import TlsEngine
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection, Connections

log = logging.getLogger(__name__)

REPEAT_MS = 10_000.0  # until the same failure is logged again
_KEPT_MAX = 1_000  # failures remembered for that purpose


class Failures:
    """Turn exceptions into statuses and log lines; the API's lock is held in every call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.count = 0  # of failures that were not the client's own fault

    def note(self, what: str, failure: Exception) -> tuple[str, str]:
        """Log a failure of `what`; return status and reason for the client. Raises MemoryError."""
        if isinstance(failure, MemoryError):
            raise failure
        if isinstance(failure, UsageError):
            return type(failure).__name__, str(failure)
        self.count += 1
        if isinstance(failure, HastoreError):
            answer = type(failure).__name__, str(failure)
        elif isinstance(failure, OSError):
            answer = "StoreError", f"the store cannot be read: {failure}"
        elif isinstance(failure, UnicodeEncodeError):  # a topic in the log that is not UTF-8
            answer = "CorruptRecordError", str(failure)
        else:
            text = f"{type(failure).__name__}: {failure}"[:200]
            answer = "InternalError", f"{text}; the node's log has more"
            if self._is_new(f"{what}: {text}"):
                log.error("api: %s failed because of a bug", what, exc_info=failure)
            return answer
        if self._is_new(f"{what}: {answer[1]}"):
            log.error("api: %s failed: %s", what, answer[1])
        return answer

    def _is_new(self, text: str) -> bool:
        """Whether to log a failure now; False if it was logged less than REPEAT_MS ago."""
        now = self._clock.monotonic_ms()
        if now < self._logged.get(text, -REPEAT_MS) + REPEAT_MS:
            return False
        if len(self._logged) >= _KEPT_MAX:
            self._logged.clear()
        self._logged[text] = now
        return True


def master_of(backend: ApiBackend, failures: Failures) -> str | None:
    """Return the master's API address for a refusal; None if the node does not know it."""
    try:
        return backend.master_map().master_api
    except Exception as failure:  # the refusal is sent without it
        failures.note("the search for the master", failure)
        return None


UNSENT_OF_ONE_BYTES = 8 * 1024 * 1024  # beyond it, pulls and queries are answered BUSY
UNSENT_BYTES = 24 * 1024 * 1024  # the same, for all connections together
ENDED_AT_BYTES = 20 * 1024 * 1024  # beyond it, the connection is ended
ENDED_AT_BYTES_ALL = 40 * 1024 * 1024  # beyond it, the connection with the most is ended
GATHERED_BYTES_MAX = 256 * 1024  # beyond it, gathered replies to a connection are sent at once
BUFFERS_MAX = 64  # per system call
SEALED_BYTES = 256 * 1024  # of replies, encrypted at once
_JOIN_BYTES_MAX = 32 * 1024


class Replies:
    """Send replies to clients."""

    def __init__(self, on_unencodable: Callable[[Connection, api.Reply, Exception], None]) -> None:
        """Prepare; `on_unencodable` handles a reply that cannot be encoded, and may call `send`."""
        self._on_unencodable = on_unencodable
        self._connections: Connections
        self._gathered: dict[Connection, None] = {}  # the connections with new replies

    def open(self, connections: Connections) -> None:
        """Set the connections; called once, before the first reply."""
        self._connections = connections

    def send(
        self,
        connection: Connection,
        reply: api.Reply,
        payload: bytes | None = None,
        *,
        is_answer: bool = True,
    ) -> None:
        """Gather a reply for `flush`; a reply to a connection that has ended is dropped.

        A reply that cannot be encoded goes to `on_unencodable`; no byte of it is gathered.
        """
        if connection.ended:
            return
        try:
            header = api.encode(reply)
        except Exception as failure:
            self._on_unencodable(connection, reply, failure)
            return
        if is_answer and connection.unanswered:
            connection.unanswered -= 1
            if not connection.unanswered:
                self._connections.used(connection)
        if payload is None:
            self._gather(connection, encode_front(header))
        else:
            front = encode_front(header, len(payload))
            if len(payload) <= _JOIN_BYTES_MAX:
                self._gather(connection, front + payload)
            else:
                self._gather(connection, front)
                self._gather(connection, payload)
        self._move(connection)

    def _move(self, connection: Connection) -> None:
        """Move many gathered bytes from this process to the kernel."""
        if connection.unsent_bytes > GATHERED_BYTES_MAX:
            if connection.watched:
                self._bound(connection)
            else:
                self.flush_one(connection)

    def send_frame(
        self, connection: Connection, data: bytes, payload: bytes | None = None, *, answers: bool
    ) -> None:
        """Gather a frame of RocketMQ's protocol; with `answers` it answers a request.

        A frame to a connection that has ended is dropped. `payload` is the rest of the frame. With
        empty `data` the request ends without an answer.
        """
        if connection.ended:
            return
        if answers and connection.unanswered:
            connection.unanswered -= 1
            if not connection.unanswered:
                self._connections.used(connection)
        if not data:
            return
        self._gather(connection, data)
        if payload:
            self._gather(connection, payload)
        self._move(connection)

    def send_raw(self, connection: Connection) -> None:
        """Gather the ZMTP output of a connection: greeting, READY, PONG."""
        if not connection.ended:
            self._gather(connection, connection.wire.take_output())

    def shake(self, connection: Connection) -> None:
        """Let the next `flush` send what TLS has to say, and what waited for its handshake."""
        if not connection.ended:
            self._gathered[connection] = None

    def flush(self) -> None:
        """Send the replies gathered since the last call."""
        while self._gathered:
            connection, _ = self._gathered.popitem()
            if not connection.ended:
                self.flush_one(connection)

    def flush_one(self, connection: Connection) -> None:
        """Send one connection's unsent bytes, as far as the kernel takes them."""
        if connection.tls is not None:
            if not connection.shaking:
                self._flush_sealed(connection, connection.tls)
            return
        unsent = connection.unsent
        connections = self._connections
        while unsent:
            try:
                if len(unsent) == 1:
                    sent = connection.sock.send(unsent[0])
                else:
                    sent = connection.sock.sendmsg(islice(unsent, BUFFERS_MAX))
            except BlockingIOError:
                break
            except OSError as failure:
                connections.lost(connection, str(failure))
                return
            freed = 0
            while unsent and sent >= len(unsent[0]):
                first = unsent.popleft()
                sent -= len(first)
                freed += _kept(first)
            if sent:
                freed += _kept(unsent[0])
                unsent[0] = _rest(unsent[0], sent)
                freed -= _kept(unsent[0])
            self._count(connection, -freed)
        if unsent or connection.watched:
            self._bound(connection)

    def _flush_sealed(self, connection: Connection, tls: TlsEngine) -> None:
        """Encrypt and send, one slice after the other, so that little ciphertext waits."""
        connections = self._connections
        while connection.sealed or self._seal(connection, tls):
            try:
                sent = connection.sock.send(connection.sealed)
            except BlockingIOError:
                break
            except OSError as failure:
                connections.lost(connection, str(failure))
                return
            before = _kept(connection.sealed)
            connection.sealed = _rest(connection.sealed, sent)
            self._count(connection, _kept(connection.sealed) - before)
        if connection.sealed or connection.watched:
            self._bound(connection)

    def _seal(self, connection: Connection, tls: TlsEngine) -> bool:
        """Encrypt the next unsent bytes; False if there is nothing to send now."""
        unsent, taken, freed = connection.unsent, 0, 0
        if tls.open and unsent:
            pieces = []
            while unsent and (not taken or taken + len(unsent[0]) <= SEALED_BYTES):
                piece = unsent.popleft()
                freed += _kept(piece)
                if taken + len(piece) > SEALED_BYTES:
                    rest = _rest(piece, SEALED_BYTES)
                    unsent.appendleft(rest)
                    freed -= _kept(rest)
                    piece = memoryview(piece)[:SEALED_BYTES]
                pieces.append(piece)
                taken += len(piece)
            data = tls.encrypt(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        else:
            data = tls.take_outgoing()
        connection.sealed = memoryview(data)
        self._count(connection, len(data) - freed)
        return bool(data)

    def has_room(self, connection: Connection) -> bool:
        """Whether another large reply to this connection stays within the bounds."""
        if connection.unsent_bytes >= UNSENT_OF_ONE_BYTES:
            return False
        return self._connections.unsent_bytes < UNSENT_BYTES

    def _gather(self, connection: Connection, data: bytes) -> None:
        unsent = connection.unsent
        if not connection.watched or len(data) > _JOIN_BYTES_MAX:
            unsent.append(data)
        elif unsent and type(last := unsent[-1]) is bytearray and len(last) < _JOIN_BYTES_MAX:
            last += data  # small objects would take more memory than their bytes
        else:
            unsent.append(bytearray(data))
        self._count(connection, len(data))
        if connection.meter is not None:
            connection.meter.answered(len(data))
        self._gathered[connection] = None

    def _count(self, connection: Connection, more: int) -> None:
        connection.unsent_bytes += more
        self._connections.unsent_bytes += more

    def _bound(self, connection: Connection) -> None:
        connections = self._connections
        if connection.unsent_bytes > ENDED_AT_BYTES:
            connections.end(connection, "it does not read its replies")
            return
        connections.watch_for_room(connection)
        while connections.unsent_bytes > ENDED_AT_BYTES_ALL:
            worst = max(connections.all(), key=lambda each: each.unsent_bytes)
            connections.end(worst, "it has the most unsent bytes of all connections")


def _kept(data: bytes | bytearray | memoryview) -> int:
    """Return the size of the memory that a buffer keeps: of a view, all that it is a part of."""
    whole = data.obj if type(data) is memoryview else data
    assert isinstance(whole, bytes | bytearray)
    return len(whole)


def _rest(data: bytes | bytearray | memoryview, sent: int) -> memoryview:
    """Return a buffer from `sent` on: a copy if a view would keep more than twice its size."""
    left = memoryview(data)[sent:]
    return left if 2 * len(left) >= _kept(left) else memoryview(bytes(left))
