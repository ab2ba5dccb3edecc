"""Requests to the HTTP port: the same request, refusal and answer, however its bytes come."""

from __future__ import annotations

import h11

from hastore.server import http_server
from hastore.server.http_server import Exchange, Refusal, Request
from tests.fuzz import kit

REACHES = (Exchange.receive, Exchange._read_line, Exchange.answer, http_server._token)
LEAST = kit.Least(0.3, 4)
TOKENS = (
    b"GET ",
    b"HEAD ",
    b" HTTP/1.1\r\n",
    b"Authorization: Bearer a:b\r\n",
    b"\r\n\r\n",
    b"?q",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Basic YTpi",
    b"\r\n ",
)


def seeds() -> list[bytes]:
    """Return requests of browsers, of Prometheus and of health checks, and wrong ones."""
    return [
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"HEAD /healthz HTTP/1.0\r\n\r\n",
        b"GET /a?b HTTP/1.1\n\n",
        b"GET /metrics HTTP/1.1\r\nHost: h\r\nUser-Agent: Prometheus/2.53\r\nAccept: */*\r\n"
        b"Accept-Encoding: gzip\r\nAuthorization: Bearer app:" + b"ab" * 32 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Basic YXBwOmFi\r\nAuthorization: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET /" + b"a" * 600 + b" HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 800 + b"\r\n",
        b"GET / HTTP/1.1\r\nA b\r\n\r\n",
        b"GET \xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHo",
        b"G T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
    ]


def outcome(pieces: list[bytes]) -> tuple[Request | Refusal | None, bytes]:
    """Return what the server makes of a request, and its whole answer."""
    exchange = Exchange()
    for piece in pieces:
        while piece:
            taken = piece[: exchange.room_bytes]
            assert taken, "the server has no room for a request that is not refused"
            found = exchange.receive(taken)
            if found is not None:
                code, text = found if isinstance(found, Refusal) else (200, b"the answer")
                return found, exchange.answer(code, text)
            piece = piece[len(taken) :]
    return None, b""


def one(data: bytes) -> None:
    """Take a request in one piece and in several; its answer is one that a client reads."""
    found, answer = outcome([data])
    if isinstance(found, Request):
        http_server._token(found.authorization or b"")
        again = [outcome(pieces)[0] for pieces in kit.splits(data)]
        # Bytes behind a request that is complete change nothing.
        assert all(one == found for one in again), (again, found)
    else:
        for pieces in kit.splits(data):
            code = outcome(pieces)[0]
            assert (code is None) == (found is None) or isinstance(code, Request | Refusal)
    if answer:
        client = h11.Connection(h11.CLIENT)
        head = isinstance(found, Request) and found.method == b"HEAD"
        client.send(
            h11.Request(method="HEAD" if head else "GET", target="/", headers=[("Host", "h")])
        )
        client.send(h11.EndOfMessage())
        client.receive_data(answer)
        response = client.next_event()
        assert isinstance(response, h11.Response)
    kit.refuse(isinstance(found, Request), str(getattr(found, "code", "incomplete")))
