"""The client API's connections. The API's lock is held in every call.

Three kinds of clients share the port, told apart by their first byte: those of ZMTP (0xFF), those
of RocketMQ (0x00), and those that begin with TLS (0x16), of both kinds.

    accepted --TLS, greeting, READY--> silent --first message--> spoken --> ended

With identities a client is a stranger until it has proved who it is: this belongs to the handshake,
and its messages must be small. A client of RocketMQ proves it by its first request, of any size.

The bounds, and what happens at each:

    handshake                       5 s                        the connection is ended
    frames of a stranger            STRANGER_BYTES             ended
    all bytes of a stranger         STRANGER_BYTES_ALL         ended
    one message                     30 s from first to last    ended
                                    byte
    unfinished messages of all      HELD_BYTES_MAX             strangers are ended; then reading of
    connections                                                unfinished messages above 2 KiB
                                                               pauses; once the oldest of all is
                                                               older than 1 s, its connection is
                                                               ended
    messages per read               about MESSAGES_MAX         the next read is smaller
    connections                     api.max_connections; with  the oldest silent one is ended, else
                                    n descriptors at most      the longest idle one; places.py has
                                    max(n / 2 - 64, 64)        the whole order
    half-open connections           TCP keep-alive, 30 s       ended
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import resource
import select
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hastore.addresses import address_text, plain_host
from hastore.bounded_log import BoundedLines
from hastore.clock import Clock
from hastore.config.model import ApiConfig
from hastore.errors import ConfigError
from hastore.protocol import remoting
from hastore.protocol.api import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from hastore.protocol.remoting import RemotingWire
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_refusal
from hastore.security.identities import Proof
from hastore.security.scram import ScramServer
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import TlsEngine
from hastore.server.api.handshakes import Handshakes, Step
from hastore.server.api.newcomers import OF_SOURCE_MAX, Newcomers
from hastore.server.api.places import Places, source_of
from hastore.server.api.quotas import Meter
from hastore.shares import descriptor_shares
from hastore.store.append.results import Guard

log = logging.getLogger(__name__)

HANDSHAKE_MS = 5_000.0
MESSAGE_MS = 30_000.0
HELD_BYTES_MAX = 16 * 1024 * 1024
CROWDED_MS = 1_000.0  # an unfinished message younger than this does not end its connection
CHECK_MS = 100.0  # without events, late connections are looked for at most this often
PAUSE_MS = 20.0  # until a paused connection is read again, or paused accepting begins again
BACKLOG = 1_024
ACCEPTS_MAX = 16  # per iteration
RECEIVE_BYTES = 64 * 1024  # the largest read, except of large frames
RECEIVE_BYTES_FIRST = 2 * 1024
RECEIVE_BYTES_MIN = 512
MESSAGES_MAX = 256  # per read, roughly: the size of the next read adapts
RECEIVE_BYTES_MAX = 512 * 1024  # the largest read while a large frame is incomplete
WARNINGS_PER_S = 10
CLOSING_READS_MAX = 64
STRANGER_BYTES = 4 * 1024  # of a frame, before the client has proved who it is
STRANGER_BYTES_ALL = 64 * 1024  # of all that it sends before, TLS included
# The same of a client of RocketMQ, which proves who it is by the first request itself.
_REMOTING_STRANGER_BYTES = STRANGER_BYTES_ALL + remoting.MAX_FRAME_BYTES
TLS_RECORD_BYTES = 17 * 1024  # the most that TLS keeps of an incomplete record
_IN = select.EPOLLIN
_IN_OUT = select.EPOLLIN | select.EPOLLOUT
_ONCE = select.EPOLLONESHOT  # of newcomers: what they send waits for its turn, and is reported once
_LIMITS = (MAX_HEADER_BYTES, MAX_FRAME_BYTES)
_STRANGER_LIMITS = (STRANGER_BYTES, STRANGER_BYTES)
_REMOTING_LIMITS = (remoting.MAX_HEADER_BYTES, remoting.MAX_FRAME_BYTES)
_REMOTING = 0x00  # the first byte of RocketMQ's clients: the size of a frame below 16 MiB
_PLAIN_GREETING = 0xFF  # the first byte of a ZMTP client without TLS
_NOT_TLS = (
    "this port speaks TLS: name the group's CA as tls_ca in the client's security file "
    "(HASTORE_SECURITY, or --security of commands)"
)
_NEVER = float("inf")
_INT = struct.Struct("=i")
_RESET, _CLOSE = struct.pack("=ii", 1, 0), struct.pack("=ii", 0, 0)  # struct linger
_SIOCOUTQNSD = 0x894B  # linux/sockios.h
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Wire(Protocol):
    """A protocol without its socket: ZmtpConnection, or RemotingWire."""

    failure: str | None

    @property
    def is_open(self) -> bool:
        """Whether its handshake, if it has one, is finished."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes kept of what is incomplete."""
        ...

    @property
    def missing_bytes(self) -> int:
        """A lower bound of the bytes that the incomplete frame lacks."""
        ...

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something to send."""
        ...

    def take_output(self) -> bytes:
        """Return, once, what the protocol itself has to send."""
        ...

    def receive(self, data: bytes) -> list[Any]:
        """Take received bytes; return the messages or frames that they complete."""
        ...

    def allow(self, limits: tuple[int, ...]) -> None:
        """Set other limits of the sizes that come next."""
        ...

    def fail(self, reason: str) -> None:
        """Fail the connection."""
        ...


@dataclass(slots=True, eq=False)
class Connection:
    """One client's connection. `unsent`: replies that the kernel has not taken yet, in order.

    With TLS, `unsent` has what is not encrypted yet, and `sealed` what the kernel has not taken.
    `unsent_bytes` counts both.
    """

    sock: socket.socket
    descriptor: int
    peer: str
    wire: Wire  # ZMTP's, until the first byte tells that the client speaks RocketMQ's protocol
    begun_ms: float  # when the handshake, or the unfinished message, began
    decided: bool = False  # the first byte has come, so `wire` is that of the client
    remoting: bool = False  # it speaks RocketMQ's protocol
    fast: bool = False  # it came to the fast port, as RocketMQ's slaves do
    joined: bool = False  # it is a member of a group that shares queues, or has been one
    unfinished: bool = True
    spoken: bool = False
    ended: bool = False
    address: tuple[str, int] = ("", 0)
    source: str = ""  # its address, as `places.source_of` counts it
    identity: str | None = None  # the name of whom it has proved to be
    took_place: bool = False  # another one had to go for it
    turns: int = 0  # as a newcomer
    unanswered: int = 0  # requests whose reply is not gathered yet
    held_bytes: int = 0  # of the unfinished message
    run: int = 0
    next_at: int | None = None  # place of the run's next put; None: one was refused
    parked: int = 0
    unsent: deque[bytes | bytearray | memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    watched: bool = False  # the epoll reports when the kernel takes more
    receive_bytes: int = RECEIVE_BYTES_FIRST  # of the next read
    inbox: list[Any] = field(default_factory=list)  # read, but left for the next iteration
    tls: TlsEngine | None = None
    shaking: bool = False  # a step of TLS's handshake is under way: `tls` belongs to its thread
    shaken: Step[Connection] | None = None  # the step that is done and was not taken in yet
    tls_held: int = 0  # received bytes that have given no plaintext yet
    sealed: memoryview = memoryview(b"")
    stranger: bool = False  # it must prove who it is first
    stranger_bytes: int = 0  # received from it as a stranger
    refused: int = 0  # requests of a stranger
    exchange: ScramServer | None = None
    proof: Proof | None = None  # who the client is, with identities
    earlier_proof: Proof | None = None  # by the certificate, if a key was proved beside it
    guard: Guard | None = None  # forbids records of its puts, with identities
    meter: Meter | None = None  # of its identity's quota

    @property
    def is_open(self) -> bool:
        """Whether the handshake is finished, and the proof of who the client is, if it is due."""
        return self.wire.is_open and not self.stranger

    @property
    def is_new(self) -> bool:
        """Whether the client must still prove who it is, or finish TLS's handshake."""
        return self.stranger or (self.tls is not None and not self.tls.open)

    @property
    def waits(self) -> bool:
        """Whether anything is under way: a request, a reply, an unfinished message."""
        return bool(self.unanswered or self.unsent_bytes or self.held_bytes or self.inbox)

    @property
    def waits_for_room(self) -> bool:
        """Whether the kernel must take bytes before more can be sent."""
        return bool(self.unsent) if self.tls is None else bool(self.sealed)


class Connections:
    """All connections of the listening sockets, and the epoll over them."""

    def __init__(
        self,
        listener: socket.socket,
        config: ApiConfig,
        clock: Clock,
        *,
        tls: TlsContexts | None = None,
        handshakes: Handshakes[Connection] | None = None,
        on_tls_failure: Callable[[str, str], None] = lambda _address, _why: None,
        asks_who: bool = False,
        fast: socket.socket | None = None,
    ) -> None:
        """Serve `listener`, and `fast`; with `asks_who` each client is a stranger until `welcome`.

        `tls` needs `handshakes`; each step that is done there is given to `shake_on`.
        `on_tls_failure(address, why)` is called for each client that TLS refuses.
        """
        self._tls = tls
        self._handshakes = handshakes
        self._on_tls_failure = on_tls_failure
        self._asks_who = asks_who
        self._listeners = [listener] if fast is None else [listener, fast]
        self._places: Places[Connection] = Places(
            _affordable(config.max_connections), config.evict_idle_ms,
            config.max_connections_of_address, config.max_connections_of_identity,
        )  # fmt: skip
        self._clock = clock
        self.epoll = select.epoll()
        for one in self._listeners:
            self.epoll.register(one, _IN | _ONCE)
        self.newcomers: Newcomers[Connection] = Newcomers(clock.monotonic_ms())
        self.listener_descriptors = frozenset(one.fileno() for one in self._listeners)
        self._by_descriptor: dict[int, Connection] = {}
        # In the order of `begun_ms`.
        self._unfinished: OrderedDict[Connection, None] = OrderedDict()
        self._paused: dict[Connection, None] = {}
        self._accepting_from_ms = 0.0  # accepting pauses until this time; 0: no pause
        self._warn = BoundedLines(
            log, clock=clock, burst=1, every_ms=1_000.0 / WARNINGS_PER_S
        ).write
        self.held_bytes = 0
        self.unsent_bytes = 0
        self.accepted = 0
        self.refused = 0
        self.ended = 0
        self.evicted = 0  # idle ones, for others
        self.malformed = 0
        self.tls_handshakes = 0  # that were completed
        self.left_parked: list[Connection] = []  # they have ended, and left parked pulls
        self.left_remoting: list[Connection] = []  # ended: RocketMQ's clients, and members

    @property
    def count(self) -> int:
        """The number of open connections."""
        return len(self._by_descriptor)

    @property
    def spoken(self) -> int:
        """The number of connections that have sent a message."""
        return len(self._by_descriptor) - len(self._places.silent)

    def find(self, descriptor: int) -> Connection | None:
        """Return the connection with this descriptor."""
        return self._by_descriptor.get(descriptor)

    def all(self) -> list[Connection]:
        """Return every open connection."""
        return list(self._by_descriptor.values())

    def accept(self, now_ms: float) -> list[Connection]:
        """Accept waiting connections; nothing is sent before the first byte of each is read."""
        accepted: list[Connection] = []
        for _ in range(ACCEPTS_MAX):
            try:
                sock, address, is_fast = self._accept_one()
            except BlockingIOError:
                self._listen_again()
                break
            except OSError as failure:
                if failure.errno in _NO_DESCRIPTORS:
                    self._pause_accepting(failure, now_ms)
                    break
                log.debug("api: a connection was gone before it was accepted: %s", failure)
                continue
            source = source_of(address[0])
            if self.newcomers.is_full(source):  # the cheapest answer to a flood
                self.refused += 1
                self._warn(
                    "api: connection from %s refused: %d others from there wait for their first "
                    "turn", address_text(*address[:2]), OF_SOURCE_MAX,
                )  # fmt: skip
                sock.close()
                continue
            try:
                accepted.append(self._take_up(sock, address, source, now_ms))
                accepted[-1].fast = is_fast
            except (OSError, ConfigError) as failure:  # the kernel has no memory for it, say
                self._warn("api: cannot set up a connection: %s", failure)
                sock.close()
        return [connection for connection in accepted if not connection.ended]

    def _accept_one(self) -> tuple[socket.socket, Any, bool]:
        """Accept one connection, and say whether it came to the fast port.

        Raises BlockingIOError if none waits at any listener.
        """
        listener, *fast = self._listeners
        if fast:
            with contextlib.suppress(BlockingIOError):
                return *listener.accept(), False
            return *fast[0].accept(), True
        return *listener.accept(), False

    def receive(self, connection: Connection, now_ms: float, *, broken: bool = False) -> list[Any]:
        """Read once, and return the messages, or RocketMQ's frames, that this read completed.

        A connection that the client has closed is ended. If `broken`, the epoll has reported an
        error; only a read says which. The caller sends the output of the connection's `wire`
        afterwards.
        """
        wire = connection.wire
        size = connection.receive_bytes
        if connection.held_bytes:
            if self.held_bytes >= HELD_BYTES_MAX and not broken:
                self._relieve(now_ms, connection)
                if connection.ended or connection in self._paused:
                    return []
                size = RECEIVE_BYTES_MIN
            size = max(size, min(wire.missing_bytes, RECEIVE_BYTES_MAX))
        elif self.held_bytes >= HELD_BYTES_MAX:
            size = RECEIVE_BYTES_MIN
        try:
            data = connection.sock.recv(size)
        except BlockingIOError:
            return []
        except OSError as failure:
            self.lost(connection, str(failure))
            return []
        if not data:
            self.lost(connection, "closed by the client")
            return []
        received = len(data)
        if connection.stranger:
            connection.stranger_bytes += received
            limit = _REMOTING_STRANGER_BYTES if connection.remoting else STRANGER_BYTES_ALL
            if connection.stranger_bytes > limit:
                most = f"{limit} bytes of a client before it has proved who it is"
                self.end(connection, f"more than {most}")
                return []
        tls = connection.tls
        if tls is not None:
            if not tls.open:
                self._begin_step(connection, tls, data)
                return []
            data = self._check_tls(connection, tls, tls.receive(data), received)
            if connection.ended:
                return []
        return self._take_in(connection, data, received, now_ms)

    def shake_on(self, step: Step[Connection]) -> None:
        """Give a connection whose step of TLS's handshake is done its next turn."""
        connection = step.connection
        connection.shaking = False
        if not connection.ended:
            connection.shaken = step
            self.newcomers.add(connection, 0)

    def finish_step(
        self, connection: Connection, step: Step[Connection], now_ms: float
    ) -> list[Any]:
        """Take in what a step of TLS's handshake gave; return the messages that it completed."""
        connection.shaken = None
        assert connection.tls is not None
        if isinstance(step.plain, Exception):
            raise step.plain
        data = self._check_tls(connection, connection.tls, step.plain, step.received)
        if connection.ended:
            return []
        self.tls_handshakes += connection.tls.open  # a step is a part of the handshake
        return self._take_in(connection, data, step.received, now_ms)

    def _take_in(
        self, connection: Connection, data: bytes, received: int, now_ms: float
    ) -> list[Any]:
        """Return the messages that these bytes complete; `received`: what they were on the wire.

        The first byte of a client tells its protocol.
        """
        wire = connection.wire
        if not connection.decided and data:
            connection.decided = True
            if data[0] == _REMOTING:
                # A stranger's, too: it proves who it is by its first request, which may be large.
                wire = connection.wire = RemotingWire(_REMOTING_LIMITS)
                connection.remoting = True
                self._let_close_reset(connection, True)
        messages: list[Any] = wire.receive(data) if data else []
        if wire.failure is not None:
            self.malformed += 1
            more = " (a client must prove who it is first)" if connection.stranger else ""
            self.end(connection, wire.failure + more)
            return []
        if connection.unfinished or wire.held_bytes or connection.tls_held:
            self._note_unfinished(connection, bool(messages), now_ms)
        if messages and not connection.stranger:
            if connection.spoken:
                self._places.use(connection, now_ms)
            else:
                self._use_first(connection, now_ms)
        if len(messages) > MESSAGES_MAX:  # read less next time; more waits in the kernel
            fewer = connection.receive_bytes * MESSAGES_MAX // len(messages)
            connection.receive_bytes = max(RECEIVE_BYTES_MIN, fewer)
        elif received >= connection.receive_bytes and len(messages) <= MESSAGES_MAX // 2:
            connection.receive_bytes = min(2 * connection.receive_bytes, RECEIVE_BYTES)
        return messages

    def welcome(self, connection: Connection) -> None:
        """Let a client that has proved who it is send messages of the usual size.

        If all places are in use and its identity has too many, one of the identity's is ended.
        """
        now_ms = self._clock.monotonic_ms()
        connection.stranger = False
        connection.wire.allow(_REMOTING_LIMITS if connection.remoting else _LIMITS)
        if connection.proof is not None:
            connection.identity = connection.proof.identity.name
        self._use_first(connection, now_ms)
        if not connection.held_bytes:
            self._unfinished.pop(connection, None)
            connection.unfinished = False
        victim = self._places.to_end_of_identity(connection, now_ms, _is_quiet)
        if victim is connection:
            self.refused += 1
            self.end(victim, f"identity {connection.identity} has too many connections, and all "
                             "are in use (api.max_connections_of_identity)")  # fmt: skip
        elif victim is not None:
            self._evict(victim, now_ms)

    def end_turn(self, connection: Connection) -> None:
        """Let the epoll report what a newcomer sends next, after its turn."""
        if not connection.ended and not connection.spoken:
            if connection.turns == 1:
                self._places.begin(connection)
            if not connection.shaking:
                self._watch(connection)

    def used(self, connection: Connection) -> None:
        """Note that nothing of a connection is under way from now on: it has its last reply."""
        if connection.spoken and not connection.ended:
            self._places.use(connection, self._clock.monotonic_ms())

    def watch_for_room(self, connection: Connection) -> None:
        """Let the epoll report when the kernel takes more, while there are unsent bytes."""
        wanted = connection.waits_for_room
        if wanted is not connection.watched:
            connection.watched = wanted
            self._watch(connection)

    def end(self, connection: Connection, reason: str) -> None:
        """Close a connection and log the reason; if no reply is unsent, send the reason first."""
        if connection.ended:
            return
        self.ended += 1
        self._warn("api: connection from %s ended: %s", connection.peer, reason)
        wire, tls = connection.wire, connection.tls
        wire.fail(reason)
        shakes = tls is not None and not tls.open  # then nothing can be sent before the reason
        if not connection.shaking and not connection.sealed and (shakes or not connection.unsent):
            last = wire.take_output()
            if tls is not None:
                last = (tls.encrypt(last) if tls.open else b"") + tls.close()
            try:
                connection.sock.send(last)
            except OSError as failure:  # it is ended all the same
                log.debug("api: %s: %s", connection.peer, failure)
        if connection.remoting and _unsent_in_kernel(connection.sock):
            self._let_close_reset(connection, False)  # earlier replies still go out
        self._forget(connection)

    def lost(self, connection: Connection, why: str) -> None:
        """Close a connection whose peer is gone."""
        if not connection.ended:
            log.debug("api: connection from %s: %s", connection.peer, why)
            self._forget(connection)

    def wait_ms(self, now_ms: float) -> float:
        """Return how long the loop may sleep before `end_late`; infinity: no check is due."""
        due = _NEVER
        first = next(iter(self._unfinished), None)
        if first is not None:  # a later handshake may be due before an earlier message
            due = max(first.begun_ms + HANDSHAKE_MS, now_ms + CHECK_MS)
        if self._paused:
            due = min(due, now_ms + PAUSE_MS)
        if self._accepting_from_ms:
            due = min(due, self._accepting_from_ms)
        return max(0.0, due - now_ms)

    def end_late(self, now_ms: float) -> None:
        """End late connections, and resume paused ones."""
        first = next(iter(self._unfinished), None)
        late = first is not None and now_ms >= first.begun_ms + HANDSHAKE_MS
        for connection in list(self._unfinished) if late else ():
            limit_ms = MESSAGE_MS if connection.is_open else HANDSHAKE_MS
            if now_ms < connection.begun_ms + HANDSHAKE_MS:
                break  # the others began later
            if now_ms >= connection.begun_ms + limit_ms:
                what = "a message" if connection.is_open else _handshake_of(connection)
                self.end(connection, f"{what} was not finished within {limit_ms / 1000.0:g} s")
        if self._accepting_from_ms and now_ms >= self._accepting_from_ms:
            self._accepting_from_ms = 0.0
            self._listen_again()
        if self._paused:
            self._relieve(now_ms)

    def close(self) -> None:
        """Close all connections, such that sent replies still arrive; then close the epoll."""
        for connection in self.all():
            if connection.remoting:
                self._let_close_reset(connection, False)
            try:
                connection.sock.shutdown(socket.SHUT_WR)
                for _ in range(CLOSING_READS_MAX):  # unread bytes would turn the close into a reset
                    if not connection.sock.recv(RECEIVE_BYTES):
                        break
            except OSError as failure:
                log.debug("api: %s: %s", connection.peer, failure)
            self._forget(connection)
        self.epoll.close()

    # -- internal

    def _take_up(
        self, sock: socket.socket, address: tuple[str, int], source: str, now_ms: float
    ) -> Connection:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
        stranger = self._asks_who
        zmtp = ZmtpConnection(SocketType.ROUTER, _STRANGER_LIMITS if stranger else _LIMITS)
        host, port = plain_host(address[0]), address[1]  # records say it as RocketMQ does
        connection = Connection(sock, sock.fileno(), address_text(host, port), zmtp, now_ms)
        connection.address = host, port
        connection.stranger = stranger
        connection.source = source
        if self._tls is not None:
            context = self._tls.server(require_certificate=False)
            connection.tls = TlsEngine(context, server_side=True)
        self.epoll.register(connection.descriptor, _IN | _ONCE)  # first: the kernel may refuse it
        self._by_descriptor[connection.descriptor] = connection
        log.debug("api: connection from %s accepted", connection.peer)
        self.accepted += 1
        self._places.add(connection)
        self._unfinished[connection] = None
        if len(self._by_descriptor) > self._places.limit:
            self._make_room(connection, now_ms)
        return connection

    def _begin_step(self, connection: Connection, tls: TlsEngine, data: bytes) -> None:
        """Hand bytes of TLS's handshake over; ends the connection of a client without TLS."""
        if connection.tls_held or data[0] != _PLAIN_GREETING:
            assert self._handshakes is not None
            connection.shaking = True
            self._handshakes.begin(connection, tls, data)
            return
        try:
            connection.sock.send(encode_refusal(_NOT_TLS))
        except OSError as failure:  # it is ended all the same
            log.debug("api: %s: %s", connection.peer, failure)
        self.malformed += 1
        why = "the client does not speak TLS"
        self._warn("api: connection from %s ended: %s", connection.peer, why)
        self._on_tls_failure(connection.peer, why)
        self._forget(connection)

    def _check_tls(
        self, connection: Connection, tls: TlsEngine, plain: bytes, received: int
    ) -> bytes:
        """Return the plaintext of received bytes; ends the connection if TLS has failed."""
        connection.tls_held = 0 if plain else min(connection.tls_held + received, TLS_RECORD_BYTES)
        if tls.failure is not None:
            self.malformed += 1
            self.end(connection, f"TLS: {tls.failure}")
            if not tls.open:
                self._on_tls_failure(connection.peer, tls.failure)
            return b""
        if tls.ended and not plain:
            self.lost(connection, "closed by the client")
        return plain

    def _let_close_reset(self, connection: Connection, wanted: bool) -> None:
        """Let the end of a connection, also by a kill of the node, reset it, or close it as usual.

        RocketMQ's Java clients 4.x take a reset for a failure at once, and send again. At a usual
        close they wait for the answers that they lack until their timeout, and then do not.
        """
        linger = _RESET if wanted else _CLOSE
        try:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        except OSError as failure:  # its client has gone meanwhile
            log.debug("api: %s: %s", connection.peer, failure)

    def _make_room(self, latest: Connection, now_ms: float) -> None:
        places = self._places
        victim = places.to_end(latest, now_ms, _is_quiet)
        latest.took_place = victim is not latest
        if victim.spoken:
            self._evict(victim, now_ms)
            return
        self.refused += 1
        if victim is latest:
            source, many = places.most()
            self._warn(
                "api: connection from %s refused: all %d are in use (api.max_connections) and none "
                "that could give way is idle; most, %d, are from %s",
                victim.peer, places.limit, many - (source == latest.source), source,
            )  # fmt: skip
        else:
            self._warn(
                "api: connection from %s ended: more than %d connections (api.max_connections)",
                victim.peer, places.limit,
            )  # fmt: skip
        self._give_way(victim)

    def _evict(self, connection: Connection, now_ms: float) -> None:
        """Close a connection that is used no more, or by whom has too many, for another one."""
        unused_ms = self._places.unused_ms(connection, now_ms) or 0.0
        source, many = self._places.most()
        self._warn(
            "api: connection from %s, unused for %.0f s, gave way to another one: all %d are in "
            "use (api.max_connections), %d of them from %s; does a client leak them?",
            connection.peer, unused_ms / 1000.0, self._places.limit,
            min(many, self._places.limit), source,
        )  # fmt: skip
        self.evicted += 1
        self._give_way(connection)

    def _give_way(self, connection: Connection) -> None:
        """Close a connection for want of room. The client is not told why, and connects again.

        An ERROR would be worse than none: libzmq takes it for the end, and never connects again.
        """
        self.ended += 1
        tls = connection.tls
        if tls is not None and not connection.shaking and tls.open and not connection.unsent_bytes:
            try:
                connection.sock.send(tls.close())
            except OSError as failure:  # it is ended all the same
                log.debug("api: %s: %s", connection.peer, failure)
        self._forget(connection)

    def _pause_accepting(self, failure: OSError, now_ms: float) -> None:
        """End a connection to free its descriptor; if none can go, pause for PAUSE_MS."""
        self._warn("api: cannot accept: %s; raise the limit of open files", failure)
        victim = self._places.oldest_silent()
        if victim is not None:
            self._warn(
                "api: connection from %s ended: its descriptor is needed for another connection",
                victim.peer,
            )
            self._give_way(victim)
            return
        victim = self._places.idle(now_ms, _is_quiet)
        if victim is not None:
            self._evict(victim, now_ms)
            return
        self._accepting_from_ms = now_ms + PAUSE_MS
        self.newcomers.knocking = False

    def _note_unfinished(self, connection: Connection, some_ended: bool, now_ms: float) -> None:
        """Track whether a message or the handshake is unfinished, and how many bytes it holds."""
        held = connection.wire.held_bytes + connection.tls_held
        self.held_bytes += held - connection.held_bytes
        connection.held_bytes = held
        unfinished = bool(held) or not connection.is_open
        if unfinished and (some_ended and connection.is_open or not connection.unfinished):
            connection.begun_ms = now_ms
            self._unfinished.pop(connection, None)
            self._unfinished[connection] = None
        elif not unfinished:
            self._unfinished.pop(connection, None)
        connection.unfinished = unfinished
        if held and self.held_bytes >= HELD_BYTES_MAX:
            self._relieve(now_ms, connection)

    def _relieve(self, now_ms: float, latest: Connection | None = None) -> None:
        """Keep unfinished messages within HELD_BYTES_MAX: end the oldest, or pause `latest`.

        Those of new clients are ended first: they cannot hold up those who are known. A small
        message is never paused: its end makes more room than waiting for it does.
        """
        if self.held_bytes >= HELD_BYTES_MAX:
            for each in [one for one in self._unfinished if one.held_bytes and one.is_new]:
                self.end(each, f"{HELD_BYTES_MAX} bytes of unfinished messages, and it is new")
                if self.held_bytes < HELD_BYTES_MAX:
                    break
        while self.held_bytes >= HELD_BYTES_MAX:
            oldest = next((each for each in self._unfinished if each.held_bytes), None)
            if oldest is None or now_ms < oldest.begun_ms + CROWDED_MS:
                break
            held = f"{HELD_BYTES_MAX} bytes of unfinished messages"
            self.end(oldest, f"{held}, and this one's is the oldest")
        if self.held_bytes < HELD_BYTES_MAX:
            paused, self._paused = self._paused, {}
            for connection in paused:
                self._watch(connection)
        elif latest is not None and not latest.ended and not _is_small(latest):
            if latest not in self._paused:
                self._paused[latest] = None
                self._watch(latest)

    def _listen_again(self) -> None:
        """Let the epoll report the next connection that waits to be accepted."""
        self.newcomers.knocking = False
        for one in self._listeners:
            self.epoll.modify(one, _IN | _ONCE)

    def _use_first(self, connection: Connection, now_ms: float) -> None:
        """Take the first request of a connection: it is known from now on."""
        connection.spoken = True
        self._places.use(connection, now_ms)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        if connection.shaking:  # `end_turn` watches it again
            return
        wanted = _IN_OUT if connection.watched else _IN
        if connection in self._paused:
            wanted &= ~_IN
        if not connection.spoken:
            wanted |= _ONCE
        self.epoll.modify(connection.descriptor, wanted)

    def _forget(self, connection: Connection) -> None:
        connection.ended = True
        del self._by_descriptor[connection.descriptor]
        self._places.remove(connection)
        self.newcomers.discard(connection)
        self._unfinished.pop(connection, None)
        self._paused.pop(connection, None)
        if connection.parked:
            self.left_parked.append(connection)
        if connection.remoting or connection.joined:
            self.left_remoting.append(connection)
        self.held_bytes -= connection.held_bytes
        self.unsent_bytes -= connection.unsent_bytes
        connection.held_bytes = connection.unsent_bytes = 0
        connection.unsent.clear()
        connection.sealed = memoryview(b"")
        connection.sock.close()


def _unsent_in_kernel(sock: socket.socket) -> bool:
    """Whether the kernel has bytes that it has not sent yet, which a reset would drop."""
    try:
        (unsent,) = _INT.unpack(fcntl.ioctl(sock.fileno(), _SIOCOUTQNSD, bytes(_INT.size)))
    except OSError:  # the connection is broken
        return False
    return bool(unsent)


def _is_small(connection: Connection) -> bool:
    """Whether the unfinished message, as far as it is known, has at most 2 KiB."""
    return connection.held_bytes + connection.wire.missing_bytes <= RECEIVE_BYTES_FIRST


def _handshake_of(connection: Connection) -> str:
    if connection.remoting:
        return "a signed request" if connection.stranger else "a request"
    if connection.tls is not None and not connection.tls.open:
        return "the handshake of TLS"
    return "the proof of the client's identity" if connection.wire.is_open else "the handshake"


def _is_quiet(connection: Connection) -> bool:
    """Whether the kernel has no bytes of a client that were not read: no request is on its way."""
    try:
        return not connection.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError as failure:  # the client is gone
        log.debug("api: %s: %s", connection.peer, failure)
        return True


def _affordable(limit: int) -> int:
    """Return how many connections may be open: at most their share of the descriptors."""
    most = descriptor_shares().connections
    if most is None:
        return limit
    if most < limit:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.warning(
            "api: %d connections instead of %d (api.max_connections): the process may open %d "
            "files; raise that limit (ulimit -n)", most, limit, descriptors,
        )  # fmt: skip
    return min(limit, most)
