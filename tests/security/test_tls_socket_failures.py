"""TlsSocket: failures as the links expect them, and its timeouts."""

import socket
import struct
import threading
import time

import pytest

from hastore.errors import AuthenticationError
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import TlsEngine
from hastore.security.tls_socket import TlsSocket
from tests.security.pki import Pki

PLENTY_S = 20.0
QUARTER_S = struct.pack("@ll", 0, 250_000)


class Ends:
    """Both ends of a connection: TlsSockets, and the sockets below them."""

    def __init__(self, pki):
        contexts = TlsContexts(pki.node())
        self.near_plain, self.far_plain = socket.socketpair()
        far_engine = TlsEngine(contexts.server(require_certificate=True), server_side=True)
        found = []

        def accept():
            found.append(TlsSocket.over(self.far_plain, far_engine, lambda: PLENTY_S))

        thread = threading.Thread(target=accept)
        thread.start()
        near_engine = TlsEngine(contexts.node_client(), server_side=False)
        self.near = TlsSocket.over(self.near_plain, near_engine, lambda: PLENTY_S)
        thread.join()
        self.far = found[0]

    def close(self):
        self.near.close()
        self.far.close()


@pytest.fixture
def ends(tmp_path):
    both = Ends(Pki(tmp_path / "pki"))
    yield both
    both.close()


def test_a_broken_link_is_an_error_of_the_socket_for_those_who_send(ends):
    """The thread that appends pushes to links: it takes an OSError, as of any broken socket."""
    ends.far_plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    ends.near.settimeout(PLENTY_S)
    with pytest.raises(AuthenticationError, match="broke TLS"):
        ends.near.recv(100)
    with pytest.raises(OSError, match="broke TLS"):
        ends.near.sendmsg([b"head", b"body"], [], socket.MSG_DONTWAIT)
    with pytest.raises(OSError, match="broke TLS"):
        ends.near.sendall(b"more")


@pytest.mark.parametrize("by", ["settimeout", "SO_RCVTIMEO"])
def test_a_record_that_trickles_in_does_not_outlast_the_timeout(ends, by):
    """Links send their heartbeats, and end late peers, when a read has timed out."""
    if by == "settimeout":
        ends.near.settimeout(0.25)
    else:
        ends.near.settimeout(None)
        ends.near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, QUARTER_S)
    record = ends.far._engine.encrypt(b"x" * 1000)
    done = threading.Event()

    def trickle():
        for byte in record[:-1]:
            if done.wait(0.02):
                break
            ends.far_plain.sendall(bytes((byte,)))

    thread = threading.Thread(target=trickle)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises((TimeoutError, BlockingIOError)) as caught:
            ends.near.recv(2000)
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - begun < PLENTY_S / 2
    expected = TimeoutError if by == "settimeout" else BlockingIOError
    assert type(caught.value) is expected
