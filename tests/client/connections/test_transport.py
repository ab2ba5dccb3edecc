"""Both transports, over plain sockets and over libzmq, keep the same contract."""

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

from hastore.client.connections import bootstrap, socket_transport
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import (
    CONNECT_MS,
    PING_MS,
    PONG_MS,
    Arrival,
    Transport,
)
from hastore.client.connections.transport_factory import make_transport
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.client.conftest import Node

MIB = 1024 * 1024
MakeTransport = Callable[..., tuple[str, Transport]]


@pytest.fixture(params=["tcp", "zmq+tcp"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    """Make a transport with a connection to one address; returns the address without scheme zmq."""
    made: list[Transport] = []

    def transport(
        address: str, scheme: str = "tcp", clock: Any = SYSTEM_CLOCK
    ) -> tuple[str, Transport]:
        (own,), found = make_transport((address.replace("tcp", scheme, 1),), clock)
        made.append(found)
        found.open([own])
        return own, found

    yield transport
    for each in made:
        each.close()


def until(
    transport: Transport, condition: Callable[[list[Arrival]], Any], timeout_s: float = 60.0
) -> Any:
    """Wait on a transport until the arrivals fit the condition; return all of them."""
    arrivals: list[Arrival] = []
    end = time.monotonic() + timeout_s
    while not condition(arrivals):
        assert time.monotonic() < end, arrivals
        arrivals += transport.wait(0.1)
    return arrivals


def news(arrivals: list[Arrival]) -> list[bool]:
    return [each.up for each in arrivals if each.reply is None]


def up(transport: Transport) -> list[Arrival]:
    return until(transport, lambda arrivals: True in news(arrivals))  # type: ignore[no-any-return]


def ask(transport: Transport, address: str, rid: int) -> None:
    assert transport.send(address, api.AskMap(rid))
    arrivals = until(transport, lambda arrivals: any(each.reply for each in arrivals))
    assert [each.reply.rid for each in arrivals if each.reply] == [rid]


class Peer:
    """A node that the test drives step by step."""

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
        """Read once; the protocol's answer is left for the test to send or not."""
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


def meet(peer: Peer, transport: Transport) -> None:
    """Complete the handshake."""
    shaking = threading.Thread(target=peer.shake)
    shaking.start()
    up(transport)
    shaking.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.close()


class Hand:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now)


# -- both transports


def test_a_node_that_goes_and_comes_is_reported(
    node: Node, make: MakeTransport, scheme: str
) -> None:
    address, transport = make(node.address, scheme)
    assert transport.addresses == [address] == [node.address]
    assert news(up(transport)) == [True]
    assert transport.is_up(address)
    ask(transport, address, 1)
    node.server.stop()
    arrivals = until(transport, news)
    assert news(arrivals) == [False]
    assert not transport.is_up(address)
    node.restart()
    assert news(up(transport)) == [True]
    ask(transport, address, 2)


def test_nothing_is_sent_to_an_unreachable_address(
    node: Node, make: MakeTransport, scheme: str
) -> None:
    node.server.stop()
    address, transport = make(node.address, scheme)
    assert not transport.send(address, api.AskMap(1))
    assert not transport.send("tcp://127.0.0.1:1", api.AskMap(1))
    assert not transport.wait(0.1)
    assert not transport.send(address, api.AskMap(1), b"payload")
    node.restart()
    assert news(up(transport)) == [True]
    ask(transport, address, 7)  # the first reply is the answer to this request


def test_a_replaced_connection_reports_only_up(
    node: Node, make: MakeTransport, scheme: str
) -> None:
    address, transport = make(node.address, scheme)
    up(transport)
    node.backend.transfer.hold = True
    assert transport.send(address, api.AskMap(1))
    transport.reopen(address)
    assert not transport.is_up(address)
    arrivals = up(transport)
    assert [(each.reply, each.up) for each in arrivals] == [(None, True)]
    ask(transport, address, 2)
    transport.reopen("tcp://127.0.0.1:1")
    assert set(transport.addresses) == {address, "tcp://127.0.0.1:1"}
    ask(transport, address, 3)


def test_a_peer_that_reads_slowly_gets_all_in_order(make: MakeTransport, scheme: str) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, transport = make(peer.address, scheme)
        meet(peer, transport)
        sent = [bytes([n]) * (n * 300_000 + 1) for n in range(12)]  # 20 MiB
        begin = time.monotonic()
        for rid, payload in enumerate(sent):
            assert transport.send(address, api.Put(rid), payload)
        assert time.monotonic() - begin < 60.0, "it waited for the reader"
        got: list[Any] = []
        while len(got) < len(sent):
            assert transport.wait(0.0) == []
            got += peer.read()
        assert [payload for _, payload in got] == sent
        assert [api.decode_request(header).rid for header, _ in got] == list(range(12))
    finally:
        peer.close()


def test_unsent_bytes_are_sent_within_the_linger_time(scheme: str, make: MakeTransport) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, transport = make(peer.address, scheme)
        meet(peer, transport)
        payload = os.urandom(9 * MIB)
        assert transport.send(address, api.Put(1), payload)
        closing = threading.Thread(target=transport.close, args=(20.0,))
        closing.start()
        got: list[Any] = []
        while not got:
            got = peer.read()
        closing.join(60)
        assert not closing.is_alive()
        assert got[0][1] == payload
    finally:
        peer.close()


def test_a_close_does_not_wait_for_a_peer_that_does_not_read(
    make: MakeTransport, scheme: str
) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, transport = make(peer.address, scheme)
        meet(peer, transport)
        assert transport.send(address, api.Put(1), bytes(20 * MIB))
        begin = time.monotonic()
        transport.close(0.2)
        assert time.monotonic() - begin < 60.0  # the peer never reads
    finally:
        peer.close()


@pytest.mark.parametrize(("bound", "named"), [("127.0.0.1", "localhost"), ("[::1]", "[::1]")])
def test_names_and_both_families(bound: str, named: str, make: MakeTransport, scheme: str) -> None:
    server = ApiServer(f"tcp://{bound}:0", FakeBackend(), ApiConfig(), on_failure=raise_failure)
    server.start()
    try:
        port = server.endpoint.rpartition(":")[2]
        address, transport = make(f"tcp://{named}:{port}", scheme)
        up(transport)
        ask(transport, address, 1)
    finally:
        assert server.stop(60)


def test_a_sleep_ends_with_a_wake_from_another_thread(
    node: Node, make: MakeTransport, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transport, "PING_MS", 1e7)  # no timer ends the sleep
    _, transport = make(node.address, scheme)
    up(transport)
    transport.collect()
    for _ in range(20):
        waking = threading.Timer(0.005, transport.wake)
        waking.start()
        begin = time.monotonic()
        transport.wait(120.0)
        waking.join()
        assert time.monotonic() - begin < 60.0
    transport.wake()  # before the sleep, which then returns at once
    begin = time.monotonic()
    transport.sleep(120.0)
    assert time.monotonic() - begin < 60.0


def test_a_message_that_cannot_be_encoded_harms_no_connection(
    node: Node, make: MakeTransport, scheme: str
) -> None:
    address, transport = make(node.address, scheme)
    up(transport)
    with pytest.raises(UnicodeEncodeError):
        transport.send(address, api.FindKey(1, "\udc80", "k"))
    ask(transport, address, 2)
    assert transport.is_up(address)


def test_a_malformed_reply_is_skipped(peer: Peer, make: MakeTransport, scheme: str) -> None:
    _, transport = make(peer.address, scheme)
    meet(peer, transport)
    good = encode_front(api.encode(api.Found(5, 1)), 3) + b"abc"
    peer.socks[-1].sendall(encode_front(b"junk") + good)
    arrivals = until(transport, lambda arrivals: arrivals)
    assert [(each.reply.rid, each.payload) for each in arrivals if each.reply] == [(5, b"abc")]


def test_descriptors_and_threads_end_with_the_transport(node: Node, scheme: str) -> None:
    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    (address,), transport = make_transport((node.address.replace("tcp", scheme, 1),))
    transport.open([address])  # first use, which loads modules
    up(transport)
    transport.close()
    del transport
    gc.collect()  # objects of earlier tests
    end = time.monotonic() + 60.0
    while node.server._connections.count and time.monotonic() < end:
        time.sleep(0.005)
    before = open_now()
    for _ in range(5):
        _, transport = make_transport((node.address.replace("tcp", scheme, 1),))
        transport.open([address, "tcp://127.0.0.1:1"])
        up(transport)
        transport.reopen(address)
        transport.close()
        transport.close()
        del transport
    while any(now > then for now, then in zip(open_now(), before, strict=True)):
        assert time.monotonic() < end + 60.0, (before, open_now())
        time.sleep(0.01)


# -- plain sockets only


def test_a_connection_buffers_no_more_than_its_bound(make: MakeTransport) -> None:
    peer = Peer(receive_buffer=8_192)
    try:
        address, transport = make(peer.address)
        meet(peer, transport)
        taken = 0
        while transport.send(address, api.Put(taken), bytes(4 * MIB)):
            taken += 1
            assert taken < 20
        assert taken * 4 * MIB > socket_transport.UNSENT_BYTES_MAX
        got = 0
        while got < taken:
            transport.wait(0.0)
            got += len(peer.read())
        assert transport.send(address, api.AskMap(1))
    finally:
        peer.close()


def test_a_peer_that_answers_no_ping_is_dropped(peer: Peer, make: MakeTransport) -> None:
    clock = Hand()
    address, transport = make(peer.address, "tcp", clock)
    meet(peer, transport)
    clock.now += PING_MS - 1
    assert transport.collect() == [] and transport.due_s() > 0.0
    clock.now += 1
    assert transport.collect() == []
    while not peer.zmtp.has_output:  # a PING came
        assert peer.read() == []
    peer.socks[-1].sendall(peer.zmtp.take_output())  # the PONG
    deadline = time.monotonic() + 60.0
    while transport._connections[address].pinged_ms is not None:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        assert transport.wait(0.01) == []
    clock.now += PING_MS
    assert transport.collect() == []
    clock.now += PONG_MS - 1
    assert transport.collect() == [] and transport.is_up(address)
    clock.now += 1
    assert news(transport.collect()) == [False]
    assert not transport.is_up(address)


def test_a_ping_behind_bytes_that_still_leave_is_waited_for(make: MakeTransport) -> None:
    """Over a slow link a large message may take longer than a PONG."""
    clock, peer = Hand(), Peer(receive_buffer=8_192)
    try:
        address, transport = make(peer.address, "tcp", clock)
        meet(peer, transport)
        assert transport.send(address, api.Put(1), bytes(16 * MIB))
        clock.now += PING_MS
        for _ in range(40):
            before = transport.acked_bytes(address)
            while transport.acked_bytes(address) <= before:  # a little leaves in each half second
                peer.read()
                assert transport.collect() == []
            clock.now += socket_transport.LOOK_MS
            assert transport.collect() == [] and transport.is_up(address)
            assert 0.0 <= transport.due_s() <= socket_transport.LOOK_MS / 1_000.0
        assert transport.acked_bytes(address) < transport.sent_bytes(address)
        lost = clock.now
        while transport.is_up(address):  # and now nothing leaves any more
            clock.now += socket_transport.LOOK_MS
            transport.collect()
        assert PONG_MS - socket_transport.LOOK_MS <= clock.now - lost
        assert clock.now - lost <= PONG_MS + socket_transport.LOOK_MS
    finally:
        peer.close()


def test_a_client_that_was_stopped_first_reads_its_input(peer: Peer, make: MakeTransport) -> None:
    clock = Hand()
    address, transport = make(peer.address, "tcp", clock)
    meet(peer, transport)
    clock.now += PING_MS
    assert transport.collect() == []
    while not peer.zmtp.has_output:
        peer.read()
    peer.socks[-1].sendall(peer.zmtp.take_output())
    time.sleep(0.05)  # loopback has delivered it by then
    clock.now += 100 * PONG_MS
    # An event of none of its connections.
    transport._ready = [(transport.fileno(), 0)]  # type: ignore[attr-defined]
    assert transport.collect() == [] and transport.is_up(address)


def test_an_attempt_without_an_answer_ends_and_another_follows(
    peer: Peer, make: MakeTransport
) -> None:
    clock = Hand()
    _, transport = make(peer.address, "tcp", clock)
    for _ in range(3):
        peer.accept(most=64)  # the greeting, no READY
        transport.wait(0.05)
        clock.now += CONNECT_MS
        assert transport.collect() == []
        clock.now += 1_000.0
        assert transport.collect() == []
    meet(peer, transport)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an attempt of libzmq last 0.2 s instead of 5 s; by itself it lasts up to 127 s."""
    zmq_transport = pytest.importorskip("hastore.client.connections.zmq_transport")
    monkeypatch.setattr(zmq_transport, "CONNECT_MS", 200.0)


@pytest.mark.usefixtures("hasty")
def test_libzmq_leaves_a_peer_that_takes_the_connection_and_says_nothing(
    peer: Peer, make: MakeTransport
) -> None:
    _, transport = make(peer.address, "zmq+tcp")
    peer.accept(most=64)  # the greeting, no READY
    meet(peer, transport)


def _calling(address: str) -> set[str]:
    """Return the local ends of the connections to an address that nothing has answered yet."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    with open("/proc/thread-self/net/tcp") as table:
        rows = [row.split() for row in table][1:]
    return {own for _, own, far, state, *_ in rows if far.endswith(port) and state == "02"}


@pytest.mark.usefixtures("hasty")
def test_libzmq_calls_anew_while_the_network_drops_its_calls(make: MakeTransport) -> None:
    """Else it goes on up to a minute after the network is back, when the kernel tries again."""
    with contextlib.ExitStack() as ends:
        full = ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host = full.getsockname()
        address = f"tcp://127.0.0.1:{host[1]}"
        ends.enter_context(socket.create_connection(host))  # the kernel drops what comes next
        own, transport = make(address, "zmq+tcp")
        seen: set[str] = set()
        end = time.monotonic() + 60.0
        while len(seen) < 3:
            assert time.monotonic() < end, seen
            seen |= _calling(address)
            assert transport.wait(0.02) == []
        assert not transport.is_up(own)


def test_replies_before_a_peers_failure_are_returned(peer: Peer, make: MakeTransport) -> None:
    _, transport = make(peer.address)
    meet(peer, transport)
    peer.socks[-1].sendall(encode_front(api.encode(api.Found(3, 0))) + b"\xf0\0")
    arrivals = until(transport, news)
    found = [(each.reply is not None, each.up) for each in arrivals]
    assert found == [(True, True), (False, False)]


@pytest.mark.parametrize("host", ["no-such-host", "a..b", "x" * 70, "nul\0"])
def test_unknown_names_are_looked_up_again(
    node: Node, make: MakeTransport, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Nothing waits for the look-up, and the client connects as soon as the name is known."""
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
    address, transport = make(f"tcp://{host}:{node.address.rpartition(':')[2]}")
    assert not transport.send(address, api.AskMap(1))
    assert transport.wait(0.2) == []
    known.set()
    up(transport)
    ask(transport, address, 2)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "nul\0", "no address"])
def test_other_than_numeric_addresses_are_left_to_the_look_up(host: str) -> None:
    assert bootstrap.numeric_targets(host, 1) == []


def test_a_look_up_without_a_thread_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found: list[bootstrap.Targets] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    bootstrap.look_up("localhost", 1, found.append)
    assert found == [[]]


def test_a_late_look_up_is_ignored(node: Node, make: MakeTransport) -> None:
    address, transport = make(node.address)
    up(transport)
    assert isinstance(transport, SocketTransport)
    connection = transport._connections[address]
    sock = connection.sock
    transport._on_resolved(connection, [(int(socket.AF_INET), ("127.0.0.1", 1))])
    assert transport.wait(0.1) == []
    assert connection.sock is sock and transport.is_up(address)


def test_an_unsupported_address_family_is_skipped(
    node: Node, make: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = socket.socket

    def without(family: int = socket.AF_INET, *arguments: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *arguments, **named)

    port = int(node.address.rpartition(":")[2])
    both: bootstrap.Targets = [
        (int(socket.AF_INET6), ("::1", port, 0, 0)), (int(socket.AF_INET), ("127.0.0.1", port)),
    ]  # fmt: skip
    monkeypatch.setattr(socket_transport, "numeric_targets", lambda *_: both)
    with monkeypatch.context() as patched:
        patched.setattr(socket_transport.socket, "socket", without)
        address, transport = make(node.address)
        up(transport)
    ask(transport, address, 1)


# -- interrupted calls


class Cut:
    """Raise KeyboardInterrupt at the n-th line that SocketTransport runs, as a signal can."""

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


DEEDS: dict[str, Callable[[SocketTransport, str], Any]] = {
    "send": lambda transport, address: transport.send(address, api.AskMap(1)),
    "send much": lambda transport, address: transport.send(address, api.Put(1), bytes(4 * MIB)),
    "collect": lambda transport, address: (
        transport.send(address, api.AskMap(1)), time.sleep(0.002), transport.collect(),
    ),
    "open": lambda transport, address: transport.open([address]),
    "reopen": lambda transport, address: transport.reopen(address),
    "up": lambda transport, address: (transport.reopen(address), up(transport)),
    "sleep": lambda transport, address: transport.sleep(0.5),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("deed", DEEDS)
def test_connections_recover_from_a_signal_at_any_line(
    node: Node, make: MakeTransport, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    monkeypatch.setattr(socket_transport, "RECONNECT_MS", 1.0)
    monkeypatch.setattr(socket_transport, "PING_MS", 1e7)  # no timer ends the last sleep
    address, transport = make(node.address)
    assert isinstance(transport, SocketTransport)
    up(transport)
    at = 0
    while True:
        at += 1
        cut = Cut(at)
        inside = None
        if deed == "open":
            transport._disconnect(transport._connections.pop(address))
        if deed == "sleep":
            transport.wake()
        try:
            with cut:
                DEEDS[deed](transport, address)
        except KeyboardInterrupt:
            inside = transport._in_call
        transport.open([address])  # as the owner does for each map that it gets
        told = transport.collect()
        if inside and address in [each.address for each in told]:
            assert False in news(told), cut.where  # a waiting caller learns of it
        end = time.monotonic() + 60.0
        while not transport.is_up(address):
            assert time.monotonic() < end, cut.where
            told += transport.wait(0.05)
        rid = 1_000 + at
        while not transport.send(address, api.AskMap(rid)):
            assert time.monotonic() < end, cut.where
            transport.wait(0.01)
        while not any(each.reply and each.reply.rid == rid for each in told):
            assert time.monotonic() < end, cut.where
            told += transport.wait(0.05)
        transport.wake()
        begin = time.monotonic()
        transport.sleep(120.0)
        assert time.monotonic() < begin + 60.0, f"a wake-up is lost: {cut.where}"
        if cut.left > 0:
            break
    assert at > 5


def test_a_descriptor_left_open_does_not_end_every_sleep(node: Node, make: MakeTransport) -> None:
    _, transport = make(node.address)
    assert isinstance(transport, SocketTransport)
    up(transport)
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        transport._epoll.register(ours)
        transport.collect()
        transport.collect()
        begin = time.monotonic()
        transport.sleep(0.2)
        assert time.monotonic() - begin > 0.15
