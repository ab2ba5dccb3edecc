"""The HTTP port over TLS: who is answered, and how wrong and slow clients are treated."""

import base64
import contextlib
import datetime
import logging
import random
import secrets
import socket
import ssl
import threading
import urllib.error
import urllib.request

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from hastore.clock import SYSTEM_CLOCK
from hastore.security.identities import Identities
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.security.tls_contexts import TlsContexts
from hastore.server.http_server import MAX_CONNECTIONS, HttpAccess
from tests.ha.nodes import wait_for
from tests.security.floods import flood
from tests.security.pki import NODE_1, Pki, now
from tests.server.http.kit import serve

KEY = secrets.token_hex(32)
BIG = b"m" * 3_000_000


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path / "pki")


@pytest.fixture
def make(pki, tmp_path):
    """Make a server; `identities` are those that are asked for, None: none are."""
    started = []

    def start(identities=None, **options):
        access = None
        if identities is not None:
            path = str(tmp_path / "ids.yaml")
            for number, (name, key) in enumerate(identities.items()):
                editor = IdentityEditor(path, create=number == 0)
                editor.add(Identity(name, by_certificate=key is None), key, 0)
                editor.save()
            access = HttpAccess(Identities(path), lambda *_given, **_fields: None, SYSTEM_CLOCK)
        contexts = TlsContexts(pki.node(), node=NODE_1)
        server = serve(
            "127.0.0.1:0", lambda: {"node": 1}, lambda: BIG,
            access=access, tls=contexts, **options,
        )  # fmt: skip
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        assert server.stop(60)


def client_context(pki, files=None):
    """The context that any client of HTTPS makes."""
    context = ssl.create_default_context(cafile=pki.ca)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def get(server, path, context, *, host="127.0.0.1", **headers):
    port = server.address.rpartition(":")[2]
    request = urllib.request.Request(f"https://{host}:{port}{path}", headers=headers)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read()


def problem(server, context, **options):
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)) as error:
        get(server, "/healthz", context, **options)
    return str(error.value)


def test_everything_is_answered_over_tls(make, pki):
    server, context = make(), client_context(pki)
    assert get(server, "/healthz", context) == (200, b"ok\n")
    assert get(server, "/status", context) == (200, b'{"node": 1}\n')
    assert get(server, "/metrics", context, host="localhost") == (200, BIG)


def test_tokens_and_certificates_of_identities(make, pki):
    server = make({"prometheus": KEY, "ops": None})
    context = client_context(pki)
    assert get(server, "/healthz", context) == (200, b"ok\n")
    assert get(server, "/status", context)[0] == 401
    token = base64.b64encode(f"prometheus:{KEY}".encode()).decode()
    assert get(server, "/status", context, Authorization=f"Basic {token}")[0] == 200
    assert get(server, "/status", context, Authorization=f"Bearer prometheus:{KEY}")[0] == 200
    assert get(server, "/status", context, Authorization=f"Bearer ops:{KEY}")[0] == 401
    assert get(server, "/status", client_context(pki, pki.client("ops")))[0] == 200
    assert get(server, "/status", client_context(pki, pki.client("prometheus")))[0] == 401
    assert get(server, "/status", client_context(pki, pki.client("stranger")))[0] == 401
    assert get(server, "/status", client_context(pki, pki.node(NODE_1)))[0] == 401
    uris = [x509.UniformResourceIdentifier(NODE_1.uri)]  # a node's of another tool, named as ops
    pair = pki.authority._sign("ops", uris, [ExtendedKeyUsageOID.CLIENT_AUTH], now(), 1)
    assert get(server, "/status", client_context(pki, pki.write("named", pair)))[0] == 401


def test_wrong_certificates_are_refused_both_ways(make, pki, tmp_path, caplog):
    server = make({"ops": None})
    other = Pki(tmp_path / "other", "other CA")
    assert "CERTIFICATE_VERIFY_FAILED" in problem(server, client_context(other))
    wait_for(lambda: "the other end refuses this side's certificate" in caplog.text, "the reason")
    past = now() - datetime.timedelta(days=9)
    late = pki.client("late", made=past, days=8)
    foreign = other.client("ops")
    for files, words in ((late, "has expired"), (foreign, "is not signed by the CA")):
        caplog.clear()
        problem(server, client_context(pki, files))
        wait_for(lambda words=words: words in caplog.text, words)
        lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(lines) == 1 and lines[0].getMessage().startswith("http: 127.0.0.1:")


def test_a_plain_client_is_told_so_and_gets_nothing(make, caplog):
    server = make()
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while piece := client.recv(65_536):
            got += piece
    assert got.startswith(b"HTTP/1.1 400") and got.endswith(b"this port speaks HTTPS only\n")
    assert b"node" not in got
    assert "does not speak TLS" in caplog.text


def test_a_flood_of_failed_handshakes_is_bounded_in_the_log(make, caplog):
    noted = []
    server = make(on_tls_failure=lambda *fields: noted.append(fields))
    flood(server.address, noted, caplog, "refused")


def test_unfinished_handshakes_do_not_keep_others_out(make, pki):
    server, context = make(), client_context(pki)
    host, port = server.address.rsplit(":", 1)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    with contextlib.ExitStack() as open_ones:
        for number in range(200):
            peer = open_ones.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(ConnectionError):
                peer.sendall(hello[: number % 12])
            if number % 50 == 49:
                assert get(server, "/healthz", context)[0] == 200
        assert len(server._connections) <= MAX_CONNECTIONS


def test_an_unfinished_handshake_ends_at_the_deadline(make):
    server = make(deadline_ms=200.0)
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(b"\x16\x03\x01")
        with contextlib.suppress(ConnectionError):
            assert peer.recv(100) == b""


def test_requests_beyond_the_bounds_and_garbage(make, pki):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    server, context = make(), client_context(pki)
    host, port = server.address.rsplit(":", 1)

    def send(data):
        with socket.create_connection((host, int(port)), timeout=60) as plain:
            with context.wrap_socket(plain, server_hostname=host) as link:
                got = b""
                with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                    link.sendall(data)
                    while piece := link.recv(65_536):
                        got += piece
                return got

    assert send(b"GET /" + b"a" * 60_000).startswith(b"HTTP/1.1 414")
    head = b"GET /status HTTP/1.1\r\n"
    assert send(head + b"X: " + b"a" * 60_000).startswith(b"HTTP/1.1 431")
    assert send(chance.randbytes(2_000) + b"\r\n\r\n").startswith(b"HTTP/1.1 4")
    for _ in range(30):
        with socket.create_connection((host, int(port)), timeout=60) as plain:
            with contextlib.suppress(ConnectionError):
                plain.sendall(b"\x16\x03" + chance.randbytes(chance.randrange(1_000)))
    assert get(server, "/healthz", context) == (200, b"ok\n")


def test_a_certificate_is_replaced_without_a_restart(make, pki, monkeypatch):
    monkeypatch.setattr("hastore.security.tls_contexts.CHECK_MS", 0.0)
    server, context = make(), client_context(pki)
    host, port = server.address.rsplit(":", 1)

    def shown():
        with socket.create_connection((host, int(port)), timeout=60) as plain:
            with context.wrap_socket(plain, server_hostname=host) as link:
                return link.getpeercert()["serialNumber"]

    before = shown()
    assert shown() == before
    pki.node()
    assert shown() != before


def test_many_clients_at_once(make, pki):
    server, context = make({"ops": None}), client_context(pki, pki.client("ops"))
    codes = []

    def ask():
        for _ in range(5):
            codes.append(get(server, "/metrics", context))

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(60)
    assert codes == [(200, BIG)] * 20


def test_a_client_needs_the_ca(make):
    server = make()
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        get(server, "/healthz", ssl.create_default_context())


def test_a_refused_certificate_is_told_by_tls_and_not_in_the_clear(make, pki, tmp_path):
    """A client's certificate comes with its second flight, which begins with another record."""
    server = make()
    strange = Pki(tmp_path / "strange").client("ops")
    context = client_context(pki, strange)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain:
        with pytest.raises(ssl.SSLError, match="ALERT_UNKNOWN_CA"):
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
                secured.recv(100)
