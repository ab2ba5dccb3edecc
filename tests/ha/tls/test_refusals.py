"""Who is kept out of an HA link under TLS, on real sockets, and what each side then says.

After each attack the master is the same, in the same epoch, and its slave has lost nothing.
"""

import contextlib
import datetime
import logging
import os
import random
import socket
import threading
import time

import pytest

from hastore.bounded_log import BURST, EVERY_MS
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Role
from hastore.errors import AuthenticationError, HastoreError, ProtocolError
from hastore.ha.hello.accepting import admit
from hastore.ha.hello.answering import answer_hello
from hastore.ha.hello.peer import Deadline, call, receive_exactly
from hastore.protocol.hello import CALL_MAGIC, Purpose, Surveyed, encode_hello, frame
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import NodeName, TlsEngine
from tests.ha.nodes import Peer, wait_for
from tests.protocol.test_hello import make_hello
from tests.security.floods import PLAIN, flood
from tests.security.pki import Pki, now

SECRET = b"sixteen bytes or more"


@pytest.fixture
def pair(make_group, pki):
    """A master, its slave, and what both must be like at the end."""
    group = make_group(3, ha={"hello_timeout_ms": 2_000, "max_connections": 16})
    one, two = (group.start(n, tls=pki.contexts(n), role=Role.SYNC_MASTER) for n in (1, 2))
    epoch = one.promote().epoch
    one.put(b"a", b"b")
    two.follow()
    wait_for(lambda: two.linked)
    yield one
    assert one.member.open_epoch == epoch and not one.superseded
    assert two.state.data.promised_epoch == epoch and two.linked
    assert one.put_confirmed(b"the end")[0] == "PUT_OK"
    assert two.bytes() == one.bytes()


def hello(**changes):
    """What node 3 says."""
    said = {"purpose": Purpose.SURVEY, "node": 3, "nonce": os.urandom(32), "history": (),
            "max_offset": 0, "confirmed_offset": 0, "promised_epoch": 0}  # fmt: skip
    return make_hello(**{**said, **changes})


def ask(node, tls, secret=None, **changes):
    made = call(node.address, hello(**changes), secret, SYSTEM_CLOCK, 20_000, tls)
    made.close()
    return made.answer


def refused(node, tls, caplog, *, says, logs, **changes):
    """Call; the caller and the log of `node` must say these words, each in one line."""
    caplog.clear()
    with pytest.raises((HastoreError, OSError)) as error:
        ask(node, tls, **changes)
    assert says in str(error.value), str(error.value)
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    wait_for(lambda: any(logs in one.getMessage() for one in caplog.records), f"{logs}: {lines}")
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1 and "\n" not in lines[0] and lines[0].startswith("HA connection of"), (
        lines
    )


def test_a_node_of_the_group_is_answered(pair, pki):
    assert ask(pair, pki.contexts(3)) == Surveyed()


def test_a_certificate_of_another_node_or_group(pair, pki, caplog):
    for name in (pki.name(2), pki.name(3, group="h"), pki.name(3, cluster="d")):
        tls = pki.stolen(pki.node(name, stem="stolen"))
        words = f"its certificate is that of {name}, but its HELLO says c/g node 3"
        refused(pair, tls, caplog, says="closed the connection in the middle", logs=words)
    # One that says truly where it belongs to is refused by its HELLO.
    other = pki.name(3, group="h")
    with pytest.raises(AuthenticationError, match="belongs to c/g, not to c/h"):
        ask(pair, pki.stolen(pki.node(other, stem="other")), group="h")


def test_a_clients_certificate_is_not_a_nodes(pair, pki, caplog):
    refused(
        pair, pki.stolen(pki.client("orders")), caplog,
        says="closed the connection in the middle",
        logs="its certificate (orders) is not a node's; make one with `hastore keys cert -c",
    )  # fmt: skip
    refused(
        pair, TlsContexts(TlsFiles(pki.ca)), caplog,
        says="asks for a certificate; configure certificate and key here",
        logs="the other end has no certificate",
    )  # fmt: skip


def test_a_certificate_out_of_its_time(pair, pki, caplog):
    for made, days, words in ((-9, 8, "has expired"), (2, 8, "is not valid yet")):
        at = now() + datetime.timedelta(days=made)
        tls = pki.stolen(pki.node(pki.name(3), made=at, days=days))
        refused(
            pair, tls, caplog,
            says="refuses this side's certificate", logs=f"the other end's certificate {words}",
        )  # fmt: skip


def test_a_certificate_of_another_ca(pair, pki, caplog, tmp_path):
    files = Pki(tmp_path / "other", "other CA").node(pki.name(3))
    refused(
        pair, pki.stolen(files), caplog,
        says="another CA has signed it", logs="is not signed by the CA of this side",
    )  # fmt: skip


def test_tls_and_the_secret_are_both_needed(make_group, pki, caplog):
    node = make_group(3).start(1, tls=pki.contexts(1), secret=SECRET)
    tls = pki.contexts(3)
    assert ask(node, tls, SECRET) == Surveyed()
    with pytest.raises(ProtocolError, match="closed the connection"):
        ask(node, tls, b"another secret, as long")
    with pytest.raises(AuthenticationError, match="wants a proof of ha.secret_file first"):
        ask(node, tls, None)
    with pytest.raises(AuthenticationError, match="speaks TLS only"):
        ask(node, None, SECRET)
    assert "ha.secret_file must hold the same bytes" in caplog.text


# ---- no way around TLS


def test_a_plain_caller_is_refused(pair, caplog):
    refused(
        pair, None, caplog,
        says="speaks TLS only; set security.ha: tls on this node too",
        logs="does not speak TLS, and nothing else is accepted here; set security.ha: tls",
    )  # fmt: skip


def test_a_whole_plain_hello_at_once_is_refused_and_not_read(pair):
    """The caller does not wait for anything; nothing of it has an effect."""
    said = hello(purpose=Purpose.PROMISE, promised_epoch=1 << 40 | 3, nodes=(1, 2, 3), acks=1)
    peer = Peer(pair.address)
    peer.send(CALL_MAGIC + frame(encode_hello(said)) + frame(b""))
    got = peer.sock.recv(100)
    assert got == bytes((21, 3, 3, 0, 2, 2, 70))
    with contextlib.suppress(ConnectionResetError):
        assert peer.sock.recv(100) == b""
    peer.sock.close()


def test_a_tls_caller_of_a_plain_node(make_group, pki, caplog):
    node = make_group(3).start(1)
    refused(
        node, pki.contexts(3), caplog,
        says="does not speak TLS; both ends must be configured for it",
        logs="the caller speaks TLS, but security.ha is plain here; set it to tls on every node",
    )  # fmt: skip
    assert ask(node, None) == Surveyed()


def test_rocketmqs_slaves_stay_plain_only_where_they_are_allowed(make_group, pki, caplog):
    for allowed in (False, True):
        group = make_group(2, ha={"allow_classic_peers": allowed})
        node = group.start(1, tls=pki.contexts(1), role=Role.ASYNC_MASTER)
        node.promote()
        end = node.put(b"a record")
        peer = Peer(node.address)
        peer.report(0)
        if allowed:
            assert b"".join(body for _, body in peer.frames_until(end)) == node.bytes()
            with pytest.raises(AuthenticationError, match="speaks TLS only"):
                ask(node, None)  # a node of hastore may not pretend to be one
        else:
            assert peer.sock.recv(1) == b""
            wait_for(lambda: "set ha.allow_classic_peers: true" in caplog.text)
        peer.sock.close()


def test_a_flood_of_refused_callers_is_bounded_in_the_log(pair, caplog):
    """The audit log gets each of them, and bounds them itself."""
    noted = []
    pair.member.on_refused = lambda *fields: noted.append(fields)
    openings = (PLAIN, b"\x16\x03\x01" + bytes(99))
    flood(pair.address, noted, caplog, "HA connection of", openings)


def test_a_flood_of_refused_hellos_is_bounded_in_the_log(make_group, caplog):
    node = make_group(3).start(1)
    begun_ms = SYSTEM_CLOCK.monotonic_ms()
    with caplog.at_level(logging.INFO):
        for _ in range(2 * BURST):
            with pytest.raises(AuthenticationError):
                ask(node, None, purpose=Purpose.FOLLOW, cluster="another")
    lines = [one.getMessage() for one in caplog.records if "refused follow" in one.getMessage()]
    passed_ms = SYSTEM_CLOCK.monotonic_ms() - begun_ms
    assert lines and len(lines) <= BURST + 1 + passed_ms / EVERY_MS


def test_a_refused_caller_does_not_stay_by_sending_single_bytes(pair):
    peer = Peer(pair.address)
    begun_ms = SYSTEM_CLOCK.monotonic_ms()
    peer.send(b"GET / HT")
    bytes_left = 100  # without a bound all of them are awaited: 10 s
    with contextlib.suppress(ConnectionError):
        while bytes_left:
            peer.send(b"x")
            bytes_left -= 1
            time.sleep(0.1)
    peer.sock.close()
    assert bytes_left, SYSTEM_CLOCK.monotonic_ms() - begun_ms


# ---- false masters


@contextlib.contextmanager
def false_node(tls, said):
    """Answer one call as a node would, with this certificate and this HELLO."""

    class Answerer:
        secret = None

        def hello(self, _purpose):
            return said

        def identify(self, _hello):
            pass

        def decide(self, _hello):
            return Surveyed()

    def serve():
        sock, _ = listener.accept()
        with sock, contextlib.suppress(HastoreError, OSError):
            deadline = Deadline(SYSTEM_CLOCK, 20_000)
            link, _ = admit(sock, receive_exactly(sock, 8, deadline), deadline, tls)
            answer_hello(link, deadline, Answerer())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def test_a_false_master_is_not_believed(pki, tmp_path):
    caller = pki.contexts(3)

    def problem(files, **said):
        contexts = pki.stolen(files)
        with false_node(contexts, hello(**{"node": 1, **said})) as address:
            with pytest.raises(AuthenticationError) as error:
                call(address, hello(), None, SYSTEM_CLOCK, 20_000, caller)
        return str(error.value)

    assert "is that of c/g node 2, but its HELLO says c/g node 1" in problem(pki.node(pki.name(2)))
    assert "is that of c/h node 1" in problem(pki.node(NodeName("c", "h", 1), stem="h"))
    assert "is not for this use" in problem(pki.client("orders"))
    other = Pki(tmp_path / "other").node(pki.name(1))
    assert "is not signed by the CA" in problem(other)
    past = now() - datetime.timedelta(days=9)
    assert "has expired" in problem(pki.node(pki.name(1), made=past, days=8, stem="late"))
    assert problem_free(pki, caller)


def problem_free(pki, caller):
    with false_node(pki.contexts(1), hello(node=1)) as address:
        made = call(address, hello(), None, SYSTEM_CLOCK, 20_000, caller)
        made.close()
    return made.answer == Surveyed()


# ---- floods and garbage


def test_200_peers_that_never_finish_their_handshake(pair, pki):
    """They are bounded in number and time; puts go on, and a node of the group gets in."""
    first = TlsEngine(pki.contexts(3).node_client(), server_side=False).take_outgoing()
    peers = []
    try:
        for number in range(200):
            peer = socket.create_connection(pair.address.rsplit(":", 1), 60, ("127.0.0.2", 0))
            peers.append(peer)
            with contextlib.suppress(ConnectionError):
                peer.sendall((first, first[:7], first[:100], b"")[number % 4])
            if number % 20 == 0:
                assert pair.put_confirmed(b"beside the flood")[0] == "PUT_OK"
        strangers = [one for one in pair.ha.accepted.all() if not one.known]
        assert len(strangers) <= pair.config.ha.max_connections
        assert ask(pair, pki.contexts(3)) == Surveyed()
        wait_for(lambda: len(pair.ha.accepted.all()) == 1, "the end of the unfinished handshakes")
    finally:
        for peer in peers:
            peer.close()


def test_one_byte_at_a_time_ends_at_the_hello_timeout(pair, pki):
    first = TlsEngine(pki.contexts(3).node_client(), server_side=False).take_outgoing()
    began = time.monotonic()
    with Peer(pair.address).sock as slow, contextlib.suppress(ConnectionError):
        for at in range(len(first)):
            slow.sendall(first[at : at + 1])
            time.sleep(0.05)
            if time.monotonic() - began > 60:
                break
        slow.settimeout(60)
        while slow.recv(1000):
            pass
    assert time.monotonic() - began < 60


def test_truncated_and_garbage_handshakes(pair, pki):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    first = TlsEngine(pki.contexts(3).node_client(), server_side=False).take_outgoing()
    for _ in range(60):
        data = bytearray(first)
        kind = chance.randrange(3)
        if kind == 0:
            data = data[: chance.randrange(len(data))]
        elif kind == 1:
            data = bytearray(chance.randbytes(chance.randrange(1, 3_000)))
            data[0:2] = b"\x16\x03"
        else:
            for _ in range(chance.randrange(1, 9)):
                data[chance.randrange(2, len(data))] ^= 1 << chance.randrange(8)
        with Peer(pair.address).sock as peer, contextlib.suppress(ConnectionError, TimeoutError):
            peer.settimeout(0.2)
            peer.sendall(data)
            if chance.random() < 0.5:
                peer.recv(1000)
    assert pair.ha.failure is None


def test_garbage_inside_tls_ends_the_link_only(pair, pki):
    tls = pki.contexts(3)
    made = call(pair.address, hello(), None, SYSTEM_CLOCK, 20_000, tls)
    made.close()
    for data in (b"\x00" * 8, b"GET / HT", os.urandom(8), CALL_MAGIC + b"\xff\xff\xff\xff"):
        plain = socket.create_connection(pair.address.rsplit(":", 1), timeout=60)
        with plain:
            engine = TlsEngine(tls.node_client(), server_side=False)
            plain.sendall(engine.take_outgoing())
            while not engine.open:
                engine.feed(plain.recv(10_000))
            plain.sendall(engine.take_outgoing() + engine.encrypt(data))
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(1000):
                    pass
    assert pair.ha.failure is None
