"""A client's links over plain sockets and over libzmq: the same is promised of both."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from hastore.client.connections import resolver, socket_transport
from hastore.client.connections.socket_transport import SocketLinks
from hastore.client.connections.transport import PING_MS, PONG_MS, Arrival, Links, make_links
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.client.conftest import Node

MIB = 1024 * 1024
MakeLinks = Callable[..., tuple[str, Links]]


@pytest.fixture(params=["tcp", "zmq+tcp"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make() -> Iterator[MakeLinks]:
    """Make links to one address and open them; returns the address's own name too."""
    made: list[Links] = []

    def links(address: str, scheme: str = "tcp", clock: Any = SYSTEM_CLOCK) -> tuple[str, Links]:
        (own,), found = make_links((address.replace("tcp", scheme, 1),), clock)
        made.append(found)
        found.open([own])
        return own, found

    yield links
    for each in made:
        each.close()


def until(links: Links, condition: Callable[[list[Arrival]], Any], timeout_s: float = 60.0) -> Any:
    """Wait on links until the arrivals are as wanted; return all of them."""
    arrivals: list[Arrival] = []
    end = time.monotonic() + timeout_s
    while not condition(arrivals):
        assert time.monotonic() < end, arrivals
        arrivals += links.wait(0.1)
    return arrivals


def news(arrivals: list[Arrival]) -> list[bool]:
    return [each.up for each in arrivals if each.reply is None]


def up(links: Links) -> list[Arrival]:
    return until(links, lambda arrivals: True in news(arrivals))  # type: ignore[no-any-return]


def ask(links: Links, address: str, rid: int) -> None:
    assert links.send(address, api.AskMap(rid))
    arrivals = until(links, lambda arrivals: any(each.reply for each in arrivals))
    assert [each.reply.rid for each in arrivals if each.reply] == [rid]


class Peer:
    """A node that does what the test says, step by step."""

    def __init__(self, *, receive_buffer: int | None = None) -> None:
        self.listener = socket.socket()
        if receive_buffer is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(5)
        self.listener.settimeout(60.0)
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.socks: list[socket.socket] = []

    def accept(self, *, most: int = 1_000) -> None:
        sock, _ = self.listener.accept()
        sock.settimeout(60.0)
        self.socks.append(sock)
        self.zmtp = ZmtpConnection(SocketType.ROUTER, (64 * MIB, 64 * MIB))
        sock.sendall(self.zmtp.take_output()[:most])

    def read(self) -> list[Any]:
        """Read once; what the protocol answers is kept for the test to send or not."""
        data = self.socks[-1].recv(256 * 1024)
        assert data, "closed by the client"
        found = self.zmtp.receive(data)
        assert self.zmtp.failure is None, self.zmtp.failure
        return found

    def shake(self) -> None:
        self.accept()
        while not self.zmtp.is_open:
            assert self.read() == []

    def close(self) -> None:
        for sock in (*self.socks, self.listener):
            sock.close()


def meet(peer: Peer, links: Links) -> None:
    """Shake hands, both at once."""
    shaking = threading.Thread(target=peer.shake)
    shaking.start()
    up(links)
    shaking.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.close()


class Hand:
    """A clock that goes when the test moves it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now)


# -- the same over both


def test_news_of_a_node_that_goes_and_comes(node: Node, make: MakeLinks, scheme: str) -> None:
    address, links = make(node.address, scheme)
    assert links.addresses == [address] == [node.address]
    assert news(up(links)) == [True]
    assert links.is_up(address)
    ask(links, address, 1)
    node.server.stop()
    arrivals = until(links, news)
    assert news(arrivals) == [False]
    assert not links.is_up(address)
    node.restart()
    assert news(up(links)) == [True]
    ask(links, address, 2)


def test_nothing_is_sent_to_whoever_is_not_there(
    node: Node, make: MakeLinks, scheme: str
) -> None:
    node.server.stop()
    address, links = make(node.address, scheme)
    assert not links.send(address, api.AskMap(1))
    assert not links.send("tcp://127.0.0.1:1", api.AskMap(1))
    assert not links.wait(0.1)
    assert not links.send(address, api.AskMap(1), b"payload")
    node.restart()
    assert news(up(links)) == [True]
    ask(links, address, 7)  # and the first one that comes is the answer to this


def test_a_link_made_anew_tells_of_its_way_up_alone(
    node: Node, make: MakeLinks, scheme: str
) -> None:
    address, links = make(node.address, scheme)
    up(links)
    node.backend.transfer.hold = True
    assert links.send(address, api.AskMap(1))
    links.reopen(address)
    assert not links.is_up(address)
    arrivals = up(links)
    assert [(each.reply, each.up) for each in arrivals] == [(None, True)]
    ask(links, address, 2)
    links.reopen("tcp://127.0.0.1:1")
    assert set(links.addresses) == {address, "tcp://127.0.0.1:1"}
    ask(links, address, 3)


def test_a_peer_that_reads_slowly_gets_all_in_order(make: MakeLinks, scheme: str) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, links = make(peer.address, scheme)
        meet(peer, links)
        sent = [bytes([n]) * (n * 300_000 + 1) for n in range(12)]  # 20 MiB
        begin = time.monotonic()
        for rid, payload in enumerate(sent):
            assert links.send(address, api.Put(rid), payload)
        assert time.monotonic() - begin < 60.0, "it waited for the reader"
        got: list[Any] = []
        while len(got) < len(sent):
            assert links.wait(0.0) == []
            got += peer.read()
        assert [payload for _, payload in got] == sent
        assert [api.decode_request(header).rid for header, _ in got] == list(range(12))
    finally:
        peer.close()


def test_what_is_unsent_at_the_close_is_sent_within_its_time(scheme: str, make: MakeLinks) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, links = make(peer.address, scheme)
        meet(peer, links)
        payload = os.urandom(9 * MIB)
        assert links.send(address, api.Put(1), payload)
        closing = threading.Thread(target=links.close, args=(20.0,))
        closing.start()
        got: list[Any] = []
        while not got:
            got = peer.read()
        closing.join(60)
        assert not closing.is_alive()
        assert got[0][1] == payload
    finally:
        peer.close()


def test_a_close_does_not_wait_for_a_peer_that_does_not_read(make: MakeLinks, scheme: str) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, links = make(peer.address, scheme)
        meet(peer, links)
        assert links.send(address, api.Put(1), bytes(20 * MIB))
        begin = time.monotonic()
        links.close(0.2)
        assert time.monotonic() - begin < 60.0  # the peer never reads
    finally:
        peer.close()


@pytest.mark.parametrize(("bound", "named"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
def test_names_and_both_families(
    bound: str, named: str, make: MakeLinks, scheme: str
) -> None:
    server = ApiServer(f"tcp://{bound}:0", FakeBackend(), ApiConfig(), on_failure=raise_failure)
    server.start()
    try:
        port = server.endpoint.rpartition(":")[2]
        address, links = make(f"tcp://{named}:{port}", scheme)
        up(links)
        ask(links, address, 1)
    finally:
        assert server.stop(60)


def test_a_sleep_ends_with_a_wake_from_another_thread(
    node: Node, make: MakeLinks, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transport, "PING_MS", 1e7)  # no chore ends the sleep
    _, links = make(node.address, scheme)
    up(links)
    links.collect()
    for _ in range(20):
        waking = threading.Timer(0.005, links.wake)
        waking.start()
        begin = time.monotonic()
        links.wait(120.0)
        waking.join()
        assert time.monotonic() - begin < 60.0
    links.wake()  # before the sleep: it does not begin
    begin = time.monotonic()
    links.sleep(120.0)
    assert time.monotonic() - begin < 60.0


def test_a_message_that_cannot_be_encoded_harms_no_link(
    node: Node, make: MakeLinks, scheme: str
) -> None:
    address, links = make(node.address, scheme)
    up(links)
    with pytest.raises(UnicodeEncodeError):
        links.send(address, api.FindKey(1, "\udc80", "k"))
    ask(links, address, 2)
    assert links.is_up(address)


def test_a_reply_that_is_none_is_left_out(peer: Peer, make: MakeLinks, scheme: str) -> None:
    _, links = make(peer.address, scheme)
    meet(peer, links)
    good = encode_front(api.encode(api.Found(5, 1)), 3) + b"abc"
    peer.socks[-1].sendall(encode_front(b"junk") + good)
    arrivals = until(links, lambda arrivals: arrivals)
    assert [(each.reply.rid, each.payload) for each in arrivals if each.reply] == [(5, b"abc")]


def test_descriptors_and_threads_end_with_the_links(node: Node, scheme: str) -> None:
    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    (address,), links = make_links((node.address.replace("tcp", scheme, 1),))
    links.open([address])  # the first use of all modules
    up(links)
    links.close()
    del links
    gc.collect()  # what earlier tests left
    end = time.monotonic() + 60.0
    while node.server._connections.count and time.monotonic() < end:
        time.sleep(0.005)
    before = open_now()
    for _ in range(5):
        _, links = make_links((node.address.replace("tcp", scheme, 1),))
        links.open([address, "tcp://127.0.0.1:1"])
        up(links)
        links.reopen(address)
        links.close()
        links.close()
        del links
    while any(now > then for now, then in zip(open_now(), before, strict=True)):
        assert time.monotonic() < end + 60.0, (before, open_now())
        time.sleep(0.01)


# -- plain sockets alone


def test_a_link_takes_no_more_than_its_bound(make: MakeLinks) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, links = make(peer.address)
        meet(peer, links)
        taken = 0
        while links.send(address, api.Put(taken), bytes(4 * MIB)):
            taken += 1
            assert taken < 20
        assert taken * 4 * MIB > socket_transport.UNSENT_BYTES_MAX
        got = 0
        while got < taken:
            links.wait(0.0)
            got += len(peer.read())
        assert links.send(address, api.AskMap(1))
    finally:
        peer.close()


def test_a_peer_without_a_sign_of_life_is_given_up(peer: Peer, make: MakeLinks) -> None:
    clock = Hand()
    address, links = make(peer.address, "tcp", clock)
    meet(peer, links)
    clock.now += PING_MS - 1
    assert links.collect() == [] and links.due_s() > 0.0
    clock.now += 1
    assert links.collect() == []
    while not peer.zmtp.has_output:  # a PING came
        assert peer.read() == []
    peer.socks[-1].sendall(peer.zmtp.take_output())  # its answer is a sign of life
    deadline = time.monotonic() + 60.0
    while links._links[address].pinged_ms is not None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        assert links.wait(0.01) == []
    clock.now += PING_MS
    assert links.collect() == []
    clock.now += PONG_MS - 1
    assert links.collect() == [] and links.is_up(address)
    clock.now += 1
    assert news(links.collect()) == [False]
    assert not links.is_up(address)


def test_who_was_stopped_itself_first_reads_what_came_meanwhile(
    peer: Peer, make: MakeLinks
) -> None:
    clock = Hand()
    address, links = make(peer.address, "tcp", clock)
    meet(peer, links)
    clock.now += PING_MS
    assert links.collect() == []
    while not peer.zmtp.has_output:
        peer.read()
    peer.socks[-1].sendall(peer.zmtp.take_output())
    time.sleep(0.05)  # on loopback it is there
    clock.now += 100 * PONG_MS
    links._ready = [(links.fileno(), 0)]  # type: ignore[attr-defined]  # nothing of this link
    assert links.collect() == [] and links.is_up(address)


def test_an_attempt_without_an_answer_ends_and_another_follows(
    peer: Peer, make: MakeLinks
) -> None:
    clock = Hand()
    _, links = make(peer.address, "tcp", clock)
    for _ in range(3):
        peer.accept(most=64)  # the greeting, no READY
        links.wait(0.05)
        clock.now += socket_transport.CONNECT_MS
        assert links.collect() == []
        clock.now += 1_000.0
        assert links.collect() == []
    meet(peer, links)


def test_replies_before_a_peers_failure_are_told(peer: Peer, make: MakeLinks) -> None:
    _, links = make(peer.address)
    meet(peer, links)
    peer.socks[-1].sendall(encode_front(api.encode(api.Found(3, 0))) + b"\xf0\0")
    arrivals = until(links, news)
    found = [(each.reply is not None, each.up) for each in arrivals]
    assert found == [(True, True), (False, False)]


@pytest.mark.parametrize("host", ["no-such-host", "a..b", "x" * 70, "nul\0"])
def test_names_that_nobody_knows_are_asked_for_again(
    node: Node, make: MakeLinks, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Nobody waits for it meanwhile, and the link stands as soon as the name is known."""
    known = threading.Event()
    real = socket.getaddrinfo

    def look(name: str, port: int, **options: Any) -> Any:
        if not known.is_set():
            if options["flags"] or name == "no-such-host":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return real(name, port, **{**options, "flags": socket.AI_NUMERICHOST})
        if options["flags"]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    address, links = make(f"tcp://{host}:{node.address.rpartition(':')[2]}")
    assert not links.send(address, api.AskMap(1))
    assert links.wait(0.2) == []
    known.set()
    up(links)
    ask(links, address, 2)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "nul\0", "no address"])
def test_what_is_no_numeric_address_is_left_to_the_look_up(host: str) -> None:
    assert resolver.numeric_targets(host, 1) == []


def test_a_look_up_without_a_thread_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found: list[resolver.Targets] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    resolver.look_up("localhost", 1, found.append)
    assert found == [[]]


def test_a_look_up_that_was_overtaken_is_left(node: Node, make: MakeLinks) -> None:
    address, links = make(node.address)
    up(links)
    assert isinstance(links, SocketLinks)
    link = links._links[address]
    sock = link.sock
    links._found(link, [(int(socket.AF_INET), ("127.0.0.1", 1))])
    assert links.wait(0.1) == []
    assert link.sock is sock and links.is_up(address)


def test_a_family_that_the_system_has_not_is_passed_over(
    node: Node, make: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = socket.socket

    def without(family: int = socket.AF_INET, *arguments: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *arguments, **named)

    port = int(node.address.rpartition(":")[2])
    both: resolver.Targets = [
        (int(socket.AF_INET6), ("::1", port, 0, 0)), (int(socket.AF_INET), ("127.0.0.1", port)),
    ]  # fmt: skip
    monkeypatch.setattr(socket_transport, "numeric_targets", lambda *_: both)
    with monkeypatch.context() as patched:
        patched.setattr(socket_transport.socket, "socket", without)
        address, links = make(node.address)
        up(links)
    ask(links, address, 1)


# -- cut off


class Cut:
    """Raise KeyboardInterrupt at the n-th line that SocketLinks runs, as a signal may."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __enter__(self) -> Cut:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename == socket_transport.__file__ else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


DEEDS: dict[str, Callable[[SocketLinks, str], Any]] = {
    "send": lambda links, address: links.send(address, api.AskMap(1)),
    "send much": lambda links, address: links.send(address, api.Put(1), bytes(4 * MIB)),
    "collect": lambda links, address: (
        links.send(address, api.AskMap(1)), time.sleep(0.002), links.collect(),
    ),
    "open": lambda links, address: links.open([address]),
    "reopen": lambda links, address: links.reopen(address),
    "up": lambda links, address: (links.reopen(address), up(links)),
    "sleep": lambda links, address: links.sleep(0.5),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("deed", DEEDS)
def test_links_recover_from_a_signal_at_any_line(
    node: Node, make: MakeLinks, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    monkeypatch.setattr(socket_transport, "RECONNECT_MS", 1.0)
    monkeypatch.setattr(socket_transport, "PING_MS", 1e7)  # no chore ends the last sleep
    address, links = make(node.address)
    assert isinstance(links, SocketLinks)
    up(links)
    at = 0
    while True:
        at += 1
        cut = Cut(at)
        inside = None
        if deed == "open":
            links._disconnect(links._links.pop(address))
        if deed == "sleep":
            links.wake()
        try:
            with cut:
                DEEDS[deed](links, address)
        except KeyboardInterrupt:
            inside = links._inside
        links.open([address])  # as the owner does each time that it learns of its addresses
        told = links.collect()
        if inside and address in [each.address for each in told]:
            assert False in news(told), cut.where  # whoever waits for an answer learns of it
        end = time.monotonic() + 60.0
        while not links.is_up(address):
            assert time.monotonic() < end, cut.where
            told += links.wait(0.05)
        rid = 1_000 + at
        while not links.send(address, api.AskMap(rid)):
            assert time.monotonic() < end, cut.where
            links.wait(0.01)
        while not any(each.reply and each.reply.rid == rid for each in told):
            assert time.monotonic() < end, cut.where
            told += links.wait(0.05)
        links.wake()
        begin = time.monotonic()
        links.sleep(120.0)
        assert time.monotonic() < begin + 60.0, f"a wake-up is lost: {cut.where}"
        if cut.left > 0:
            break
    assert at > 5


def test_a_descriptor_that_was_left_open_ends_no_sleep_again_and_again(
    node: Node, make: MakeLinks
) -> None:
    _, links = make(node.address)
    assert isinstance(links, SocketLinks)
    up(links)
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        links._epoll.register(ours)
        links.collect()
        links.collect()
        begin = time.monotonic()
        links.sleep(0.2)
        assert time.monotonic() - begin > 0.15
