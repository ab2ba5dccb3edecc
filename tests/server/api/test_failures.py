"""A failure affects one request only: its client gets the reason, and the node goes on."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.errors import CorruptRecordError, StoreError
from hastore.protocol import api
from hastore.server.api import pulls as api_pulls
from hastore.server.api.server import ApiServer
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, Pulls, record, until

FAILURES: list[tuple[Callable[[], Exception], str, str]] = [
    (lambda: OSError(errno.EIO, os.strerror(errno.EIO), "log/0"), "StoreError", "log/0"),
    (lambda: FileNotFoundError(errno.ENOENT, "gone", "log/0"), "StoreError", "log/0"),
    (lambda: CorruptRecordError("offset 7 is damaged"), "CorruptRecordError", "offset 7"),
    (lambda: StoreError("the store is closed"), "StoreError", "closed"),
    (lambda: TypeError("a mistake"), "InternalError", "TypeError: a mistake"),
    (lambda: AssertionError(), "InternalError", "AssertionError"),
    (lambda: RecursionError("deep"), "InternalError", "RecursionError"),
]
NAMES = ["EIO", "unlinked", "damage", "store", "bug", "assertion", "recursion"]


def raising(make: Callable[[], Exception]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise make()

    return fail


def works(server: ApiServer) -> None:
    """Another client puts, and is answered."""
    other = Client(server.endpoint)
    try:
        assert other.ask(api.Put(99, 1), record(topic="other")).status is api.Status.PUT_OK
    finally:
        other.close()


@pytest.mark.parametrize(("make", "status", "reason"), FAILURES, ids=NAMES)
@pytest.mark.parametrize(
    ("method", "question"),
    [
        ("pull", api.Pull(7, "t", 0, api.Position(0))),
        ("search_key", api.FindKey(7, "t", "k")),
        ("record_at", api.FindOffset(7, 0)),
        ("queue_offset_by_time", api.FindTime(7, "t", 0, 1)),
        ("topics", api.AskTopics(7)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_query_that_fails_is_answered_with_the_reason(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, method: str, question: Any,
    make: Callable[[], Exception], status: str, reason: str,
) -> None:  # fmt: skip
    client.ask(api.Put(1, 1), record())
    monkeypatch.setattr(backend.store, method, raising(make))
    with caplog.at_level(logging.ERROR):
        reply = client.ask(question)
    assert isinstance(reply, api.Failed), reply
    assert reply.status == status and reason in reply.reason
    [line] = [each for each in caplog.records if each.name == "hastore.server.api.replies"]
    assert bool(line.exc_info) == (status == "InternalError")  # a bug with its traceback
    monkeypatch.undo()
    assert not isinstance(client.ask(question), api.Failed)  # on the same connection
    works(server)


@pytest.mark.parametrize("method", ["status", "master_map", "history"])
def test_a_query_to_the_node_that_fails_is_answered_too(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:  # fmt: skip
    client.ask(api.Put(1, 1), record())
    monkeypatch.setattr(backend, method, raising(lambda: KeyError("node")))
    question = {
        "status": api.AskStatus(7),
        "master_map": api.AskMap(7),
        "history": api.Pull(7, "t", 0, api.Position(1, 65537, 0)),
    }[method]
    assert client.ask(question).status == "InternalError"
    monkeypatch.undo()
    works(server)


def test_a_failure_is_logged_once_not_with_each_retry(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    client.ask(api.Put(1, 1), record())
    monkeypatch.setattr(backend.store, "pull", raising(lambda: OSError(errno.EIO, "no", "log/0")))
    with caplog.at_level(logging.ERROR):
        for rid in range(2, 22):
            assert client.ask(api.Pull(rid, "t", 0, api.Position(0))).status == "StoreError"
    lines = [each for each in caplog.records if each.name == "hastore.server.api.replies"]
    assert len(lines) == 1 and "queue 0 of 't'" in lines[0].getMessage()


def test_failed_pulls_leave_room_for_parked_ones(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_pulls, "MAX_PARKED", 20)
    client.ask(api.Put(1, 1), record())
    with monkeypatch.context() as broken:
        broken.setattr(backend.store, "pull", raising(lambda: CorruptRecordError("damaged")))
        for rid in range(2, 32):
            assert client.ask(api.Pull(rid, "t", 0, api.Position(0))).status == "CorruptRecordError"
    assert server._pulls.parked == 0
    client.send(api.Pull(50, "t", 0, api.Position(1), wait_ms=60_000))
    until(lambda: server._pulls.parked == 1)  # it is parked: there is room
    backend.store.put_encoded([record(body=b"new")])
    backend.moved()
    reply, _ = client.receive()
    assert (reply.rid, reply.status) == (50, api.PullStatus.FOUND)


# -- parked pulls, driven without a socket, so that each step is visible


def failing_for(backend: FakeBackend, method: str, topic: str, failure: Exception) -> None:
    real = getattr(backend.store, method)

    def one(name: str, *given: Any, **named: Any) -> Any:
        if name == topic:
            raise failure
        return real(name, *given, **named)

    setattr(backend.store, method, one)


@pytest.mark.parametrize(("make", "status", "reason"), FAILURES, ids=NAMES)
@pytest.mark.parametrize("method", ["pull", "queue_range"])
def test_a_parked_pull_that_meets_damage_is_answered_and_the_others_are_kept(
    backend: FakeBackend, method: str, make: Callable[[], Exception], status: str, reason: str
) -> None:
    backend.store.put_encoded([record(topic="bad"), record(topic="good"), record(topic="still")])
    pulls = Pulls(backend)
    for rid, topic in enumerate(("bad", "bad", "good", "still")):
        pulls.wait(rid, topic, 1)
    backend.store.put_encoded([record(topic="bad"), record(topic="good")])
    failing_for(backend, method, "bad", make())
    pulls.look_again()
    assert {rid: reply.status for rid, reply in pulls.answers.items()} == {
        0: status, 1: status, 2: api.PullStatus.FOUND
    }  # fmt: skip
    assert reason in pulls.answers[0].reason
    assert pulls.handler.parked == pulls.connection.parked == 1
    pulls.look_again()
    assert len(pulls.answers) == 3
    pulls.connection.ended = True
    pulls.handler.forget_ended([pulls.connection])
    assert pulls.handler.parked == 0


@pytest.mark.parametrize(("make", "status", "reason"), FAILURES, ids=NAMES)
def test_a_parked_pull_that_meets_damage_when_its_time_is_up(
    backend: FakeBackend, make: Callable[[], Exception], status: str, reason: str
) -> None:
    backend.store.put_encoded([record(topic="bad"), record(topic="good")])
    pulls = Pulls(backend)
    pulls.wait(0, "bad", 1, wait_ms=1_000)
    pulls.wait(1, "good", 1, wait_ms=1_000)
    pulls.wait(2, "good", 1, wait_ms=60_000)
    failing_for(backend, "pull", "bad", make())
    pulls.look_again(SYSTEM_CLOCK.monotonic_ms() + 2_000.0)
    assert {rid: reply.status for rid, reply in pulls.answers.items()} == {
        0: status, 1: api.PullStatus.NO_NEW
    }  # fmt: skip
    assert reason in pulls.answers[0].reason
    assert pulls.handler.parked == pulls.connection.parked == 1


# -- puts, commits, positions


def test_a_put_whose_admission_fails_is_refused(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "writable_reason", raising(lambda: TypeError("a mistake")))
    reply = client.ask(api.Put(1), record())
    assert reply.status is api.Status.SERVICE_NOT_AVAILABLE and "a mistake" in reply.reason
    monkeypatch.undo()
    assert backend.store.max_offset == 0
    works(server)


@pytest.mark.parametrize("own", [False, True], ids=["put", "commit"])
def test_an_append_that_fails_half_way_says_neither_stored_nor_refused(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    own: bool,
) -> None:  # fmt: skip
    real = backend.store.put_encoded

    def half(payloads: Any) -> Any:
        real(payloads)
        raise OSError(errno.EIO, os.strerror(errno.EIO), "log/0")

    assert client.ask(api.AskMap(1)).rid == 1
    monkeypatch.setattr(backend.store, "put_encoded", half)
    if own:
        done = client.ask(api.Commit(2, "g", "t", {0: api.Position(5)}))
        assert done.status is api.Status.TIMEOUT
    else:
        client.send(api.Put(2), record())
        until(lambda: server._connections.ended == 1)
        assert client.silent(0.1)
    monkeypatch.undo()
    assert backend.store.max_offset > 0
    if own:  # the commit is not under way any more
        done = client.ask(api.Commit(3, "g", "t", {0: api.Position(6)}))
        assert done.status is api.Status.PUT_OK
    works(server)


def test_a_reply_that_cannot_be_encoded_ends_only_its_connection(
    server: ApiServer, client: Client, backend: FakeBackend
) -> None:
    other = Client(server.endpoint)
    other.ask(api.Put(1, 1), record())
    client.ask(api.Put(1, 1), record())
    backend.transfer.hold = True
    client.send(api.Put(2, -1), record())
    until(lambda: backend.transfer.waiting and not server._io_lock.locked())
    good = backend.transfer.level
    backend.transfer.level = object()  # cannot be encoded
    backend.transfer.end_all()
    until(lambda: server._connections.ended == 1)
    backend.transfer.level = good
    assert (server.pending_puts, server.pending_bytes) == (0, 0)
    assert other.ask(api.Pull(3, "t", 0, api.Position(0))).count == 3  # it is stored
    other.close()


@pytest.mark.parametrize("where", ["wait_limit_ms", "add"])
def test_a_put_that_cannot_wait_leaves_nothing_behind(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:  # fmt: skip
    target = backend if where == "wait_limit_ms" else backend.transfer
    monkeypatch.setattr(target, where, raising(lambda: KeyError("need")))
    client.send(api.Put(1, -1), record())
    until(lambda: server._connections.ended == 1)
    monkeypatch.undo()
    assert (server.pending_puts, server.pending_bytes) == (0, 0)
    works(server)


@pytest.mark.parametrize(("make", "status", "reason"), FAILURES, ids=NAMES)
def test_positions_that_cannot_be_read_are_answered_with_the_reason(
    server: ApiServer, client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Exception], status: str, reason: str,
) -> None:  # fmt: skip
    client.ask(api.Commit(1, "g", "t", {0: api.Position(5)}))
    with monkeypatch.context() as broken:
        broken.setattr(backend.store, "pull", raising(make))
        reply = client.ask(api.Fetch(2, "g", "t"))
        assert reply.status == status and reason in reply.reason
    assert client.ask(api.Fetch(3, "g", "t")).positions == {0: api.Position(5)}
    works(server)


def test_a_bug_in_handling_a_message_ends_only_its_connection(
    server: ApiServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.ask(api.AskMap(1)).rid == 1
    handle = server._handle_request
    monkeypatch.setattr(server, "_handle_request", raising(lambda: IndexError("a mistake")))
    client.send(api.AskMap(2))
    until(lambda: server._connections.ended == 1)
    monkeypatch.setattr(server, "_handle_request", handle)
    works(server)


def test_without_memory_the_node_ends(backend: FakeBackend) -> None:
    told: list[str] = []
    server = ApiServer(
        "tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=lambda name, _: told.append(name)
    )
    server.start()
    client = Client(server.endpoint)
    client.ask(api.Put(1, 1), record())
    backend.store.pull = raising(MemoryError)
    client.send(api.Pull(2, "t", 0, api.Position(0)))
    until(lambda: told == ["ApiServer"])
    assert isinstance(server.failure, MemoryError)
    client.close()
    assert server.stop(60)
