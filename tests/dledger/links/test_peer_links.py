"""Links between nodes on loopback: who is let in, what goes through, and how a link ends."""

import collections
import logging
import os
import socket
import threading
import time

import pytest

from hastore.clock import SYSTEM_CLOCK, SystemClock
from hastore.dledger.links import channel
from hastore.dledger.links.channel import DEFAULT_TIMES, QUEUE_MESSAGES_MAX, LinkTimes
from hastore.dledger.links.identity import REPLACED_MAX, Stores
from hastore.dledger.links.peer_links import _PeerCaller
from hastore.errors import ProtocolError
from hastore.ha.hello.forward_link import NOT_TAKEN
from hastore.ha.hello.peer import call
from hastore.protocol.dledger import AppendRequest, CommitRequest, HeartBeatRequest, TakeLeadership
from hastore.protocol.dledger_link import KEEP_ALIVE, MESSAGE_TYPE, message_frame
from hastore.protocol.ha_link import HEADER
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    CALL_MAGIC,
    Linked,
    Purpose,
    Refused,
    StoreKnown,
    encode_hello,
    frame,
)
from tests.dledger.links.groups import FILE_SIZE, Bytes, LinkGroup
from tests.ha.hello.forwarding import Caller, Master
from tests.ha.nodes import Group, Peer, wait_for
from tests.protocol.test_hello import make_hello

OWN_PURPOSES = (Purpose.DLEDGER, Purpose.FORWARD, Purpose.REPAIR)
CLASSIC_PURPOSES = [one for one in Purpose if one not in OWN_PURPOSES]
SECRET = b"sixteen bytes or more"


class JumpingClock(SystemClock):
    """A clock that a test sets forward."""

    def __init__(self):
        self.ahead_ms = 0.0

    def monotonic_ms(self):
        return super().monotonic_ms() + self.ahead_ms


@pytest.fixture
def group(tmp_path):
    made = LinkGroup(tmp_path)
    yield made
    made.stop()


def linked(*nodes):
    """Wait until every two of the nodes are linked, in both handlers."""
    numbers = {node.config.node for node in nodes}
    for node in nodes:
        others = numbers - {node.config.node}
        wait_for(lambda node=node, others=others: node.recorder.up >= others, "the links")


def said(**changes):
    """The HELLO of node 3, from another program."""
    fields = {
        "purpose": Purpose.DLEDGER, "node": 3, "mode": "dledger", "file_size": FILE_SIZE,
        "history": (), "promised_epoch": 0, "max_offset": 0, "confirmed_offset": 0,
        "nonce": os.urandom(32),
    }  # fmt: skip
    return make_hello(**{**fields, **changes})


def ask(one, secret=None, /, **changes):
    return call(one.address, said(**changes), secret, SYSTEM_CLOCK, 20_000)


def link_and_leave(one, node, **changes):
    """Link `node` with `one`, and end this link: only then may another store of `node` call."""
    made = ask(one, node=node, **changes)
    assert made.answer == Linked()
    wait_for(lambda: node in one.recorder.up, "the link")
    made.close()
    wait_for(lambda: node not in one.recorder.up, "the end of the link")


def append(pos, size, term=1, prev=-1, prev_term=-1):
    return AppendRequest(term, prev, prev_term, pos, size, ((term, 1),), -1)


# ---- what goes through


@pytest.mark.parametrize("secret", [None, SECRET])
def test_both_nodes_of_a_pair_may_forward_requests_beside_their_link(group, secret):
    one, two = (group.make(n, secret=secret).start() for n in (1, 2))
    linked(one, two)
    for master, forwarder in ((one, two), (two, one)):
        Master(master.links.forward_port).echo()
        caller = Caller(forwarder.links.dial_forward, master.config.node).opened()
        assert caller.send(1, b"a put") and caller.outcome(1).payload == b"a put"
        caller.stop()
    linked(one, two)
    assert not one.links.problems and not two.links.problems


def test_a_node_without_a_handler_for_requests_says_so(group):
    one, two = (group.make(n).start() for n in (1, 2))
    two.links.forward_port.refusal = NOT_TAKEN
    caller = Caller(one.links.dial_forward, two.config.node)
    wait_for(lambda: caller.problems, "the refusal")
    caller.stop()
    assert "remoting.enabled" in caller.problems[0][0]
    with pytest.raises(ProtocolError, match="not known"):
        one.links.dial_forward(9, 1_000)


def test_every_pair_has_one_link_and_messages_keep_their_order(group):
    nodes = [group.make(n).start() for n in (1, 2, 3)]
    linked(*nodes)
    for sender in nodes:
        for receiver in nodes:
            for number in range(1, 201):
                sender.links.send(receiver.config.node, HeartBeatRequest(1, number, -1))
    for receiver in nodes:
        wait_for(lambda node=receiver: len(node.recorder.got) == 400, "the messages")
        for sender in {1, 2, 3} - {receiver.config.node}:
            rounds = [m.round for p, m, _ in receiver.recorder.got if p == sender]
            assert rounds == list(range(1, 201))
    assert [one.linked for one in nodes[0].links.status()] == [True, True]
    accepted = [len(node.links.accepted.all()) for node in nodes]
    assert accepted == [2, 1, 0], "of two nodes the one with the greater number calls"


@pytest.mark.parametrize("size", [48, 1_000, 100_000, 130_000, 300_000, 4 << 20])
def test_an_append_brings_the_bytes_of_the_log(group, size):
    data = os.urandom(size + 10)
    one, two = group.make(1, source=Bytes(data)).start(), group.make(2).start()
    linked(one, two)
    for _ in range(3):
        one.links.send(2, append(10, size))
        one.links.send(2, CommitRequest(1, 0))
    wait_for(lambda: len(two.recorder.got) == 6)
    assert two.recorder.got == 3 * [
        (1, append(10, size), data[10:]),
        (1, CommitRequest(1, 0), None),
    ]


def test_a_follower_that_does_not_read_holds_no_memory_and_no_thread(group):
    """What waits are messages; the sender goes on, and the link is closed when too many wait."""
    data = os.urandom(1 << 20)
    times = LinkTimes(silence_ms=60_000, retry_least_ms=5_000)
    one = group.make(1, source=Bytes(data), times=times).start()
    two = group.make(2, times=times).start()
    linked(one, two)
    two.recorder.gate.clear()
    began = time.monotonic()
    for number in range(100):
        one.links.send(2, append(0, len(data), prev=number, prev_term=1))
    assert time.monotonic() - began < 30, "sending never waits"
    channel = one.links._channels[2]
    assert channel._queued_bytes <= 32 << 20
    for number in range(2 * QUEUE_MESSAGES_MAX):
        one.links.send(2, HeartBeatRequest(1, number, -1))
    wait_for(lambda: 2 not in one.links.linked, "the end of the link")
    assert "reads too slowly" in one.links.problems[2]
    two.recorder.gate.set()


def test_a_peer_that_takes_nothing_is_left_after_the_silence(group):
    data = os.urandom(4 << 20)
    one = group.make(1, source=Bytes(data), times=LinkTimes(silence_ms=2_000)).start()
    made = ask(one, node=2)
    assert made.answer == Linked()
    wait_for(lambda: 2 in one.recorder.up)
    stop = threading.Event()

    def chatter():  # it talks, a hundred times in the silence, but it does not read
        while not stop.wait(0.02):
            try:
                made.sock.sendall(KEEP_ALIVE)
            except OSError:
                return

    talker = threading.Thread(target=chatter)
    talker.start()
    for number in range(5):
        one.links.send(2, append(0, len(data), prev=number, prev_term=1))
    wait_for(lambda: 2 not in one.recorder.up, "the end of the link")
    stop.set()
    talker.join(60)
    assert "took no bytes" in one.links.problems[2]
    made.close()


def test_a_cut_closes_the_links_that_still_send_what_is_cut(group):
    data = os.urandom(4 << 20)
    times = LinkTimes(silence_ms=60_000)
    one = group.make(1, source=Bytes(data), times=times).start()
    made = ask(one, node=2)
    wait_for(lambda: 2 in one.recorder.up)
    for number in range(5):
        one.links.send(2, append(0, len(data), prev=number, prev_term=1))
    one.links.cut(len(data))
    assert 2 in one.links.linked, "nothing beyond the cut is on its way"
    one.links.cut(len(data) - 1)
    wait_for(lambda: 2 not in one.recorder.up, "the end of the link")
    assert "the log was cut" in one.links.problems[2]
    made.close()


# ---- how a link ends and comes back


def test_a_link_comes_back_after_a_restart(group):
    one, two = group.make(1).start(), group.make(2).start()
    linked(one, two)
    one.stop()
    wait_for(lambda: not two.recorder.up)
    assert two.links.status()[0].problem
    again = group.make(1).start()
    linked(again, two)
    assert two.recorder.links == [(1, True), (1, False), (1, True)]
    assert two.links.problems == {}


class EndingLinks:
    """Links that last as long as a test says, by a clock that it moves."""

    times = DEFAULT_TIMES
    closed = False
    on_failure = None

    def __init__(self, lasts_ms):
        self.clock = self
        self.now_ms = 0.0
        self.lasts_ms = list(lasts_ms)
        self.paused_ms = []

    def monotonic_ms(self):
        return self.now_ms

    def dial(self, peer, address):
        return socket.socket()

    def serve(self, sock, *_):
        self.now_ms += self.lasts_ms.pop(0)
        self.closed = not self.lasts_ms

    def is_set(self):  # of `stopping`, as `wait`
        return False

    def wait(self, timeout_s):
        self.paused_ms.append(round(1000 * timeout_s))


def test_links_that_end_at_once_are_opened_more_and_more_slowly():
    links = EndingLinks([1, 1, 1, 1, 1, 1, 600, 1])
    caller = _PeerCaller(links, 2, "nowhere")
    caller.stopping = links
    caller.run()
    assert links.paused_ms == [50, 100, 200, 400, 500, 500, 50, 100]


def test_a_second_link_replaces_the_first(group):
    one = group.make(1).start()
    first = ask(one, node=2)
    wait_for(lambda: 2 in one.recorder.up)
    second = ask(one, node=2)
    first.sock.settimeout(60)
    while first.sock.recv(4096):
        continue
    wait_for(lambda: len(one.recorder.links) >= 2)
    second.sock.sendall(message_frame(TakeLeadership(7)))
    wait_for(lambda: one.recorder.got == [(2, TakeLeadership(7), None)])
    assert 2 in one.links.linked and (2, False) not in one.recorder.links
    first.close()
    second.close()


@pytest.mark.parametrize("sent", [b"", b"x", message_frame(TakeLeadership(1))[:20]])
def test_a_silent_or_stalled_peer_is_left(group, sent):
    one = group.make(1, times=LinkTimes(silence_ms=300)).start()
    made = ask(one, node=2)
    wait_for(lambda: 2 in one.recorder.up)
    made.sock.sendall(sent)
    wait_for(lambda: 2 not in one.recorder.up, "the end of the link")
    assert "silent for 0.3 s" in one.links.problems[2]
    made.close()


def test_a_trickle_of_one_message_is_no_sign_of_life(group):
    clock = JumpingClock()
    one = group.make(1, times=LinkTimes(silence_ms=60_000), clock=clock).start()
    made = ask(one, node=2)
    wait_for(lambda: 2 in one.recorder.up)
    made.sock.sendall(HEADER.pack(MESSAGE_TYPE - (1 << 63), 60_000))
    with pytest.raises(OSError):
        for sent in range(10_000):
            if sent == 20:
                clock.ahead_ms = 61_000.0
            made.sock.sendall(b"x")
            time.sleep(0.01)
    assert "no whole message" in one.links.problems[2]
    made.close()


def test_idle_links_stay(group, monkeypatch):
    """Three quarters of the silence pass, and then two signs of life come, again and again."""
    heard = collections.Counter()

    class Counting(channel.FrameReceiver):
        def received(self, size):
            got = super().received(size)
            heard[self] += len(got)
            return got

    monkeypatch.setattr(channel, "FrameReceiver", Counting)
    monkeypatch.setattr(LinkTimes, "keep_alive_ms", 100)
    clock = JumpingClock()
    times = LinkTimes(silence_ms=200_000)
    one, two = (group.make(n, times=times, clock=clock).start() for n in (1, 2))
    linked(one, two)
    for _ in range(3):
        clock.ahead_ms += 150_000.0
        heard.clear()
        wait_for(lambda: sum(count >= 2 for count in heard.copy().values()) == 2)
    assert one.recorder.links == [(2, True)] and two.recorder.links == [(1, True)]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (os.urandom(64).join([b"\x00" * 12] * 2), ""),
        (HEADER.pack(5, 100), "without an append"),
        (HEADER.pack(1 - (1 << 63), 16) + bytes(16), "unknown control frame"),
        (HEADER.pack(MESSAGE_TYPE - (1 << 63), 2**31 - 1), "at most"),
        (message_frame(append(0, 100)) + HEADER.pack(0, 4 << 20), "after an append"),
    ],
    ids=range(5),
)  # fmt: skip
def test_nonsense_closes_the_link_with_a_reason(group, sent, text):
    one = group.make(1).start()
    made = ask(one, node=2)
    wait_for(lambda: 2 in one.recorder.up)
    made.sock.sendall(sent)
    wait_for(lambda: 2 not in one.recorder.up, "the end of the link")
    assert text in one.links.problems[2] and one.recorder.got == []
    made.close()


@pytest.mark.parametrize("where", ["on_messages", "view"])
def test_a_defect_ends_the_link_and_not_the_node(group, where, monkeypatch):
    one, two = group.make(1, source=Bytes(bytes(1 << 20))).start(), group.make(2).start()
    linked(one, two)
    failed = []

    def fail(*_args):
        if not failed:
            failed.append(1)
            raise ValueError("a defect")
        return real(*_args)

    owner = one.recorder if where == "on_messages" else one.source
    real = getattr(owner, where)
    if where == "on_messages":  # the link has the method already: make it anew
        monkeypatch.setattr(owner, where, fail)
        one.links._channels[2].close("anew")
        wait_for(lambda: 2 not in one.links.linked)
        linked(one, two)
        two.links.send(1, TakeLeadership(1))
    else:
        monkeypatch.setattr(owner, where, fail)
        one.links.send(2, append(0, 300_000))
    wait_for(lambda: one.links.failure, "the failure")
    assert "ValueError('a defect')" in one.links.failure
    wait_for(lambda: len(two.recorder.links) >= 3, "a new link")

    def goes_through():  # what is sent while the link is made anew is lost
        one.links.send(2, append(0, 300_000))
        return two.recorder.got

    wait_for(goes_through, "a message on the new link")


def test_after_hang_up_no_link_is_opened(group):
    one, two = group.make(1).start(), group.make(2).start()
    linked(one, two)
    one.links.hang_up("its disk has failed")
    wait_for(lambda: "its disk has failed" in two.links.problems.get(1, ""))
    wait_for(lambda: not one.links.linked)  # two may have learned of it sooner


def test_removed_and_added_addresses_are_followed(group):
    ports = dict(group.ports)
    one = group.make(1, ports={1: ports[1], 3: ports[3]}).start()
    three = group.make(3, ports=ports).start()
    linked(one, three)
    two = group.make(2).start()
    wait_for(lambda: "is not in this node's list" in two.links.problems.get(1, ""))
    one.links.set_addresses({n: f"127.0.0.1:{port}" for n, port in ports.items()})
    linked(one, two, three)
    three.links.set_addresses({n: f"127.0.0.1:{ports[n]}" for n in (1, 3)})
    wait_for(lambda: 2 not in three.recorder.up)


def test_nobody_waits_for_a_call_to_a_node_that_has_gone_before_the_end(group, monkeypatch):
    """The driver's thread follows the members: a leader that waits there sends no heart beats."""
    waited, stop = [], _PeerCaller.stop

    def stop_noted(caller, timeout_s=5.0):
        waited.append(caller.peer)
        return stop(caller, timeout_s)

    monkeypatch.setattr(_PeerCaller, "stop", stop_noted)
    calls, over = threading.Event(), threading.Event()

    def dial(_peer, _address):
        calls.set()
        over.wait(60)  # as to a machine that is off
        raise OSError("no answer")

    two = group.make(2)
    monkeypatch.setattr(two.links, "dial", dial)
    two.start()
    assert calls.wait(60)
    two.links.set_addresses({2: f"127.0.0.1:{group.ports[2]}"})
    assert waited == []
    over.set()
    two.stop()
    assert waited == [1]


# ---- who is let in


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node": 1}, ("this node's own", "give each node its own `node`")),
        ({"node": 9}, ("not in this node's list", "add it to `nodes`")),
        ({"mode": "classic"}, ("runs in mode classic", "set the same `mode`")),
        ({"mode": "later"}, ("runs in mode later", "set the same `mode`")),
        ({"file_size": 1 << 30}, ("log files of", "store.commitlog_file_size")),
        *(({"purpose": one}, ("answers dledger only",)) for one in CLASSIC_PURPOSES),
    ],
    ids=str,
)  # fmt: skip
def test_a_caller_outside_the_group_is_refused_with_a_remedy(group, changes, words):
    one = group.make(1).start()
    made = ask(one, **changes)
    made.close()
    assert isinstance(made.answer, Refused)
    assert all(word in made.answer.reason for word in words), made.answer.reason
    assert not one.links.linked and one.state.data.known_stores == {}


@pytest.mark.parametrize("field", ["cluster", "group"])
def test_another_cluster_or_group_is_refused_on_both_sides(group, field):
    one = group.make(1).start()
    with pytest.raises(ProtocolError, match="belongs to c/g, not to"):
        ask(one, **{field: "x"})
    other = group.make(3, **{field: "x"}).start()
    wait_for(lambda: "check the addresses under `nodes`" in other.links.problems.get(1, ""))
    told = []
    one.member.on_refused = lambda address, why: told.append((address, why))
    why = one.member.identity_problem(said(**{field: "x"})) or ""
    assert one.links.decide(said(**{field: "x"}), "caller:1") == Refused(why)
    assert told == [("caller:1", why)]
    assert not one.links.linked and one.state.data.known_stores == {}


def test_a_check_that_says_nothing_is_no_refusal(group, caplog):
    caplog.set_level(logging.DEBUG, "hastore")
    one = group.make(1).start()
    told = []
    one.member.on_refused = lambda address, why: told.append(why)
    host, port = one.address.rsplit(":", 1)
    socket.create_connection((host, int(port)), 60).close()
    wait_for(lambda: "said nothing" in caplog.text)
    assert told == [] and "WARNING" not in caplog.text


def test_a_smaller_number_does_not_call(group):
    three = group.make(3).start()
    made = call(three.address, said(node=2), None, SYSTEM_CLOCK, 20_000)
    made.close()
    assert isinstance(made.answer, Refused) and "node 3 calls node 2" in made.answer.reason


def test_a_node_under_a_wrong_address_is_not_taken(group):
    ports = dict(group.ports)
    group.make(2).start()
    three = group.make(3, ports={**ports, 1: ports[2]}).start()
    wait_for(lambda: "node 2 answers at" in three.links.problems.get(1, ""))
    assert "correct `nodes`" in three.links.problems[1] and 1 not in three.links.linked


def test_nodes_that_have_met_prove_the_secret_first_for_ever(group):
    """Their stores are of the version before, so each might have met an old node until then."""
    one, two = (group.make(n, secret=SECRET) for n in (1, 2))
    for node in (one, two):
        node.state.save(proved_only=False)
        node.start()
    linked(one, two)
    assert one.state.data.proved_nodes == (2,) and two.state.data.proved_nodes == (1,)
    assert one.member.may_be_old() and one.member.may_be_old(3) and not one.member.may_be_old(2)
    old = Peer(one.address)  # it says that it is node 2, as the version before says it
    old.send(CALL_MAGIC)
    assert old.receive(8) == ANSWER_MAGIC
    old.send(frame(encode_hello(said(node=2))))
    assert old.sock.recv(1) == b""
    old.close()


def test_the_secret_lets_in_and_nothing_else_does(group):
    one, two = (group.make(n, secret=SECRET).start() for n in (1, 2))
    linked(one, two)
    three = group.make(3).start()
    wait_for(lambda: three.links.problems.get(1))
    for secret in (None, b"another secret, as long"):
        with pytest.raises((ProtocolError, OSError)):
            ask(one, secret)
    assert not three.recorder.up and 3 not in one.links.linked
    assert 3 not in one.state.data.known_stores


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000, bytes(8), CALL_MAGIC + b"\xff\xff\xff\xff",
        CALL_MAGIC[:-1] + b"\x02" + bytes(20), CALL_MAGIC + b"\x00\x00\x00\x02\xc1\xc1",
    ],
    ids=range(6),
)  # fmt: skip
def test_a_strangers_bytes_close_only_their_connection(group, data):
    one, two = group.make(1).start(), group.make(2).start()
    linked(one, two)
    stranger = Peer(one.address)
    try:
        stranger.send(data)
        assert stranger.closed
    except OSError:
        pass  # it was closed while it sent
    stranger.close()
    assert 2 in one.links.linked and one.recorder.links == [(2, True)]
    assert one.links.failure is None


def test_silent_connections_are_few_and_end(group):
    one = group.make(1, ha={"max_connections": 3, "hello_timeout_ms": 400}).start()
    silent = [socket.create_connection(("127.0.0.1", group.ports[1])) for _ in range(8)]
    two = group.make(2).start()
    linked(one, two)
    wait_for(lambda: len(one.links.accepted.all()) == 1, "the end of the silent connections")
    for sock in silent:
        sock.close()


def test_strangers_do_not_end_the_hello_of_a_nodes_host(group):
    one = group.make(1, ha={"max_connections": 3, "hello_timeout_ms": 60_000}).start()
    slow = Peer(one.address)  # node 3, over a slow network
    slow.send(CALL_MAGIC[:1])
    wait_for(lambda: len(one.links.accepted.all()) == 1, "its connection")
    strangers = [Peer(one.address, "127.0.0.2") for _ in range(30)]
    wait_for(lambda: strangers[-1] and len(one.links.accepted.all()) == 4, "three of them")
    slow.send(CALL_MAGIC[1:])
    assert slow.receive(8) == ANSWER_MAGIC
    for peer in (*strangers, slow):
        peer.close()


# ---- lost disks


def test_a_number_that_is_known_with_another_store_is_refused(group):
    one, two = group.make(1).start(), group.make(2).start()
    linked(one, two)
    two.stop()
    wait_for(lambda: not one.recorder.up)
    assert one.state.data.known_stores == {2: two.state.data.store_id}
    other = group.make(2, store_id="cd" * 16)
    assert other.links.ask_others() == ({1}, {1}), "node 1 knows another store of node 2"
    other.start()
    wait_for(lambda: "known with another store" in other.links.problems.get(1, ""))
    other.stop()
    knowing = group.make(2, store_id="cd" * 16)
    knowing.state.save(lost_disk=True)
    knowing.start()
    linked(one, knowing)
    assert one.state.data.known_stores == {2: "cd" * 16}


def test_a_second_node_of_a_number_does_not_replace_a_linked_one(group):
    one, two = group.make(1).start(), group.make(2).start()
    linked(one, two)
    for changes in ({"lost_disk": True}, {"new_store": True}):
        made = ask(one, node=2, store_id="cd" * 16, **changes)
        made.close()
        assert isinstance(made.answer, Refused) and "two nodes have the number 2" in (
            made.answer.reason
        )
    assert 2 in one.links.linked


def test_a_new_store_is_unknown_everywhere(group):
    nodes = [group.make(n) for n in (1, 2, 3)]
    assert nodes[0].member.answers_needed == 2
    assert nodes[0].links.ask_others() == ({2, 3}, set()), "questions are answered before a start"
    made = ask(nodes[0], new_store=True)
    made.close()
    assert made.answer == StoreKnown(False)
    made = ask(nodes[0])
    made.close()
    assert isinstance(made.answer, Refused) and "has not started yet" in made.answer.reason
    nodes[2].stop()
    assert nodes[0].links.ask_others() == ({2}, set())


@pytest.mark.parametrize(("nodes", "needed"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_how_many_others_must_answer(tmp_path, nodes, needed):
    group = LinkGroup(tmp_path, nodes)
    assert group.make(1).member.answers_needed == needed
    group.stop()


def test_both_nodes_of_two_groups_of_one_name_say_so(group):
    """Of two nodes one calls: the other would only refuse it, and say nothing to its operator."""
    one, two = group.make(1), group.make(2)
    one.state.save(group_id="a" * 16)
    two.state.save(group_id="b" * 16)
    one.start()
    two.start()
    says = "node 2 belongs to another group: the id of its group is bbbb"
    wait_for(lambda: says in two.links.problems.get(1, ""), "the caller's problem")
    assert says in one.links.problems[2]


# ---- the other mode


def test_nodes_of_both_modes_refuse_each_other_by_name(tmp_path):
    classic = Group(tmp_path / "classic", 1)
    node = classic.start(1)
    node.promote()
    group = LinkGroup(tmp_path)
    group.ports[1] = int(node.address.rpartition(":")[2])
    two = group.make(2, store={"commitlog_file_size": node.store.file_size}).start()
    wait_for(lambda: "node 2 is not in this node's list" in two.links.problems.get(1, ""))
    made = ask(node, node=1)  # a caller that knows more than it should
    made.close()
    assert isinstance(made.answer, Refused)
    asked = call(
        two.address, make_hello(node=1, purpose=Purpose.SURVEY), None, SYSTEM_CLOCK, 20_000
    )
    asked.close()
    assert isinstance(asked.answer, Refused) and "node 1 runs in mode classic, node 2 in mode" in (
        asked.answer.reason
    )
    assert asked.hello.open_epoch == 0 and asked.hello.mode == "dledger"
    group.stop()
    classic.stop()


def test_a_classic_node_names_the_mode_of_a_dledger_caller(tmp_path):
    classic = Group(tmp_path, 2)
    node = classic.start(1)
    node.promote()
    made = call(
        node.address,
        said(node=2, file_size=node.store.file_size, promised_epoch=9 << 16 | 2),
        None, SYSTEM_CLOCK, 20_000,
    )  # fmt: skip
    made.close()
    assert isinstance(made.answer, Refused) and "node 2 runs in mode dledger" in made.answer.reason
    assert node.member.open_epoch, "its term is no epoch"
    classic.stop()


# ---- stores that were replaced


def test_who_learns_of_a_replaced_store_tells_the_others(group):
    """Node 3 has no link with node 2 meanwhile, and still refuses its old store."""
    one, three = group.make(1).start(), group.make(3).start()
    linked(one, three)
    link_and_leave(one, 2, store_id="first")
    three.member.learn(said(node=2, store_id="first"))
    link_and_leave(one, 2, store_id="second", lost_disk=True)
    wait_for(lambda: three.state.data.replaced_stores.get(2) == ("first",), "the word of node 1")
    assert three.state.data.known_stores[2] == "second"
    for node in (one, three):
        for lost in (False, True):
            old = ask(node, node=2, store_id="first", lost_disk=lost)
            assert isinstance(old.answer, Refused) and "was replaced" in old.answer.reason
            old.close()


def test_a_store_names_those_that_it_has_replaced(group):
    """A node that was down meanwhile takes the new store, though it does not say `lost_disk`."""
    one = group.make(1).start()
    one.member.learn(said(node=2, store_id="first"))
    unknown = ask(one, node=2, store_id="third")
    assert isinstance(unknown.answer, Refused) and "another store" in unknown.answer.reason
    unknown.close()
    link_and_leave(one, 2, store_id="third", replaced_stores={2: ("first", "second")})
    assert one.state.data.replaced_stores[2] == ("first", "second")
    second = ask(one, node=2, store_id="second", replaced_stores={2: ("first",)})
    assert isinstance(second.answer, Refused) and "was replaced" in second.answer.reason
    second.close()


def test_a_node_does_not_believe_that_its_present_store_was_replaced_by_none(group):
    """What a member knows of a third node is older, perhaps: the later store stays known."""
    now = Stores({2: "b"}, {2: ("a",)})
    assert now.told(Stores({2: "a"}, {}), 1) == now
    assert now.told(Stores({2: "c"}, {2: ("a", "b")}), 1) == Stores({2: "c"}, {2: ("a", "b")})
    assert now.told(Stores({}, {1: ("own",)}), 1) == now
    many = Stores({2: "x"}, {2: tuple(f"s{n}" for n in range(REPLACED_MAX))})
    assert many.with_store(2, "y").replaced[2][-1] == "x"
    assert len(many.with_store(2, "y").replaced[2]) == REPLACED_MAX


def test_ids_of_a_hello_have_a_bound(group):
    one = group.make(1).start()
    for more in ({"stores": {2: "s" * 65}}, {"replaced_stores": {2: ("s" * 65,)}}):
        with pytest.raises((ProtocolError, OSError)):
            ask(one, node=2, **more).close()


def test_a_node_of_another_group_is_not_told_that_it_was_removed(group):
    """It is in the list of its own group: it would refuse reads, and forget its leader."""
    one, two = group.make(1, ports={1: group.ports[1]}), group.make(2)
    one.recorder.removal_of = lambda _node: (5, 2, (1,))
    one.state.save(group_id="a")
    answers = []
    for group_id in ("", "a", "b"):
        two.state.save(group_id=group_id)
        answers.append(one.links.decide(two.member.hello(), "caller:1").removed)
    assert answers == [(5, 2, (1,)), (5, 2, (1,)), None]
