"""TlsEngine: both ends in memory; what is refused, and what it says."""

import datetime
import random

import pytest

from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import HANDSHAKE_BYTES_MAX, TlsEngine
from tests.security.pki import NODE_1, NODE_2, Pki, now


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


def connect(server, client, *, host="127.0.0.1", require_certificate=False):
    """Return both engines after all that they had to say."""
    called = TlsEngine(server.server(require_certificate=require_certificate), server_side=True)
    caller = TlsEngine(client.client(), server_side=False, host=host)
    exchange(caller, called)
    return caller, called


def exchange(caller, called):
    for _ in range(4):
        assert called.receive(caller.take_outgoing()) == b""
        assert caller.receive(called.take_outgoing()) == b""


def contexts(files):
    return TlsContexts(files)


def test_bytes_pass_both_ways_in_any_pieces(pki):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    caller, called = connect(pki.node_1, contexts(TlsFiles(pki.ca)))
    assert caller.open and called.open and called.peer is None
    assert caller.peer.node == NODE_1 and caller.peer.common_name == "hastore node 1"
    for _ in range(20):
        for one, other in ((caller, called), (called, caller)):
            data = chance.randbytes(chance.choice((1, 100, 16_384, 16_385, 700_000)))
            cipher = one.encrypt(data)
            assert data[:64] not in cipher or len(data) < 16
            got = b""
            while cipher:
                size = chance.choice((1, 5, 1000, 1 << 20))
                got += other.receive(cipher[:size])
                cipher = cipher[size:]
            assert got == data


def test_a_reader_takes_no_more_than_its_buffer_holds(pki):
    caller, called = connect(pki.node_1, contexts(TlsFiles(pki.ca)))
    called.feed(caller.encrypt(bytes(range(256)) * 100))
    buffer = memoryview(bytearray(1000))
    assert called.read_into(buffer) == 1000 and bytes(buffer[:256]) == bytes(range(256))
    rest = memoryview(bytearray(100_000))
    assert called.read_into(rest) == 24_600
    assert called.read_into(rest) == 0


def test_the_end_of_tls_is_told_from_a_cut(pki):
    caller, called = connect(pki.node_1, contexts(TlsFiles(pki.ca)))
    assert called.receive(caller.encrypt(b"last") + caller.close()) == b"last"
    assert called.ended and called.failure is None
    caller, called = connect(pki.node_1, contexts(TlsFiles(pki.ca)))
    called.feed_eof()
    assert "ended without the end of TLS" in called.failure


def test_a_verified_client_has_a_name(pki):
    _, called = connect(pki.node_1, contexts(pki.client("orders")), require_certificate=True)
    assert called.peer.common_name == "orders" and called.peer.node is None
    assert called.peer.not_after_s > now().timestamp()


def refused(server, client, *, host="127.0.0.1", require_certificate=True):
    caller, called = connect(server, client, host=host, require_certificate=require_certificate)
    # In TLS 1.3 a client has finished before the server checks its certificate.
    assert not (caller.open and called.open) or caller.failure
    assert caller.encrypt(b"") == b"" if caller.failure else True
    return caller.failure, called.failure


def test_a_certificate_of_another_ca_is_refused(pki, tmp_path):
    other = Pki(tmp_path / "other", "other CA")
    caller, called = refused(other.node_1, contexts(pki.client()))
    assert "is not signed by the CA of this side" in caller
    assert "refuses this side's certificate: another CA has signed it" in called
    foreign = other.client()
    caller, called = refused(
        pki.node_1, contexts(TlsFiles(pki.ca, foreign.certificate, foreign.key))
    )
    assert "is not signed by the CA of this side" in called
    assert "another CA has signed it" in caller


@pytest.mark.parametrize(
    ("days", "made", "text"),
    [(1, -2, "has expired"), (9, 5, "is not valid yet")],
)
def test_a_certificate_out_of_its_time_is_refused(pki, days, made, text):
    made = now() + datetime.timedelta(days=made)
    late = pki.client("late", days=days, made=made)
    caller, called = refused(pki.node_1, contexts(late))
    assert text in called and "clock" in caller
    server = contexts(pki.node(days=days, made=made, stem="late"))
    caller, _ = refused(server, contexts(pki.client()))
    assert text in caller


def test_a_clients_certificate_is_no_servers(pki):
    caller, _ = refused(contexts(pki.client()), contexts(pki.client()))
    assert "is not for this use" in caller


@pytest.mark.parametrize("host", ["127.0.0.2", "example.org"])
def test_a_certificate_for_another_host_is_refused(pki, host):
    caller, _ = refused(pki.node_1, contexts(pki.client()), host=host)
    assert f"is not for {host}" in caller


def test_a_client_without_a_certificate_is_refused_where_one_is_required(pki):
    caller, called = refused(pki.node_1, contexts(TlsFiles(pki.ca)))
    assert "has no certificate" in called
    assert "asks for a certificate" in caller


def test_plain_peers_are_told_apart(pki):
    called = TlsEngine(pki.node_1.server(require_certificate=True), server_side=True)
    called.feed(b"\xffHASTOR\x01")
    assert "does not speak TLS" in called.failure
    assert called.take_outgoing() == bytes((21, 3, 3, 0, 2, 2, 70))
    caller = TlsEngine(pki.node_2.client(), server_side=False, host="127.0.0.1")
    assert caller.receive(b"HTTP/1.1 400") == b""
    assert "does not speak TLS" in caller.failure
    called = TlsEngine(pki.node_1.server(require_certificate=True), server_side=True)
    called.feed(TlsEngine(pki.node_2.client(), server_side=False, host="x").take_outgoing()[:5])
    called.feed(b"garbage " * 1000)
    assert "broke TLS" in called.failure


def test_garbage_never_raises_and_is_bounded(pki):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    hello = TlsEngine(pki.node_2.client(), server_side=False, host="x").take_outgoing()
    for _ in range(200):
        called = TlsEngine(pki.node_1.server(require_certificate=False), server_side=True)
        data = bytearray(hello)
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        assert called.receive(bytes(data[: chance.randrange(len(data) + 1)])) == b""
        called.feed_eof()
        assert called.failure is not None and "\n" not in called.failure
    called = TlsEngine(pki.node_1.server(require_certificate=False), server_side=True)
    sent = 0
    record = b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(16_379)  # a hello that never ends
    while called.failure is None:
        assert called.receive(record) == b""
        sent += len(record)
        assert sent <= HANDSHAKE_BYTES_MAX + len(record)


def test_a_damaged_record_ends_the_connection(pki):
    caller, called = connect(pki.node_1, pki.node_2)
    cipher = bytearray(caller.encrypt(b"x" * 100))
    cipher[50] ^= 1
    assert called.receive(bytes(cipher)) == b""
    assert "broke TLS" in called.failure
    assert called.receive(caller.encrypt(b"more")) == b""
    assert called.peer.node == NODE_2


def test_nothing_is_encrypted_before_the_handshake(pki):
    caller = TlsEngine(pki.node_2.client(), server_side=False, host="x")
    with pytest.raises(ValueError, match="before the TLS handshake"):
        caller.encrypt(b"early")
    with pytest.raises(ValueError, match="cannot be checked"):
        TlsEngine(pki.node_2.client(), server_side=False, host="a" * 70)
