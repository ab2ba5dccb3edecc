"""Links of a DLedger group under TLS: what goes through, and who is kept out."""

import os
import socket
import threading

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import AuthenticationError, HastoreError, ProtocolError
from hastore.ha.hello.peer import call
from hastore.protocol.dledger import CommitRequest, HeartBeatRequest
from hastore.protocol.hello import Linked, StoreKnown
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import NodeName, TlsEngine
from hastore.security.tls_socket import TlsSocket
from tests.dledger.links.groups import Bytes, LinkGroup
from tests.dledger.links.test_peer_links import append, linked, said
from tests.ha.nodes import wait_for
from tests.ha.tls.conftest import GroupPki
from tests.security.floods import flood
from tests.security.pki import Pki


@pytest.fixture
def group(tmp_path):
    made = LinkGroup(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def pki(tmp_path):
    return GroupPki(tmp_path / "pki")


def make(group, pki, number, **options):
    return group.make(number, tls=pki.contexts(number), **options)


@pytest.mark.parametrize("secret", [None, b"sixteen bytes or more"])
def test_messages_and_appends_of_every_size_keep_their_order(group, pki, secret):
    data = os.urandom(4 << 20)
    nodes = [make(group, pki, n, source=Bytes(data), secret=secret).start() for n in (1, 2, 3)]
    linked(*nodes)
    channels = [channel for node in nodes for channel in node.links._channels.values()]
    assert len(channels) == 6 and all(isinstance(one._sock, TlsSocket) for one in channels)
    sizes = [48, 1_000, 16_384, 100_000, 130_000, 300_000, 4 << 20]
    senders = []

    def send(one):
        for number, size in enumerate(sizes * 3, 1):
            for other in {1, 2, 3} - {one.config.node}:
                one.links.send(other, append(0, size))
                one.links.send(other, HeartBeatRequest(1, number, -1))

    for one in nodes:  # both directions of each link at once
        senders.append(threading.Thread(target=send, args=(one,)))
        senders[-1].start()
    for sender in senders:
        sender.join(60)
    for node in nodes:
        wait_for(lambda node=node: len(node.recorder.got) == 4 * 3 * len(sizes), "the messages")
        for peer in {1, 2, 3} - {node.config.node}:
            got = [(m, body) for p, m, body in node.recorder.got if p == peer]
            rounds = [m.round for m, _ in got if isinstance(m, HeartBeatRequest)]
            assert rounds == list(range(1, 3 * len(sizes) + 1))
            bodies = [body for m, body in got if not isinstance(m, HeartBeatRequest)]
            assert bodies == [data[:size] for size in sizes * 3]


def test_a_reader_that_pauses_gets_every_byte(group, pki):
    """The kernel takes a part of what is pushed; the rest is sent by the writer, in order."""
    data = os.urandom(100_000)
    one, two = (make(group, pki, n, source=Bytes(data)).start() for n in (1, 2))
    linked(one, two)
    two.recorder.gate.clear()
    for _ in range(150):
        one.links.send(2, append(0, len(data)))
    two.recorder.gate.set()
    one.links.send(2, CommitRequest(1, 0))
    wait_for(lambda: two.recorder.got and isinstance(two.recorder.got[-1][1], CommitRequest))
    bodies = [body for _, _, body in two.recorder.got[:-1]]
    assert len(bodies) > 20 and set(bodies) == {data}


def ask(one, tls, **changes):
    made = call(one.address, said(**changes), None, SYSTEM_CLOCK, 20_000, tls)
    made.close()
    return made.answer


def test_who_is_let_in(group, pki, caplog, tmp_path):
    one, two = (make(group, pki, n).start() for n in (1, 2))
    linked(one, two)
    assert ask(one, pki.contexts(3)) == Linked()
    assert isinstance(ask(one, pki.contexts(3), new_store=True), StoreKnown)

    def refused(tls, says, **changes):
        caplog.clear()
        with pytest.raises((HastoreError, OSError)) as error:
            ask(one, tls, **changes)
        wait_for(lambda: says in caplog.text, says)
        return str(error.value)

    as_two = pki.contexts(2)
    refused(as_two, "is that of c/g node 2, but its HELLO says c/g node 3")
    refused(as_two, "is that of c/g node 2, but its HELLO says c/g node 3", new_store=True)
    refused(pki.stolen(pki.client("orders")), "its certificate (orders) is not a node's")
    other = Pki(tmp_path / "other").node(NodeName("c", "g", 3))
    assert "another CA" in refused(pki.stolen(other), "is not signed by the CA")
    text = refused(None, "does not speak TLS, and nothing else is accepted here")
    assert "speaks TLS only; set security.ha: tls" in text
    assert one.links.linked >= {2} and two.links.linked == {1}


def test_a_flood_of_refused_callers_is_bounded_in_the_log(group, pki, caplog):
    one = make(group, pki, 1).start()
    noted = []
    one.links.member.on_refused = lambda *fields: noted.append(fields)
    flood(one.address, noted, caplog, "HA connection of")


def test_plain_and_tls_do_not_meet(group, pki):
    """Each side says what is wrong, and no link is made."""
    one, two = make(group, pki, 1).start(), group.make(2).start()
    wait_for(lambda: "speaks TLS only" in two.links.problems.get(1, ""), "the reason")
    three = make(group, pki, 3).start()
    linked(one, three)
    wait_for(lambda: "does not speak TLS" in three.links.problems.get(2, ""), "the reason")
    assert one.links.linked == {3} and not two.links.linked


def test_a_false_node_is_not_linked(group, pki):
    """Node 2 answers at the address of node 1, with its own certificate, and says that it is 1."""
    false = group.make(1, tls=TlsContexts(pki.node(NodeName("c", "g", 2), stem="false"))).start()
    two = make(group, pki, 2).start()
    words = "is that of c/g node 2, but its HELLO says c/g node 1"
    wait_for(lambda: words in two.links.problems.get(1, ""), words)
    assert not two.links.linked and not false.links.linked


def test_unfinished_handshakes_beside_working_links(group, pki):
    nodes = [make(group, pki, n, ha={"hello_timeout_ms": 1_000}).start() for n in (1, 2)]
    one, two = nodes
    linked(one, two)
    first = TlsEngine(pki.contexts(3).node_client(), server_side=False).take_outgoing()
    peers = []
    try:
        for number in range(200):
            peer = socket.create_connection(one.address.rsplit(":", 1), 60, ("127.0.0.2", 0))
            peers.append(peer)
            try:
                peer.sendall(first[: 1 + number])
            except ConnectionError:
                continue
        assert sum(not each.known for each in one.links.accepted.all()) <= 16
        assert isinstance(ask(one, pki.contexts(3), new_store=True), StoreKnown)
        two.links.send(1, HeartBeatRequest(1, 7, -1))
        wait_for(lambda: (2, HeartBeatRequest(1, 7, -1), None) in one.recorder.got, "a message")
        wait_for(lambda: len(one.links.accepted.all()) == 1, "the end of the handshakes")
    finally:
        for peer in peers:
            peer.close()
    assert one.links.failure is None


def test_an_error_says_which_kind_it_is(group, pki):
    one = make(group, pki, 1).start()
    with pytest.raises(AuthenticationError):
        ask(one, None)
    with pytest.raises(ProtocolError):
        ask(one, TlsContexts(TlsFiles(pki.ca)))
