"""The API's server on a real socket: puts, pulls, positions, bounds, untrusted clients."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest
import zmq

from hastore.config.model import ApiConfig
from hastore.errors import ConfigError, StoreBrokenError
from hastore.ha.master.group_transfer import Need, Outcome
from hastore.protocol import api
from hastore.record.codec import NO_HOST, build_record, decode_record
from hastore.record.topic_records import (
    MAX_QUEUES,
    TopicChange,
    TopicConfig,
    build_change,
)
from hastore.server.api.connections import Connection
from hastore.server.api.replies import Replies
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend, FakePut
from tests.server.api.kit import Client, record, until

# -- puts


def test_a_put_is_answered_with_place_and_level(client: Client) -> None:
    reply = client.ask(api.Put(1), record(body=b"a") + record(body=b"bb", queue=2))
    assert reply.status is api.Status.PUT_OK
    assert reply.level == "SYNC_MEM(1)"
    assert reply.epoch == 65537
    assert reply.queue_ids == [0, 2]
    assert reply.offsets[0] == 0 and reply.offsets[1] > 0
    assert reply.host == b"\x7f\0\0\x01\0\0\x2a\x9f"


def test_a_node_that_was_removed_serves_no_reads(client: Client, backend: FakeBackend) -> None:
    """Its log has an end that the group has long passed. It still says what it is."""
    client.ask(api.Put(1), record(body=b"a"))
    backend.moved()
    client.send(api.Pull(2, "t", 0, api.Position(1), 10, 1000, 300))  # it waits
    backend.removed = "node 4 was removed from the group"
    late, _ = client.receive()
    assert isinstance(late, api.Failed) and late.reason == backend.removed
    reads = (
        api.Pull(3, "t", 0, api.Position(0)),
        api.AskTopics(4, None),
        api.FindKey(5, "t", "k"),
        api.FindOffset(6, 0),
        api.FindTime(7, "t", 0, 1),
        api.Fetch(8, "g", "t"),
        api.Commit(9, "g", "t", {0: api.Position(1)}),
    )
    for request in reads:
        refused = client.ask(request)
        assert isinstance(refused, api.Failed), refused
        assert (refused.status, refused.reason) == ("SERVICE_NOT_AVAILABLE", backend.removed)
    assert client.ask(api.AskMap(10)).map.node == backend.node
    assert client.ask(api.AskStatus(11)).status["node"] == backend.node
    backend.removed = None
    assert client.ask(api.Pull(12, "t", 0, api.Position(0))).status is api.PullStatus.FOUND


def test_only_a_master_that_knows_its_log_says_how_far_a_producer_came(
    monkeypatch: pytest.MonkeyPatch, client: Client, backend: FakeBackend
) -> None:
    assert client.ask(api.AskProducer(1, "p")) == api.ProducerKnown(1, 65537)
    client.ask(api.Put(2), record(seq=3) + record(seq=4))
    backend.store.forgotten = 2
    assert client.ask(api.AskProducer(3, "p")) == api.ProducerKnown(3, 65537, 4, 2)
    monkeypatch.setattr(backend.store, "producer_progress", lambda _: None)
    busy = client.ask(api.AskProducer(4, "p"))
    assert isinstance(busy, api.Failed) and busy.status == "BUSY"
    backend.writable, backend.master, backend.nodes = False, 2, {2: "tcp://h:1"}
    refused = client.ask(api.AskProducer(5, "p"))
    assert isinstance(refused, api.Failed) and refused.status == "SERVICE_NOT_AVAILABLE"
    assert refused.master == "tcp://h:1"


def test_the_confirming_thread_answers_while_the_api_sleeps(
    monkeypatch: pytest.MonkeyPatch,
    client: Client,
    server: ApiServer,
    backend: FakeBackend,
) -> None:
    threads: list[threading.Thread] = []
    send = Replies.flush_one

    def noted(self: Replies, connection: Connection) -> None:
        threads.append(threading.current_thread())
        send(self, connection)

    client.ask(api.Put(1), record())
    backend.transfer.hold = True
    monkeypatch.setattr(Replies, "flush_one", noted)
    for rid in range(2, 12):  # the API's thread may just hold its connections
        client.send(api.Put(rid), record())
        until(lambda: backend.transfer.waiting and not server._io_lock.locked())
        threads.clear()
        backend.transfer.end_all()
        assert client.receive()[0].rid == rid
        if set(threads) == {threading.current_thread()}:
            break
    else:
        raise AssertionError("the API's thread answered each of them")
    client.send(api.Put(20), record())
    until(lambda: backend.transfer.waiting)
    threads.clear()
    with server._io_lock:  # as during an iteration
        backend.transfer.end_all()
        assert client.silent()
    assert client.receive()[0].rid == 20
    assert threading.current_thread() not in threads


def test_no_message_is_missed_while_other_threads_answer(
    server: ApiServer, backend: FakeBackend
) -> None:
    """Sending consumes the event that announces a message: the API's thread wakes all the same."""
    backend.transfer.hold = True
    ended = threading.Event()

    def confirm() -> None:
        waiting = backend.transfer.waiting
        while not ended.wait(0.0002):
            while waiting:
                waiting.pop(0)[3](Outcome.CONFIRMED, "SYNC_MEM(1)")
                backend.transfer.after_done()

    confirming = threading.Thread(target=confirm)
    confirming.start()
    clients = [Client(server.endpoint) for _ in range(4)]
    try:
        for turn in range(1_500):
            for place, each in enumerate(clients):
                each.send(api.Put(turn), record(body=bytes([place])))
            for each in clients:
                assert each.receive(2.0)[0].rid == turn, f"turn {turn}"
    finally:
        ended.set()
        confirming.join()
        for each in clients:
            each.close()


def test_a_failed_answer_ends_the_api_not_the_confirming_thread(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, BaseException]] = []
    server = ApiServer(
        "tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=lambda *each: heard.append(each)
    )
    server.start()
    client = Client(server.endpoint)
    client.ask(api.Put(1), record())
    backend.transfer.hold = True
    client.send(api.Put(2), record())
    until(lambda: backend.transfer.waiting and not server._io_lock.locked())

    def flush(_: Replies) -> None:
        raise OSError("the epoll has failed")

    monkeypatch.setattr(Replies, "flush", flush)
    backend.transfer.end_all()  # does not fail in this thread
    until(lambda: not server.alive)
    assert isinstance(server.failure, OSError) and heard == [("ApiServer", server.failure)]
    assert backend.transfer.end_all() == 0
    client.close()


def test_put_ok_comes_only_with_the_confirmation(client: Client, backend: FakeBackend) -> None:
    backend.transfer.hold = True
    client.send(api.Put(1, -1), record())
    assert client.silent()
    until(lambda: backend.transfer.waiting)
    end_offset, _, need, _ = backend.transfer.waiting[0]
    assert (end_offset, need) == (backend.store.max_offset, Need.SLAVES)
    backend.transfer.end_all()
    assert client.receive()[0].status is api.Status.PUT_OK


@pytest.mark.parametrize("outcome", [Outcome.FLUSH_SLAVE_TIMEOUT, Outcome.FLUSH_DISK_TIMEOUT])
def test_a_put_that_is_stored_but_not_confirmed_says_so(
    client: Client, backend: FakeBackend, outcome: Outcome
) -> None:
    backend.transfer.hold = True
    client.send(api.Put(1, -1), record())
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(outcome)
    reply, _ = client.receive()
    assert reply.status.value == outcome.value
    assert reply.offsets == [0]


@pytest.mark.parametrize("outcome", [Outcome.WAIT_QUORUM_ACK_TIMEOUT, Outcome.TERM_CHANGED])
def test_a_put_that_no_majority_has_confirmed_claims_nothing(
    client: Client, backend: FakeBackend, outcome: Outcome
) -> None:
    """Unlike a put that slaves have not confirmed: the next leader may cut it."""
    backend.transfer.hold = True
    client.send(api.Put(1, -1), record())
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(outcome)
    reply, _ = client.receive()
    assert reply.status is api.Status.TIMEOUT and not reply.status.is_stored
    assert (reply.offsets, reply.level) == ([], "")
    assert reply.reason.startswith(f"{outcome.value}: ")


def test_no_put_is_acknowledged_by_the_leader_alone(backend: FakeBackend) -> None:
    server = ApiServer(
        "tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure, always_all=True
    )
    server.start()
    client = Client(server.endpoint)
    try:
        backend.transfer.hold = True
        for rid, (acks, sync_flush, need) in enumerate(
            ((1, False, Need.SLAVES), (1, True, Need.SLAVE_DISKS), (-1, False, Need.SLAVES)), 1
        ):
            client.send(api.Put(rid, acks, sync_flush), record())
            until(lambda: backend.transfer.waiting)
            assert backend.transfer.waiting[0][2] is need
            backend.transfer.end_all()
            assert client.receive()[0].status is api.Status.PUT_OK
        client.send(api.Put(4, 0), record())
        assert client.silent() and backend.transfer.waiting == []
    finally:
        client.close()
        server.stop()


@pytest.mark.parametrize(
    ("acks", "sync_flush", "flush_each", "need"),
    [
        (1, False, False, None),
        (1, True, False, Need.MASTER_DISK),
        (1, False, True, Need.MASTER_DISK),
        (-1, False, False, Need.SLAVES),
        (-1, True, False, Need.SLAVE_DISKS),
        (None, False, False, Need.SLAVES),
    ],
)
def test_what_a_put_waits_for(
    client: Client, backend: FakeBackend, acks: int | None, sync_flush: bool, flush_each: bool,
    need: Need | None,
) -> None:  # fmt: skip
    backend.transfer.hold = True
    backend.flush_sync = flush_each
    client.send(api.Put(1, acks, sync_flush), record())
    if need is None:
        assert client.receive()[0].level == "MASTER_MEM"
        return
    until(lambda: backend.transfer.waiting)
    assert backend.transfer.waiting[0][2] is need
    assert client.silent(0.05)
    backend.transfer.end_all()


def test_the_default_under_an_asynchronous_master_is_the_master_alone(
    client: Client, backend: FakeBackend
) -> None:
    backend.sync = False
    assert client.ask(api.Put(1), record()).level == "MASTER_MEM"


def test_acks_0_is_stored_and_not_answered(client: Client, backend: FakeBackend) -> None:
    client.send(api.Put(1, 0), record())
    assert client.silent()
    assert backend.store.max_offset > 0


def test_a_slave_refuses_names_the_reason_and_the_master(
    client: Client, backend: FakeBackend
) -> None:
    backend.writable = False
    backend.master, backend.nodes = 2, {2: "tcp://127.0.0.1:10921"}
    reply = client.ask(api.Put(1), record())
    assert reply.status is api.Status.SERVICE_NOT_AVAILABLE
    assert reply.reason == "this node is a slave"
    assert reply.master == "tcp://127.0.0.1:10921"
    assert backend.store.max_offset == 0


def test_without_a_slave_a_put_is_refused_unappended(client: Client, backend: FakeBackend) -> None:
    backend.unconfirmable = "0 of 1 slaves are in sync"
    reply = client.ask(api.Put(1, -1), record())
    assert reply.status is api.Status.SLAVE_NOT_AVAILABLE
    assert backend.store.max_offset == 0
    assert client.ask(api.Put(2, 1), record()).status is api.Status.PUT_OK


def test_a_gate_that_closed_meanwhile_appends_nothing(client: Client, backend: FakeBackend) -> None:
    backend.gate_closed = True
    reply = client.ask(api.Put(1), record())
    assert (reply.status, reply.reason) == (api.Status.SERVICE_NOT_AVAILABLE, "superseded")


def told(*statuses: str) -> list[FakePut]:
    """Return the results of a put that a disk failed; only PUT_OK has an offset, 0."""
    return [
        FakePut(status, 0, 90, 0, 0)
        if status is api.Status.PUT_OK
        else FakePut(status, reason="disk")
        for status in map(api.Status, statuses)
    ]


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (["SERVICE_NOT_AVAILABLE"] * 2, api.Status.SERVICE_NOT_AVAILABLE),
        (["MESSAGE_ILLEGAL", "SERVICE_NOT_AVAILABLE"], api.Status.SERVICE_NOT_AVAILABLE),
        (["TIMEOUT"] * 2, api.Status.TIMEOUT),
        (["SERVICE_NOT_AVAILABLE", "TIMEOUT"], api.Status.TIMEOUT),
    ],
)
def test_a_put_that_the_disk_failed_is_refused_whole_and_the_rest_of_its_run(
    client: Client,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    results: list[str],
    status: api.Status,
) -> None:
    monkeypatch.setattr(backend.store, "put_encoded", lambda _: [told(*results)])
    reply = client.ask(api.Put(1, run=1, at=0), record() + record())
    assert (reply.status, reply.statuses, reply.offsets) == (status, None, [])
    assert reply.reason == "disk"
    monkeypatch.undo()
    assert client.ask(api.Put(2, run=1, at=1), record()).status is api.Status.BUSY
    assert client.ask(api.Put(3, run=2, at=0), record()).status is api.Status.PUT_OK


def test_a_put_that_the_disk_failed_half_way_has_a_status_for_each_record(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ["PUT_OK", "TIMEOUT", "SERVICE_NOT_AVAILABLE"]
    monkeypatch.setattr(backend.store, "put_encoded", lambda _: [told(*results)])
    reply = client.ask(api.Put(1, run=1, at=0), record() * 3)
    assert reply.statuses is not None and reply.reason == "disk"
    assert [each.value for each in reply.statuses] == results
    monkeypatch.undo()
    assert client.ask(api.Put(2, run=1, at=1), record()).status is api.Status.BUSY


def test_a_broken_store_refuses_and_the_server_lives(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise StoreBrokenError("a sync failed")

    monkeypatch.setattr(backend.store, "put_encoded", broken)
    assert client.ask(api.Put(1), record()).status is api.Status.SERVICE_NOT_AVAILABLE
    monkeypatch.undo()
    assert client.ask(api.Put(2), record()).status is api.Status.PUT_OK


def test_a_put_of_which_nothing_is_stored_does_not_say_put_ok(client: Client) -> None:
    """A client that looks at `status` only must not take refused records for stored ones."""
    illegal, ok = api.Status.MESSAGE_ILLEGAL, api.Status.PUT_OK
    for acks in (1, -1):
        done = client.ask(api.Put(1, acks), record(queue=9) + record(queue=8))
        assert (done.status, done.statuses) == (illegal, [illegal] * 2)
        assert (done.epoch, done.level, done.offsets) == (0, "", [0, 0])
        done = client.ask(api.Put(2, acks), record(queue=9) + record())
        assert (done.status, done.statuses) == (ok, [illegal, ok]) and done.epoch and done.level
        done = client.ask(api.Put(3, acks), b"")
        assert (done.status, done.statuses) == (ok, None)
    client.ask(api.Put(4, 1), record(seq=1))
    assert client.ask(api.Put(5, 1), record(seq=1)).status is ok  # a repeat is stored


def test_an_illegal_record_does_not_affect_the_others(client: Client) -> None:
    reply = client.ask(api.Put(1), record() + record(queue=99) + record(queue=1))
    assert [s.value for s in reply.statuses] == ["PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK"]
    assert "queue 99" in reply.reason


@pytest.mark.parametrize("payload", [b"garbage" * 20, b"\xff" * 300, record()[:50]])
def test_bytes_that_are_not_a_record_are_illegal(
    client: Client, backend: FakeBackend, payload: bytes
) -> None:
    reply = client.ask(api.Put(1), payload)
    assert reply.statuses == [api.Status.MESSAGE_ILLEGAL]
    assert backend.store.max_offset == 0


def test_a_duplicate_is_answered_like_its_original_once_confirmed(
    client: Client, backend: FakeBackend
) -> None:
    backend.transfer.hold = True
    client.send(api.Put(1), record(seq=0))
    until(lambda: backend.transfer.waiting)
    client.send(api.Put(2), record(seq=0))
    until(lambda: len(backend.transfer.waiting) == 2)
    assert client.silent(0.05)
    assert len({end for end, *_ in backend.transfer.waiting}) == 1
    backend.transfer.end_all()
    first, second = client.receive()[0], client.receive()[0]
    assert first.offsets == second.offsets
    assert first.status is second.status is api.Status.PUT_OK


def test_a_queue_offset_that_is_not_known_is_not_told_as_0(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original of a duplicate was removed, or its disk fails."""
    first = client.ask(api.Put(1), record(seq=0))
    unknown = FakePut(api.Status.PUT_OK, 0, backend.store.max_offset, 0, duplicate=True)
    monkeypatch.setattr(backend.store, "put_encoded", lambda _: [[unknown]])
    reply = client.ask(api.Put(2), record(seq=0))
    assert (reply.status, reply.offsets) == (api.Status.PUT_OK, first.offsets)
    assert reply.queue_offsets == [-1]


def test_many_messages_are_appended_in_one_go(client: Client, backend: FakeBackend) -> None:
    for rid in range(1, 257):
        client.send(api.Put(rid), record())
    assert [client.receive()[0].rid for _ in range(256)] == list(range(1, 257))
    assert backend.store.appends < 200


class TestRuns:
    def test_a_run_is_taken_in_order(self, client: Client) -> None:
        for at in range(3):
            reply = client.ask(api.Put(at + 1, 1, False, 1000, 7, at), record())
            assert reply.status is api.Status.PUT_OK

    @pytest.mark.parametrize(("run", "at"), [(1, 1), (2, 5)])
    def test_a_run_that_does_not_begin_at_0_is_refused(
        self, client: Client, run: int, at: int
    ) -> None:
        put = api.Put(1, 1, False, 1000, run, at)
        assert client.ask(put, record()).status is api.Status.BUSY

    def test_after_a_refusal_the_run_is_refused(self, client: Client, backend: FakeBackend) -> None:
        assert client.ask(api.Put(1, 1, False, 1000, 1, 0), record()).status is api.Status.PUT_OK
        backend.unconfirmable = "none"
        refused = client.ask(api.Put(2, -1, False, 1000, 1, 1), record())
        assert refused.status is api.Status.SLAVE_NOT_AVAILABLE
        backend.unconfirmable = None
        for rid, at in ((3, 2), (4, 1)):
            again = client.ask(api.Put(rid, -1, False, 1000, 1, at), record())
            assert again.status is api.Status.BUSY
        assert client.ask(api.Put(5, -1, False, 1000, 2, 0), record()).status is api.Status.PUT_OK
        old = client.ask(api.Put(6, -1, False, 1000, 1, 0), record())
        assert old.status is api.Status.BUSY

    def test_a_refused_append_breaks_the_run(self, client: Client, backend: FakeBackend) -> None:
        backend.gate_closed = True
        client.ask(api.Put(1, 1, False, 1000, 1, 0), record())
        backend.gate_closed = False
        assert client.ask(api.Put(2, 1, False, 1000, 1, 1), record()).status is api.Status.BUSY


class TestPending:
    @pytest.fixture
    def config(self) -> ApiConfig:
        return ApiConfig(max_pending_puts=10, max_pending_bytes=100_000)

    def test_beyond_the_count_puts_are_busy(self, client: Client, backend: FakeBackend) -> None:
        backend.transfer.hold = True
        for rid in range(1, 31):
            client.send(api.Put(rid), record())
            time.sleep(0.002)
        until(lambda: len(backend.transfer.waiting) >= 10)
        end = backend.store.max_offset
        reply = client.ask(api.Put(99), record()) if client.silent(0) else client.receive()[0]
        assert reply.status is api.Status.BUSY
        assert "max_pending_puts" in reply.reason
        assert backend.store.max_offset == end
        backend.transfer.end_all()

    def test_beyond_the_bytes_puts_are_busy(
        self, client: Client, backend: FakeBackend, server: ApiServer
    ) -> None:
        backend.transfer.hold = True
        client.send(api.Put(1), record(body=bytes(100_000)))
        until(lambda: backend.transfer.waiting)
        assert client.ask(api.Put(2), record()).status is api.Status.BUSY
        backend.transfer.end_all()
        assert client.receive()[0].status is api.Status.PUT_OK
        until(lambda: server.pending_puts == 0)
        assert server.pending_bytes == 0


# -- pulls


def test_pull_gives_records_up_to_the_readable_offset(client: Client, backend: FakeBackend) -> None:
    client.ask(api.Put(1), b"".join(record(body=b"%d" % i) for i in range(5)))
    backend.store.confirmed = backend.store.units["t", 0][3][0]
    reply = client.ask(api.Pull(2, "t", 0, api.Position(1)))
    assert reply.status is api.PullStatus.FOUND
    assert (reply.count, reply.next_queue_offset) == (2, 3)
    assert decode_record(client.payload).body == b"1"
    assert reply.epochs == [(65537, backend.store.units["t", 0][1][0])]


def test_a_parked_pull_is_answered_when_a_record_becomes_readable(
    client: Client, backend: FakeBackend
) -> None:
    backend.store.confirmed = 0
    client.send(api.Put(1, 1), record())
    client.receive()
    client.send(api.Pull(2, "t", 0, api.Position(0), 10, 1000, 60_000))
    assert client.silent(0.1)
    backend.store.confirmed = backend.store.max_offset
    begin = time.monotonic()
    backend.moved()
    reply, _ = client.receive()
    assert reply.status is api.PullStatus.FOUND
    assert time.monotonic() - begin < 30.0  # before its wait of a minute ends


def test_a_parked_pull_of_a_topic_that_comes_later(client: Client) -> None:
    client.send(api.Pull(1, "new", 0, api.Position(0), 10, 1000, 60_000))
    assert client.silent(0.05)
    client.send(api.Put(2, 1), record("new"))
    assert {client.receive()[0].rid, client.receive()[0].rid} == {1, 2}


def test_a_parked_pull_is_answered_when_its_wait_ends(client: Client) -> None:
    begin = time.monotonic()
    reply = client.ask(api.Pull(1, "t", 0, api.Position(0), 10, 1000, 150))
    assert reply.status in (api.PullStatus.NO_NEW, api.PullStatus.NO_SUCH_QUEUE)
    assert time.monotonic() - begin > 0.14


def test_a_position_beyond_the_end(client: Client) -> None:
    client.ask(api.Put(1), record())
    assert client.ask(api.Pull(2, "t", 0, api.Position(9))).status is (
        api.PullStatus.OFFSET_TOO_LARGE
    )


def test_a_position_beyond_the_end_is_an_answer_once_replay_has_passed_there(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that got queue offsets which this node has not must learn it, and not wait."""
    client.ask(api.Put(1), record())
    (offset, _), (epoch, _) = backend.store.units["t", 0][0], backend.entries[0]
    large, no_new = api.PullStatus.OFFSET_TOO_LARGE, api.PullStatus.NO_NEW
    there = api.Pull(2, "t", 0, api.Position(9, epoch, offset), 10, 1000, 50)
    elsewhere = api.Pull(3, "unknown", 0, api.Position(9, epoch, offset), 10, 1000, 50)
    assert [client.ask(one).status for one in (there, elsewhere)] == [large, large]
    assert client.ask(api.Pull(4, "unknown", 0, api.Position(9))).status is large
    empty = client.ask(api.Pull(5, "unknown", 0, api.Position(0)))
    assert empty.status is api.PullStatus.NO_SUCH_QUEUE
    monkeypatch.setattr(type(backend.store), "dispatched_offset", offset)
    assert client.ask(there).status is no_new
    assert client.ask(elsewhere).status is api.PullStatus.NO_SUCH_QUEUE


def test_a_position_that_a_failover_cut_names_the_common_point(
    client: Client, backend: FakeBackend
) -> None:
    client.ask(api.Put(1), b"".join(record(body=b"%d" % i) for i in range(6)))
    units = backend.store.units["t", 0]
    backend.entries = [(65537, 0), (131074, units[3][0])]
    lost = api.Position(5, 65537, units[4][0])
    reply = client.ask(api.Pull(2, "t", 0, lost))
    assert reply.status is api.PullStatus.HISTORY_DIFFERS
    assert reply.common == api.Position(3, 65537, units[2][0])
    good = api.Position(5, 131074, units[4][0])
    assert client.ask(api.Pull(3, "t", 0, good)).count == 1
    ahead = api.Position(5, 999_999, units[4][0])
    assert client.ask(api.Pull(4, "t", 0, ahead)).status is api.PullStatus.NO_NEW


# -- positions and queries


def test_positions_are_kept_and_follow_the_log(client: Client, backend: FakeBackend) -> None:
    places = {0: api.Position(5, 65537, 100), 1: api.Position(7)}
    assert client.ask(api.Commit(1, "g", "t", places)).status is api.Status.PUT_OK
    assert client.ask(api.Fetch(2, "g", "t")).positions == places
    client.ask(api.Commit(3, "g", "t", {0: api.Position(6)}))
    assert client.ask(api.Fetch(4, "g", "t")).positions == {0: api.Position(6), 1: places[1]}
    assert client.ask(api.Fetch(5, "other", "t")).positions == {}
    assert backend.store.reader.query_key(api.POSITIONS_TOPIC, "g")


def replayed_up_to(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, end: int) -> None:
    monkeypatch.setattr(type(backend.store), "dispatched_offset", end)


def test_replay_may_move_on_while_the_api_is_at_work(
    monkeypatch: pytest.MonkeyPatch, client: Client, server: ApiServer, backend: FakeBackend
) -> None:
    """A fetch waits for the last commit. No other event came, so it waited for ever."""
    assert client.ask(api.Commit(1, "g", "t", {0: api.Position(1)})).status is api.Status.PUT_OK
    (offset, _) = backend.store.units[api.POSITIONS_TOPIC, 0][-1]
    replayed_up_to(monkeypatch, backend, offset)
    client.send(api.Fetch(2, "g", "t"))
    until(lambda: server._fetches and not server._io_lock.locked())
    serve = server._serve_newcomers

    def moved_meanwhile() -> None:
        if server._fetches and server._readable_moved:
            replayed_up_to(monkeypatch, backend, backend.store.max_offset)
            server.wake_readers()
        serve()

    monkeypatch.setattr(server, "_serve_newcomers", moved_meanwhile)
    server.wake_readers()
    assert client.receive(10.0)[0].positions == {0: api.Position(1)}


def test_the_api_sleeps_while_a_fetch_waits_for_replay(
    monkeypatch: pytest.MonkeyPatch, client: Client, server: ApiServer, backend: FakeBackend
) -> None:
    """Replay may be held up for long, as by a full disk: it kept a processor busy."""
    assert client.ask(api.Commit(1, "g", "t", {0: api.Position(1)})).status is api.Status.PUT_OK
    read = type(server._positions).take

    def commits_meanwhile(self: object, *taken: object) -> bool:
        """Read one commit; another one is confirmed, and not replayed."""
        (offset, _) = backend.store.units[api.POSITIONS_TOPIC, 0][-1]
        replayed_up_to(monkeypatch, backend, offset)
        return read(self, *taken)  # type: ignore[arg-type]

    monkeypatch.setattr(type(server._positions), "take", commits_meanwhile)
    client.send(api.Fetch(2, "g", "t"))
    until(lambda: type(backend.store).dispatched_offset != backend.store.max_offset)
    turns = []
    run_once = server._run_once
    monkeypatch.setattr(server, "_run_once", lambda events: (turns.append(1), run_once(events)))
    assert client.silent(0.3)
    assert len(turns) < 20
    replayed_up_to(monkeypatch, backend, backend.store.max_offset)
    server.wake_readers()
    assert client.receive()[0].positions == {0: api.Position(1)}


def test_positions_are_known_without_any_other_event(
    monkeypatch: pytest.MonkeyPatch, client: Client, server: ApiServer, backend: FakeBackend
) -> None:
    """A new master has seen that a broker's tables were taken over: nothing moves in its log."""
    waits = [True]
    monkeypatch.setattr(backend, "positions_wait", lambda: waits[0])
    client.send(api.Fetch(1, "g", "t"))
    until(lambda: server._fetches and not server._io_lock.locked())
    assert client.silent(0.1)
    waits[0] = False
    assert client.receive(10.0)[0].positions == {}


def test_positions_are_read_again_when_the_log_was_cut(
    client: Client, backend: FakeBackend
) -> None:
    client.ask(api.Commit(1, "g", "t", {0: api.Position(1)}))
    client.ask(api.Commit(2, "g", "t", {0: api.Position(2)}))
    assert client.ask(api.Fetch(3, "g", "t")).positions == {0: api.Position(2)}
    units = backend.store.units[api.POSITIONS_TOPIC, 0]
    cut = units.pop()[0]
    del backend.store.log[cut:]
    assert client.ask(api.Fetch(4, "g", "t")).positions == {0: api.Position(1)}


def test_a_record_that_is_not_a_commit_is_skipped(client: Client) -> None:
    client.ask(api.Put(1), record(api.POSITIONS_TOPIC, b"{not json"))
    client.ask(api.Put(2), record(api.POSITIONS_TOPIC, b'{"group":"g","topic":"t","positions":5}'))
    client.ask(api.Commit(3, "g", "t", {0: api.Position(2)}))
    assert client.ask(api.Fetch(4, "g", "t")).positions == {0: api.Position(2)}


def test_a_slave_refuses_commits(client: Client, backend: FakeBackend) -> None:
    backend.writable = False
    reply = client.ask(api.Commit(1, "g", "t", {0: api.Position(1)}))
    assert reply.status is api.Status.SERVICE_NOT_AVAILABLE


def test_a_list_of_all_topics_holds_nobody_up_and_is_bounded(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, listed = backend.store.topic_table, threading.Event()

    def make(number: int) -> None:
        config = TopicConfig(f"t{number}", MAX_QUEUES, 1)
        raw = build_change(TopicChange(config), 1)
        table.take(number, 1, decode_record(raw).properties)

    for number in range(122):
        make(number)
    monkeypatch.setattr(backend.store, "topics", lambda: listed.wait(60) and {})
    client.send(api.AskTopics(1))
    client.send(api.AskConfigs(2))
    assert client.ask(api.AskMap(3)).map == backend.master_map()
    listed.set()
    replies = sorted((client.receive()[0] for _ in range(2)), key=lambda reply: reply.rid)
    assert sum(map(len, replies[0].topics.values())) == 122 * MAX_QUEUES
    assert [one.name for one in replies[1].topics] == sorted(replies[0].topics)
    make(122)
    refused = client.ask(api.AskTopics(4))
    assert refused.status == "UsageError" and "more than 500,000 queues" in refused.reason
    assert len(client.ask(api.AskTopics(5, "t5")).topics["t5"]) == MAX_QUEUES


def test_queries(client: Client, backend: FakeBackend) -> None:
    keyed = build_record(
        "t", b"k", queue_id=1, properties=[("KEYS", "a b")], born_timestamp_ms=1,
        born_host=NO_HOST,
    )  # fmt: skip
    client.ask(api.Put(1), record() + keyed)
    assert client.ask(api.FindKey(2, "t", "b")).count == 1
    assert decode_record(client.payload).body == b"k"
    assert client.ask(api.FindKey(3, "t", "c")).count == 0
    assert client.ask(api.FindOffset(4, 0)).count == 1
    assert client.ask(api.FindOffset(5, 1)).count == 0
    assert client.ask(api.FindOffset(6, 2**63 - 1)).count == 0
    assert client.ask(api.FindTime(7, "t", 0, 0)).queue_offset == 0
    assert client.ask(api.FindTime(8, "t", 3, 0)).status == "NO_SUCH_QUEUE"
    assert client.ask(api.AskTopics(9)).topics == {"t": {0: (0, 1), 1: (0, 1)}}
    assert client.ask(api.AskMap(10)).map == backend.master_map()
    assert client.ask(api.AskStatus(11)).status["node"] == 1


def test_records_that_are_not_readable_are_not_found(client: Client, backend: FakeBackend) -> None:
    keyed = build_record(
        "t", b"k", queue_id=1, properties=[("KEYS", "a")], born_timestamp_ms=1, born_host=NO_HOST
    )
    client.ask(api.Put(1), keyed)
    backend.store.confirmed = 0
    assert client.ask(api.FindKey(2, "t", "a")).count == 0
    assert client.ask(api.FindOffset(3, 0)).count == 0


# -- bounds and untrusted clients


def resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def port_of(server: ApiServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


def test_a_port_in_use_is_an_error_of_the_configuration(
    server: ApiServer, backend: FakeBackend
) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        ApiServer(server.endpoint, backend, ApiConfig(), on_failure=raise_failure).start()


@pytest.mark.parametrize("frames", [[b"junk"], [b""], [b"\xff" * 70_000], [b"a", b"b", b"c"] * 50])
def test_a_malformed_message_ends_only_its_connection(
    server: ApiServer, client: Client, frames: list[bytes]
) -> None:
    client.ask(api.AskMap(1))
    stranger = Client(server.endpoint)
    stranger.socket.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.socket.send_multipart(frames)
    assert monitor.poll(60_000), "the connection still stands"
    stranger.socket.disable_monitor()
    monitor.close()
    stranger.close()
    assert server.malformed == 1
    assert client.ask(api.AskMap(2)).rid == 2


def test_random_bytes_do_no_harm(server: ApiServer, client: Client) -> None:
    seed = int(os.environ.get("SEED", time.time_ns()))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    before = resident_mib()
    for _ in range(60):
        with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
            kind = chance.randrange(3)
            if kind == 0:
                raw = chance.randbytes(chance.randrange(1, 5_000))
            elif kind == 1:
                raw = greeting() + chance.randbytes(500)
            else:  # a frame of 2^63 - 1 or 4 GiB
                size = chance.choice([2**63 - 1, 2**32, api.MAX_FRAME_BYTES + 1])
                raw = greeting() + ready() + b"\x02" + size.to_bytes(8, "big") + b"x" * 100
            try:
                stranger.sendall(raw)
            except OSError:
                continue
    assert client.ask(api.AskMap(1)).rid == 1
    assert resident_mib() - before < 32


def greeting() -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


def ready() -> bytes:
    kind = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    body = b"\x05READY" + kind + b"\x08Identity" + bytes(4)
    return b"\x04" + bytes((len(body),)) + body


def test_a_message_without_end_is_cut_off(server: ApiServer, client: Client) -> None:
    before = resident_mib()
    peak = 0.0
    with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
        stranger.sendall(greeting() + ready())
        stranger.settimeout(5.0)
        end = time.monotonic() + 20.0
        with pytest.raises(OSError):
            while time.monotonic() < end:  # frames of one byte, each with MORE set
                stranger.sendall(b"\x01\x01x" * 20_000)
                peak = max(peak, resident_mib() - before)
    assert peak < 250  # 64 bytes for each such frame, up to 5.2 MiB of them
    assert client.ask(api.AskMap(1)).rid == 1


class TestConnections:
    @pytest.fixture
    def config(self) -> ApiConfig:
        return ApiConfig(max_connections=20, evict_idle_ms=3_600_000)

    def test_silent_connections_are_ended_first(self, server: ApiServer, client: Client) -> None:
        client.ask(api.AskMap(1))
        idle = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(60)]
        for stranger in idle:
            stranger.sendall(greeting() + ready())
        time.sleep(0.3)
        late = Client(server.endpoint)
        assert late.ask(api.AskMap(2)).rid == 2
        assert client.ask(api.AskMap(3)).rid == 3
        for stranger in idle:
            stranger.close()
        late.close()

    def test_beyond_the_limit_the_latest_connection_is_ended(self, server: ApiServer) -> None:
        clients = [Client(server.endpoint) for _ in range(20)]
        for each in clients:
            each.ask(api.AskMap(1))
        late = Client(server.endpoint)
        late.send(api.AskMap(1))
        until(lambda: server._connections.refused >= 2)  # it connects again by itself
        assert late.silent(0)
        clients.pop().close()
        assert late.receive()[0].rid == 1  # and gets the place as soon as it is free
        for each in clients:
            assert each.ask(api.AskMap(2)).rid == 2
            each.close()
        late.close()


def test_a_client_that_does_not_read_its_replies_is_bounded(
    server: ApiServer, client: Client
) -> None:
    for rid in range(1, 9):
        client.ask(api.Put(rid), record(body=bytes(1_000_000)))
    lazy = Client(server.endpoint)
    lazy.socket.setsockopt(zmq.RCVHWM, 1)
    before = resident_mib()
    for rid in range(1, 400):
        lazy.send(api.Pull(rid, "t", 0, api.Position(0), 10, 4_000_000))
    time.sleep(0.5)
    assert client.ask(api.AskMap(9)).rid == 9
    assert resident_mib() - before < 200
    lazy.close()


def test_stop_answers_known_outcomes_and_frees_the_port(backend: FakeBackend) -> None:
    server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    server.start()
    assert server.stop(60)
    again = ApiServer(server.endpoint, backend, ApiConfig(), on_failure=raise_failure)
    again.start()
    assert again.stop(60)
