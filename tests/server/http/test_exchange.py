"""Requests of the HTTP port as bytes: whole, byte by byte, too large, not HTTP."""

import pytest

from hastore.server.http_server import MAX_HEAD_BYTES, MAX_LINE_BYTES, Exchange, Refusal, Request

GOOD = [
    (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", Request(b"GET", b"/status")),
    (b"GET /status HTTP/1.1\r\n\r\n", Request(b"GET", b"/status")),
    (b"HEAD /metrics?name=x HTTP/1.0\r\n\r\n", Request(b"HEAD", b"/metrics")),
    (b"GET /healthz HTTP/1.1\nHost: x\n\n", Request(b"GET", b"/healthz")),
    (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", Request(b"POST", b"/")),
    (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n", Request(b"GET", b"/")),
    (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", Request(b"GET", b"/")),
]
BAD = [
    (b"GET /status HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"GET /status HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    (b"GET /status HTTP/1.1\r\n folded: x\r\n\r\n", 400),
    (b"GET /status HTTP/1.1\r\nA: \0\r\n\r\n", 400),
    (b"GET /status HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    (b"GET /status HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
    (b"POST /status HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"POST /status HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    (b"G(T /status HTTP/1.1\r\n\r\n", 400),
    (b"GET /st\xffatus HTTP/1.1\r\n\r\n", 400),
    (b"GET /st\x01atus HTTP/1.1\r\n\r\n", 400),
    (b"GET /status HTTP/2.0\r\n", 400),
    (b"GET /status\r\n", 400),
    (b"\r\n", 400),
    (b"GET /" + b"a" * MAX_LINE_BYTES, 414),
    (b"GET / HTTP/1.1\r\nA: " + b"b" * MAX_HEAD_BYTES, 431),
]


def take(data: bytes, piece: int) -> tuple[Exchange, Request | Refusal | None]:
    """Feed an exchange in pieces, as a socket would, until it returns a result."""
    exchange, said, at = Exchange(), None, 0
    while said is None and at < len(data):
        size = min(piece, exchange.room_bytes)
        said = exchange.receive(data[at : at + size])
        at += size
    return exchange, said


@pytest.mark.parametrize("piece", [1, 7, 1_000_000])
@pytest.mark.parametrize(("data", "expected"), GOOD)
def test_a_request_is_read_however_it_comes(data: bytes, expected: Request, piece: int) -> None:
    assert take(data, piece)[1] == expected
    if piece > len(data):
        assert take(data + b"GET /more HTTP/1.1\r\n\r\n", piece)[1] == expected
    assert take(data[:-1], piece)[1] is None


@pytest.mark.parametrize("piece", [1, 7, 1_000_000])
@pytest.mark.parametrize(("data", "code"), BAD)
def test_a_bad_request_is_refused_and_answered(data: bytes, code: int, piece: int) -> None:
    exchange, said = take(data, piece)
    assert isinstance(said, Refusal) and said.code == code
    answer = exchange.answer(said.code, said.text)
    assert answer.startswith(f"HTTP/1.1 {code} ".encode())
    assert b"\r\nConnection: close\r\n" in answer and answer.endswith(b"\r\n\r\n" + said.text)


def test_the_largest_request_is_read() -> None:
    start, end = b"GET /status HTTP/1.1\r\nA: ", b"\r\n\r\n"
    data = start + b"b" * (MAX_HEAD_BYTES - len(start) - len(end)) + end
    assert take(data, 1_000_000)[1] == Request(b"GET", b"/status")
    line = b"GET /" + b"a" * (MAX_LINE_BYTES - 15) + b" HTTP/1.1\r"
    assert len(line) == MAX_LINE_BYTES
    assert isinstance(take(line + b"\n\r\n", 1_000_000)[1], Request)


@pytest.mark.parametrize("code", [200, 404, 500])
def test_an_answer_in_bytes(code: int) -> None:
    reason = {200: b"OK", 404: b"Not Found", 500: b"Internal Server Error"}[code]
    head = (
        b"HTTP/1.1 %d %s\r\nContent-Type: a/b\r\nContent-Length: 3\r\n"
        b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    ) % (code, reason)
    exchange, _ = take(GOOD[0][0], 1_000)
    assert exchange.answer(code, b"abc", "a/b") == head + b"abc"
    exchange, _ = take(GOOD[2][0], 1_000)
    assert exchange.answer(code, b"abc", "a/b") == head, "HEAD has no body"
