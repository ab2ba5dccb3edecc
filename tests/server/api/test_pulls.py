"""Pulls: those in bulk, and what parked ones cost and wait for."""

from __future__ import annotations

import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Flush, StoreKind
from hastore.errors import NotCachedError
from hastore.protocol import api
from hastore.server.api import server as api_server
from hastore.server.api.parked import Found, OwnPull
from hastore.server.api.queries import answer_at_once
from hastore.server.api.server import ApiServer
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend, FakePull
from tests.cli.test_status import Group
from tests.server.api.kit import Client, Pulls, Waiting, record, until
from tests.server.kit import config_of, group_of_one, running
from tests.store import kit


def fill(backend: FakeBackend, count: int) -> None:
    for n in range(count):
        backend.store.put_encoded([record(body=b"x" * n)])


def bulk(rid: int, at: int = 0) -> api.Pull:
    return api.Pull(rid, "t", 0, api.Position(at), 10, bulk=True)


def test_the_reply_has_the_sizes_only_if_they_are_asked_for(
    client: Client, backend: FakeBackend
) -> None:
    fill(backend, 20)
    reply = client.ask(bulk(1))
    sizes = [size for _, size in backend.store.units["t", 0][:10]]
    assert struct.unpack(">10i", reply.sizes) == tuple(sizes)
    assert client.ask(api.Pull(2, "t", 0, api.Position(0))).sizes == b""


def test_only_bulk_pulls_leave_the_bodies_unchecked(client: Client, backend: FakeBackend) -> None:
    fill(backend, 5)
    seen: list[bool] = []
    pull = backend.store.pull

    def spied(*args: Any, check_bodies: bool = True, **limits: Any) -> FakePull:
        seen.append(check_bodies)
        found: FakePull = pull(*args, **limits)
        return found

    backend.store.pull = spied
    client.ask(bulk(1))
    client.ask(api.Pull(2, "t", 0, api.Position(0)))
    assert seen == [False, True]


@pytest.mark.parametrize("is_bulk", [True, False], ids=["bulk", "ordinary"])
def test_a_put_waits_for_one_pull_at_most(
    client: Client, backend: FakeBackend, server: ApiServer, is_bulk: bool
) -> None:
    """The node reads all of this input at once, because it is busy with the first pull."""
    fill(backend, 50)
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    pull, put = backend.store.pull, backend.store.put_encoded

    def pull_spied(topic: str, queue_id: int, queue_offset: int, **limits: Any) -> FakePull:
        begun.set()
        go_on.wait()
        done.append(f"pull {queue_offset}")
        found: FakePull = pull(topic, queue_id, queue_offset, **limits)
        return found

    def put_spied(payloads: Any) -> Any:
        done.append("put")
        return put(payloads)

    backend.store.pull, backend.store.put_encoded = pull_spied, put_spied

    def ask(rid: int) -> None:
        client.send(api.Pull(rid, "t", 0, api.Position(rid), 10, bulk=is_bulk))

    ask(1)
    assert begun.wait(60)
    ask(2)
    ask(3)
    client.send(api.Put(4, 1), record())
    (connection,) = server._connections.all()

    def waiting() -> bytes:
        try:
            return connection.sock.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:  # nothing has arrived yet
            return b""

    try:
        until(lambda: record() in waiting())
    finally:
        go_on.set()
    replies = [client.receive()[0].rid for _ in range(4)]
    assert done == ["pull 1", "put", "pull 2", "pull 3"]
    assert replies == [1, 4, 2, 3]


# -- parked pulls

MANY = 600


def steps(call: Callable[[], object]) -> int:
    """Return how many lines of the client API and of the queues a call executes."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if "hastore" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.fixture
def parked(backend: FakeBackend) -> Pulls:
    """Idle consumers, each of its own topic and with its own connection."""
    pulls = Pulls(backend)
    backend.store.put_encoded([record(topic=f"t{n}") for n in range(MANY)])
    for n in range(MANY):
        pulls.connection = Waiting()
        pulls.wait(n, f"t{n}", 1, wait_ms=60_000 if n else 1_000)
    return pulls


def test_an_event_costs_what_it_wakes_however_many_pulls_are_parked(
    backend: FakeBackend, parked: Pulls
) -> None:
    handler = parked.handler
    parked.look_again()
    backend.store.put_encoded([record(topic="other")])
    assert steps(parked.look_again) < MANY
    backend.store.put_encoded([record(topic="t7")])
    assert steps(parked.look_again) < MANY
    assert parked.answers[7].status is api.PullStatus.FOUND
    now = SYSTEM_CLOCK.monotonic_ms() + 2_000.0
    assert steps(lambda: parked.look_again(now)) < MANY
    assert parked.answers[0].status is api.PullStatus.NO_NEW
    parked.connection.ended = True
    assert steps(lambda: handler.forget_ended([parked.connection])) < MANY
    assert handler.parked == MANY - 3 and len(parked.answers) == 2


def test_only_records_that_somebody_waits_for_wake_the_api(
    backend: FakeBackend, parked: Pulls
) -> None:
    handler, store = parked.handler, backend.store
    parked.look_again()
    store.confirmed = store.max_offset
    store.put_encoded([record(topic="other")])
    assert not handler.has_news()
    store.put_encoded([record(topic="t7")])  # it is there, but readers must not see it yet
    assert not handler.has_news()
    parked.look_again()
    assert 7 not in parked.answers and not handler.has_news()
    store.put_encoded([record(topic="t7"), record(topic="t8")])
    assert not handler.has_news()
    store.confirmed = store.max_offset
    assert handler.has_news()
    parked.look_again()
    assert parked.answers[7].count == 2 and parked.answers[8].count == 1
    assert not handler.has_news()


@pytest.fixture
def woken(server: ApiServer, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The wake-ups of the API's thread; the store of the fake wakes nobody."""
    backend.watchers.clear()
    calls: list[None] = []
    wake = server.wake
    monkeypatch.setattr(server, "wake", lambda: (calls.append(None), wake()))
    return calls


def test_a_thread_that_has_news_answers_parked_pulls_itself(
    backend: FakeBackend, server: ApiServer, client: Client, woken: list[None]
) -> None:
    client.send(api.Pull(1, "t", 0, api.Position(0), wait_ms=60_000))
    until(lambda: server._pulls.parked == 1)
    server.answer_readers()  # there is no news
    backend.store.put_encoded([record()])
    with server._io_lock:  # the API's thread is in its `poll`, and stays there
        assert server._pulls.has_news()
    server.answer_readers()
    assert client.receive()[0].count == 1
    assert not woken and not server._pulls.parked


def test_it_wakes_the_api_if_another_thread_has_its_lock(
    backend: FakeBackend, server: ApiServer, client: Client, woken: list[None]
) -> None:
    client.send(api.Pull(1, "t", 0, api.Position(0), wait_ms=60_000))
    until(lambda: server._pulls.parked == 1)
    backend.store.put_encoded([record()])
    with server._io_lock:
        server.answer_readers()
        server.answer_readers()
        assert len(woken) == 1  # once is enough
    assert client.receive()[0].count == 1


def test_it_answers_for_a_bounded_time(
    backend: FakeBackend, server: ApiServer, client: Client, woken: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(api_server, "LENT_MS", 0.0)
    for rid in range(3):
        client.send(api.Pull(rid, "t", 0, api.Position(0), wait_ms=60_000))
    until(lambda: server._pulls.parked == 3)
    backend.store.put_encoded([record()])
    server.answer_readers()
    assert len(woken) == 1  # for the other two
    assert sorted(client.receive()[0].rid for _ in range(3)) == [0, 1, 2]


def test_a_pull_in_an_epoch_to_come_waits_for_the_history(backend: FakeBackend) -> None:
    """It is woken by nothing else, and then looks where it is."""
    backend.store.put_encoded([record(), record()])
    pulls = Pulls(backend)
    (epoch, _), (offset, _) = backend.entries[0], backend.store.units["t", 0][0]
    request = api.Pull(1, "t", 0, api.Position(1, epoch + 1, offset), wait_ms=60_000)
    pulls.handler.answer_or_park(pulls.connection, request)
    seen: list[object] = []
    real = backend.store.pull
    backend.store.pull = lambda *given, **limits: seen.append(given) or real(*given, **limits)
    for _ in range(5):
        backend.store.put_encoded([record(topic="other")])
        pulls.look_again()
    assert not seen and not pulls.answers
    backend.entries.append((epoch + 1, offset))
    assert pulls.handler.has_news()
    pulls.look_again()
    assert pulls.answers[1].status is api.PullStatus.FOUND


def test_ended_waits_leave_nothing_behind(backend: FakeBackend) -> None:
    """Consumers whose pulls are answered quickly, with long waits: the heaps do not grow."""
    pulls = Pulls(backend)
    for rid in range(1_000):
        pulls.wait(rid, "t", rid)
        backend.store.put_encoded([record()])
        pulls.look_again()
        assert pulls.answers.pop(rid).status is api.PullStatus.FOUND
    waiting = pulls.handler._waiting
    assert not waiting and not waiting._queues and not waiting._of_connection
    assert len(waiting._deadlines._entries) < 100
    assert not backend.store.grown._watched


def test_the_queues_of_one_topic_are_found_without_looking_at_others(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kit.opened(tmp_path) as store:
        names = [f"topic{n}" for n in range(100)]
        kit.put(store, *[kit.message(n, topic=name) for n, name in enumerate(names)])
        assert store.wait_dispatched(store.max_offset, 60)
        assert store.queues.topic_count == 100
        assert store.queues.topics() == {name: {0: (0, 1)} for name in sorted(names)}
        backend.store = store
        monkeypatch.setattr(store, "default_queues", 4, raising=False)
        looks: list[object] = []
        real = store.queues.queue_range
        monkeypatch.setattr(
            store.queues, "queue_range", lambda *key: looks.append(key) or real(*key)
        )
        reply = answer_at_once(backend, api.AskTopics(1, "topic7"))
        assert isinstance(reply, api.Topics) and reply.topics == {"topic7": {0: (0, 1)}}
        assert looks == [("topic7", 0)]
        reply = answer_at_once(backend, api.AskTopics(2, "unknown"))
        assert isinstance(reply, api.Topics) and not reply.topics


def readers_miss(store: MessageStore, waiting: dict[int, api.Pull]) -> list[api.Pull]:
    """Return the parked pulls for which there are records."""
    found = [
        (request, store.reader.pull(
            request.topic, 0, request.position.queue_offset, max_messages=1, max_bytes=1,
            limit_offset=store.readable_offset,
        ))
        for request in waiting.values()
    ]  # fmt: skip
    return [request for request, pulled in found if pulled.count]


def test_no_parked_pull_misses_a_record_whatever_happens(
    backend: FakeBackend, tmp_path: Path
) -> None:
    """Puts, confirmations and cuts in any order, in the store's own threads."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with kit.opened(tmp_path) as store:
        store.set_limits(confirmed=0, readable=0)
        backend.store = store
        pulls, waiting, number = Pulls(backend), dict[int, api.Pull](), 0
        for rid in range(150):
            topic = f"t{chance.randrange(4)}"
            at = chance.choice((0, 0, 1, 2, 5)) + (store.queues.queue_range(topic, 0) or (0, 0))[1]
            request = api.Pull(rid, topic, 0, api.Position(max(0, at - 2)), wait_ms=60_000)
            waiting[rid] = request
            pulls.handler.answer_or_park(pulls.connection, request)
            what = chance.random()
            if what < 0.7:
                number += 1
                kit.put(store, kit.message(number, topic=f"t{chance.randrange(4)}"))
            if 0.4 < what < 0.9:
                store.set_limits(readable=chance.randint(store.readable_offset, store.max_offset))
            elif what >= 0.9:
                end = chance.randint(store.min_offset, store.max_offset)
                store.set_limits(readable=min(end, store.readable_offset))
                store.truncate(end)
                store.set_limits(readable=min(store.readable_offset, store.max_offset))
            assert store.wait_dispatched(store.max_offset, 60), store.problems
            if pulls.handler.has_news():
                pulls.look_again()
            waiting = {n: one for n, one in waiting.items() if n not in pulls.answers}
            assert not readers_miss(store, waiting), f"step {rid}"
        assert pulls.handler.parked == len(waiting)


# -- in a whole node


def answers_parked_pulls(server: ApiServer, put: Callable[[], object]) -> None:
    """Each pull of queue 0 of "t" waits, and gets the next message."""
    reader = Client(server.endpoint)
    try:
        for at in range(3):
            reader.send(api.Pull(at, "t", 0, api.Position(at), wait_ms=60_000))
            until(lambda: server._pulls.parked == 1)
            put()
            reply, _ = reader.receive()
            assert (reply.rid, reply.status, reply.count) == (at, api.PullStatus.FOUND, 1)
    finally:
        reader.close()


@pytest.mark.parametrize("kind", ["classic", "dledger", "memory"])
def test_parked_pulls_are_woken_by_replay_in_each_mode(tmp_path: Path, kind: str) -> None:
    store = {"flush": Flush.ASYNC, "kind": StoreKind.MEMORY} if kind == "memory" else {}
    node: BaseNode = (
        Node(config_of(tmp_path / "s"), lambda: None)
        if kind == "classic"
        else DLedgerNode(group_of_one(tmp_path / "s", **store), lambda: None)
    )
    with running(node), Producer(node.api.endpoint) as producer:
        answers_parked_pulls(node.api, lambda: producer.send_sync("t", b"x", queue=0))


def test_parked_pulls_of_a_slave_are_woken_by_its_replay(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    try:
        group.start(1, 2)
        group.settle()
        with Producer(group.api(1)) as producer:
            answers_parked_pulls(group[2].api, lambda: producer.send_sync("t", b"x", queue=0))
    finally:
        group.end()


# -- pulls that the node makes for clients of another protocol


class Own(OwnPull):
    """A pull of queue 0 of "t" whose answers are kept."""

    def __init__(self, backend: FakeBackend, at: int, wait_ms: int = 60_000) -> None:
        super().__init__("t", 0, api.Position(at), wait_ms)
        self.backend = backend
        self.looks = 0
        self.cold = False  # what it reads is on the disk only
        self.replies: list[Any] = []

    def find(self) -> Found:
        self.looks += 1
        if self.cold:
            self.cold = False
            raise NotCachedError("it is on the disk")
        at = self.position.queue_offset
        found = self.backend.store.pull(
            "t", 0, at, max_messages=1, max_bytes=1, limit_offset=self.backend.store.max_offset
        )
        return Found(found.count, may_wait=not found.count)

    def respond(self, reply: Any) -> None:
        self.replies.append(reply)


def test_a_pull_of_another_protocol_waits_as_every_pull(backend: FakeBackend) -> None:
    pulls = Pulls(backend)
    early, late = Own(backend, 0), Own(backend, 5)
    for own in (early, late):
        pulls.handler.offer(pulls.connection, own)
    pulls.look_again()
    assert (early.looks, late.looks, pulls.handler.parked) == (1, 1, 2)
    for _ in range(3):
        backend.store.put_encoded([record(topic="other")])
        assert not pulls.handler.has_news()
    backend.store.put_encoded([record()])
    pulls.look_again()
    assert (early.replies, early.looks, late.looks) == ([1], 2, 1)
    late.position = api.Position(1)  # `find` may move it: from now on it waits there
    pulls.look_again(SYSTEM_CLOCK.monotonic_ms() + 120_000)
    assert late.replies == [0] and pulls.handler.parked == pulls.connection.parked == 0


def test_a_pull_of_another_protocol_is_read_from_the_disk_by_another_thread(
    backend: FakeBackend,
) -> None:
    backend.store.put_encoded([record()])
    pulls = Pulls(backend)
    own = Own(backend, 0, wait_ms=0)
    own.cold = True
    cold = pulls.handler._cold
    cold.start()
    try:
        pulls.handler.answer_or_park(pulls.connection, own)
        assert not own.replies
        until(lambda: cold.has_done)
        cold.finish(lambda _, failure: pytest.fail(str(failure)))
    finally:
        cold.stop()
    assert (own.replies, own.looks) == ([1], 2)


def test_a_pull_that_may_not_wait_is_refused_and_not_told_to_come_again_at_once(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.server.api.pulls.MAX_PARKED", 1)
    pulls = Pulls(backend)
    owns = [Own(backend, 0), Own(backend, 0), Own(backend, 0, wait_ms=0)]
    for own in owns:
        pulls.handler.answer_or_park(pulls.connection, own)
    backend.store.put_encoded([record()])
    backend.removed = "this node was removed"
    pulls.look_again()
    assert [own.replies for own in owns] == [
        [api.Failed(0, "SERVICE_NOT_AVAILABLE", "this node was removed")],
        [api.Failed(0, "BUSY", "too many pulls wait for records")],
        [0],
    ]
