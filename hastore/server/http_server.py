"""The HTTP port: a page, /status, /metrics and three probes; requests and clients are untrusted.

    GET /          the status page, and /page.json, which it shows (server/status_page.py)
    GET /status    the JSON of `hastore status`, one object
    GET /metrics   the same for Prometheus
    GET /healthz   "ok" while the node answers
    GET /readyz    "ok" while the node serves its role, as the master or as one that follows it
    GET /master    "ok" while puts that do not set `acks` are taken here

The last two answer 503 and why not, for load balancers and orchestrators.

On a node that has identities, the three probes are open, but do not say why, and everything else
needs a proved identity, whatever its rights (docs/security.md): by a client certificate, or by a
token, `Authorization: Bearer NAME:KEY` or the same as Basic. A token goes over TLS or loopback
only. With `security.http: tls` all this is over TLS; a plain client is told so, and not answered.

`HttpServer` is one thread with non-blocking sockets and no keep-alive. Three bounds limit the cost
of untrusted clients: at most MAX_CONNECTIONS connections of strangers' hosts and KNOWN_CONNECTIONS
of the group's and of those that have proved an identity, the bounds of a request (`Exchange`), and
DEADLINE_MS from the accept to the last byte of the answer. If the connections are taken, a new one
replaces one of the source that has most of them (security/slots.py), if possible an idle one: the
server waits for its client. So slow clients do not block quick ones, nor a flood the others.
"""

import base64
import binascii
import json
import logging
import random
import select
import selectors
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import h11

from hastore.addresses import address_text, is_loopback, parse_address
from hastore.bounded_log import BoundedLines
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ConfigError
from hastore.listeners import listen
from hastore.security.audit_log import Note
from hastore.security.identities import Denied, Identities, Tokens
from hastore.security.identity import Identity
from hastore.security.slots import KnownHosts, crowded_out, source_of
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import TlsEngine
from hastore.server.status_page import StatusPage
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 512
MAX_HEAD_BYTES = 4_096  # a scrape by Prometheus sends about 600

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    414: "URI Too Long",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_MORE = {
    # Two headers: Chromium reads one scheme in each, and would not ask for a name and a key.
    401: (
        ("WWW-Authenticate", 'Bearer realm="hastore"'),
        ("WWW-Authenticate", 'Basic realm="hastore"'),
    ),
    429: (("Retry-After", "1"),),
}


Headers = Sequence[tuple[str, str]]


class Request(NamedTuple):
    """A complete request; its body, if any, is not read."""

    method: bytes
    path: bytes  # without the query
    authorization: bytes | None = None  # None without the header, or with two of them


class Refusal(NamedTuple):
    """A request that is answered without asking the node."""

    code: int
    text: bytes


class Exchange:
    """Read one request, then write its answer: bytes in, bytes out, without a socket or a clock.

        b"GET /sta" --receive()--> None, more is to come
        b"tus HTTP/1.1\\r\\n\\r\\n" --receive()--> Request, or Refusal --answer()--> bytes

    h11 parses the headers and writes the head of the answer. It gets every request as HTTP/1.0,
    because it refuses HTTP/1.1 without a `Host` header, which many health checks do not send.
    """

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER)
        self._line: bytearray | None = bytearray()  # None after h11 has received it
        self._received = 0
        self._head_only = False

    @property
    def room_bytes(self) -> int:
        """The maximum number of bytes to read next, at least 1."""
        return MAX_HEAD_BYTES + 1 - self._received

    def receive(self, data: bytes) -> Request | Refusal | None:
        """Take up to `room_bytes` bytes; return None while the request is incomplete."""
        self._received += len(data)
        if self._line is not None:
            self._line += data
            refusal = self._read_line(self._line)
            if refusal is not None:
                return refusal
        else:
            self._http.receive_data(data)
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            return Refusal(400, b"this is not a valid HTTP request\n")
        if isinstance(event, h11.Request):
            self._head_only = event.method == b"HEAD"
            given = [value for name, value in event.headers if name == b"authorization"]
            proof = bytes(given[0]) if len(given) == 1 else None
            return Request(event.method, event.target.partition(b"?")[0], proof)
        if self._received > MAX_HEAD_BYTES:
            return Refusal(431, b"the request is too large\n")
        return None

    def _read_line(self, received: bytearray) -> Refusal | None:
        """Check the request line and, once it is complete, hand it to h11 as HTTP/1.0."""
        line, newline, rest = bytes(received).partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            return Refusal(414, b"the request line is too long\n")
        if not newline:
            return None
        words = line.strip().split(b" ")
        if len(words) != 3:
            return Refusal(400, b"this port speaks HTTP\n")
        method, target, version = words
        if not version.startswith(b"HTTP/1."):
            return Refusal(400, b"this port speaks HTTP/1.1\n")
        self._line = None
        self._http.receive_data(method + b" " + (target or b"/") + b" HTTP/1.0\r\n" + rest)
        return None

    def answer(
        self, code: int, body: bytes, kind: str = "text/plain", headers: Headers = ()
    ) -> bytes:
        """Return the whole answer, without its body if the request was a HEAD."""
        response = h11.Response(
            status_code=code,
            reason=_REASONS[code],
            headers=[
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Connection", "close"),
                *_MORE.get(code, ()),
                *headers,
            ],
        )
        head = self._http.send(response) or b""
        return head if self._head_only else head + body


OPEN_PATHS = (b"/healthz", b"/readyz", b"/master")
_HOW = (
    b"this node asks who you are: send a client certificate, or the header "
    b"Authorization: Bearer NAME:KEY, with a key that hastore keys new made\n"
)


class HttpAccess:
    """Decide whether a request is answered; one thread calls it."""

    def __init__(self, identities: Identities, note: Note, clock: Clock) -> None:
        self._identities = identities
        self._note = note
        self._tokens = Tokens(identities, clock)
        self.identity: Identity | None = None  # whose request was let in last; None: an open path

    def refusal(
        self,
        path: bytes,
        authorization: bytes | None,
        address: str,
        *,
        encrypted: bool = False,
        common_name: str | None = None,
    ) -> Refusal | None:
        """Return how a request from `address`, "HOST:PORT", is refused; None: it is answered.

        `common_name` is that of the verified client certificate, None without one.
        """
        self.identity = None
        if path in OPEN_PATHS:
            return None
        known = None if common_name is None else self._identities.by_certificate(common_name)
        if known is not None:
            self.identity = known.identity
            return None
        host = _host(address)
        if authorization is None:
            claimed = None if common_name is None else f"certificate {common_name}"
            self._refused(claimed, address, "neither a token nor a certificate of an identity")
            return Refusal(401, _HOW)
        if not encrypted and not is_loopback(host):
            self._refused(None, address, "a token in the clear")
            return Refusal(403, b"a token goes over TLS only; change this key, it was readable\n")
        found = self._tokens.prove(_token(authorization), host, in_turn=True)
        if not isinstance(found, Denied):
            self.identity = found.identity
            return None
        self._refused(found.claimed, address, found.reason)
        return Refusal(429 if found.again else 401, found.reason.encode() + b"\n")

    def takes_turns(
        self, request: Request, address: str, *, encrypted: bool, common_name: str | None
    ) -> bool:
        """Whether the request has a token whose key must be checked, which costs: it waits for it.

        The server lets the sources of such requests take turns, so that a flood of wrong tokens
        keeps no right one out.
        """
        token = request.authorization
        if request.path in OPEN_PATHS or token is None:
            return False
        if not encrypted and not is_loopback(_host(address)):
            return False
        if common_name is not None and self._identities.by_certificate(common_name) is not None:
            return False
        return self._tokens.needs_check(_token(token))

    @property
    def has_room(self) -> bool:
        """Whether the key of a token may be checked now."""
        return self._tokens.has_room

    def _refused(self, claimed: str | None, address: str, reason: str) -> None:
        self._note("http", outcome="refused", identity=claimed, address=address, reason=reason)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _token(authorization: bytes) -> str:
    """Return NAME:KEY of the header's value; "" if it has none."""
    scheme, _, rest = authorization.strip().partition(b" ")
    try:
        if scheme.lower() == b"basic":
            rest = base64.b64decode(rest.strip(), validate=True)
        elif scheme.lower() != b"bearer":
            return ""
        return rest.strip().decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return ""


MAX_CONNECTIONS = 64
KNOWN_CONNECTIONS = 128
DEADLINE_MS = 5_000.0
WAIT_MS = 4_000.0  # for so long a request waits for the check of its token's key
# Longer than a request waits: sources that come back at once do not get ahead of one that waits.
TURNS_MS = 10_000.0
_TURN_S = 0.05  # so often waiting requests are looked at
_SLICE = 64 * 1024
_TLS_BYTES = 16 * 1024  # of ciphertext, received at once


@dataclass(slots=True, eq=False)
class _Connection:
    """One client's connection: the client sends its request, reads its answer, and closes.

    The server waits until the client closes. If the server closed first, while the client still
    sends, the kernel would reset the connection, and the answer would be lost.
    """

    socket: socket.socket
    address: str  # the client's
    deadline_ms: float
    source: str
    known: bool  # its host has slots of its own
    tls: TlsEngine | None = None
    exchange: Exchange = field(default_factory=Exchange)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))  # under TLS: ciphertext
    waiting: Request | None = None  # complete, until its token's key may be checked
    waits_until_ms: float = 0.0
    answered: bool = False  # the last byte for the client is in `unsent`, or has been sent

    @property
    def idle(self) -> bool:
        """Whether the server waits for the client: for its request, or for its close."""
        return not self.unsent


class HttpServer(Service):
    """Answer what the module's text lists on `address`, "HOST:PORT"; port 0: a free port.

    `status`, `metrics`, and `not_ready` and `not_master`, which return why not, are called in the
    server's thread, once per request; an exception becomes a 500. The constructor binds the port,
    and raises ConfigError if it cannot. Requests are answered between `start` and `stop`. Without
    `access` everybody may read everything. `hosts`: those that have slots of their own. `page`: the
    status page, None without one.
    `on_tls_failure(address, why)` is called for each client that TLS refuses.
    """

    def __init__(
        self,
        address: str,
        status: Callable[[], dict[str, object]],
        metrics: Callable[[Identity | None], bytes],
        *,
        not_ready: Callable[[], str | None],
        not_master: Callable[[], str | None],
        clock: Clock = SYSTEM_CLOCK,
        deadline_ms: float = DEADLINE_MS,
        access: HttpAccess | None = None,
        tls: TlsContexts | None = None,
        hosts: KnownHosts | None = None,
        page: StatusPage | None = None,
        on_tls_failure: Callable[[str, str], None] = lambda _address, _why: None,
        on_failure: OnFailure,
    ) -> None:
        super().__init__("HttpServer", on_failure=on_failure)
        self._page = page
        self._on_tls_failure = on_tls_failure
        self._access = access
        self._tls = tls
        self._hosts = hosts or KnownHosts(lambda: (), clock, on_failure=on_failure)
        self._status = status
        self._metrics = metrics
        self._probes = {b"/healthz": self._dead, b"/readyz": not_ready, b"/master": not_master}
        self._clock = clock
        self._warn = BoundedLines(log, clock=clock).write  # anyone can cause these
        self._deadline_ms = deadline_ms
        self._listener = _listen(address)
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        self._turns: Counter[str] = Counter()  # of each source, since `_turns_since_ms`
        self._turns_since_ms = clock.monotonic_ms()
        self._selector = selectors.DefaultSelector()

    @property
    def address(self) -> str:
        """The address that the port is bound to, "HOST:PORT"."""
        return address_text(*self._listener.getsockname()[:2])

    def wake(self) -> None:
        """Wake the loop, so that it sees `stopping`. If the loop never ran, free the port."""
        if self._thread is None:
            self._close_all()
        elif self.alive:
            try:
                self._waker.send(b"x")
            except OSError:
                return  # the loop has seen `stopping` and closed everything

    def run(self) -> None:
        """Accept, read, answer and write until `stopping` is set."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        try:
            while not self.stopping.is_set():
                for key, _ in self._selector.select(self._drop_late()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Connection):
                        self._serve(key.data)
                self._take_turns()
        finally:
            self._close_all()

    def _accept(self) -> None:
        try:
            client, peer = self._listener.accept()
        except OSError as failure:  # the client has left, or no descriptor is free
            self._warn("http: cannot accept: %s", failure)
            select.select([], [], [], 0.01)
            return
        client.setblocking(False)
        source = source_of(peer[0])
        known = source in self._hosts
        held = [one for one in self._connections.values() if one.known == known]
        if len(held) >= (KNOWN_CONNECTIONS if known else MAX_CONNECTIONS):
            self._close(crowded_out(held, lambda one: one.source, _idle_first))
        engine = None
        if self._tls is not None:
            engine = TlsEngine(self._tls.server(require_certificate=False), server_side=True)
        deadline_ms = self._clock.monotonic_ms() + self._deadline_ms
        address = address_text(*peer[:2])
        connection = _Connection(client, address, deadline_ms, source, known, engine)
        self._connections[client.fileno()] = connection
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.unsent:
                self._send(connection)
            elif connection.waiting is not None:
                if not connection.socket.recv(_SLICE):
                    self._close(connection)
            elif not connection.answered:
                self._read(connection)
            elif not connection.socket.recv(_SLICE):
                self._close(connection)
        except BlockingIOError:
            pass  # the selector reports the socket again, until the deadline
        except OSError:
            self._close(connection)  # the client is gone

    def _send(self, connection: _Connection) -> None:
        """Send what the kernel takes; then wait until it takes more, or for the client."""
        sent = connection.socket.send(connection.unsent[:_SLICE])
        connection.unsent = connection.unsent[sent:]
        if not connection.unsent:
            if connection.answered:
                connection.socket.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        exchange, tls = connection.exchange, connection.tls
        data = connection.socket.recv(exchange.room_bytes if tls is None else _TLS_BYTES)
        if not data:
            raise ConnectionResetError("closed before its request was complete")
        last = b""
        if tls is not None:
            data, last = tls.receive(data), tls.take_outgoing()
            if tls.failure is not None:
                self._warn("http: %s refused: %s", connection.address, tls.failure)
                if not tls.open:
                    self._on_tls_failure(connection.address, tls.failure)
                connection.answered = True
                if tls.peer_is_plain:
                    last = exchange.answer(400, b"this port speaks HTTPS only\n")
                if not last:
                    raise ConnectionResetError(tls.failure)
        request = None
        while data and request is None:  # what is beyond the bounds of a request is a Refusal
            room = exchange.room_bytes
            request, data = exchange.receive(data[:room]), data[room:]
        if isinstance(request, Request) and self._takes_turns(connection, request):
            connection.waiting = request
            connection.waits_until_ms = self._clock.monotonic_ms() + WAIT_MS
        elif request is not None:
            last += self._answer(connection, request)
        if last:
            self._begin_send(connection, last)

    def _begin_send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent = memoryview(bytes(connection.unsent) + data)
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._send(connection)

    def _takes_turns(self, connection: _Connection, request: Request) -> bool:
        if self._access is None or request.method not in (b"GET", b"HEAD"):
            return False
        return self._access.takes_turns(
            request,
            connection.address,
            encrypted=connection.tls is not None,
            common_name=_client_name(connection),
        )

    def _take_turns(self) -> None:
        """Answer requests that wait for the check of their token, as many as may be checked now.

        The source whose requests were answered least often in this span of TURNS_MS is next, and of
        its requests one at random. Who has waited for WAIT_MS is told to come again.
        """
        waiting = [one for one in self._connections.values() if one.waiting is not None]
        now = self._clock.monotonic_ms()
        if now - self._turns_since_ms >= TURNS_MS:
            self._turns_since_ms = now
            self._turns.clear()
        while waiting:
            late = [one for one in waiting if one.waits_until_ms <= now]
            if self._access is not None and self._access.has_room:
                least = min(self._turns[one.source] for one in waiting)
                waiting_least = [one for one in waiting if self._turns[one.source] == least]
                source = random.choice(sorted({one.source for one in waiting_least}))
                chosen = random.choice([one for one in waiting_least if one.source == source])
                self._turns[source] += 1
            elif late:
                chosen = late[0]
            else:
                return
            waiting.remove(chosen)
            self._answer_waiting(chosen)

    def _answer_waiting(self, connection: _Connection) -> None:
        request, connection.waiting = connection.waiting, None
        assert request is not None
        try:
            self._begin_send(connection, self._answer(connection, request))
        except BlockingIOError:
            pass  # the selector reports the socket again, until the deadline
        except OSError:
            self._close(connection)  # the client is gone

    def _answer(self, connection: _Connection, request: Request | Refusal) -> bytes:
        """Return the last bytes for the client."""
        if isinstance(request, Refusal):
            answer = connection.exchange.answer(request.code, request.text)
        else:
            answer = connection.exchange.answer(*self._respond(request, connection))
        connection.answered = True
        tls = connection.tls
        return answer if tls is None else tls.encrypt(answer) + tls.close()

    def _respond(
        self, request: Request, connection: _Connection
    ) -> tuple[int, bytes, str] | tuple[int, bytes, str, Headers]:
        """Return the code, the body and its content type, perhaps with more headers."""
        text, path = "text/plain", request.path
        if request.method not in (b"GET", b"HEAD"):
            return 405, b"only GET\n", text
        try:
            if self._access is not None:
                refused = self._access.refusal(
                    path,
                    request.authorization,
                    connection.address,
                    encrypted=connection.tls is not None,
                    common_name=_client_name(connection),
                )
                if refused is not None:
                    return refused.code, refused.text, text
                if path not in OPEN_PATHS:  # it has proved an identity
                    self._hosts.learn(connection.source)
            access = self._access
            whose = None if access is None else access.identity
            if self._page is not None:
                shown = self._page.answer(path, whose, secured=access is not None)
                if shown is not None:
                    return 200, *shown
            if path == b"/status":
                return 200, json.dumps(self._status()).encode() + b"\n", "application/json"
            if path == b"/metrics":
                return 200, self._metrics(whose), "text/plain; version=0.0.4; charset=utf-8"
            if path in self._probes:
                why_not = self._probes[path]()
                if why_not is None:
                    return 200, b"ok\n", text
                if self._access is not None:
                    why_not = "no; /status says why"
                return 503, why_not.encode() + b"\n", text
        except Exception:  # logged; the server goes on
            log.exception("http: %s failed", path.decode("latin-1"))
            return 500, b"failed; the node's log says why\n", text
        return 404, b"this port has /, /status, /metrics, /healthz, /readyz and /master\n", text

    def _dead(self) -> None:
        """Ask the node for its status: a node that cannot give it is not healthy."""
        self._status()

    def _drop_late(self) -> float | None:
        """Close connections past their deadline; return the seconds to the next deadline."""
        now = self._clock.monotonic_ms()
        for connection in [one for one in self._connections.values() if one.deadline_ms <= now]:
            self._close(connection)
        if not self._connections:
            return None
        if any(one.waiting is not None for one in self._connections.values()):
            return _TURN_S
        return max(0.0, min(one.deadline_ms for one in self._connections.values()) - now) / 1000.0

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            self._close(connection)
        self._selector.close()
        for one in (self._listener, self._waker, self._wakened):
            one.close()


def _client_name(connection: _Connection) -> str | None:
    """Return the common name of the client's verified certificate; None without one."""
    peer = connection.tls.peer if connection.tls is not None else None
    return None if peer is None else peer.client_name


def _idle_first(crowd: Sequence[_Connection]) -> _Connection:
    return random.choice([one for one in crowd if one.idle] or crowd)


def _listen(address: str) -> socket.socket:
    endpoint = parse_address(address)
    if endpoint is None:
        raise ConfigError(f"http: {address!r} is not an address; write HOST:PORT")
    try:
        listener = listen(*endpoint, 64, ipv4_first=True)
    except OSError as failure:
        remedy = "free the port, or give the node another"
        raise ConfigError(
            f"http: cannot listen on {address}: {failure.strerror}; {remedy}"
        ) from failure
    listener.setblocking(False)
    return listener
