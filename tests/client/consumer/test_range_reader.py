"""Reading a range in bulk: the API server of real nodes over stores in memory, and a raw socket."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore.client.connections.bulk_link import BulkLink
from hastore.client.consumer import range_reader
from hastore.client.consumer.range_reader import Chunk, RangeReader
from hastore.client.messages import decode_messages
from hastore.config.model import ApiConfig
from hastore.errors import CorruptRecordError, PositionLostError, UnreachableError
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front
from hastore.record.codec import Host, build_record
from hastore.server.api import pulls
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.message_reader import PullStatus
from tests.api_fakes import FakeBackend, FakePull

HOST = Host(b"\x7f\0\0\1", 4242)
NEXT_EPOCH = 131073


def fill(backend: FakeBackend, numbers: range, size: Callable[[], int] = lambda: 10) -> None:
    for n in numbers:
        body = str(n).encode().rjust(size(), b".")
        backend.store.put_encoded(
            [build_record("t", body, queue_id=0, born_timestamp_ms=n, born_host=HOST)]
        )


@contextlib.contextmanager
def serving(*backends: FakeBackend) -> Iterator[tuple[list[str], list[ApiServer]]]:
    with contextlib.ExitStack() as stack:
        servers = []
        for backend in backends:
            server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
            server.start()
            stack.callback(server.stop)
            servers.append(server)
        nodes = {b.node: s.endpoint for b, s in zip(backends, servers, strict=True)}
        for backend in backends:
            backend.nodes = nodes
        yield list(nodes.values()), servers


def pair() -> tuple[FakeBackend, FakeBackend]:
    master, slave = FakeBackend(1), FakeBackend(2, writable=False)
    slave.master = 1
    return master, slave


def numbers_of(chunk: Chunk) -> list[int]:
    messages, damage = decode_messages(bytes(chunk.payload), [])
    if damage is not None:
        raise damage
    sizes = struct.unpack(f">{len(chunk.sizes) // 4}i", chunk.sizes)
    assert not sizes or (len(sizes) == len(messages) and sum(sizes) == len(chunk.payload))
    return [int(message.body.strip(b".")) for message in messages]


def read(
    bootstrap: list[str],
    start: int,
    end: int,
    *,
    skip_lost: bool = False,
    between: Callable[[int, RangeReader], None] = lambda count, reader: None,
) -> list[int]:
    """Read a range as the data source does; `between` is called after each chunk."""
    reader = RangeReader(tuple(bootstrap), "t", 0, start, end, skip_lost=skip_lost)
    found: list[int] = []
    for count, chunk in enumerate(reader.chunks()):
        try:
            found += numbers_of(chunk)
        except CorruptRecordError as damage:
            reader.refuse(damage)
        between(count, reader)
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "PULL_BYTES", 3_000)
    monkeypatch.setattr(range_reader, "PAUSE_S", 0.01)


def spy(backend: FakeBackend, before: Callable[[int, dict[str, Any]], None]) -> list[int]:
    """Call `before` with the queue offset of each pull; return the list of these offsets."""
    seen: list[int] = []
    pull = backend.store.pull

    def spied(topic: str, queue_id: int, queue_offset: int, **limits: Any) -> FakePull:
        before(queue_offset, limits)
        seen.append(queue_offset)
        found: FakePull = pull(topic, queue_id, queue_offset, **limits)
        return found

    backend.store.pull = spied
    return seen


def test_each_record_comes_once_whatever_the_sizes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    node = FakeBackend()
    fill(node, range(700), lambda: rng.choice((4, 10, 100, 500, 5_000)))
    with serving(node) as (bootstrap, _):
        for _ in range(5):
            start = rng.randrange(699)
            end = rng.randrange(start + 1, 701)
            assert read(bootstrap, start, end) == list(range(start, end))


def test_the_next_pull_is_sent_before_the_last_reply_is_read() -> None:
    node = FakeBackend()
    fill(node, range(200))
    asked = spy(node, lambda at, limits: None)
    behind: list[int] = []
    with serving(node) as (bootstrap, _):
        reader = RangeReader(tuple(bootstrap), "t", 0, 0, 200)
        for chunk in reader.chunks():
            handed_out = numbers_of(chunk)[-1] + 1
            if handed_out < 200 and behind:
                while max(asked) < handed_out:  # ends only if the node is asked by itself
                    threading.Event().wait(0.001)
            behind.append(handed_out)
    assert behind[-1] == 200 and len(behind) > 5


def test_a_node_that_sends_no_sizes_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_packed", lambda sizes: b"")
    node = FakeBackend()
    fill(node, range(100))
    with serving(node) as (bootstrap, _):
        assert read(bootstrap, 3, 97) == list(range(3, 97))


def test_slaves_first_and_a_lagging_one_is_left_for_the_master() -> None:
    master, slave = pair()
    fill(master, range(300))
    fill(slave, range(120))
    sources: list[str] = []
    with serving(master, slave) as (bootstrap, _):
        found = read(
            bootstrap, 0, 300, between=lambda _, reader: sources.append(str(reader.source))
        )
    assert found == list(range(300))
    assert list(dict.fromkeys(sources)) == [bootstrap[1], bootstrap[0]]


def test_a_node_that_stops_in_mid_range_is_replaced() -> None:
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(300))
    with serving(master, slave) as (bootstrap, servers):

        def stop(count: int, reader: RangeReader) -> None:
            if count == 2:
                assert reader.source == bootstrap[1]
                servers[1].stop()

        assert read(bootstrap, 0, 300, between=stop) == list(range(300))


def test_a_node_that_says_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "ANSWER_S", 0.2)
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 1e6)
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(300))
    over = threading.Event()

    def stall(at: int, limits: dict[str, Any]) -> None:
        if at > 100:
            over.wait()

    spy(slave, stall)
    with serving(master, slave) as (bootstrap, _):
        try:
            assert read(bootstrap, 0, 300) == list(range(300))
        finally:
            over.set()


def test_a_damaged_record_is_read_from_another_replica() -> None:
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(300))
    offset, size = slave.store.units["t", 0][150]
    slave.store.log[offset + 88] ^= 1  # in the body, which the node leaves to the client to check
    sources: list[str] = []
    with serving(master, slave) as (bootstrap, _):
        found = read(
            bootstrap, 0, 300, between=lambda _, reader: sources.append(str(reader.source))
        )
        assert found == list(range(300))
        assert list(dict.fromkeys(sources)) == [bootstrap[1], bootstrap[0]]
        master.store.log[offset + 88] ^= 1
        with pytest.raises(CorruptRecordError):
            read(bootstrap, 0, 300)


def behind() -> tuple[FakeBackend, FakeBackend]:
    """Return a new master, and a node that does not follow it yet; both have the records."""
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(100))
    master.entries.append((NEXT_EPOCH, master.store.max_offset))
    return master, slave


def test_a_node_that_does_not_follow_yet_may_have_what_the_new_master_has_damaged() -> None:
    master, slave = behind()
    offset, _ = master.store.units["t", 0][50]
    master.store.log[offset + 88] ^= 1

    def follow(_offset: int, _limits: Any) -> None:
        if len(asked) > 4:
            slave.entries = master.entries

    asked = spy(master, follow)
    with serving(master, slave) as (bootstrap, _):
        assert read(bootstrap, 0, 100) == list(range(100))


def test_a_node_that_does_not_follow_yet_may_have_what_the_new_master_has_removed() -> None:
    master, slave = behind()
    asked: list[int] = []

    def removed(_topic: str, _queue: int, queue_offset: int, **_limits: Any) -> FakePull:
        asked.append(queue_offset)
        if len(asked) > 4:
            slave.entries = master.entries
        return FakePull(PullStatus.OFFSET_TOO_SMALL, 100, 100, 100)

    master.store.pull = removed
    with serving(master, slave) as (bootstrap, _):
        assert read(bootstrap, 0, 100, skip_lost=True) == list(range(100))


def test_a_damaged_record_is_waited_for_while_a_node_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.2)
    master, slave = pair()
    fill(master, range(100))
    offset, _ = master.store.units["t", 0][50]
    master.store.log[offset + 88] ^= 1
    asked = spy(master, lambda _offset, _limits: None)
    with serving(master, slave) as (bootstrap, servers):
        servers[1].stop()
        monkeypatch.setattr(range_reader, "GIVE_UP_S", 1.0)
        with pytest.raises(CorruptRecordError):
            read(bootstrap, 0, 100)
        assert max(Counter(asked).values()) > 2, "it was asked again"


def trim(backend: FakeBackend, low: int) -> None:
    """Let a node have removed the messages before `low`."""
    pull = backend.store.pull

    def trimmed(topic: str, queue_id: int, queue_offset: int, **limits: Any) -> FakePull:
        if queue_offset < low:
            return FakePull(PullStatus.OFFSET_TOO_SMALL, low, low, 100)
        found: FakePull = pull(topic, queue_id, queue_offset, **limits)
        return found

    backend.store.pull = trimmed


@pytest.mark.parametrize("skip_lost", [False, True])
def test_removed_records_are_waited_for_while_a_node_is_down_that_may_have_them(
    monkeypatch: pytest.MonkeyPatch, skip_lost: bool
) -> None:
    """Each node removes its oldest files by itself: the one that is down may have kept more."""
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.2)
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 1e6)
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(100))
    trim(master, 40)
    with serving(master, slave) as (bootstrap, servers):
        servers[1].stop()
        asked: list[int] = []

        def start(at: int, _limits: Any) -> None:
            asked.append(at)
            if len(asked) == 3:
                again = ApiServer(bootstrap[1], slave, ApiConfig(), on_failure=raise_failure)
                again.start()
                servers.append(again)

        spy(master, start)
        try:
            assert read(bootstrap[:1], 0, 100, skip_lost=skip_lost) == list(range(100))
        finally:
            servers[-1].stop()
        assert asked[:3] == [0, 0, 0]


def test_what_is_left_out_is_said_with_the_nodes_that_did_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.2)
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 0.3)
    master, slave = pair()
    fill(master, range(100))
    trim(master, 40)
    with serving(master, slave) as (bootstrap, servers):
        servers[1].stop()
        silent = f"{bootstrap[1]} did not answer within 0.3 s, and may have them"
        with pytest.raises(PositionLostError, match=f"0 is before the first .* 40; {silent}"):
            read(bootstrap, 0, 100)
        assert not caplog.records
        assert read(bootstrap, 0, 100, skip_lost=True) == list(range(40, 100))
        assert read(bootstrap, 0, 30, skip_lost=True) == []
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"messages [0, {end}) of queue 0 of 't' are left out: "
        f"{bootstrap[0]} begins at 40; {silent}"
        for end in (40, 30)
    ]


def test_a_node_that_was_waited_for_in_vain_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read from which retention takes one file after the other would wait at each of them."""
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.2)
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 0.3)
    master, slave = pair()
    fill(master, range(100))
    lows = iter([20, 60])
    whole = master.store.pull
    trim(master, next(lows))
    with serving(master, slave) as (bootstrap, servers):
        servers[1].stop()

        def remove_more(count: int, reader: RangeReader) -> None:
            if count == 0:
                reader._give_up_s = 1e6  # a second wait would not end
                master.store.pull = whole
                trim(master, next(lows))

        found = read(bootstrap, 0, 100, skip_lost=True, between=remove_more)
    assert found[0] == 20 and found[-40:] == list(range(60, 100)) and len(found) < 80


def test_removed_records_are_lost_only_if_no_replica_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(100))
    trim(slave, 40)
    with serving(master, slave) as (bootstrap, _):
        assert read(bootstrap, 0, 100) == list(range(100))
        trim(master, 20)
        with pytest.raises(PositionLostError, match="0 is before the first one kept, 20"):
            read(bootstrap, 0, 100)
        assert not caplog.records
        assert read(bootstrap, 0, 100, skip_lost=True) == list(range(20, 100))
        assert read(bootstrap, 0, 15, skip_lost=True) == []
    said = [record.getMessage() for record in caplog.records]
    kept = sorted([f"{bootstrap[1]} begins at 40", f"{bootstrap[0]} begins at 20"])
    assert [text.partition(": ")[0] for text in said] == [
        f"messages [0, {end}) of queue 0 of 't' are left out" for end in (20, 15)
    ]
    assert all(sorted(text.partition(": ")[2].split(", ")) == kept for text in said)


def rewrite(backend: FakeBackend, first: int) -> None:
    """Cut the log before record `first` and write others in a new epoch, as after a failover."""
    store = backend.store
    offset = store.units["t", 0][first][0]
    del store.log[offset:], store.units["t", 0][first:]
    backend.entries = [*backend.entries, (NEXT_EPOCH, offset)]
    fill(backend, range(10_000 + first, 10_300))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("back", [0, 5])
def test_records_that_are_cut_between_two_replies_are_reported(last: bool, back: int) -> None:
    """The cut comes while a pull is in flight, perhaps the last, that was sent before the cut.

    It removes the records from this pull's on, or also `back` records that were read before.
    """
    node = FakeBackend()
    fill(node, range(300))

    def cut(at: int, limits: dict[str, Any]) -> None:
        right = at > 100 and (not last or at + limits["max_messages"] == 300)
        if right and len(node.entries) == 1:
            rewrite(node, at - back)

    spy(node, cut)
    handed_out: list[int] = []
    with serving(node) as (bootstrap, _):
        if back:
            with pytest.raises(PositionLostError, match="a failover cut away"):
                read(bootstrap, 0, 300, between=lambda count, _: handed_out.append(count))
            assert len(handed_out) > 2
        else:
            found = read(bootstrap, 0, 300)
            assert found[:100] == list(range(100)) and found[-1] == 10_299
            assert [number % 10_000 for number in found] == list(range(300))


def test_a_position_that_a_failover_cut_away_is_lost_at_the_next_replica_too() -> None:
    master, slave = pair()
    for node in (master, slave):
        fill(node, range(300))
    with serving(master, slave) as (bootstrap, servers):

        def fail_over(count: int, reader: RangeReader) -> None:
            if count == 1:
                servers[1].stop()
                rewrite(master, 10)

        with pytest.raises(PositionLostError, match="a failover cut away"):
            read(bootstrap, 0, 300, between=fail_over)


def test_a_busy_node_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeBackend()
    fill(node, range(300))
    refusals = iter([False, True, False, False, True, True, False])
    with serving(node) as (bootstrap, servers):
        monkeypatch.setattr(servers[0]._pulls, "_has_room", lambda connection: next(refusals, True))
        assert read(bootstrap, 0, 300) == list(range(300))
    assert next(refusals, None) is None


def test_without_any_node_one_error_names_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.2)
    with pytest.raises(
        UnreachableError, match=r"no node of tcp://127.0.0.1:9, tcp://127.0.0.1:10 sent queue 0"
    ):
        read(["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"], 0, 10)


# -- the link, against a peer that misbehaves


@contextlib.contextmanager
def peer(answer: bytes) -> Iterator[str]:
    """A node that shakes hands, sends `answer` to the first request, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            zmtp = ZmtpConnection(SocketType.ROUTER, (65536, 65536))
            sock.sendall(zmtp.take_output())
            while not zmtp.receive(sock.recv(4096)):
                continue
            sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join()
        listener.close()


REPLY = api.encode(api.Pulled(1, api.PullStatus.FOUND, 1, 0, 1, 1))
PING = b"\x04\x07\x04PING\0\0"


def ask(answer: bytes) -> tuple[api.Reply, bytes]:
    with peer(answer) as address, contextlib.closing(BulkLink(address, 30.0)) as link:
        link.send(api.Pull(1, "t", 0, api.Position(0)))
        reply, payload = link.receive()
        return reply, bytes(payload)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 8_000, 9_000, 300_000])
def test_a_payload_of_any_size_arrives_whole(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    front = encode_front(REPLY, size)
    header = front[: front.index(REPLY) + len(REPLY)]
    reply, got = ask(PING + header + PING + front[len(header) :] + payload)
    assert (reply.rid, got) == (1, payload)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "closed by the node"),
        (encode_front(REPLY, 1_000) + b"half", "closed by the node within a reply"),
        (b"\x02" + (17 << 20).to_bytes(8, "big"), "a frame of 17825792 bytes"),
        (b"\xf0\x01", "the flags 0xf0"),
        (b"\0\x03abc", "not a reply"),
        (b"\x04\x0a\x05ERROR\x03why", "the peer gave up: 'why'"),
    ],
)
def test_a_malformed_reply_is_an_error_of_this_node(answer: bytes, text: str) -> None:
    with pytest.raises(UnreachableError, match=text):
        ask(answer)
