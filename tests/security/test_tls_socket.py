"""TlsSocket: real sockets, one reader and several writers, short sends, ends."""

import contextlib
import os
import random
import socket
import struct
import threading
import time

import pytest

from hastore.errors import AuthenticationError
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import TlsEngine
from hastore.security.tls_socket import TlsSocket
from tests.security.pki import NODE_2, Pki


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


PLENTY_S = 100.0
QUARTER_S = struct.pack("@ll", 0, 250_000)


def patience():
    return 60.0


@pytest.fixture
def ends(pki):
    """A caller's and an answerer's socket, connected."""
    with contextlib.ExitStack() as stack:
        one, other = socket.socketpair()
        stack.callback(one.close)
        stack.callback(other.close)
        made = {}

        def answer():
            engine = TlsEngine(pki.node_1.server(require_certificate=True), server_side=True)
            made["answerer"] = TlsSocket.over(other, engine, patience)

        thread = threading.Thread(target=answer)
        thread.start()
        engine = TlsEngine(pki.node_2.node_client(), server_side=False)
        caller = TlsSocket.over(one, engine, patience)
        thread.join(60)
        caller.settimeout(60)
        made["answerer"].settimeout(60)
        yield caller, made["answerer"]


def receive(sock, size):
    got = bytearray()
    while len(got) < size:
        piece = sock.recv(size - len(got))
        assert piece
        got += piece
    return bytes(got)


def test_both_ends_know_the_other(ends):
    assert ends[1].peer.node == NODE_2 and ends[0].peer.node.node == 1


def test_both_directions_at_once(ends):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    data = [random.Random(seed + side).randbytes(5_000_000) for side in (0, 1)]
    got = {}

    def write(side):
        chance = random.Random(seed + side)
        left = memoryview(data[side])
        while left:
            size = chance.choice((1, 12, 1_000, 16_384, 100_000, 700_000))
            ends[side].sendall(left[:size])
            left = left[size:]

    def read(side):
        buffer, out = memoryview(bytearray(300_000)), bytearray()
        while len(out) < len(data[1 - side]):
            out += buffer[: ends[side].recv_into(buffer)]
        got[side] = bytes(out)

    threads = [threading.Thread(target=f, args=(side,)) for f in (write, read) for side in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert got == {0: data[1], 1: data[0]}


def test_writers_in_several_threads_do_not_mix_their_messages(ends):
    caller, answerer = ends
    sizes = {mark: 200_000 + 17 * mark for mark in range(1, 5)}

    def write(mark):
        for _ in range(10):
            caller.sendall(struct.pack(">BI", mark, sizes[mark]) + bytes([mark]) * sizes[mark])

    threads = [threading.Thread(target=write, args=(mark,)) for mark in sizes]
    for one in threads:
        one.start()
    seen = []
    for _ in range(40):
        mark, size = struct.unpack(">BI", receive(answerer, 5))
        assert size == sizes[mark] and receive(answerer, size) == bytes([mark]) * size
        seen.append(mark)
    for one in threads:
        one.join(60)
    assert sorted(seen) == sorted([*sizes] * 10)


def test_a_short_send_is_finished_by_the_next_one(ends):
    caller, answerer = ends
    caller.settimeout(None)  # else Python waits, whatever the flags say
    sent, expected = 0, bytearray()
    while True:
        part = os.urandom(50_000)
        size = caller.sendmsg([part[:10], part[10:]], [], socket.MSG_DONTWAIT)
        expected += part
        sent += size
        if size < len(part):
            rest = part[size:]
            break
    with pytest.raises(BlockingIOError):
        caller.sendmsg([b"other"], [], socket.MSG_DONTWAIT)
    more = os.urandom(100_000)
    expected += more
    thread = threading.Thread(target=caller.sendall, args=(rest + more,))
    thread.start()
    assert receive(answerer, len(expected)) == bytes(expected)
    thread.join(60)
    assert caller.sendmsg([b"a", b"bc"], [], socket.MSG_DONTWAIT) == 3
    assert receive(answerer, 3) == b"abc"


def test_a_timeout_of_the_kernel_is_passed_on(ends):
    caller, answerer = ends
    answerer.settimeout(None)
    answerer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
    with pytest.raises(BlockingIOError):
        answerer.recv(10)
    caller.sendall(b"late")
    assert receive(answerer, 4) == b"late"
    answerer.settimeout(0.02)
    with pytest.raises(TimeoutError):
        answerer.recv(10)


def test_a_waiting_reader_keeps_no_writer_waiting(ends):
    caller, answerer = ends
    reader = threading.Thread(target=lambda: receive(answerer, 1))
    reader.start()
    time.sleep(0.05)
    for number in range(50):
        answerer.sendall(b"%02d" % number)
        assert receive(caller, 2) == b"%02d" % number
    caller.sendall(b"x")
    reader.join(60)
    assert not reader.is_alive()


def test_the_end_of_the_connection_is_an_end(ends):
    caller, answerer = ends
    caller.sendall(b"last")
    caller.shutdown(socket.SHUT_RDWR)
    assert receive(answerer, 4) == b"last"
    assert answerer.recv(10) == b"" and answerer.recv(10) == b""


def test_damage_on_the_way_is_an_error(ends):
    caller, answerer = ends
    caller._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(AuthenticationError, match="broke TLS"):
        answerer.recv(10)
    with pytest.raises(AuthenticationError, match="the other end ended TLS: bad record mac"):
        caller.recv(10)


def test_a_refused_certificate_is_told_at_the_first_read(pki):
    """In TLS 1.3 the caller's handshake ends before the answerer has checked its certificate."""
    one, other = socket.socketpair()
    with one, other:
        failures = []

        def answer():
            engine = TlsEngine(pki.node_1.server(require_certificate=True), server_side=True)
            try:
                TlsSocket.over(other, engine, patience)
            except AuthenticationError as error:
                failures.append(str(error))

        thread = threading.Thread(target=answer)
        thread.start()
        caller = TlsSocket.over(
            one, TlsEngine(TlsContexts(TlsFiles(pki.ca)).node_client(), server_side=False), patience
        )
        thread.join(60)
        with pytest.raises(AuthenticationError, match="asks for a certificate"):
            caller.recv(10)
        assert "has no certificate" in failures[0]


@pytest.mark.parametrize("first", [b"", b"\x16\x03", b"\x16\x03\x01\x02\x00\x01"])
def test_an_answerer_that_goes_away_in_the_handshake(pki, first):
    one, other = socket.socketpair()
    with one:
        with other:
            other.sendall(first)
        engine = TlsEngine(pki.node_2.node_client(), server_side=False)
        with pytest.raises((AuthenticationError, ConnectionError)):
            TlsSocket.over(one, engine, patience)


def test_a_broken_link_is_an_error_of_the_socket_for_those_who_send(ends):
    """The thread that appends pushes to links: it takes an OSError, as of any broken socket."""
    near, far = ends
    far._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(AuthenticationError, match="broke TLS"):
        near.recv(100)
    with pytest.raises(OSError, match="broke TLS"):
        near.sendmsg([b"head", b"body"], [], socket.MSG_DONTWAIT)
    with pytest.raises(OSError, match="broke TLS"):
        near.sendall(b"more")


@pytest.mark.parametrize("by", ["settimeout", "SO_RCVTIMEO"])
def test_a_record_that_trickles_in_does_not_outlast_the_timeout(ends, by):
    """Links send their heartbeats, and end late peers, when a read has timed out."""
    near, far = ends
    if by == "settimeout":
        near.settimeout(0.25)
    else:
        near.settimeout(None)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, QUARTER_S)
    record = far._engine.encrypt(b"x" * 10_000)  # trickles for 200 s
    done = threading.Event()

    def trickle():
        for byte in record[:-1]:
            if done.wait(0.02):
                break
            far._sock.sendall(bytes((byte,)))

    thread = threading.Thread(target=trickle)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises((TimeoutError, BlockingIOError)) as caught:
            near.recv(20_000)
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - begun < PLENTY_S
    expected = TimeoutError if by == "settimeout" else BlockingIOError
    assert type(caught.value) is expected
