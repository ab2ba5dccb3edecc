"""Commits at a node: none moves its group back unasked, whatever else is in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.errors import StoreError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import api, committed_positions
from hastore.protocol.committed_positions import CommitBody
from hastore.server.api import commits, position_reader
from hastore.server.api.commit_records import CommitReader, commit_record
from hastore.server.api.commits import CommitHandler, PositionTable
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, record, until


def commit(rid: int, offset: int, *, back: list[int] | None = None, queue: int = 0) -> api.Commit:
    return api.Commit(rid, "g", "t", {queue: api.Position(offset)}, back=back or [])


def committed(client: Client) -> dict[int, int]:
    found = client.ask(api.Fetch(99, "g", "t")).positions
    return {queue: place.queue_offset for queue, place in found.items()}


def fill(client: Client, count: int = 20) -> None:
    """Put messages into queue 0 of t."""
    assert client.ask(api.Put(1, 1), b"".join([record()] * count)).status is api.Status.PUT_OK


def test_a_lower_commit_is_refused_and_says_both_positions(client: Client) -> None:
    fill(client)
    client.ask(commit(2, 12))
    refused = client.ask(commit(3, 5))
    assert isinstance(refused, api.Failed)
    assert refused.status == "POSITION_BEHIND"
    assert refused.reason == "group 'g' in topic 't' is at 12 in queue 0, the commit at 5"
    assert committed(client) == {0: 12}
    assert client.ask(commit(4, 12)).status is api.Status.PUT_OK  # repeating it is harmless
    assert client.ask(commit(5, 13)).status is api.Status.PUT_OK
    other = api.Commit(6, "another", "t", {0: api.Position(1)})
    assert client.ask(other).status is api.Status.PUT_OK
    assert committed(client) == {0: 13}


def test_a_commit_that_is_lower_in_one_queue_is_refused_whole(client: Client) -> None:
    client.ask(api.Put(1, 1), record() * 9 + record(queue=1) * 9)
    client.ask(api.Commit(2, "g", "t", {0: api.Position(5), 1: api.Position(5)}))
    mixed = {0: api.Position(7), 1: api.Position(3)}
    refused = client.ask(api.Commit(3, "g", "t", mixed))
    assert refused.reason == "group 'g' in topic 't' is at 5 in queue 1, the commit at 3"
    assert committed(client) == {0: 5, 1: 5}
    assert isinstance(client.ask(api.Commit(4, "g", "t", mixed, back=[0])), api.Failed)
    done = client.ask(api.Commit(5, "g", "t", mixed, back=[1]))
    assert done.status is api.Status.PUT_OK
    assert committed(client) == {0: 7, 1: 3}


def test_a_position_that_a_failover_cut_away_is_not_compared(
    client: Client, backend: FakeBackend
) -> None:
    fill(client, 6)
    units = backend.store.units["t", 0]
    lost = api.Position(5, 65537, units[4][0])
    assert client.ask(api.Commit(2, "g", "t", {0: lost})).status is api.Status.PUT_OK
    assert isinstance(client.ask(commit(3, 2)), api.Failed)
    # The epoch of a rival master begins at the fourth record, so the fifth differed before.
    backend.entries = [(65537, 0), (131074, units[3][0])]
    assert client.ask(commit(4, 2)).status is api.Status.PUT_OK
    assert committed(client) == {0: 2}


def test_a_position_without_an_epoch_that_lies_beyond_the_end_is_not_compared(
    client: Client,
) -> None:
    fill(client, 6)
    client.ask(commit(2, 7))
    assert client.ask(commit(3, 5)).status is api.Status.PUT_OK
    client.ask(api.Commit(4, "g", "gone", {0: api.Position(7)}))
    gone = client.ask(api.Commit(5, "g", "gone", {0: api.Position(3)}))
    assert gone.status is api.Status.PUT_OK


def test_a_commit_waits_for_the_one_before_it(client: Client, backend: FakeBackend) -> None:
    fill(client)
    backend.transfer.hold = True
    client.send(commit(2, 12))
    until(lambda: backend.transfer.waiting)
    client.send(commit(3, 5))
    client.send(commit(4, 13))
    client.send(api.Commit(5, "another", "t", {0: api.Position(1)}))
    until(lambda: len(backend.transfer.waiting) == 2)  # the commit of another group does not wait
    backend.transfer.hold = False
    backend.transfer.end_all()
    replies: dict[int, Any] = {}
    while len(replies) < 4:
        reply, _ = client.receive()
        replies[reply.rid] = reply
    assert isinstance(replies[3], api.Failed) and replies[3].status == "POSITION_BEHIND"
    assert {replies[rid].status for rid in (2, 4, 5)} == {api.Status.PUT_OK}
    assert committed(client) == {0: 13}


def test_a_waiting_commit_whose_time_is_up_is_refused(client: Client, backend: FakeBackend) -> None:
    fill(client)
    backend.transfer.hold = True
    client.send(commit(2, 12))
    until(lambda: backend.transfer.waiting)
    client.send(api.Commit(3, "g", "t", {0: api.Position(5)}, timeout_ms=1, back=[0]))
    client.send(api.Fetch(99, "g", "t"))
    replies: dict[int, Any] = {}

    def receive_until(*rids: int) -> None:
        while not replies.keys() >= set(rids):
            reply, _ = client.receive()
            replies[reply.rid] = reply

    receive_until(99)  # the node has seen commit 3 by then
    time.sleep(0.002)  # longer than its timeout
    backend.transfer.hold = False
    backend.transfer.end_all()
    receive_until(2, 3)
    assert replies[2].status is api.Status.PUT_OK
    assert isinstance(replies[3], api.Failed) and replies[3].status == "BUSY"
    assert committed(client) == {0: 12}


def test_a_waiting_commit_ends_with_its_connection(
    client: Client, server: ApiServer, backend: FakeBackend
) -> None:
    """Taken later, it would move the group back behind commits made since."""
    fill(client)
    backend.transfer.hold = True
    client.send(commit(2, 12))
    until(lambda: backend.transfer.waiting)
    gone = Client(server.endpoint)
    try:
        gone.send(commit(3, 5, back=[0]))
        committed(gone)  # the node has seen the commit by then
        assert server.connections == 2
    finally:
        gone.close()
    until(lambda: server.connections == 1)
    client.send(commit(5, 13))
    committed(client)
    backend.transfer.hold = False
    backend.transfer.end_all()
    assert {client.receive()[0].rid, client.receive()[0].rid} == {2, 5}
    assert committed(client) == {0: 13}
    until(lambda: not server._fetches)
    at = backend.store.units[api.POSITIONS_TOPIC, 0]
    assert len(at) == 2, "the commit of a connection that had ended was taken"


def test_a_commit_that_is_stored_but_not_confirmed_counts_too(
    client: Client, backend: FakeBackend
) -> None:
    fill(client)
    backend.transfer.hold = True
    backend.store.confirmed = len(backend.store.log)
    client.send(commit(2, 12))
    until(lambda: backend.transfer.waiting)
    backend.transfer.hold = False
    backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    assert client.receive()[0].status is api.Status.FLUSH_SLAVE_TIMEOUT
    assert committed(client) == {}  # it is not readable yet
    assert isinstance(client.ask(commit(3, 5)), api.Failed)
    backend.store.confirmed = None
    assert committed(client) == {0: 12}
    assert isinstance(client.ask(commit(4, 5)), api.Failed)


def test_a_commit_that_a_failover_cut_away_does_not_count(
    client: Client, backend: FakeBackend
) -> None:
    fill(client)
    backend.store.confirmed = len(backend.store.log)
    assert client.ask(commit(2, 12)).status is api.Status.PUT_OK
    cut = backend.store.units[api.POSITIONS_TOPIC, 0].pop()[0]
    del backend.store.log[cut:]
    assert client.ask(commit(3, 5)).status is api.Status.PUT_OK


def test_a_commit_at_a_slave_and_one_that_is_no_record_are_refused_with_their_reasons(
    client: Client, backend: FakeBackend
) -> None:
    fill(client)
    client.ask(commit(2, 12))
    illegal = client.ask(api.Commit(3, "g\x01", "t", {0: api.Position(1)}))
    assert illegal.status == "MessageIllegalError"
    backend.writable = False
    refused = client.ask(commit(4, 5))  # this slave may lag behind the group's position
    assert refused.status is api.Status.SERVICE_NOT_AVAILABLE
    backend.writable = True
    assert isinstance(client.ask(commit(5, 5)), api.Failed)


def test_a_client_of_an_older_version_is_understood(client: Client) -> None:
    """Its header ends before `back`: no queue may move back."""
    fill(client)
    old = api.encode(commit(2, 12))
    assert old.endswith(b"\xcd\x0b\xb8\x90\xc0")  # timeout_ms 3000, back [], member nil
    client.ask(commit(2, 12))
    short = bytes((old[0] - 2,)) + api.encode(commit(3, 5))[1:-2]
    client.socket.send_multipart([short])
    assert client.receive()[0].status == "POSITION_BEHIND"


def test_a_commit_whose_record_is_refused_does_not_say_put_ok(
    client: Client, backend: FakeBackend
) -> None:
    """Clients take a commit for stored by `status` alone."""
    backend.store.default_queues = 0  # so that no record is taken
    reply = client.ask(api.Commit(1, "g", "t", {0: api.Position(1)}))
    assert reply.status is api.Status.MESSAGE_ILLEGAL and "queue 0 of 0" in reply.reason
    backend.store.default_queues = 4
    assert client.ask(api.Commit(2, "g", "t", {0: api.Position(1)})).status is api.Status.PUT_OK


def test_positions_wait_until_a_brokers_are_taken_over(
    client: Client, backend: FakeBackend
) -> None:
    """A group that is told that it has none would begin anew."""
    fill(client)
    backend.waits = True
    client.send(api.Fetch(2, "g", "t"))
    client.send(commit(3, 5))
    assert client.silent()
    assert client.ask(api.Put(4, 1), record()).status is api.Status.PUT_OK  # puts go on
    assert client.silent()
    backend.waits = False
    client.send(api.Put(5, 1), record())  # any news lets the node look again
    assert {client.receive()[0].rid for _ in range(3)} == {2, 3, 5}


def test_a_long_list_of_queues_that_may_move_back_is_not_searched_for_each_queue(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Searched(list[int]):
        def __contains__(self, _queue: object) -> bool:
            raise AssertionError("55,000 entries, for each of 1,024 queues, under the API's lock")

    known = {queue: api.Position(9) for queue in range(1_024)}
    monkeypatch.setattr(CommitHandler, "known", lambda *_: known)
    puts, refused = mock.Mock(), mock.Mock()
    positions = mock.Mock(**{"problem_of.return_value": None})
    handler = CommitHandler(
        backend, positions, puts, mock.Mock(), refused, mock.Mock(), SYSTEM_CLOCK, mock.Mock()
    )
    lower = {queue: api.Position(8) for queue in known}
    back = Searched([5] * 55_000 + list(known))
    whole = api.Commit(1, "g", "t", lower, back=back)
    assert handler.begin(whole, SYSTEM_CLOCK.monotonic_ms(), mock.Mock(), refused)
    assert puts.admit_own_record.call_count == 1 and not refused.called


# -- as many groups and topics as may have positions


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups keep positions in three topics."""
    for module in (committed_positions, commits):
        monkeypatch.setattr(module, "MAX_GROUPS", 3)


def in_topic(rid: int, topic: str, group: str = "g") -> api.Commit:
    return api.Commit(rid, group, topic, {0: api.Position(rid)})


def delete(client: Client, topic: str) -> None:
    done = client.ask(api.DropTopic(90, topic))
    assert done.status is api.Status.PUT_OK, done.reason


@pytest.mark.usefixtures("three")
def test_a_commit_without_room_says_what_makes_room_and_is_not_tried_again(
    client: Client, server: ApiServer
) -> None:
    for rid, topic in enumerate("ab", 1):
        assert client.ask(in_topic(rid, topic)).status is api.Status.PUT_OK
    assert server.problems() == []
    assert client.ask(in_topic(3, "c")).status is api.Status.PUT_OK
    assert client.ask(api.Fetch(80, "g", "c")).positions  # it is read
    refused = client.ask(in_topic(4, "d"))
    assert refused.status == "UsageError"  # not BUSY, after which clients try for seconds
    assert "`hastore topics delete`" in refused.reason
    assert "in 3 of 3 possible pairs" in server.problems()[0]
    assert "`hastore topics delete`" in server.problems()[0]
    assert client.ask(in_topic(5, "c")).status is api.Status.PUT_OK


@pytest.mark.usefixtures("three")
def test_positions_in_a_deleted_topic_make_room_on_each_node(
    client: Client, server: ApiServer, backend: FakeBackend
) -> None:
    for topic in "abc":
        assert client.ask(api.Put(70, 1), record(topic)).status is api.Status.PUT_OK
        assert client.ask(in_topic(1, topic)).status is api.Status.PUT_OK
    delete(client, "b")
    assert client.ask(api.Fetch(80, "g", "b")).positions  # as long as the room is not needed
    assert server.problems() == []
    assert client.ask(in_topic(4, "d")).status is api.Status.PUT_OK
    assert client.ask(api.Fetch(81, "g", "d")).positions == {0: api.Position(4)}
    assert client.ask(api.Fetch(82, "g", "b")).positions == {}
    delete(client, "c")
    assert client.ask(api.Put(71, 1), record("c")).status is api.Status.PUT_OK  # it begins anew
    assert client.ask(in_topic(5, "e")).status == "UsageError"
    slave = PositionTable(backend, SYSTEM_CLOCK)
    while not slave.catch_up():
        pass
    assert sorted(slave.pairs()) == [("g", "a"), ("g", "c"), ("g", "d")]


@pytest.mark.usefixtures("three")
def test_commits_that_were_taken_at_once_all_count(client: Client, backend: FakeBackend) -> None:
    """None of them knows of the others, so they are more than there is room for."""
    backend.transfer.hold = True
    for rid, topic in enumerate("abcde", 1):
        client.send(in_topic(rid, topic))
    until(lambda: len(backend.transfer.waiting) == 5)
    backend.transfer.hold = False
    backend.transfer.end_all()
    assert {client.receive()[0].status for _ in range(5)} == {api.Status.PUT_OK}
    for rid, topic in enumerate("abcde", 1):
        found = client.ask(api.Fetch(80, "g", topic)).positions
        assert found == {0: api.Position(rid)}
    assert client.ask(in_topic(6, "f")).status == "UsageError"


@pytest.mark.usefixtures("three")
def test_a_node_that_reads_later_keeps_what_the_master_took(
    client: Client, backend: FakeBackend
) -> None:
    """The topic that made room may be there again by then."""
    for topic in "abc":
        client.ask(api.Put(70, 1), record(topic))
        client.ask(in_topic(1, topic))
    delete(client, "b")
    assert client.ask(in_topic(4, "d")).status is api.Status.PUT_OK
    again = client.ask(api.SetTopic(72, api.TopicInfo("b", 4, 4)))
    assert again.status is api.Status.PUT_OK and not backend.store.topic_table.deleted()
    slave = PositionTable(backend, SYSTEM_CLOCK)
    while not slave.catch_up():
        pass
    assert slave.find("g", "d") == {0: api.Position(4)}


# -- after a start: the log has commits that nobody has read


class Reading:
    """Says which thread reads commits, and lets PositionReader's wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self._real = CommitReader.next
        monkeypatch.setattr(CommitReader, "next", lambda *given, **named: self(*given, **named))

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.names.append(threading.current_thread().name)
        if self.names[-1] == "PositionReader":
            assert self.go_on.wait(60)
            if self.failure is not None:
                raise self.failure
        return self._real(*given, **named)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    found = Reading(monkeypatch)
    yield found
    found.go_on.set()


def commits_of(backend: FakeBackend, count: int) -> None:
    """Fill the log with commits of g in t."""
    bodies = (CommitBody("g", "t", {0: (at, None, None)}) for at in range(count))
    backend.store.put_encoded([b"".join(commit_record(body, 1) for body in bodies)])


@pytest.fixture
def restarted(reading: Reading, backend: FakeBackend) -> Iterator[ApiServer]:
    commits_of(backend, 1_000)
    running = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    running.start()
    yield running
    reading.go_on.set()
    assert running.stop(60)


def test_positions_are_read_before_anybody_asks(restarted: ApiServer, reading: Reading) -> None:
    reading.go_on.set()
    until(lambda: restarted._positions.find("g", "t") == {0: api.Position(999)})
    assert set(reading.names) == {"PositionReader"}


def test_retention_that_passes_the_last_commit_has_none_read_again(
    restarted: ApiServer, reading: Reading, backend: FakeBackend
) -> None:
    """A history that begins where the log does says nothing of the commit that was read last."""
    reading.go_on.set()
    until(lambda: restarted._positions.find("g", "t") == {0: api.Position(999)})
    backend.history_is_whole = False
    backend.entries = [(65537, len(backend.store.log))]
    backend.store.put_encoded([commit_record(CommitBody("g", "t", {0: (1_000, None, None)}), 1)])
    until(lambda: restarted._positions.find("g", "t") == {0: api.Position(1_000)})
    assert restarted._positions.commits == 1_001


def test_who_waits_for_positions_after_a_start_keeps_nobody_else(
    restarted: ApiServer, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions of commits: the API's thread reads none of them."""
    monkeypatch.setattr(position_reader, "MANY", 1_000)
    client = Client(restarted.endpoint)
    try:
        client.send(api.Fetch(99, "g", "t"))
        client.send(commit(98, 1_000))
        until(lambda: reading.names)
        assert client.ask(api.Put(1, 1), record()).status is api.Status.PUT_OK
        assert "1000 commits are left" in restarted.problems()[0]
        assert set(reading.names) == {"PositionReader"}
        reading.go_on.set()
        replies = {reply.rid: reply for reply, _ in (client.receive(), client.receive())}
        assert replies[99].positions[0].queue_offset >= 999
        assert replies[98].status is api.Status.PUT_OK
        assert restarted.problems() == []
    finally:
        client.close()


def test_who_waits_for_positions_that_cannot_be_read_is_told_why(
    restarted: ApiServer, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    reading.failure = StoreError("a bad sector")
    reading.go_on.set()
    client = Client(restarted.endpoint)
    try:
        with caplog.at_level(logging.WARNING):
            failed = client.ask(api.Fetch(2, "g", "t"))
        assert (failed.status, failed.reason) == ("StoreError", "a bad sector")
        until(lambda: "could not be read: StoreError('a bad sector')" in caplog.text)
        reading.failure = None
        assert client.ask(api.Fetch(3, "g", "t")).positions == {0: api.Position(999)}
    finally:
        client.close()


def test_a_slave_reads_on_though_nobody_asks(
    restarted: ApiServer, reading: Reading, backend: FakeBackend
) -> None:
    """Who becomes the master has the positions then."""
    reading.go_on.set()
    until(lambda: restarted._positions.warm)
    backend.writable = False
    commits_of(backend, 1_100)
    until(lambda: restarted._positions.find("g", "t") == {0: api.Position(1_099)})
    assert set(reading.names) == {"PositionReader"}
