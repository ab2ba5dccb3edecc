"""The client API over TLS: clients, certificates as identities, wrong peers, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from hastore import aio
from hastore.client import Admin, Consumer, Producer
from hastore.client.connections.bulk_link import BulkLink
from hastore.client.connections.proving import make_prover
from hastore.client.consumer.range_reader import RangeReader
from hastore.client.security import Security
from hastore.clock import SystemClock
from hastore.config.model import ApiConfig
from hastore.errors import (
    ForbiddenError,
    NotAuthenticatedError,
    UnreachableError,
    UsageError,
)
from hastore.protocol import api
from hastore.security.identities import Identities, Proof
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import TlsEngine
from hastore.server.api import connections as api_connections
from hastore.server.api import handshakes, newcomers
from hastore.server.api import replies as api_replies
from tests.process.wire import LONG, MORE, Wire, command, frame, greeting, ready
from tests.security.pki import NODE_1, Pki, now
from tests.server.api.kit import until
from tests.server.api.secured import Secured, ask, prove, sends

ALL = '["*"]'
MIB = 1024 * 1024
SOON_S = 40.0


class OtherWall(SystemClock):
    """A clock whose wall time is ahead."""

    ahead_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


class TlsWire(Wire):
    """A connection under TLS on which a test sends any bytes."""

    def __init__(self, address: str, files: TlsFiles, *, source: str = "") -> None:
        super().__init__(address, source=source)
        context = TlsContexts(files).client()
        self._engine = TlsEngine(context, server_side=False, host="127.0.0.1")
        with contextlib.ExitStack() as at_failure:
            at_failure.callback(self._socket.close)
            self._open()
            at_failure.pop_all()

    def _open(self) -> None:
        self._socket.sendall(self._engine.take_outgoing())
        while not self._engine.open:
            data = self._socket.recv(65536)
            assert data, "closed during the handshake of TLS"
            self._raw += self._engine.receive(data)
            assert self._engine.failure is None, self._engine.failure
            self._socket.sendall(self._engine.take_outgoing())

    def send(self, *parts: bytes) -> None:
        self._socket.sendall(self._engine.encrypt(b"".join(parts)))

    def send_cipher(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def sealed(self, data: bytes) -> bytes:
        """Return bytes as they would be sent."""
        return self._engine.encrypt(data)

    def _receive(self) -> bool:
        while True:
            try:
                data = self._socket.recv(65536)
            except ConnectionError:  # the node closed it before it read all of our bytes
                return False
            plain = self._engine.receive(data)
            self._raw += plain
            if plain or not data or self._engine.ended or self._engine.failure:
                return bool(plain)


def files_of(security: Security) -> TlsFiles:
    assert security.tls_ca is not None
    return TlsFiles(security.tls_ca, security.tls_certificate, security.tls_key)


@pytest.fixture
def trusting(secured: Secured) -> Security:
    return Security(tls_ca=secured.pki.ca)


def with_key(secured: Secured, name: str, **rights: str) -> Security:
    mine = secured.identity(name, **rights)
    return Security(tls_ca=secured.pki.ca, identity=name, key_file=mine.key_file)


def by_certificate(secured: Secured, name: str, **rights: str) -> Security:
    secured.text.add(name, certificate="true", **rights)
    secured.save()
    files = secured.pki.client(name)
    return Security(tls_ca=files.ca, tls_certificate=files.certificate, tls_key=files.key)


def test_all_clients_work_over_tls_with_a_key(secured: Secured) -> None:
    mine = with_key(secured, "orders", produce=ALL, consume=ALL)
    with secured.server(tls=True) as server:
        where = [server.endpoint]
        bodies = [b"%d" % n * 1000 for n in range(300)]
        with Producer(where, security=mine) as producer:
            big = producer.send("orders", bytes(3 * MIB), queue=1)
            for future in [producer.send("orders", body, queue=0) for body in bodies]:
                future.result(60)
            big.result(60)
        with Consumer("orders", where, queues=[0], security=mine) as consumer:
            got: list[bytes] = []
            until(lambda: got.extend(m.body for m in consumer.poll()) or len(got) == 300)
        assert got == bodies
        with Admin(where, security=mine) as admin:
            assert admin.topics()["orders"][1] == (0, 1)
        ranged = RangeReader((server.endpoint,), "orders", 1, 0, 1, security=mine)
        [chunk] = ranged.chunks()
        assert len(chunk.payload) > 3 * MIB

        async def run() -> int:
            async with aio.Producer(where, security=mine) as sender:
                await asyncio.gather(*(sender.send("aio", b"x", queue=0) for _ in range(50)))
            async with aio.Consumer("aio", where, queues=[0], security=mine) as reader:
                count = 0
                while count < 50:
                    count += len(await reader.poll())
                return count

        assert asyncio.run(run()) == 50


def test_a_certificate_is_an_identity(secured: Secured) -> None:
    mine = by_certificate(secured, "orders", produce='["orders"]')
    with secured.server(tls=True) as server:
        with Producer([server.endpoint], security=mine) as producer:
            producer.send_sync("orders", b"x", queue=0)
        with TlsWire(server.endpoint, files_of(mine)) as wire:  # it says nothing, but is known
            wire.shake_hands()
            until(lambda: not server._connections._unfinished)
        other = secured.pki.client("somebody")
        stranger = Security(tls_ca=other.ca, tls_certificate=other.certificate, tls_key=other.key)
        with Admin([server.endpoint], security=stranger) as admin:
            with pytest.raises(NotAuthenticatedError, match="asks its clients"):
                admin.status()
        with Producer([server.endpoint], security=mine) as producer:
            producer.send_sync("orders", b"x", queue=0)
            secured.revoke("orders")
            with pytest.raises(NotAuthenticatedError, match="certificate 'orders' is no identity"):
                until(lambda: sends(producer) and False)


def test_whom_all_nodes_have_refused_is_served_once_they_accept_him(secured: Secured) -> None:
    """A certificate that has expired is renewed, an identity is given back: the client goes on."""
    mine = by_certificate(secured, "orders", produce=ALL, consume=ALL, admin="true")
    with secured.server(tls=True) as server, contextlib.ExitStack() as ends:
        where = [server.endpoint]
        with Producer(where, security=mine) as producer:
            producer.send_sync("orders", b"x", queue=0)
        reader = ends.enter_context(Consumer("orders", where, queues=[0], security=mine))
        admin = ends.enter_context(Admin(where, security=mine))
        calls: list[Callable[[], Any]] = [
            lambda: reader.poll(timeout_s=0.2), reader.end_offsets, admin.topics, admin.nodes,
        ]  # fmt: skip
        until(calls[0])
        before = secured.text.entries["orders"]
        for call in calls:
            secured.revoke("orders")
            for _ in range(2):  # the second one finds it refused already
                with pytest.raises(NotAuthenticatedError, match="is no identity"):
                    until(lambda call=call: call() and False)
            secured.text.entries["orders"] = before
            secured.save()
            reader.seek_to_earliest() if call is calls[0] else None
            until(lambda call=call: _result_of(call))


def _result_of(call: Callable[[], Any]) -> Any:
    """Return what a call returns; None as long as the client is refused."""
    try:
        return call()
    except NotAuthenticatedError:
        return None


def test_a_certificate_is_looked_up_once_for_a_connection(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def by_name(identities: Identities, name: str) -> Proof | None:
        asked.append(name)
        return find(identities, name)

    find = Identities.by_certificate
    monkeypatch.setattr(Identities, "by_certificate", by_name)
    with secured.server(tls=True) as server:
        with TlsWire(server.endpoint, secured.pki.client("somebody")) as wire:
            wire.shake_hands()
            for rid in range(1, 5):
                assert isinstance(ask(wire, api.AskMap(rid)), api.Failed)
    assert asked == ["somebody"]  # each look reads the whole file of identities


def test_a_key_counts_instead_of_a_certificate(secured: Secured) -> None:
    certified = by_certificate(secured, "machine", produce='["machine"]')
    keyed = secured.identity("orders", produce='["orders"]')
    both = dataclasses.replace(certified, identity="orders", key_file=keyed.key_file)
    wrong = dataclasses.replace(both, identity="machine")
    with secured.server(tls=True) as server:
        with Producer([server.endpoint], security=both) as producer:
            producer.send_sync("orders", b"x", queue=0)
            with pytest.raises(ForbiddenError, match="identity orders has no right"):
                producer.send_sync("machine", b"x", queue=0)
        with Admin([server.endpoint], security=wrong) as admin:
            with pytest.raises(NotAuthenticatedError, match="identity machine"):
                admin.status()


def parked(rid: int, topic: str) -> bytes:
    """Return a pull that waits for a minute."""
    return frame(api.encode(api.Pull(rid, topic, 0, api.Position(0), 1, 1, 60_000)))


def test_a_connection_ends_when_its_certificate_expires(secured: Secured) -> None:
    """Only one that the certificate proves; a key beside it counts on."""
    day_ms = 24 * 3_600_000
    short = by_certificate(secured, "short", consume=ALL)
    files = secured.pki.client("short", days=2)
    by_key = secured.identity("keyed", consume=ALL)
    long = by_certificate(secured, "long", consume=ALL)
    clock = OtherWall()
    with secured.server(tls=True, clock=clock) as server:
        with (
            TlsWire(server.endpoint, files) as first,
            TlsWire(server.endpoint, files) as second,
            TlsWire(server.endpoint, files_of(long)) as third,
        ):
            for each in (first, second, third):
                each.shake_hands()
            assert isinstance(prove(second, by_key), api.Welcome)
            first.send(parked(7, "orders"))
            until(lambda: server._pulls.parked == 1)
            clock.ahead_ms = day_ms
            secured.identity("another")  # so that the node looks at all connections
            until(lambda: server._access._version == 2)
            assert server._connections.count == 3
            clock.ahead_ms = 3 * day_ms
            [error] = first.until_closed()
            assert b"the certificate of identity short has expired; make it" in error.body
            until(lambda: server._pulls.parked == 0)
            for each in (second, third):
                assert isinstance(ask(each, api.AskMap(1)), api.Map)
            clock.ahead_ms = 400 * day_ms
            [error] = third.until_closed()
            assert isinstance(ask(second, api.AskMap(1)), api.Map)
        ended = [note for note in secured.notes if note["outcome"] == "ended"]
        assert [note["identity"] for note in ended] == ["short", "long"]
        with Admin([server.endpoint], security=short) as admin:  # a new certificate, by real time
            clock.ahead_ms = 0
            assert admin.status()


def test_a_revoked_certificate_ends_what_it_began_before_a_key_was_proved(
    secured: Secured,
) -> None:
    certified = by_certificate(secured, "machine", consume='["machine"]')
    keyed = secured.identity("orders", consume='["orders"]')
    with secured.server(tls=True) as server:
        with TlsWire(server.endpoint, files_of(certified)) as wire:
            wire.shake_hands()
            wire.send(parked(7, "machine"))
            until(lambda: server._pulls.parked == 1)
            assert isinstance(prove(wire, keyed), api.Welcome)
            secured.revoke("machine")
            [error] = wire.until_closed()
            assert b"identity machine was revoked" in error.body
            until(lambda: server._pulls.parked == 0)


def test_the_certificate_of_a_node_is_no_identity_whatever_its_name(secured: Secured) -> None:
    """hastore's own have a name that no identity can have; those of other tools may have any."""
    by_certificate(secured, "orders", consume=ALL)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for number, uri in enumerate((NODE_1.uri, "hastore:node/demo/g0/not-a-number")):
        uris = [x509.UniformResourceIdentifier(uri)]
        pair = secured.pki.authority._sign("orders", uris, uses, now(), 1)
        files = secured.pki.write(f"other-tool-{number}", pair)
        with secured.server(tls=True) as server, TlsWire(server.endpoint, files) as wire:
            wire.shake_hands()
            reply = ask(wire, api.AskMap(1))
            assert isinstance(reply, api.Failed) and reply.status == "UNAUTHENTICATED"
            assert "is a node's" in reply.reason


@pytest.mark.parametrize("stage", ["tls", "greeting", "proof"])
def test_a_link_in_bulk_does_not_wait_longer_for_single_bytes(secured: Secured, stage: str) -> None:
    """Each byte of a peer that is no node comes in time; the link does not open in time."""
    keyed = secured.identity("orders")
    mine = with_key(secured, "orders") if stage == "tls" else keyed
    begin = greeting() + ready(b"ROUTER") if stage == "proof" else b""
    drops = {"tls": b"\x16\x03\x03\x40\x00" + bytes(95), "greeting": greeting() + bytes(36)}
    drip = drops.get(stage, command(b"PING", b"\0\0") * 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(begin)
                said = b""
                while begin and b"auth" not in said:
                    said += peer.recv(4096)
                for byte in drip:
                    peer.sendall(bytes((byte,)))
                    time.sleep(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnreachableError, match=r"within 0\.5 s|timed out"):
            BulkLink(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 0.5, make_prover(mine))
        thread.join()


def test_a_dead_address_of_a_name_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, secured: Secured, trusting: Security
) -> None:
    real = socket.getaddrinfo

    def look(host: str, port: int, *given: Any, **named: Any) -> Any:
        if host != "localhost":
            return real(host, port, *given, **named)
        both = ("127.0.0.2", "127.0.0.1")
        return [each for one in both for each in real(one, port, *given, **named)]

    with secured.server(tls=True, identities=False) as server, contextlib.ExitStack() as held:
        port = int(server.endpoint.rpartition(":")[2])
        held.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(4):  # until the kernel drops further ones, as a dead host does
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        monkeypatch.setattr(socket, "getaddrinfo", look)
        link = BulkLink(f"tcp://localhost:{port}", 3.0, make_prover(trusting))
        link.close()


def test_tls_without_identities(secured: Secured, trusting: Security) -> None:
    with secured.server(tls=True, identities=False) as server:
        with Producer([server.endpoint], security=trusting) as producer:
            assert producer.send_sync("t", b"x").status is api.Status.PUT_OK


WRONG: dict[str, Any] = {
    "another CA": "not signed by the CA of this side",
    "another host": "is not for 127.0.0.1",
    "expired": "expired",
    "not yet valid": "not valid yet",
    "a client's certificate": "not for this use",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_client_refuses_a_wrong_node_at_once(
    secured: Secured, trusting: Security, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime

    from tests.security.pki import now

    pki, day = secured.pki, datetime.timedelta(days=1)
    files = {
        "another CA": lambda: Pki(secured.folder / "other", "other").node(),
        "another host": lambda: pki.node(hosts=("example.com",)),
        "expired": lambda: pki.node(days=1, made=now() - 3 * day),
        "not yet valid": lambda: pki.node(made=now() + 3 * day),
        "a client's certificate": lambda: pki.client("node"),
    }[kind]()
    monkeypatch.setattr(Pki, "node", lambda _self: files)
    with secured.server(tls=True, identities=False) as server:
        begun = time.monotonic()
        with Admin([server.endpoint], security=trusting, timeout_s=60) as admin:
            with pytest.raises(NotAuthenticatedError, match=WRONG[kind]):
                admin.status()
        with pytest.raises(NotAuthenticatedError, match=WRONG[kind]):
            BulkLink(server.endpoint, 60.0, make_prover(trusting))
        assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("kind", ["another CA", "expired"])
def test_a_node_refuses_a_wrong_client_at_once(secured: Secured, kind: str) -> None:
    import datetime

    from tests.security.pki import now

    secured.text.add("orders", certificate="true", produce=ALL)
    made = now() - datetime.timedelta(days=3)
    if kind == "another CA":
        files = Pki(secured.folder / "other", "other").client("orders")
    else:
        files = secured.pki.client("orders", days=1, made=made)
    security = Security(tls_ca=secured.pki.ca, tls_certificate=files.certificate, tls_key=files.key)
    with secured.server(tls=True) as server:
        with Admin([server.endpoint], security=security, timeout_s=60) as admin:
            with pytest.raises(NotAuthenticatedError, match="this side's certificate") as no:
                admin.status()
    assert files.certificate is not None and files.certificate in str(no.value)


def test_a_plain_client_and_a_tls_port_and_the_reverse(
    secured: Secured, trusting: Security, caplog: pytest.LogCaptureFixture
) -> None:
    with secured.server(tls=True, identities=False) as server:
        with Admin([server.endpoint], security=Security(), timeout_s=60) as admin:
            with pytest.raises(NotAuthenticatedError, match="this port speaks TLS.*--security"):
                admin.status()
        # The error says it; a warning beside it would say it to a user of commands once more.
        loud = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert not [each for each in loud if each.name.startswith("hastore.client")]
        until(lambda: "does not speak TLS" in caplog.text)  # the node's thread may come later
    with secured.server(identities=False) as server:
        with Admin([server.endpoint], security=trusting, timeout_s=60) as admin:
            with pytest.raises(NotAuthenticatedError, match="does not speak TLS"):
                admin.status()
        until(lambda: "the client speaks TLS" in caplog.text)


@pytest.mark.parametrize("host", ["two..dots", "a" * 64])
def test_a_name_that_no_certificate_can_have_is_said_at_once(trusting: Security, host: str) -> None:
    address = f"tcp://{host}:1"
    begun = time.monotonic()
    with Admin([address], security=trusting, timeout_s=60) as admin:
        with pytest.raises(NotAuthenticatedError, match=f"'{host}' cannot be checked.*its address"):
            admin.status()
    with Producer([address], security=trusting) as producer:
        with pytest.raises(NotAuthenticatedError, match=f"'{host}' cannot be checked.*its address"):
            producer.send_sync("t", b"1")
    with pytest.raises(UnreachableError, match=f"{host}.*label"):
        BulkLink(address, 60.0, make_prover(trusting))
    assert time.monotonic() - begun < SOON_S


def test_libzmq_cannot_speak_tls(trusting: Security) -> None:
    with pytest.raises(UsageError, match="cannot speak TLS"):
        Producer(["zmq+tcp://127.0.0.1:1"], security=trusting)


def test_libzmq_proves_an_identity_in_the_clear(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL, consume=ALL)
    wrong = secured.folder / "wrong.key"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    with secured.server() as server:
        where = ["zmq+" + server.endpoint]
        with Producer(where, security=mine) as producer:
            assert producer.send_sync("orders", b"x", queue=0).queue_offset == 0
        with Consumer("orders", where, queues=[0], security=mine) as consumer:
            until(consumer.poll)
        for security, text in (
            (Security(identity="orders", key_file=str(wrong)), "orders"),
            (Security(), "asks its clients"),
        ):
            with Admin(where, security=security, timeout_s=60) as admin:
                with pytest.raises(NotAuthenticatedError, match=text):
                    admin.status()


def test_messages_may_be_cut_anywhere(secured: Secured, trusting: Security) -> None:
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            said = greeting() + ready() + frame(api.encode(api.AskMap(7)))
            cipher = b"".join(wire.sealed(said[at : at + 5]) for at in range(0, len(said), 5))
            for at in range(0, len(cipher), 7):
                wire.send_cipher(cipher[at : at + 7])
            wire.frame()
            reply = api.decode_reply(wire.frame().body)
            assert isinstance(reply, api.Map) and reply.rid == 7


def test_a_handshake_that_is_not_finished_is_ended(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 300.0)
    with secured.server(tls=True) as server:
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        for said in (b"", b"\x16\x03\x01"):
            with socket.create_connection((host, int(port)), timeout=60) as sock:
                sock.sendall(said)
                while sock.recv(4096):
                    pass
        assert caplog.text.count("the handshake of TLS was not finished") == 2
        assert server._connections.count == 0


def test_garbage_after_the_handshake_ends_only_its_connection(
    secured: Secured, trusting: Security
) -> None:
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as other:
            other.shake_hands()
            with TlsWire(server.endpoint, files_of(trusting)) as wire:
                wire.shake_hands()
                wire.send_cipher(b"\x17\x03\x03\x00\x20" + bytes(32))
                wire.until_closed()
            assert isinstance(ask(other, api.AskMap(1)), api.Map)
        assert server.malformed == 1


def test_an_unfinished_record_counts_as_an_unfinished_message(
    secured: Secured, trusting: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            until(lambda: not server._connections._unfinished)
            cipher = wire.sealed(frame(api.encode(api.AskMap(1))))
            wire.send_cipher(cipher[:10])
            until(lambda: server._connections.held_bytes == 10)
            monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 50.0)
            monkeypatch.setattr(api_connections, "MESSAGE_MS", 100.0)
            wire.until_closed()
            until(lambda: server._connections.count == 0)


def test_a_client_that_reads_nothing_is_ended_under_tls_too(
    secured: Secured, trusting: Security
) -> None:
    """The bytes of sealed replies count as those of plain ones do."""
    with secured.server(tls=True, identities=False) as server:
        with Producer([server.endpoint], security=trusting) as producer:
            for _ in range(8):
                producer.send_sync("t", bytes(3 * MIB), queue=0)
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            most = 0
            with contextlib.suppress(OSError):
                for rid in range(1, 60):
                    position = api.Position(rid % 8)
                    wire.send(frame(api.encode(api.Pull(rid, "t", 0, position, 1, 4 * MIB))))
                    most = max(most, server._connections.unsent_bytes)
            until(lambda: server._connections.unsent_bytes < api_replies.ENDED_AT_BYTES)
            assert most < api_replies.ENDED_AT_BYTES + 8 * MIB
        until(lambda: server._connections.count == 0)
        assert server._connections.unsent_bytes == 0


def test_a_pickle_in_a_payload_stays_bytes(secured: Secured, tmp_path: pathlib.Path) -> None:
    mine = with_key(secured, "orders", produce=ALL, consume=ALL)
    proof = tmp_path / "executed"
    bad = b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    with secured.server(tls=True) as server:
        with Producer([server.endpoint], security=mine) as producer:
            producer.send_sync("orders", bad, queue=0, properties={"pickle": bad.decode()})
        with TlsWire(server.endpoint, files_of(mine)) as wire:
            wire.shake_hands()
            prove(wire, mine)
            wire.send(frame(bad, LONG))
            wire.until_closed()
        with Consumer("orders", [server.endpoint], queues=[0], security=mine) as consumer:
            got: list[Any] = []
            until(lambda: got.extend(consumer.poll()) or got)
        assert got[0].body == bad
    assert not proof.exists()


def test_certificates_are_replaced_without_a_restart(
    secured: Secured, trusting: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.security.tls_contexts.CHECK_MS", 0.0)
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            before = wire._engine.peer
            secured.pki.node(days=99)
            with TlsWire(server.endpoint, files_of(trusting)) as later:
                later.shake_hands()
                assert later._engine.peer != before
            assert isinstance(ask(wire, api.AskMap(1)), api.Map)  # goes on


def test_many_puts_in_one_record_are_answered(secured: Secured, trusting: Security) -> None:
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            wire.send(*(frame(api.encode(api.AskMap(rid))) for rid in range(500)))
            rids = [api.decode_reply(wire.frame().body).rid for _ in range(500)]
            assert rids == list(range(500))
            wire.send(frame(api.encode(api.Put(1, 1)), MORE), frame(b""))
            assert isinstance(api.decode_reply(wire.frame().body), api.PutDone)


def test_reads_grow_under_tls_as_they_do_without(secured: Secured, trusting: Security) -> None:
    """A read of ciphertext gives less plaintext than it has bytes."""
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            [connection] = server._connections.all()
            one = frame(api.encode(api.FindTime(1, "t" * 1_000, 0, 0)))
            wire.send_cipher(b"".join([wire.sealed(one) for _ in range(400)]))
            until(lambda: connection.receive_bytes > 8 * 1024)


def test_the_end_of_tls_is_the_end_of_the_connection(
    secured: Secured, trusting: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_connections, "MESSAGE_MS", 600_000.0)  # only the end can end it
    with secured.server(tls=True, identities=False) as server:
        with TlsWire(server.endpoint, files_of(trusting)) as wire:
            wire.shake_hands()
            assert isinstance(ask(wire, api.AskMap(1)), api.Map)
            wire.send_cipher(wire._engine.close())
            until(lambda: server._connections.count == 0)


def test_a_client_that_was_evicted_connects_again_silently(
    secured: Secured, trusting: Security, caplog: pytest.LogCaptureFixture
) -> None:
    config = ApiConfig(max_connections=2, evict_idle_ms=1)
    with (
        secured.server(tls=True, identities=False, config=config) as server,
        Producer([server.endpoint], security=trusting) as producer,
        contextlib.ExitStack() as stack,
    ):
        for n in range(3):
            assert producer.send_sync("orders", b"x", queue=0).queue_offset == n
            before = server._connections.all()
            while not all(each.ended for each in before):
                with contextlib.suppress(OSError, AssertionError):  # the producer took its place
                    wire = stack.enter_context(TlsWire(server.endpoint, files_of(trusting)))
                    wire.shake_hands()
                    ask(wire, api.AskMap(1))
        assert server._connections.evicted >= 3
    said = [one for one in caplog.records if one.name.startswith("hastore.client")]
    assert not [one for one in said if one.levelno >= logging.WARNING]


# -- floods


def test_a_flood_of_handshakes_holds_up_no_client(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While not one of its handshakes is done; a few are computed at a time, the rest waits.

    Of one source only so many wait; another source's clients are let in.
    """
    monkeypatch.setattr(newcomers, "OF_SOURCE_MAX", 20)
    monkeypatch.setattr(handshakes, "STEPS_MAX", 3)
    mine = with_key(secured, "orders", produce=ALL)
    files = files_of(mine)
    hello = TlsEngine(TlsContexts(files).client(), server_side=False, host="x").take_outgoing()
    slow, receive = threading.Event(), TlsEngine.receive
    begun: list[TlsEngine] = []

    def slowly(engine: TlsEngine, data: bytes) -> bytes:
        if bytes(data) == hello:
            begun.append(engine)
            assert slow.wait(60)
        return receive(engine, data)

    with secured.server(tls=True) as server, contextlib.ExitStack() as stack:
        known = stack.enter_context(TlsWire(server.endpoint, files))
        known.shake_hands()
        assert isinstance(prove(known, mine), api.Welcome)
        monkeypatch.setattr(TlsEngine, "receive", slowly)
        flood = [stack.enter_context(Wire(server.endpoint)) for _ in range(100)]
        for each in flood:
            with contextlib.suppress(ConnectionError):
                each.send(hello)
        until(lambda: begun)
        for rid in range(10, 15):
            assert isinstance(ask(known, api.AskMap(rid)), api.Map)
        until(lambda: server._connections.count <= 1 + 3 + 20 or server._connections.refused)
        for rid in range(15, 20):
            assert isinstance(ask(known, api.AskMap(rid)), api.Map)
        assert len(begun) <= 3
        threading.Timer(0.0, slow.set).start()
        other = stack.enter_context(TlsWire(server.endpoint, files, source="127.0.0.2"))
        other.shake_hands()
        assert isinstance(prove(other, mine), api.Welcome)


def test_a_step_that_fails_because_of_a_bug_ends_one_connection(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_engine: TlsEngine, _data: bytes) -> bytes:
        raise LookupError("planted defect")

    secured.save()
    files = TlsFiles(secured.pki.ca)
    hello = TlsEngine(TlsContexts(files).client(), server_side=False, host="x").take_outgoing()
    with secured.server(tls=True) as server:
        with monkeypatch.context() as planted, Wire(server.endpoint) as wire:
            planted.setattr(TlsEngine, "receive", fail)
            wire.send(hello)
            assert not wire.until_closed()
        with TlsWire(server.endpoint, files) as wire:
            wire.shake_hands()
        assert server._failures.count == 1


def test_a_connection_that_ends_during_a_step_is_forgotten(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, begun, receive = threading.Event(), threading.Event(), TlsEngine.receive

    def slowly(engine: TlsEngine, data: bytes) -> bytes:
        begun.set()
        assert slow.wait(60)
        return receive(engine, data)

    monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 50.0)
    secured.save()
    files = TlsFiles(secured.pki.ca)
    hello = TlsEngine(TlsContexts(files).client(), server_side=False, host="x").take_outgoing()
    with secured.server(tls=True) as server, Wire(server.endpoint) as wire:
        with monkeypatch.context() as planted:
            planted.setattr(TlsEngine, "receive", slowly)
            wire.send(hello)
            assert begun.wait(60)
            until(lambda: server._connections.count == 0)
            assert not wire.until_closed()
            slow.set()
            until(lambda: server._handshakes._under_way == 0)
        monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 60_000.0)
        with TlsWire(server.endpoint, files) as late:
            late.shake_hands()
