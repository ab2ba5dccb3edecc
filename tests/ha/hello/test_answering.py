"""HELLO on real sockets: who is accepted, and how untrusted, lying and slow callers are treated."""

import contextlib
import os
import socket
import struct
import threading
import time

import msgspec
import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import AuthenticationError, ClassicPeerError, ProtocolError
from hastore.ha.hello import peer as peer_module
from hastore.ha.hello.accepting import KNOWN_TIMES
from hastore.ha.hello.peer import Call, call
from hastore.ha.master.group_transfer import Need
from hastore.protocol.ha_link import REPORT
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    CALL_MAGIC,
    SECRET_ANSWER_MAGIC,
    SECRET_CALL_MAGIC,
    CopyFrom,
    Opening,
    Promised,
    Purpose,
    Refused,
    StreamFrom,
    Surveyed,
    answerer_proof,
    caller_proof,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
    frame,
    frame_length,
)
from tests.ha.nodes import Peer, peer, wait_for
from tests.protocol.test_hello import make_hello

SECRET = b"sixteen bytes or more"
E1 = 1 << 16 | 1


@pytest.fixture
def pair(make_group):
    """An open master of a group of two; the other node is not running."""
    group = make_group(2, ha={"hello_timeout_ms": 1000})
    node = group.start(1)
    node.promote()  # R = 1: its own answer is enough
    node.put(b"a", b"b")
    return node


def hello(node, /, **changes):
    """Node 2's HELLO, with an empty log, after it has promised the master's epoch."""
    said = {
        "node": 2, "purpose": Purpose.FOLLOW, "promised_epoch": node.state.data.promised_epoch,
        "history": (), "max_offset": 0, "confirmed_offset": 0,
        "file_size": node.store.file_size, "nonce": os.urandom(32),
    }  # fmt: skip
    return make_hello(**{**said, **changes})


def ask(node, secret=None, /, **changes) -> Call:
    return call(node.address, hello(node, **changes), secret, SYSTEM_CLOCK, 3000)


def answer(node, secret=None, /, **changes):
    made = ask(node, secret, **changes)
    made.close()
    return made.answer


def test_a_survey_changes_nothing(pair):
    before = pair.state.data
    made = ask(pair, purpose=Purpose.SURVEY)
    made.close()
    assert made.answer == Surveyed()
    assert (made.hello.node, made.hello.open_epoch) == (1, pair.member.open_epoch)
    assert made.hello.max_offset == pair.store.max_offset
    assert made.hello.history == pair.state.history
    assert pair.state.data == before and pair.member.open_epoch


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cluster": "other"}, "cluster"), ({"group": "other"}, "cluster"),
        ({"node": 1}, "own"), ({"node": 7}, "list"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_caller_outside_the_group_is_refused_for_any_purpose(pair, changes, word, purpose):
    """Its epoch does not turn the master read-only either."""
    made, mine, theirs = open_by_hand(
        pair, hello(pair, purpose=purpose, promised_epoch=9 << 16 | 2, **changes)
    )
    made.send(frame(b""))
    made.receive(frame_length(made.receive(4)))
    refused = decode_answer(made.receive(frame_length(made.receive(4))))
    made.close()
    assert isinstance(refused, Refused) and word in refused.reason
    assert pair.member.open_epoch and pair.state.data.promised_epoch == pair.member.open_epoch


def test_a_known_number_with_another_store_is_refused(pair):
    assert answer(pair) == StreamFrom(0)
    refused = answer(pair, store_id="cd" * 16)
    assert isinstance(refused, Refused) and "another store" in refused.reason
    refused = answer(pair, store_id="cd" * 16, purpose=Purpose.PROMISE, promised_epoch=9 << 16 | 2)
    assert isinstance(refused, Refused) and pair.member.open_epoch


def test_another_file_size_is_refused(pair):
    refused = answer(pair, file_size=1 << 30)
    assert isinstance(refused, Refused) and "commitlog_file_size" in refused.reason


def test_a_caller_with_a_higher_promise_turns_the_master_read_only(pair):
    refused = answer(pair, promised_epoch=9 << 16 | 2)
    assert isinstance(refused, Refused)
    assert not pair.member.open_epoch and pair.superseded == [9 << 16 | 2]
    assert pair.state.data.promised_epoch == 9 << 16 | 2
    assert pair.state.data.superseded_by == 9 << 16 | 2
    with pytest.raises(Exception, match="not writable"):
        pair.put(b"c")


def test_a_promise_is_kept(pair):
    epoch = 9 << 16 | 2
    promised = answer(pair, purpose=Purpose.PROMISE, promised_epoch=epoch, acks=1, nodes=(1, 2))
    assert isinstance(promised, Promised)
    assert promised.max_offset == pair.store.max_offset
    assert promised.history == pair.state.history and not promised.unclean
    assert not pair.member.open_epoch and pair.state.data.promised_epoch == epoch
    again = answer(pair, purpose=Purpose.PROMISE, promised_epoch=epoch, acks=1, nodes=(1, 2))
    assert isinstance(again, Promised)
    for lower in (8 << 16 | 2, 1 << 16 | 2):
        refused = answer(pair, purpose=Purpose.PROMISE, promised_epoch=lower)
        assert isinstance(refused, Refused) and refused.promised_epoch == epoch
    stolen = answer(pair, purpose=Purpose.PROMISE, promised_epoch=10 << 16 | 1)
    assert isinstance(stolen, Refused) and "belong" in stolen.reason


@pytest.mark.parametrize(
    ("start", "end"), [(-1, 5), (5, 4), (0, 10**9), (-(2**63), 0), (2**62, 2**62 + 1)]
)
def test_a_copy_of_no_range_is_refused(pair, start, end):
    refused = answer(pair, purpose=Purpose.COPY, copy_from=start, copy_to=end)
    assert isinstance(refused, Refused) and "no range" in refused.reason


def test_a_copy_is_served_only_while_the_source_is_as_it_answered(pair):
    epoch, end = 9 << 16 | 2, pair.store.max_offset
    assert isinstance(answer(pair, purpose=Purpose.PROMISE, promised_epoch=epoch), Promised)
    wanted = {
        "purpose": Purpose.COPY, "promised_epoch": epoch, "copy_from": 0, "copy_to": end,
        "expect_epoch": pair.state.last_epoch, "expect_end": end,
    }  # fmt: skip
    made = ask(pair, **wanted)
    assert made.answer == CopyFrom(0)
    made.sock.settimeout(60)
    got = b""
    while piece := made.sock.recv(65536):
        got += piece
    made.close()
    assert got[12:] == pair.bytes() and len(got) == 12 + end
    for changed in (
        {"expect_epoch": 5},
        {"expect_end": end + 1},
        {"promised_epoch": epoch - 65536},
    ):
        made = ask(pair, **{**wanted, **changed})
        made.sock.settimeout(60)
        assert made.sock.recv(1) == b""
        made.close()


# ---- secrets


@pytest.fixture
def guarded(make_group):
    node = make_group(2).start(1, secret=SECRET)
    node.promote()
    return node


@pytest.fixture
def upgraded(guarded):
    """The same with a store of the version before, which has not met node 2 in this version."""
    guarded.state.save(proved_only=False)
    return guarded


def test_the_secret_lets_in(guarded):
    assert answer(guarded, SECRET) == StreamFrom(0)


@pytest.mark.parametrize("secret", [None, b"another secret, as long"])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_without_the_secret_nothing_is_done(guarded, secret, purpose):
    before = guarded.state.data
    with pytest.raises((ProtocolError, OSError)):
        answer(guarded, secret, purpose=purpose, promised_epoch=9 << 16 | 2)
    assert guarded.state.data == before and guarded.member.open_epoch


def test_a_caller_with_another_secret_is_told_what_to_mend(guarded):
    with pytest.raises(AuthenticationError, match="ha.secret_file must hold the same bytes"):
        answer(guarded, b"another secret, as long")


def test_a_secret_where_none_is_expected_is_refused(pair):
    with pytest.raises((ProtocolError, OSError)):
        answer(pair, SECRET)


def open_by_hand(node, said):
    """Do the opening up to the proof; return peer, my HELLO and the peer's."""
    made = Peer(node.address)
    made.send(CALL_MAGIC)
    assert made.receive(8) == ANSWER_MAGIC
    mine = encode_hello(said)
    made.send(frame(mine))
    theirs = made.receive(frame_length(made.receive(4)))
    return made, mine, theirs


def test_a_replayed_proof_of_the_version_before_is_refused(upgraded):
    said = hello(upgraded, purpose=Purpose.SURVEY)
    made, mine, theirs = open_by_hand(upgraded, said)
    proof = caller_proof(SECRET, mine, theirs)
    made.send(frame(proof))
    made.receive(frame_length(made.receive(4)))
    assert decode_answer(made.receive(frame_length(made.receive(4)))) == Surveyed()
    made.close()
    made, mine, fresh = open_by_hand(upgraded, said)  # exactly the same HELLO
    assert fresh != theirs, "the answerer's nonce is fresh"
    made.send(frame(proof))
    assert made.closed
    made.close()


def test_a_reflected_proof_of_the_version_before_is_refused(upgraded):
    """A caller without the secret sends the node's own proof back to it."""
    made, mine, theirs = open_by_hand(upgraded, hello(upgraded, purpose=Purpose.SURVEY))
    for proof in (
        answerer_proof(SECRET, mine, theirs, b""),
        answerer_proof(SECRET, theirs, mine, encode_answer(Surveyed())),
        caller_proof(SECRET, theirs, mine),
    ):
        made.send(frame(proof))
        assert made.closed
        made.close()
        made, mine, theirs = open_by_hand(upgraded, hello(upgraded, purpose=Purpose.SURVEY))
    made.close()


class FalseMaster(threading.Thread):
    """Listens, says HELLO as node 1, and answers with the proof that `prove` makes.

    It is of the version before: it hangs up on a caller that wants a proof first.
    """

    def __init__(self, prove, magic=ANSWER_MAGIC):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.prove, self.magic = prove, magic
        self.start()

    def run(self):
        sock, _ = self.listener.accept()
        made = Peer.__new__(Peer)
        made.sock = sock
        if made.receive(8) == SECRET_CALL_MAGIC:
            sock.close()
            made.sock, _ = self.listener.accept()
            made.receive(8)
        with made.sock:
            made.send(self.magic)
            if self.magic != ANSWER_MAGIC:
                return
            theirs = made.receive(frame_length(made.receive(4)))
            mine = encode_hello(make_hello(node=1, open_epoch=E1, nonce=os.urandom(32)))
            made.send(frame(mine))
            proof = made.receive(frame_length(made.receive(4)))
            given = encode_answer(StreamFrom(0))
            made.send(frame(self.prove(theirs, mine, given, proof)) + frame(given))

    def close(self):
        self.join(60)
        self.listener.close()


@pytest.mark.parametrize(
    "prove",
    [
        lambda theirs, mine, given, proof: b"",
        lambda theirs, mine, given, proof: proof,  # reflected
        lambda theirs, mine, given, proof: answerer_proof(
            b"guessed, not known", theirs, mine, given
        ),
        lambda theirs, mine, given, proof: answerer_proof(
            SECRET, theirs, mine, encode_answer(StreamFrom(7))
        ),
    ],
    ids=["none", "reflected", "guessed", "another answer"],
)
def test_a_false_master_is_not_believed(prove):
    false = FalseMaster(prove)
    with pytest.raises(AuthenticationError, match="ha.secret_file must hold the same bytes"):
        call(false.address, make_hello(), SECRET, SYSTEM_CLOCK, 3000, may_be_old=True)
    false.close()


# ---- proof first


def begin_proof(node):
    """Begin the exchange with a secret; return peer and the node's nonce."""
    made = Peer(node.address)
    made.send(SECRET_CALL_MAGIC)
    assert made.receive(8) == SECRET_ANSWER_MAGIC
    return made, made.receive(32)


def test_a_caller_without_the_secret_learns_nothing_of_the_node(guarded):
    """Neither in the exchange with a secret, nor in the one of the version before."""
    made, theirs = begin_proof(guarded)
    said = Opening(b"another secret, as long", bytes(32), theirs, tls=False)
    made.send(said.caller_nonce + said.caller_proof)
    assert received_until_closed(made) == b""
    made = Peer(guarded.address)
    made.send(CALL_MAGIC + frame(encode_hello(hello(guarded))))
    assert received_until_closed(made) == SECRET_ANSWER_MAGIC


def received_until_closed(made):
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := made.sock.recv(65536):
            got += piece
    made.close()
    return got


@pytest.mark.parametrize("may_be_old", [False, True])
def test_a_node_says_nothing_of_itself_to_who_does_not_know_the_secret(may_be_old):
    """A false master that begins as one of this version gets a nonce and a proof."""
    got = []

    def serve():
        made = Peer.__new__(Peer)
        made.sock, _ = listener.accept()
        got.append(made.receive(8))
        made.send(SECRET_ANSWER_MAGIC + bytes(32))
        got.append(made.receive(64))
        made.send(bytes(32))
        got.append(received_until_closed(made))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AuthenticationError, match="does not have this node's secret"):
            call(address, make_hello(), SECRET, SYSTEM_CLOCK, 20_000, may_be_old=may_be_old)
        thread.join(60)
    assert got[0] == SECRET_CALL_MAGIC and got[2] == b""
    assert make_hello().store_id.encode() not in b"".join(got)


def test_proofs_are_neither_replayed_nor_reflected(guarded):
    made, theirs = begin_proof(guarded)
    good = Opening(SECRET, os.urandom(32), theirs, tls=False)
    made.send(good.caller_nonce + good.caller_proof)
    assert made.receive(32) == good.answerer_proof
    made.close()
    for proof in (
        good.caller_proof,  # replayed: the node's nonce is another one now
        good.answerer_proof,
        Opening(SECRET, good.caller_nonce, theirs, tls=True).caller_proof,
    ):
        again, fresh = begin_proof(guarded)
        assert fresh != theirs
        again.send(good.caller_nonce + proof)
        assert received_until_closed(again) == b""
    again, fresh = begin_proof(guarded)
    reflected = Opening(SECRET, fresh, fresh, tls=False)  # the node's own nonce comes back
    again.send(fresh + reflected.answerer_proof)
    assert received_until_closed(again) == b""


def test_who_has_proved_the_secret_must_seal_what_it_says(guarded):
    """HELLO without a MAC is not read."""
    made, theirs = begin_proof(guarded)
    good = Opening(SECRET, os.urandom(32), theirs, tls=False)
    made.send(good.caller_nonce + good.caller_proof)
    made.receive(32)
    made.send(frame(encode_hello(hello(guarded, purpose=Purpose.PROMISE))) + bytes(99))
    assert received_until_closed(made) == b""
    assert guarded.state.data.promised_epoch == guarded.member.open_epoch


# ---- the version before


def test_a_node_of_the_version_before_is_answered_and_told_of_loudly(upgraded, caplog, monkeypatch):
    monkeypatch.setattr(peer_module, "is_loopback", lambda _host: False)
    made, mine, theirs = open_by_hand(upgraded, hello(upgraded))
    made.send(frame(caller_proof(SECRET, mine, theirs)))
    made.receive(frame_length(made.receive(4)))
    assert decode_answer(made.receive(frame_length(made.receive(4)))) == StreamFrom(0)
    made.close()
    assert "the link with node 2 at 127.0.0.1" in caplog.text
    assert "is not tamper-proof (it is of the version before)" in caplog.text


def test_a_master_of_the_version_before_is_followed_by_an_upgraded_node_only():
    def prove(theirs, mine, given, proof):
        return answerer_proof(SECRET if proof else None, theirs, mine, given)

    false = FalseMaster(prove)
    made = call(false.address, make_hello(), SECRET, SYSTEM_CLOCK, 20_000, may_be_old=True)
    assert made.answer == StreamFrom(0) and not made.proved
    made.close()
    false.close()
    false = FalseMaster(prove)
    with pytest.raises(ProtocolError, match="upgrade it"):
        call(false.address, make_hello(), SECRET, SYSTEM_CLOCK, 20_000)
    call(false.address, make_hello(), None, SYSTEM_CLOCK, 20_000).close()
    false.close()


def test_who_was_met_in_this_version_is_not_taken_for_an_old_one_again(upgraded):
    assert upgraded.member.may_be_old()
    assert answer(upgraded, SECRET) == StreamFrom(0)
    assert upgraded.state.data.proved_nodes == (2,) and not upgraded.member.may_be_old()
    made = Peer(upgraded.address)
    made.send(CALL_MAGIC + frame(encode_hello(hello(upgraded))))
    assert received_until_closed(made) == SECRET_ANSWER_MAGIC


def test_an_old_number_says_nothing_for_one_that_was_met(make_group):
    """In a group of three that is half upgraded, each number counts alone."""
    node = make_group(3).start(1, secret=SECRET)
    node.state.save(proved_only=False, proved_nodes=(2,))
    made, _, _ = open_by_hand(node, hello(node, node=3, purpose=Purpose.SURVEY))
    made.close()
    made = Peer(node.address)
    made.send(CALL_MAGIC)
    assert made.receive(8) == ANSWER_MAGIC
    made.send(frame(encode_hello(hello(node, node=2, purpose=Purpose.SURVEY))))
    assert received_until_closed(made) == b""


def test_a_classic_master_is_recognised_by_the_echo():
    false = FalseMaster(lambda *_: b"", magic=CALL_MAGIC)
    with pytest.raises(ClassicPeerError, match="classic_master"):
        call(false.address, make_hello(), None, SYSTEM_CLOCK, 3000)
    false.close()


def test_another_version_is_refused():
    false = FalseMaster(lambda *_: b"", magic=ANSWER_MAGIC[:-1] + b"\x7f")
    with pytest.raises(ProtocolError, match="version"):
        call(false.address, make_hello(), None, SYSTEM_CLOCK, 3000)
    false.close()


# ---- untrusted peers


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\xff" * 70_000, b"\x80" + bytes(7),
        CALL_MAGIC[:-1] + b"\x02" + bytes(20), CALL_MAGIC + b"\xff\xff\xff\xff",
        CALL_MAGIC + b"\x00\x01\x00\x01", CALL_MAGIC + frame(b""), CALL_MAGIC + frame(b"\x80"),
        CALL_MAGIC + frame(os.urandom(1000)), CALL_MAGIC + frame(msgspec.msgpack.encode([1] * 999)),
        bytes(8), b"\x00" * 7 + b"\x01",
    ],
    ids=range(13),
)  # fmt: skip
def test_invalid_bytes_close_only_their_connection(pair, data):
    with peer(pair) as stranger:
        try:
            stranger.send(data)
        except OSError:
            return
        assert stranger.closed
    assert answer(pair) == StreamFrom(0)
    assert pair.member.open_epoch


def test_hello_may_come_one_byte_at_a_time(pair):
    made = Peer(pair.address)
    for byte in CALL_MAGIC:
        made.send(bytes([byte]))
    assert made.receive(8) == ANSWER_MAGIC
    for byte in frame(encode_hello(hello(pair))):
        made.send(bytes([byte]))
    theirs = made.receive(frame_length(made.receive(4)))
    assert decode_hello(theirs).node == 1
    for byte in frame(b"") + REPORT.pack(0):  # the report comes before the answer was read
        made.send(bytes([byte]))
    assert made.receive(frame_length(made.receive(4))) == b""
    assert decode_answer(made.receive(frame_length(made.receive(4)))) == StreamFrom(0)
    wait_for(lambda: [s.ack_offset for s in pair.ha.slaves()] == [0])
    made.close()


@pytest.mark.parametrize("sent", [b"", CALL_MAGIC[:5], CALL_MAGIC, CALL_MAGIC + b"\0\0\1\0" + b"x"])
def test_a_slow_hello_is_closed_in_time(pair, sent):
    began = time.monotonic()
    with peer(pair) as slow:
        slow.send(sent)
        assert slow.closed
        assert time.monotonic() - began > 0.7


@pytest.mark.parametrize("reset", [False, True])
def test_a_check_that_says_nothing_is_no_refusal(pair, caplog, reset):
    """Load balancers ask so whether a port is open, every few seconds."""
    told = []
    pair.member.on_refused = lambda address, why: told.append(why)
    check = Peer(pair.address)
    wait_for(lambda: pair.ha.accepted.all())
    linger = struct.pack("ii", int(reset), 0)
    check.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    check.sock.close()
    wait_for(lambda: not pair.ha.accepted.all())
    assert told == [] and "HA connection of" not in caplog.text
    with peer(pair) as half:
        half.send(CALL_MAGIC[:5])
        half.sock.shutdown(socket.SHUT_WR)
        assert half.closed and "in the middle of a message" in told[0]


def test_a_trickle_does_not_prolong_the_hello(pair):
    with peer(pair) as slow:
        began = time.monotonic()
        slow.send(CALL_MAGIC + b"\0\0\x10\0")
        with pytest.raises(OSError):  # the node resets it
            while time.monotonic() - began < 60:  # the announced 4 KiB take 200 s
                slow.send(b"x")
                time.sleep(0.05)


def test_the_limit_drops_silent_connections_first(make_group):
    group = make_group(2, ha={"max_connections": 4, "hello_timeout_ms": 20_000})
    node = group.start(1)
    node.promote()
    follower = ask(node)  # it has spoken
    assert follower.answer == StreamFrom(0)
    most = 4 * KNOWN_TIMES
    silent = [Peer(node.address) for _ in range(most + 3)]
    wait_for(lambda: sum(gone(one) for one in silent) == 4, "the end of four silent ones")
    assert len(node.ha.accepted.all()) == most
    assert answer(node, purpose=Purpose.SURVEY) == Surveyed()  # and another silent one is dropped
    assert len(node.ha.slaves()) == 1
    for one in silent:
        one.close()
    follower.close()


def gone(one):
    """Whether the node has closed a connection on which it says nothing; does not wait."""
    one.sock.settimeout(0)
    try:
        return one.sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_do_not_end_the_hello_of_a_nodes_host(make_group):
    """They have few slots, and none of those that hosts of `nodes` have."""
    group = make_group(2, ha={"max_connections": 4, "hello_timeout_ms": 60_000})
    node = group.start(1)
    node.promote()
    slow = Peer(node.address)  # node 2, over a slow network
    slow.send(CALL_MAGIC[:1])
    wait_for(lambda: len(node.ha.accepted.all()) == 1, "its connection")
    strangers = [Peer(node.address, "127.0.0.2") for _ in range(40)]
    wait_for(lambda: sum(gone(one) for one in strangers) == 36, "the end of all but four")
    made, mine, theirs = finish_by_hand(slow, hello(node))
    assert decode_hello(theirs).node == 1
    made.send(frame(b""))
    made.receive(frame_length(made.receive(4)))
    assert decode_answer(made.receive(frame_length(made.receive(4)))) == StreamFrom(0)
    for one in (*strangers, made):
        one.close()


def finish_by_hand(made, said):
    """Send the rest of the magic, and HELLO; return peer, my HELLO and the peer's."""
    made.send(CALL_MAGIC[1:])
    assert made.receive(8) == ANSWER_MAGIC
    mine = encode_hello(said)
    made.send(frame(mine))
    return made, mine, made.receive(frame_length(made.receive(4)))


def test_who_makes_room_is_drawn_at_random_and_not_the_oldest(make_group):
    """The node's own slots too: a flood from a node's host ends no HELLO there for certain."""
    group = make_group(2, ha={"max_connections": 2, "hello_timeout_ms": 60_000})
    node = group.start(1)
    most, ends = 2 * KNOWN_TIMES, []
    for _ in range(6):
        peers = [Peer(node.address) for _ in range(most)]
        wait_for(lambda: len(node.ha.accepted.all()) == most, "all slots taken")
        peers.append(Peer(node.address))
        wait_for(lambda peers=peers: any(map(gone, peers)), "the end of one")
        ends.append([gone(one) for one in peers].index(True))
        for one in peers:
            one.close()
        wait_for(lambda: not node.ha.accepted.all(), "the end of all")
    # Six times the oldest one: with a probability of 16 ** -6.
    assert set(ends) != {0} and len(set(ends)) > 1, ends


def count_links():
    """Count the sockets and eventfds of this process."""
    count = 0
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{one}").startswith(("socket", "anon_inode"))
    return count


def test_many_untrusted_peers_leave_no_thread_and_no_descriptor(pair):
    before = threading.active_count()
    descriptors = count_links()
    for n in range(60):
        with peer(pair) as stranger:
            stranger.send(os.urandom(n + 1))
    wait_for(  # all conditions at once: the last peer may not have been accepted yet
        lambda: (
            threading.active_count() <= before
            and count_links() <= descriptors
            and pair.ha.accepted.all() == []
        ),
        "the end of threads, descriptors and connections",
    )


# ---- a follower's stream


def follow_by_hand(node, **changes):
    """Follow as node 2 without a client; return the raw connection."""
    made = ask(node, **changes)
    assert isinstance(made.answer, StreamFrom), made.answer
    raw = Peer.__new__(Peer)
    raw.sock = made.sock
    raw.sock.settimeout(60)
    return raw


@pytest.mark.parametrize("bad", [-1, -(2**63), "beyond", 2**63 - 1, "backwards"])
def test_a_wrong_report_closes_and_confirms_no_put(pair, bad):
    raw = follow_by_hand(pair)
    raw.report(0)
    end = pair.store.max_offset
    released = []
    pair.transfer.add(
        end, float("inf"), Need.SLAVES, lambda outcome, level: released.append(outcome)
    )
    wait_for(lambda: pair.ha.slaves() and pair.ha.slaves()[0].ack_offset == 0)
    if bad == "backwards":
        raw.report(1)
        bad = 0
    raw.report(end + 1 if bad == "beyond" else bad)
    raw_closed = Peer.closed.fget(raw)
    assert raw_closed and not released
    assert pair.store.confirmed_offset <= 1 and pair.transfer.waiting == 1
    raw.close()


def test_a_batch_never_crosses_a_file_nor_an_epochs_start(pair):
    while pair.store.max_offset < 70_000:
        pair.put(*[b"x" * 900] * 5)
    pair.promote()
    starts = [entry.start for entry in pair.state.history]
    while pair.store.max_offset < 140_000:
        pair.put(*[b"y" * 900] * 7)
    raw = follow_by_hand(pair)
    raw.report(0)
    at, end, size = 0, pair.store.max_offset, pair.store.file_size
    while at < end:
        first = raw.receive(12)
        offset, length = int.from_bytes(first[:8], signed=True), int.from_bytes(first[8:])
        body = raw.receive(length)
        if offset < 0 or not length:
            continue
        assert offset == at and body == pair.bytes(at, at + length)
        assert at // size == (at + length - 1) // size
        assert not any(at < start < at + length for start in starts[1:])
        at += length
    raw.close()


def test_a_later_connection_of_a_node_replaces_the_earlier(pair):
    first = follow_by_hand(pair)
    second = follow_by_hand(pair)
    assert Peer.closed.fget(first)
    assert len(pair.ha.slaves()) == 1
    first.close()
    second.close()
    wait_for(lambda: pair.ha.slaves() == [])


def test_limits_reach_a_follower_before_and_after_it_reports(pair):
    raw = follow_by_hand(pair)
    end = pair.store.max_offset
    told = []
    raw.report(0)

    def limits():
        head = raw.receive(12)
        first, size = int.from_bytes(head[:8], signed=True), int.from_bytes(head[8:])
        body = raw.receive(size)
        if first < 0:
            told.append((int.from_bytes(body[:8]), int.from_bytes(body[8:])))
        return told

    wait_for(limits)
    assert told[0] == (0, 0)  # a synchronous master hides unconfirmed records from readers
    while raw.sock and pair.store.confirmed_offset < end:
        raw.report(end)
        time.sleep(0.05)
    wait_for(lambda: limits()[-1] == (end, end))
    raw.close()
