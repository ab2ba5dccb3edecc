"""Links on which requests are forwarded, on real sockets: outcomes, bounds, ends, who may call."""

import threading
from dataclasses import replace
from functools import partial

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ProtocolError
from hastore.ha.hello import answering, forward_link
from hastore.ha.hello.forward_link import NOT_TAKEN, STARTS, STOPS, dial_member
from hastore.protocol.forward_link import ClientRequest, Kind, reason_of
from tests.ha.hello.forwarding import CLIENT, Caller, Master
from tests.ha.nodes import wait_for
from tests.ha.tls.conftest import GroupPki

SECRET = b"sixteen bytes or more"


@pytest.fixture
def callers():
    made = []

    def make(node, to, **options):
        made.append(Caller(partial(dial_member, node.member), to, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def pki(tmp_path):
    return GroupPki(tmp_path / "pki")


@pytest.fixture
def pair(make_group):
    group = make_group(2)
    return group.start(1), group.start(2)


def test_requests_get_their_outcomes_in_any_order(pair, callers):
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    for number in range(3):
        assert caller.send(number, b"request %d" % number)
    wait_for(lambda: len(master.got) == 3, "the requests")
    assert [r.client for r in master.got] == [
        ClientRequest(CLIENT, 4_711, b"request %d" % number, 17) for number in range(3)
    ]
    assert {r.node for r in master.got} == {2}
    master.got[2].answer(b"an answer")
    master.got[0].refuse("not the master")
    master.got[1].leave_open("the term changed")
    assert caller.outcome(2)[:] == (Kind.ANSWER, 2, b"an answer")
    assert caller.outcome(0).kind is Kind.REFUSED
    assert reason_of(caller.outcome(0)) == "not the master"
    assert caller.outcome(1).kind is Kind.UNKNOWN
    master.got[1].answer(b"too late: it has its outcome")
    assert caller.send(3) and wait_for(lambda: master.got[3:], "one more")
    assert not caller.ends


@pytest.mark.parametrize("how", ["plain", "secret", "tls", "both"])
def test_many_requests_of_all_sizes_pass_under_every_protection(make_group, pki, callers, how):
    group = make_group(2)
    secret = SECRET if how in ("secret", "both") else None
    one, two = (
        group.start(n, secret=secret, tls=pki.contexts(n) if how in ("tls", "both") else None)
        for n in (1, 2)
    )
    Master(one.ha.forward_port).echo()
    caller = callers(two, 1).opened()
    frames = [bytes([n % 256]) * size for n, size in enumerate([1, 300, 70_000, 600_000] * 12)]
    for number, frame in enumerate(frames):
        assert caller.send(number, frame)
    assert [caller.outcome(n).payload for n in range(len(frames))] == frames
    assert not caller.ends and not caller.problems


def test_what_was_sent_before_a_link_broke_is_unknown_and_the_next_link_works(pair, callers):
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    assert caller.send(1)
    wait_for(lambda: master.got, "the request")
    for connection in one.ha.accepted.all():
        connection.close("cut by the test")
    ((_, unsent),) = wait_for(lambda: caller.ends, "the end")
    assert unsent == [] and not caller.outcomes
    master.got[0].answer(b"nobody waits any more")
    caller.opened()
    master.echo()
    assert caller.send(2) and caller.outcome(2).kind is Kind.ANSWER


def test_what_waited_for_the_kernel_when_a_link_ended_was_not_sent(pair, callers):
    one, two = pair
    master = Master(one.ha.forward_port)
    goes_on, taken = threading.Event(), []

    def slow(requests):
        taken.extend(requests)
        assert goes_on.wait(60)

    one.ha.forward_port.handler = slow
    caller = callers(two, 1).opened()
    frame, sent = bytes(1 << 20), 0
    while caller.link._channel._queued_bytes < 32 << 20:  # more than the kernel ever takes
        assert caller.send(sent, frame)
        sent += 1
    (broken,) = one.ha.accepted.all()
    caller.link._channel.close("cut by the test")
    goes_on.set()
    ((_, unsent),) = caller.ends
    assert unsent and unsent == list(range(sent - len(unsent), sent))
    wait_for(lambda: not broken.reader.alive, "the end of the connection")
    assert {r.id for r in taken}.isdisjoint(unsent)
    assert not master.got


def test_too_many_requests_of_a_node_are_refused(pair, callers, monkeypatch):
    monkeypatch.setattr(forward_link, "REQUESTS_MAX", 3)
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    for number in range(5):
        assert caller.send(number)
    assert caller.outcome(3).kind is caller.outcome(4).kind is Kind.REFUSED
    assert "too many" in reason_of(caller.outcome(3))
    for one_of_them in master.got:
        one_of_them.answer(b"")
    assert caller.outcome(0)[:] == (Kind.ANSWER, 0, b"")  # of a request without an answer
    assert caller.send(5)
    wait_for(lambda: len(master.got) == 4, "there is room again")


def test_bytes_of_requests_are_bounded_too(pair, callers, monkeypatch):
    monkeypatch.setattr(forward_link, "BYTES_MAX", 1_000)
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    assert caller.send(1, bytes(2_000)) and caller.send(2)
    assert caller.outcome(2).kind is Kind.REFUSED
    master.got[0].answer(b"")
    assert caller.outcome(1).kind is Kind.ANSWER
    assert caller.send(3)
    wait_for(lambda: len(master.got) == 2, "there is room again")


def test_a_second_link_of_a_node_replaces_the_first(pair, callers):
    one, two = pair
    Master(one.ha.forward_port).echo()
    first = callers(two, 1).opened()
    second = callers(two, 1).opened()
    wait_for(lambda: first.ends, "the end of the first")
    first.link.close("the test needs one")
    assert second.opened().send(1) and second.outcome(1).kind is Kind.ANSWER


def test_a_link_that_is_not_used_is_closed(pair, callers):
    one, two = pair
    Master(one.ha.forward_port).echo()
    caller = callers(two, 1).opened()
    assert caller.send(1) and caller.outcome(1)
    caller.link._times = replace(caller.link._times, idle_ms=0.0)
    wait_for(lambda: caller.ends, "the end")
    assert caller.ends == [("not used any more", [])]
    wait_for(lambda: not caller.link.alive and not one.ha.accepted.all(), "both ends")


def test_a_link_with_a_request_that_takes_long_is_used(pair, callers):
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    assert caller.send(1)
    wait_for(lambda: master.got, "the request")
    caller.link._times = replace(caller.link._times, idle_ms=100.0)
    caller.link._used_ms -= 60_000
    assert caller.link._is_over(SYSTEM_CLOCK.monotonic_ms()) is None
    master.got[0].answer(b"late")
    assert caller.outcome(1).payload == b"late"


def test_silence_ends_a_link(pair, callers, monkeypatch):
    one, two = pair
    Master(one.ha.forward_port)
    monkeypatch.setattr(forward_link, "KEEP_ALIVE", b"")  # both ends say nothing any more
    caller = callers(two, 1, silence_ms=400).opened()
    wait_for(lambda: caller.send(1) or caller.ends, "a request, or the end")
    wait_for(lambda: caller.ends, "the end")
    assert "silent" in caller.ends[0][0] and not caller.outcomes


def test_an_idle_link_shows_that_both_ends_live(pair, callers):
    one, two = pair
    Master(one.ha.forward_port).echo()
    caller = callers(two, 1).opened()
    heard_ms = caller.link._channel.heard_ms
    for _ in range(3):
        wait_for(lambda at=heard_ms: caller.link._channel.heard_ms > at, "a sign of life")
        heard_ms = caller.link._channel.heard_ms
    assert not caller.ends


def test_a_node_without_a_handler_refuses(pair, callers):
    one, two = pair
    caller = callers(two, 1)
    for why, lasts in ((STARTS, False), (NOT_TAKEN, True), (STOPS, False)):
        one.ha.forward_port.refusal = why
        problem = (f"node 1 refuses: {why}", lasts)
        wait_for(lambda said=problem: said in caller.problems, "the refusal")
    assert not caller.send(1)


def test_a_node_of_the_version_before_is_named(pair, callers, monkeypatch):
    one, two = pair
    Master(one.ha.forward_port).echo()

    def as_before(payload):
        raise ProtocolError("not a HELLO: Invalid enum value 'forward'")

    monkeypatch.setattr(answering, "decode_hello", as_before)
    caller = callers(two, 1)
    wait_for(lambda: caller.problems, "the end of the call")
    text, lasting = caller.problems[0]
    assert "version before" not in text and not lasting, "so does a node that ends"
    text, lasting = wait_for(lambda: [one for one in caller.problems if one[1]], "more")[0]
    assert "version before" in text and "upgrade" in text


def test_without_the_secret_nothing_is_taken(make_group, callers):
    group = make_group(2)
    one = group.start(1, secret=SECRET)
    two = group.start(2, secret=b"another secret, as long")
    master = Master(one.ha.forward_port)
    caller = callers(two, 1)
    wait_for(lambda: caller.problems, "the refusal")
    assert "secret" in caller.problems[0][0] and not caller.send(1) and not master.got


def test_strangers_beyond_loopback_are_refused_without_a_secret(pair):
    one, _ = pair
    Master(one.ha.forward_port)
    answer = one.ha.forward_port.decide("10.1.2.3:5", proved=False)
    assert "loopback" in answer.reason
    assert one.ha.forward_port.decide("10.1.2.3:5", proved=True).requests
    assert one.ha.forward_port.decide("127.0.0.1:5", proved=False).requests


def test_changed_bytes_end_the_link_and_are_told(make_group, callers):
    group = make_group(2)
    one, two = (group.start(n, secret=SECRET) for n in (1, 2))
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    assert caller.send(1)
    wait_for(lambda: master.got, "the request")
    sealed = master.got[0]._link._channel._sock
    with sealed._send_lock:  # bytes between both nodes that no node has sent
        sealed._sock.sendall(b"\0\0\0\5" + bytes(16) + b"wrong")
    wait_for(lambda: caller.ends, "the end")
    assert "changed" in caller.ends[0][0] and "changed" in caller.refused[0]
    assert not caller.outcomes


def test_a_caller_that_breaks_the_protocol_is_ended(pair):
    one, two = pair
    master = Master(one.ha.forward_port)
    made = dial_member(two.member, 1, 20_000)
    try:
        made.sock.sendall(b"\0\0\0\x09\x02" + bytes(8))  # an answer: only the master sends those
        made.sock.settimeout(60)
        while made.sock.recv(4_096):  # keep-alives until the end
            continue
    except ConnectionResetError:
        pass
    finally:
        made.close()
    assert not master.got


def test_an_answer_that_is_too_long_leaves_its_request_open(pair, callers, monkeypatch):
    one, two = pair
    master, caller = Master(one.ha.forward_port), callers(two, 1).opened()
    assert caller.send(1)
    wait_for(lambda: master.got, "the request is there")
    monkeypatch.setattr("hastore.protocol.forward_link.CLIENT_FRAME_BYTES_MAX", 100)
    master.got[0].answer(bytes(101))
    assert caller.outcome(1).kind is Kind.UNKNOWN
    assert one.ha.forward_port._pending[2].requests == 0


def test_a_node_that_stops_ends_its_links(pair, callers):
    one, two = pair
    Master(one.ha.forward_port).echo()
    caller = callers(two, 1).opened()
    one.stop()
    wait_for(lambda: caller.ends, "the end")
    wait_for(lambda: caller.problems, "a call in vain")
    assert not caller.problems[-1][1]
