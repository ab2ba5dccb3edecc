"""One request of the HTTP port and its answer: bytes in, bytes out.

    b"GET /sta" --receive()--> None, more is to come
    b"tus HTTP/1.1\\r\\n\\r\\n" --receive()--> Request, or Refusal --answer()--> the bytes to send

h11 parses the headers and writes the head of the answer. This module bounds the request, reads its
first line, and passes every request to h11 as HTTP/1.0, because h11 refuses HTTP/1.1 without a
`Host` header, which many health checks do not send. The port has no keep-alive in either version.

The module uses no socket and no clock; HttpServer's thread drives one Exchange per connection.
"""

from typing import NamedTuple

import h11

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
}
_MORE = {
    401: (("WWW-Authenticate", 'Bearer realm="hastore", Basic realm="hastore"'),),
    429: (("Retry-After", "1"),),
}


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
    """Read one request, then write its answer."""

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

    def answer(self, code: int, body: bytes, kind: str = "text/plain") -> bytes:
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
            ],
        )
        head = self._http.send(response) or b""
        return head if self._head_only else head + body
