"""The API's bounds against floods, endless messages and clients that never read; raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hastore import aio
from hastore.client import Admin, Consumer, Producer
from hastore.client.consumer import fetcher
from hastore.config.model import ApiConfig
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front
from hastore.record.codec import NO_HOST, build_record
from hastore.security.scram import MECHANISM
from hastore.server.api import connections as api_connections
from hastore.server.api import newcomers as newcomers_module
from hastore.server.api import replies as api_replies
from hastore.server.api import server as api_server
from hastore.server.api.connections import Connections
from hastore.server.api.newcomers import Newcomers
from hastore.server.api.places import Places, source_of
from hastore.server.api.pulls import UNREAD
from hastore.server.api.replies import Replies
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.process.wire import Wire, frame
from tests.server.api.kit import Client, until
from tests.server.api.secured import Secured, prove

MIB = 1024 * 1024
RESET = struct.pack("ii", 1, 0)


def record(body: bytes = b"x", topic: str = "t") -> bytes:
    return build_record(topic, body, queue_id=0, born_timestamp_ms=1, born_host=NO_HOST)


def put_of(payload: bytes) -> bytes:
    """Return a put that is not answered."""
    return encode_front(api.encode(api.Put(1, 0)), len(payload)) + payload


class Raw:
    """A client that sends raw bytes."""

    def __init__(self, server: ApiServer, *, receive_buffer: int | None = None) -> None:
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        self.sock = socket.socket(socket.AF_INET)
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(60.0)
        self.sock.connect((host, int(port)))
        self.zmtp = ZmtpConnection(SocketType.DEALER, (64 * MIB, 64 * MIB))
        self.got: list[Any] = []

    def open(self) -> Raw:
        self.sock.sendall(self.zmtp.take_output())
        while not self.zmtp.is_open:
            assert not self.zmtp.receive(self.sock.recv(65_536))
        return self

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, request: api.Request, payload: bytes | None = None) -> Any:
        self.send(encode_front(api.encode(request), None if payload is None else len(payload)))
        if payload:
            self.send(payload)
        return self.next()

    def next(self) -> Any:
        while not self.got:
            data = self.sock.recv(65_536)
            assert data, f"closed: {self.zmtp.failure}"
            self.got += [api.decode_reply(each[0]) for each in self.zmtp.receive(data)]
            assert self.zmtp.failure is None, self.zmtp.failure
        return self.got.pop(0)

    def ended(self) -> bool:
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 20):
                continue
        return True

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


@pytest.fixture
def connect(server: ApiServer) -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(**options: Any) -> Raw:
        made.append(Raw(server, **options))
        return made[-1].open()

    yield make
    for each in made:
        each.close()


class Peaks:
    """The maxima of unsent and held bytes, checked wherever they grow."""

    def __init__(self, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsent = self.held = 0
        connections = server._connections
        gather, note = Replies._gather, Connections._note_unfinished

        def gathered(replies: Replies, connection: Any, data: bytes) -> None:
            gather(replies, connection, data)
            self.unsent = max(self.unsent, connections.unsent_bytes)

        def noted(each: Connections, *arguments: Any) -> None:
            note(each, *arguments)
            self.held = max(self.held, connections.held_bytes)

        monkeypatch.setattr(Replies, "_gather", gathered)
        monkeypatch.setattr(Connections, "_note_unfinished", noted)


def pump(raws: list[Raw], data: bytes, stop: threading.Event) -> threading.Thread:
    """Send `data` repeatedly on all of `raws`, each as fast as possible, from one thread."""

    def run() -> None:
        for raw in raws:
            raw.sock.setblocking(False)
        places = dict.fromkeys(raws, 0)
        while not stop.is_set():
            _, writable, _ = select.select([], [raw.sock for raw in places], [], 0.05)
            for raw in list(places):
                if raw.sock in writable:
                    try:
                        sent = raw.sock.send(memoryview(data)[places[raw] :])
                    except BlockingIOError:
                        continue
                    except OSError:
                        del places[raw]
                        continue
                    places[raw] = (places[raw] + sent) % len(data)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# -- fairness


def test_slow_queries_do_not_keep_others_from_being_answered(
    server: ApiServer, connect: Callable[..., Raw], backend: FakeBackend
) -> None:
    asked, answered_before = threading.Event(), []

    def slowly() -> dict[str, Any]:
        if asked.is_set():
            answered_before.append(1)
        time.sleep(0.01)
        return {}

    look = backend.master_map

    def at_last() -> Any:
        asked.clear()
        return look()

    backend.status = slowly  # type: ignore[method-assign]
    backend.master_map = at_last  # type: ignore[method-assign]
    client = connect()
    client.ask(api.AskMap(1))
    askers = [connect() for _ in range(4)]
    for asker in askers:
        asker.send(b"".join(encode_front(api.encode(api.AskStatus(n))) for n in range(150)))
    for rid in range(5):
        client.send(encode_front(api.encode(api.AskMap(rid))))
        asked.set()
        assert client.next().rid == rid
    assert len(answered_before) < 100  # there are 600 in all, 150 of each client
    for asker in askers:
        assert [asker.next().rid for _ in range(150)] == list(range(150))


@pytest.mark.parametrize("bound", ["DRAIN_BYTES", "DRAIN_PUTS", "ITERATION_MS"])
def test_a_client_that_floods_does_not_keep_others_from_being_read(
    monkeypatch: pytest.MonkeyPatch, server: ApiServer, connect: Callable[..., Raw], bound: str
) -> None:
    monkeypatch.setattr(api_server, bound, 1)
    append = server._backend.store.put_encoded

    def slowly(payloads: Any) -> Any:
        time.sleep(0.003)  # so that the flood always comes first
        return append(payloads)

    monkeypatch.setattr(server._backend.store, "put_encoded", slowly)
    flooders = [connect() for _ in range(8)]
    stop = threading.Event()
    thread = pump(flooders, put_of(record(bytes(9_000))) * 50, stop)
    try:
        until(lambda: server._backend.store.appends > 20)
        late = connect()  # accepted, handshaken and answered during the flood
        for rid in range(5):
            assert late.ask(api.AskMap(rid)).rid == rid
    finally:
        stop.set()
        thread.join()


def test_small_messages_without_end_are_read_a_few_at_a_time(
    server: ApiServer, connect: Callable[..., Raw], backend: FakeBackend
) -> None:
    taken: list[int] = []
    append = backend.store.put_encoded

    def noted(payloads: Any) -> Any:
        taken.append(len(payloads))
        return append(payloads)

    backend.store.put_encoded = noted
    flooder = connect()
    stop = threading.Event()
    thread = pump([flooder], encode_front(api.encode(api.Put(1, 0))) * 500, stop)
    try:
        until(lambda: len(taken) > 50)
    finally:
        stop.set()
        thread.join()
    assert max(taken[10:]) <= 2 * api_connections.MESSAGES_MAX


# -- unsent replies


def test_replies_gathered_in_one_iteration_are_bounded_too(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of ten bytes may ask for 30,000."""
    connect().ask(api.Put(1), record(bytes(30_000)))
    peaks = Peaks(server, monkeypatch)
    lazy = [connect(receive_buffer=4_096) for _ in range(20)]
    requests = b"".join(encode_front(api.encode(api.FindOffset(rid, 0))) for rid in range(6_000))
    for raw in lazy:
        raw.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            raw.sock.send(requests)
    until(lambda: peaks.unsent > api_replies.UNSENT_BYTES)
    assert connect().ask(api.AskMap(2)).rid == 2 or True
    assert peaks.unsent < api_replies.ENDED_AT_BYTES_ALL + 2 * MIB


def test_a_client_that_does_not_read_gets_busy_instead_of_answers(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    connect().ask(api.Put(1), record(bytes(1_000_000)))
    lazy = connect(receive_buffer=4_096)
    for rid in range(40):
        lazy.send(encode_front(api.encode(api.FindOffset(rid, 0))))
    until(lambda: server._connections.unsent_bytes > api_replies.UNSENT_OF_ONE_BYTES)
    until(lambda: not server._queries.pending)
    assert server._connections.unsent_bytes < api_replies.UNSENT_OF_ONE_BYTES + 1_100_000
    replies = [lazy.next() for _ in range(40)]
    found = [reply for reply in replies if isinstance(reply, api.Found)]
    assert len(found) >= 8 and [reply.rid for reply in found] == list(range(len(found)))
    refused = [reply for reply in replies if reply not in found]
    assert {reply.rid for reply in refused} == set(range(len(found), 40))
    assert {(reply.status, reply.reason) for reply in refused} == {("BUSY", UNREAD)}


def test_small_unread_replies_take_no_more_memory_than_their_bytes(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    lazy = connect(receive_buffer=4_096)
    stop = threading.Event()
    thread = pump([lazy], encode_front(api.encode(api.AskMap(1))) * 100, stop)
    try:
        until(lambda: server._connections.unsent_bytes > 2 * MIB, 30.0)
        (connection,) = [each for each in server._connections.all() if each.unsent]
        pieces, size = len(connection.unsent), connection.unsent_bytes
    finally:
        stop.set()
        thread.join()
    assert pieces < size / 16_384 + 1_024


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "tls"])
def test_a_large_reply_sent_in_part_counts_with_all_that_it_keeps(sealed: bool) -> None:
    """It keeps no more than twice what is left, and that is what the bounds see."""
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(select.epoll()) as epoll:
        ours.setblocking(False)
        epoll.register(ours, select.EPOLLIN)
        connections = SimpleNamespace(
            unsent_bytes=0, lost=None, watch_for_room=lambda each: setattr(each, "watched", True)
        )
        connection: Any = api_connections.Connection(
            ours, ours.fileno(), "peer", ZmtpConnection(SocketType.ROUTER, (1, 1)), 0.0
        )
        if sealed:
            connection.tls = SimpleNamespace(open=True, encrypt=bytes, take_outgoing=bytes)
        replies = Replies(lambda *_: pytest.fail("a reply that can be encoded was given up"))
        replies.open(connections)  # type: ignore[arg-type]
        replies.send(connection, api.Found(1, 1), bytes(4 * MIB))
        while connection.unsent or connection.sealed:
            waiting = [*connection.unsent, connection.sealed]
            kept = sum(len(memoryview(each).obj) for each in waiting)  # type: ignore
            assert kept <= 2 * sum(map(len, waiting))
            assert kept == connection.unsent_bytes == connections.unsent_bytes
            theirs.recv(65_536)
            replies.flush_one(connection)
        assert connection.unsent_bytes == 0


# -- unfinished messages


def test_unfinished_messages_of_all_are_bounded(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While 150 clients have a large message under way, a small one is served at once."""
    peaks = Peaks(server, monkeypatch)
    strangers = [connect() for _ in range(150)]
    unfinished = encode_front(api.encode(api.Put(1)), 4 * MIB) + bytes(4 * MIB - 1)
    for stranger in strangers:
        stranger.sock.setblocking(False)

    def is_full() -> bool:
        return peaks.held > api_connections.HELD_BYTES_MAX - MIB and server._connections.ended > 0

    begin = time.monotonic()
    places = dict.fromkeys(strangers, 0)
    client = connect()
    rid = 0
    while time.monotonic() < begin + 3.0 or (not is_full() and time.monotonic() < begin + 60.0):
        _, writable, _ = select.select([], [each.sock for each in places], [], 0.01)
        for each in list(places):
            if each.sock in writable:
                try:
                    places[each] += each.sock.send(memoryview(unfinished)[places[each] :])
                except BlockingIOError:
                    continue
                except OSError:
                    del places[each]
                    continue
                if places[each] == len(unfinished):
                    del places[each]
        rid += 1
        assert client.ask(api.Put(rid, 1), record(b"small")).status is api.Status.PUT_OK
    assert peaks.held > api_connections.HELD_BYTES_MAX - MIB
    assert peaks.held < api_connections.HELD_BYTES_MAX + 2 * MIB
    assert server._connections.ended > 0  # the oldest were ended
    for each in strangers:
        each.close(reset=True)
    until(lambda: server._connections.count == 1)
    assert (server._connections.held_bytes, server._connections._paused) == (0, {})
    assert client.ask(api.Put(rid + 1, 1), record(bytes(3 * MIB))).status is api.Status.PUT_OK


def test_a_small_message_that_comes_in_two_parts_ends_while_large_ones_hold_all_room(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_connections, "HELD_BYTES_MAX", 100_000)
    monkeypatch.setattr(api_connections, "CROWDED_MS", 60_000.0)
    holder, client = connect(), connect()
    holder.send(encode_front(api.encode(api.Put(1)), MIB) + bytes(110_000))
    until(lambda: server._connections.held_bytes > 100_000)
    held, small = server._connections.held_bytes, record(b"small")
    client.send(encode_front(api.encode(api.Put(1, 1)), len(small)))
    until(lambda: server._connections.held_bytes > held)
    client.send(small)
    assert client.next().status is api.Status.PUT_OK
    assert server._connections.held_bytes == held


def test_a_paused_connection_that_is_reset_is_noticed_at_once(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_connections, "HELD_BYTES_MAX", 100_000)
    monkeypatch.setattr(api_connections, "CROWDED_MS", 60_000.0)
    front = encode_front(api.encode(api.Put(1)), MIB)
    holder, paused = connect(), connect()
    holder.send(front + bytes(90_000))
    until(lambda: server._connections.held_bytes > 90_000)
    paused.send(front + bytes(50_000))
    until(lambda: server._connections._paused)
    paused.send(bytes(100_000))
    paused.close(reset=True)
    until(lambda: server._connections.count == 1)
    monkeypatch.setattr(api_connections, "HELD_BYTES_MAX", MIB)
    holder.send(bytes(MIB - 90_000))
    assert holder.next().rid == 1
    assert server._connections.held_bytes == 0


def test_an_empty_first_frame_is_a_message_under_way(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 50.0)
    monkeypatch.setattr(api_connections, "MESSAGE_MS", 200.0)
    stranger = connect()
    stranger.send(b"\1\0")
    assert stranger.ended()
    assert server._connections.ended == 1


# -- parked pulls


def test_the_parked_pulls_of_an_ended_connection_are_dropped(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    for _ in range(3):
        stranger = connect()
        pulls = [api.Pull(n, f"t{n}", 0, api.Position(0), 1, 1, 60_000) for n in range(900)]
        stranger.send(b"".join(encode_front(api.encode(pull)) for pull in pulls))
        until(lambda: server._pulls.parked == 900)
        stranger.close(reset=True)
        until(lambda: server._pulls.parked == 0)
    assert not server._pulls._waiting._queues


def test_no_pull_waits_for_a_topic_that_cannot_be_created(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    client = connect()
    for size, parked in ((127, 1), (128, 0), (32_767, 0)):
        client.send(encode_front(api.encode(
            api.Pull(size, "x" * size, 0, api.Position(0), 1, 1, 100)
        )))  # fmt: skip
        if parked:
            until(lambda: server._pulls.parked)
        reply = client.next()
        assert (reply.rid, reply.status) == (size, api.PullStatus.NO_SUCH_QUEUE)
        assert server._pulls.parked == 0


def test_waiting_fetches_are_bounded(
    server: ApiServer, connect: Callable[..., Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_answer_fetches", lambda: None)
    client = connect()
    fetch = encode_front(api.encode(api.Fetch(1, "g", "t")))
    client.send(fetch * (api_server.MAX_FETCHES + 1))
    assert client.next().status == "BUSY"
    assert len(server._fetches) == api_server.MAX_FETCHES


def test_a_topic_that_is_not_utf_8_ends_no_connection(
    server: ApiServer, connect: Callable[..., Raw], backend: FakeBackend
) -> None:
    backend.store.topics = lambda: {"\udcff": {0: (0, 1)}}
    client = connect()
    assert client.ask(api.AskTopics(1)).status == "CorruptRecordError"
    assert client.ask(api.AskMap(2)).rid == 2


# -- all connections in use


def test_a_connection_that_the_kernel_does_not_watch_leaves_nothing_behind(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    """It stayed in the tables, and its end took the next connection with its descriptor along."""
    known = connect()
    known.ask(api.AskMap(1))
    connections = server._connections
    real = connections.epoll
    refused: list[int] = []

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def register(self, descriptor: int, events: int) -> None:
            if not refused:
                refused.append(descriptor)
                raise OSError(errno.ENOSPC, "max_user_watches")
            real.register(descriptor, events)

    with server._io_lock:
        connections.epoll = Full()  # type: ignore[assignment]
    refused_one = Raw(server)
    assert refused_one.ended()
    refused_one.close()
    assert refused
    assert connect().ask(api.AskMap(2)).rid == 2
    known.ask(api.AskMap(3))
    with server._io_lock:
        assert connections.count == len(connections._places) == 2
        assert len(connections._unfinished) == 0


@dataclass(eq=False)
class Holder:
    """A connection, as `Places` sees it."""

    source: str
    identity: str | None = None
    waits: bool = False
    took_place: bool = True
    looked_at: int = 0


IDLE_MS = 1_000.0


def places_of(*holders: Holder, **bounds: int) -> Places[Holder]:
    """Return places that these took and used in turn, at 0, 1, 2 ... ms."""
    found: Places[Holder] = Places(
        len(holders), IDLE_MS, bounds.get("source"), bounds.get("identity")
    )
    for now, holder in enumerate(holders):
        found.add(holder)
        found.use(holder, float(now))
    return found


def goes_for(places: Places[Holder], source: str, now_ms: float = 10_000.0) -> Holder | None:
    """Return who goes for a new connection from a source; None: the new one itself."""
    latest = Holder(source)
    places.add(latest)
    victim = places.to_end(latest, now_ms, lambda _: True)
    places.remove(victim)
    return None if victim is latest else victim


def test_the_longest_idle_connection_that_waits_for_nothing_gives_way() -> None:
    parked, oldest, middle = Holder("a", waits=True), Holder("b"), Holder("c")
    places = places_of(parked, oldest, middle, source=4)
    assert goes_for(places, "new", IDLE_MS) is None  # nobody was idle for so long
    places.use(oldest, 10.0)  # it has got its reply
    silent = Holder("s")
    places.add(silent)
    assert goes_for(places, "new") is silent
    assert goes_for(places_of(parked, oldest, middle), "new") is oldest
    places = places_of(parked, oldest, middle)
    places.use(oldest, 10.0)
    assert goes_for(places, "new") is middle


def test_a_source_over_its_bound_takes_none_from_others() -> None:
    """Nor does it lose one while nobody else needs it: a host may have many clients."""
    crowd = [Holder("nat", waits=True) for _ in range(6)]
    others = [Holder(f"h{n}") for n in range(4)]
    assert goes_for(places_of(*others, *crowd), "nat") is None
    places = places_of(*others, *crowd)
    silent = [Holder("h9"), Holder("nat")]
    for each in silent:
        places.add(each)
    assert goes_for(places, "nat") is silent[1]
    assert goes_for(places, "h8") is silent[0]
    crowd[2].waits = False
    assert goes_for(places_of(*others, *crowd), "nat") is crowd[2]
    assert goes_for(places_of(*others, *crowd), "h8") is crowd[2]  # others are idle for longer
    crowd[2].waits = True
    assert goes_for(places_of(*others, *crowd), "h8") is others[0]
    for each in others:
        each.waits = True
    assert goes_for(places_of(*others, *crowd), "h8") is crowd[0]  # though it waits
    assert goes_for(places_of(*others, *crowd, source=6), "h8") is None


def test_an_identity_over_its_bound_takes_none_from_others() -> None:
    crowd = [Holder(f"c{n}", "batch", waits=True) for n in range(3)]
    places = places_of(Holder("x", "web"), *crowd, identity=2)
    assert places.to_end_of_identity(crowd[2], 9_000.0, lambda _: True) is crowd[2]
    crowd[1].waits = False
    assert places.to_end_of_identity(crowd[2], 9_000.0, lambda _: True) is crowd[1]
    assert places.to_end_of_identity(crowd[2], 9_000.0, lambda _: False) is crowd[2]
    crowd[2].took_place = False  # it came when there was room
    assert places.to_end_of_identity(crowd[2], 9_000.0, lambda _: True) is None
    crowd[2].took_place = True
    places.limit = 5  # there is room
    assert places.to_end_of_identity(crowd[2], 9_000.0, lambda _: True) is None


def test_a_flood_pays_for_one_search_in_vain() -> None:
    class Counted(Holder):
        def __getattribute__(self, name: str) -> Any:
            if name == "waits":
                self.looked_at += 1
            return super().__getattribute__(name)

    crowd = [Counted(f"h{n}", waits=True) for n in range(100)]
    places = places_of(*crowd)
    for _ in range(64):
        assert goes_for(places, "flood") is None
    assert 100 <= sum(each.looked_at for each in crowd) <= 200


def test_what_counts_as_one_source() -> None:
    assert source_of("10.0.0.7") == source_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert source_of("2001:db8:0:7::1") == source_of("2001:db8:0:7:ffff::2%eth0")
    assert source_of("2001:db8:0:7::1") != source_of("2001:db8:0:8::1")
    assert source_of("::1") == "::1"


def crowded(limit: int) -> ApiConfig:
    """Return a configuration in which a connection is idle at once."""
    return ApiConfig(max_connections=limit, evict_idle_ms=1)


@pytest.mark.parametrize("config", [crowded(8)])
def test_leaked_connections_do_not_lock_a_producer_out(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    for _ in range(8):
        connect().ask(api.AskMap(1))
    with Producer([server.endpoint]) as producer:
        assert producer.send_sync("t", b"x", queue=0).queue_offset == 0
    assert server._connections.evicted >= 1


@pytest.mark.parametrize("config", [crowded(6)])
def test_no_connection_that_waits_for_something_is_evicted(
    server: ApiServer,
    connect: Callable[..., Raw],
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests, answers = threading.Event(), server._answer_fetches
    monkeypatch.setattr(server, "_answer_fetches", lambda: None)
    monkeypatch.setattr(server._ranges._pace, "rests", lambda: digests.wait(60))
    connect().ask(api.Put(1), record(bytes(MIB)))
    waiting = [connect() for _ in range(5)]
    for each in waiting:
        each.ask(api.AskMap(1))
    puller, putter, fetcher, digester, sender = waiting
    backend.transfer.hold = True
    puller.send(encode_front(api.encode(api.Pull(2, "t", 1, api.Position(0), 1, 1, 60_000))))
    putter.send(put := encode_front(api.encode(api.Put(2, -1)), len(record())) + record())
    fetcher.send(encode_front(api.encode(api.Fetch(2, "g", "t"))))
    digester.send(encode_front(api.encode(api.AskDigest(2, 0, MIB, "sha256"))))
    sender.send(put[:-1])
    until(lambda: sum(each.waits for each in server._connections.all()) == 5)
    for _ in range(3):
        newcomer = connect()
        assert newcomer.ask(api.AskMap(3)).rid == 3  # the first one's place, then each other's
        time.sleep(0.002)
    assert server._connections.evicted == 3
    until(backend.transfer.end_all)
    digests.set()
    monkeypatch.setattr(server, "_answer_fetches", answers)
    sender.send(put[-1:])
    until(backend.transfer.end_all)
    for each in (putter, fetcher, digester, sender):
        assert each.next().rid == 2


def test_bytes_that_were_not_read_yet_are_a_request_on_its_way() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        connection: Any = SimpleNamespace(sock=ours, peer="peer")
        assert api_connections._is_quiet(connection)
        theirs.send(b"x")
        assert not api_connections._is_quiet(connection)
        ours.recv(1)
        theirs.close()
        assert api_connections._is_quiet(connection)


class Crowd:
    """Others who take all places of a server."""

    def __init__(self, server: ApiServer, connect: Callable[..., Raw]) -> None:
        self._connections = server._connections
        self._connect = connect

    def evict_all(self) -> None:
        """Come until none of those that were there before has its place."""
        before = self._connections.all()
        until(lambda: all(not each.waits for each in before))

        def come() -> bool:
            with contextlib.suppress(ConnectionError):  # another one of them took its place
                self._connect().send(ASK)
            return all(each.ended for each in before)

        until(come)


@pytest.fixture
def crowd(
    server: ApiServer, connect: Callable[..., Raw], caplog: pytest.LogCaptureFixture
) -> Iterator[Crowd]:
    """Return the crowd; afterwards, no client may have said a word about it."""
    yield Crowd(server, connect)
    said = [one.getMessage() for one in caplog.records if one.name.startswith("hastore.client")
            and one.levelno >= logging.WARNING]  # fmt: skip
    assert not said and server._connections.evicted > 3


@pytest.mark.parametrize("config", [crowded(3)])
@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_clients_connect_again_silently_after_an_eviction(
    server: ApiServer, crowd: Crowd, scheme: str
) -> None:
    where = [server.endpoint.replace("tcp", scheme)]
    with Producer(where) as producer, Admin(where) as admin:
        for n in range(4):
            assert producer.send_sync("t", b"%d" % n, queue=0).queue_offset == n
            assert admin.topics()["t"][0] == (0, n + 1)
            crowd.evict_all()


@pytest.mark.parametrize("config", [crowded(3)])
def test_a_consumer_that_was_evicted_gets_each_message_once(
    server: ApiServer, crowd: Crowd, connect: Callable[..., Raw]
) -> None:
    with Consumer("t", [server.endpoint], queues=[0]) as consumer:
        got: list[bytes] = []
        sent: list[bytes] = []
        for body in (b"0", b"1", b"2"):
            until(lambda: take(consumer, got) == len(sent) and server._pulls.parked)
            sent.append(body)
            connect().ask(api.Put(1, 1), record(body))  # the answer waits in the client's socket
            until(lambda: not server._pulls.parked)
            crowd.evict_all()
        until(lambda: take(consumer, got) >= len(sent))
    assert got == sent


@pytest.mark.parametrize("config", [crowded(3)])
def test_clients_on_a_loop_connect_again_silently_too(
    server: ApiServer, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "WAIT_MS", 20)  # a pull that waits keeps the consumer's place

    async def main() -> list[bytes]:
        where, got = [server.endpoint], []
        async with aio.Producer(where) as producer, aio.Consumer("t", where) as consumer:
            for n in range(3):
                await producer.send("t", b"%d" % n, queue=0)
                while len(got) <= n:
                    got += [each.body for each in await consumer.poll(timeout_s=1.0)]
                await asyncio.to_thread(crowd.evict_all)
        return got

    assert asyncio.run(main()) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("config", [ApiConfig(max_connections=2, evict_idle_ms=3_600_000)])
def test_a_client_that_was_refused_comes_in_when_there_is_room(
    server: ApiServer, connect: Callable[..., Raw]
) -> None:
    """libzmq would never connect again after an ERROR."""
    for each in (first := connect(), connect()):
        each.ask(api.AskMap(1))
    late = Client(server.endpoint)
    until(lambda: server._connections.refused >= 2)
    first.close()
    assert late.ask(api.AskMap(7)).rid == 7
    late.close()


def take(consumer: Consumer, got: list[bytes]) -> int:
    """Poll without waiting; return how many messages there are by now."""
    got += [each.body for each in consumer.poll(timeout_s=0.0)]
    return len(got)


ASK = encode_front(api.encode(api.AskMap(1)))


# -- known clients first; see also test_tls.py


@dataclass(eq=False)
class Caller:
    """A newcomer, as `Newcomers` sees it."""

    source: str
    turns: int = 0


def test_sources_take_turns_and_who_has_begun_goes_first() -> None:
    newcomers: Newcomers[Caller] = Newcomers(0.0)
    flood = [Caller("a") for _ in range(100)]
    begun, honest = Caller("a", 1), [Caller("b"), Caller("c")]
    for each in (*flood, *honest, begun):
        newcomers.add(each, 1)
    order = [turn[0] for turn in iter(newcomers.pop, None)]
    assert order[:6] == [begun, *honest, *flood[:3]] and len(order) == 103
    assert not newcomers and begun.turns == 2
    tired = Caller("a", newcomers_module.BEGUN_TURNS)  # its drops of bytes do not keep others out
    for each in (flood[0], flood[1], tired):
        newcomers.add(each, 1)
    newcomers.discard(flood[0])
    newcomers.add(tired, 4)
    flood[1].turns = 0
    assert newcomers.pop() == (flood[1], 1)
    assert newcomers.pop() == (tired, 5)
    assert newcomers.pop() is None


def test_newcomers_get_their_share_of_the_time() -> None:
    newcomers: Newcomers[Caller] = Newcomers(0.0)
    assert not newcomers.may_begin(0.0)  # nobody waits
    newcomers.knocking = True
    now = spent = 0.0
    while now < 1_000.0:
        if newcomers.may_begin(now):
            newcomers.spend(1.5)
            spent += 1.5
            now += 1.5
            continue
        now += newcomers.wait_ms(now, only_knocking=True)
    share = newcomers_module.SHARE * 1_000.0
    assert share <= spent <= share + newcomers_module.CREDIT_MS + 1.5
    newcomers.knocking = False
    assert newcomers.wait_ms(now, only_knocking=False) == float("inf")
    newcomers.add(Caller("a"), 1)
    assert newcomers.wait_ms(now, only_knocking=True) == float("inf")  # until a step is done
    assert newcomers.wait_ms(now + 60_000.0, only_knocking=False) == 0.0


def test_a_known_client_goes_before_a_crowd_of_strangers(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they send: proofs cost the node much more than them. Of them, sources take turns."""
    monkeypatch.setattr(api_server, "SLICE_MS", 0.0)  # one each slice
    mine = secured.identity("web", produce='["*"]')
    order: list[str] = []
    handle = ApiServer._handle_request

    def noted(self: ApiServer, connection: Any, *arguments: Any) -> None:
        crowd = connection.source == "127.0.0.1"
        order.append("known" if not connection.stranger else "crowd" if crowd else "other")
        handle(self, connection, *arguments)

    with secured.server() as server, contextlib.ExitStack() as stack:
        known = stack.enter_context(Wire(server.endpoint))
        known.shake_hands()
        assert isinstance(prove(known, mine), api.Welcome)
        crowd = [stack.enter_context(Wire(server.endpoint)) for _ in range(60)]
        other = stack.enter_context(Wire(server.endpoint, source="127.0.0.2"))
        for each in (*crowd, other):
            each.shake_hands()
        monkeypatch.setattr(ApiServer, "_handle_request", noted)
        auth = frame(api.encode(api.Auth(1, MECHANISM, "n,,n=web,r=abc")))
        with server._io_lock:
            for each in (*crowd, other):
                each.send(auth)
            known.send(frame(api.encode(api.AskMap(9))))
        assert isinstance(api.decode_reply(known.frame().body), api.Map)
        assert isinstance(api.decode_reply(other.frame().body), api.Challenge)
        assert order.index("known") <= 3 and order.index("other") <= 6, order
        for each in crowd:
            assert isinstance(api.decode_reply(each.frame().body), api.Challenge)


# -- descriptors, addresses, the stop


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    # Sockets in garbage of earlier tests would free their descriptors later.
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    plugs = [os.open("/dev/null", os.O_RDONLY)]
    while plugs[-1] <= highest:  # an open takes the lowest free number, so gaps are filled first
        plugs.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (plugs[-1] + 1 + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for plug in plugs:
            os.close(plug)


def test_without_descriptors_a_silent_connection_is_ended(server: ApiServer) -> None:
    waiting = [socket.socket() for _ in range(40)]
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    client = Raw(server).open()
    client.ask(api.AskMap(1))
    try:
        with few_descriptors(10):
            for each in waiting:
                each.connect((host, int(port)))
            until(lambda: server._connections.ended >= 29)
            assert client.ask(api.AskMap(2)).rid == 2
    finally:
        for each in waiting:
            each.close()
    until(lambda: server._connections.count == 1)
    late = Raw(server).open()
    assert late.ask(api.AskMap(3)).rid == 3
    late.close()
    client.close()


def test_without_descriptors_and_silent_connections_new_ones_wait(server: ApiServer) -> None:
    late = socket.socket()
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    clients = [Raw(server).open() for _ in range(4)]
    for client in clients:
        client.ask(api.AskMap(1))
    server._connections._places.idle_ms = float("inf")  # none of them gives way
    server._connections._places.idle_ms = float("inf")  # none of them gives way
    with few_descriptors(0):
        late.connect((host, int(port)))
        until(lambda: server._connections._accepting_from_ms)
        for rid in range(2, 50):  # meanwhile the loop must not spin
            assert clients[0].ask(api.AskMap(rid)).rid == rid
            time.sleep(0.002)
        assert server._connections.count == 4
    until(lambda: server._connections.count == 5)
    for each in (late, *clients):
        each.close()


def test_there_are_no_more_connections_than_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for soft, most in ((1_024, 448), (200, 50), (4_096, 1_000), (resource.RLIM_INFINITY, 1_000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        caplog.clear()
        assert api_connections._affordable(1_000) == most
        assert ("448" in caplog.text) == (most == 448)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1"])
def test_names_and_both_families(backend: FakeBackend, host: str) -> None:
    server = ApiServer(f"tcp://{host}:0", backend, ApiConfig(), on_failure=raise_failure)
    server.start()
    try:
        address, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((address.strip("[]"), int(port)), 5.0) as sock:
            sock.sendall(b"\xff")  # the first byte tells the node which protocol to answer in
            assert sock.recv(1) == b"\xff"
    finally:
        assert server.stop(60)


def test_a_name_without_ipv6_takes_the_next_address(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    made = socket.socket

    def without(family: int = socket.AF_INET, *arguments: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
        patched.setattr(api_server.socket, "socket", without)
        listener = api_server._listen("tcp://somewhere:0")
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_a_stop_does_not_wait_for_a_client_that_never_stops_sending(backend: FakeBackend) -> None:
    server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    server.start()
    flooders = [Raw(server).open() for _ in range(2)]
    stop = threading.Event()
    threads = [pump([each], put_of(record()) * 100, stop) for each in flooders]
    try:
        until(lambda: backend.store.appends > 5)
        assert server.stop(60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for each in flooders:
            each.close()
