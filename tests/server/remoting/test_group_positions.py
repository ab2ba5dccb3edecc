"""Positions of RocketMQ's groups: gathered into few records, durable when acknowledged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hastore.config.model import RetentionConfig
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.api import POSITIONS_TOPIC, Commit, Fetch, Position
from hastore.protocol.committed_positions import Place
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import decode_record
from hastore.server.remoting import group_positions
from hastore.server.remoting.group_positions import (
    MAX_GROUP,
    MAX_TOPIC,
    ONE_WAY_MS,
    QUEUES_MAX,
    RETRY_MS,
    GroupPositions,
)
from hastore.server.remoting.topics import Topics
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, record
from tests.server.remoting.desk import Desk, StoreBackend, VirtualClient
from tests.server.remoting.kit import RemotingClient, served
from tests.server.remoting.test_topics import asked
from tests.store import kit


class Node:
    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.desk = Desk(self.backend)
        self.positions = GroupPositions(self.desk.door, memory_bytes=1 << 30)
        self.desk.door.join(self.positions.handlers())
        self.client = self.desk.client()

    @property
    def records(self) -> int:
        return len(self.backend.store.units.get((POSITIONS_TOPIC, 0), ()))

    def commit(self, offset: Any, queue: Any = 0, **more: Any) -> int:
        return self.client.send(Code.UPDATE_CONSUMER_OFFSET, fields(queue, offset), **more)

    def position(self, queue: int = 0, **more: str) -> int | None:
        found = self.client.ask(Code.QUERY_CONSUMER_OFFSET, fields(queue) | more)
        if found.code == Answer.QUERY_NOT_FOUND:
            return None
        assert found.code == 0, found.remark
        return int(found.fields["offset"])


def fields(queue: Any = 0, offset: Any = None, group: str = "G") -> dict[str, str]:
    found = {"consumerGroup": group, "topic": "T", "queueId": str(queue)}
    return found if offset is None else found | {"commitOffset": str(offset)}


@pytest.fixture
def node() -> Node:
    return Node()


def test_many_commits_that_are_one_way_become_one_record(node: Node) -> None:
    for queue in range(16):
        node.commit(queue * 10, queue, one_way=True)
    node.commit(7, 3, one_way=True)
    assert node.position(3) == 7 and node.position(15) == 150, "before they are written"
    assert node.records == 0
    node.desk.run(ONE_WAY_MS)
    assert node.records == 1
    assert [node.position(queue) for queue in (0, 3, 15)] == [0, 7, 150]
    for _ in range(10):  # as an idle consumer repeats them
        for queue in range(16):
            node.commit(7 if queue == 3 else queue * 10, queue, one_way=True)
        node.desk.run(5_000)
    assert node.records == 1, "what stays the same is not written again"
    node.commit(8, 3, one_way=True)
    node.desk.run(ONE_WAY_MS)
    (body,) = (decode_record(node.backend.store.log, max(node.backend.store.starts)).body,)
    assert body == b'{"group":"G","topic":"T","positions":{"3":[8,null,null]}}'


def test_a_commit_is_acknowledged_when_it_is_confirmed(node: Node) -> None:
    node.backend.transfer.hold = True
    opaque = node.commit(5)
    node.desk.run(100)
    assert node.records == 1 and opaque not in node.client.answers
    assert node.position() == 5
    later = node.commit(6)
    node.desk.run(100)
    node.backend.transfer.end_all()
    node.desk.run(10)
    assert node.client.answers.pop(opaque).code == 0 and later not in node.client.answers
    node.backend.transfer.end_all()
    node.desk.run(10)
    assert node.client.answers.pop(later).code == 0 and node.records == 2
    assert node.position() == 6


def test_what_is_not_confirmed_is_not_acknowledged(node: Node) -> None:
    node.backend.transfer.hold = True
    node.backend.store.confirmed = 0  # what is in the log is not confirmed
    for outcome in (Outcome.FLUSH_SLAVE_TIMEOUT, Outcome.TERM_CHANGED):
        opaque = node.commit(5)
        node.desk.run()
        node.backend.transfer.end_all(outcome)
        node.desk.run(10)
        answer = node.client.answers.pop(opaque)
        assert answer.code != 0 and "not known" in str(answer.remark)
    node.backend.transfer.hold = False
    before = node.records
    opaque = node.commit(5)
    node.desk.run()
    assert node.client.answers.pop(opaque).code == 0
    assert node.records == before + 1, "an equal position that is not confirmed is no excuse"
    node.backend.writable = False
    opaque = node.commit(9)
    node.desk.run(10)
    assert node.client.answers.pop(opaque).code == Answer.SERVICE_NOT_AVAILABLE


def test_an_equal_position_is_no_proof_while_a_later_one_is_not_confirmed(node: Node) -> None:
    opaque = node.commit(100)
    node.desk.run()
    assert node.client.answers.pop(opaque).code == 0
    store = node.backend.store
    store.confirmed = store.max_offset
    node.backend.transfer.hold = True
    node.commit(200)
    node.desk.run()
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run(10)
    node.backend.transfer.hold = False
    back = node.commit(100)
    node.desk.run()
    assert node.client.answers.pop(back).code == 0
    store.confirmed = store.max_offset
    node.desk.run()
    assert node.records == 3 and node.position() == 100


def test_a_node_that_does_not_know_the_positions_yet_lets_no_group_begin_anew(node: Node) -> None:
    """It follows a RocketMQ master: 0 or none would be its answer to a new group."""
    node.commit(5, 1)
    node.desk.run(ONE_WAY_MS)
    node.backend.elsewhere = "the RocketMQ master 10.0.0.1:10912"
    found = node.client.ask(Code.QUERY_CONSUMER_OFFSET, fields(0))
    assert found.code == Answer.SYSTEM_ERROR and "10.0.0.1:10912" in str(found.remark)
    assert node.position(1) == 5


def test_a_commit_behind_another_clients_costs_little(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's commit of the same group and topic is under way: this one waits for it."""
    commits, tries = node.desk.door.parts.commits, []
    begin, other = commits.begin, [True]

    def count(*given: Any) -> bool:
        tries.append(given)
        return False if other else begin(*given)

    monkeypatch.setattr(commits, "begin", count)
    opaque = node.commit(5)
    node.desk.run(1_000)
    assert 1 <= len(tries) <= 1_000 / RETRY_MS + 1
    assert len(node.desk.door._timers) <= 2
    other.clear()
    node.desk.run(RETRY_MS)
    assert node.client.answers.pop(opaque).code == 0


def test_a_position_may_go_back(node: Node) -> None:
    for offset in (9, 0, 4):
        opaque = node.commit(offset)
        node.desk.run()
        assert node.client.answers.pop(opaque).code == 0
        assert node.position() == offset


def test_a_new_group_begins_where_rocketmq_says(node: Node) -> None:
    store = node.backend.store
    assert node.position() == 0, "a queue that does not exist"
    node.backend.put_encoded([record("T", b"x" * 100)])
    assert node.position() == 0, "a whole queue"
    assert node.position(setZeroIfNotFound="false") is None
    whole = store.queue_range
    store.queue_range = lambda topic, queue: (5, 9) if topic == "T" else whole(topic, queue)
    assert node.position() is None
    store.queue_range = lambda topic, queue: (5, 5) if topic == "T" else whole(topic, queue)
    assert node.position() is None, "it had messages once"
    store.queue_range = whole
    node.positions._memory_bytes = 400  # a small machine: 160 bytes count as memory
    node.backend.put_encoded([record("U", b"x" * 1_000)])
    assert node.position() is None


def test_a_new_group_reads_a_topic_that_was_made_again_from_its_start(tmp_path: Path) -> None:
    """Its queues go on where they ended, so their start is not 0."""
    retention = RetentionConfig(max_size_bytes=8192)
    with kit.opened(tmp_path, commitlog_file_size=4096, retention=retention) as store:
        desk = Desk(StoreBackend(store))
        desk.door.join(Topics(desk.door, "g0").handlers())
        positions = GroupPositions(desk.door, memory_bytes=1 << 30)
        desk.door.join(positions.handlers())
        client = desk.client()

        def begin() -> tuple[int, str | None]:
            assert store.wait_dispatched(store.max_offset, 60)
            store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
            found = client.ask(Code.QUERY_CONSUMER_OFFSET, fields())
            return found.code, found.fields.get("offset")

        kit.put(store, *[kit.message(n, topic="T", queue_id=0) for n in range(3)])
        assert begin() == (0, "0")
        assert client.ask(Code.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
        assert client.ask(Code.UPDATE_AND_CREATE_TOPIC, asked("T")).code == 0
        assert begin() == (0, "3"), "an empty queue"
        kit.put(store, *[kit.message(n, topic="T", queue_id=0) for n in range(3, 5)])
        assert begin() == (0, "3")
        positions._memory_bytes = 400  # a small machine: 160 bytes count as memory
        assert begin() == (Answer.QUERY_NOT_FOUND, None), "they are not recent"
        positions._memory_bytes = 1 << 30
        kit.put(store, *[kit.message(n, topic="T", queue_id=0) for n in range(5, 60)])
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
        assert store.retention.delete_expired(None)
        assert begin() == (Answer.QUERY_NOT_FOUND, None), "it has lost messages of this life"


def test_hastores_own_consumers_see_them_and_the_other_way_round() -> None:
    backend = FakeBackend()
    with served(backend, lambda door: door.join(GroupPositions(door).handlers())) as running:
        theirs, own = RemotingClient(running.endpoint), Client(running.endpoint)
        assert theirs.ask(Code.UPDATE_CONSUMER_OFFSET, fields(0, 7)).code == 0
        found = own.ask(Fetch(1, "G", "T"))
        assert found.positions == {0: Position(7, None, None)}
        done = own.ask(Commit(2, "G", "T", {0: Position(9), 1: Position(2)}))
        assert done.status.value == "PUT_OK"
        for queue, offset in ((0, "9"), (1, "2")):
            answer = theirs.ask(Code.QUERY_CONSUMER_OFFSET, fields(queue))
            assert (answer.code, answer.fields) == (0, {"offset": offset})
        own.close()
        theirs.close()


def test_a_position_that_a_failover_cut_is_written_again(node: Node) -> None:
    kept = {0: Place(5, 65537, 10_000_000, 0)}  # of an offset that this log does not have
    node.backend.kept.merge(("G", "T"), kept)
    node.commit(5, one_way=True)
    node.desk.run(ONE_WAY_MS)
    assert node.records == 1


BAD = {
    "no queue": {"queueId": ""},
    "a queue that is no number": {"queueId": "x"},
    "a negative queue": {"queueId": "-1"},
    "a large queue": {"queueId": str(2**31)},
    "a negative offset": {"commitOffset": "-1"},
    "a huge offset": {"commitOffset": "9" * 5_000},
    "no group": {"consumerGroup": ""},
    "a long group": {"consumerGroup": "g" * 256},
    "a long topic": {"topic": "t" * 513},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_fields_have_one_clear_answer(node: Node, what: str) -> None:
    for code in (Code.UPDATE_CONSUMER_OFFSET, Code.QUERY_CONSUMER_OFFSET):
        if code == Code.QUERY_CONSUMER_OFFSET and "commitOffset" in BAD[what]:
            continue
        answer = node.client.ask(code, fields(0, 1) | BAD[what])
        assert answer.code == Answer.SYSTEM_ERROR and answer.remark and len(answer.remark) < 300
    node.desk.run(1_000)
    assert node.records == 0


def test_what_waits_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_positions, "MAX_PENDING", 100)
    for queue in range(200):
        node.commit(1, queue, one_way=True)
    assert node.positions.dropped == 100
    opaque = node.commit(1, 500)
    assert node.client.answers.pop(opaque).code == Answer.SYSTEM_BUSY
    node.desk.run(ONE_WAY_MS)
    assert node.position(99) == 1
    opaque = node.commit(1, 500)
    node.desk.run()
    assert node.client.answers.pop(opaque).code == 0


def test_more_queues_than_a_record_takes(node: Node) -> None:
    waiting: list[int] = []
    offsets = {queue: queue + 1 for queue in range(1_300)}
    node.positions.commit("G", "T", offsets, lambda code, _: waiting.append(code))
    node.desk.run(1_000)
    assert waiting == [0] and node.records == 3
    assert [node.position(queue) for queue in (0, 700, 1_299)] == [1, 701, 1_300]


def test_an_unreadable_table_is_said_and_harms_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.commit(1, one_way=True)
    query = node.client.send(Code.QUERY_CONSUMER_OFFSET, fields(5))
    opaque = node.commit(2, 1)
    node.desk.commits.make_calls(OSError(5, "a bad sector"))
    for one in (query, opaque):
        answer = node.client.answers.pop(one)
        assert answer.code == Answer.SYSTEM_ERROR and "bad sector" in str(answer.remark)
    node.desk.failures.count = 0
    assert node.position(5) == 0


def test_random_commits_agree_with_a_plain_model(node: Node) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model: dict[int, int] = {}
    waiting: list[tuple[VirtualClient, int]] = []
    for _ in range(3_000):
        action = rng.random()
        if action < 0.5:
            queue, offset = rng.randrange(8), rng.randrange(20)
            node.commit(offset, queue, one_way=True)
            model[queue] = offset
        elif action < 0.7:
            queue, offset = rng.randrange(8), rng.randrange(20)
            waiting.append((node.client, node.commit(offset, queue)))
            model[queue] = offset
        elif action < 0.8:
            node.backend.transfer.hold = not node.backend.transfer.hold
            node.backend.transfer.end_all()
        elif action < 0.95:
            queue = rng.randrange(8)
            assert node.position(queue) == model.get(queue, 0), seed
        else:
            node.desk.run(rng.randrange(2_000))
    node.backend.transfer.hold = False
    for _ in range(10):
        node.backend.transfer.end_all()
        node.desk.run(1_000)
    for client, opaque in waiting:
        assert client.answers.pop(opaque).code == 0
    assert node.desk.has_read()
    found = node.desk.positions.find("G", "T")
    assert {queue: place.queue_offset for queue, place in found.items()} == model


def test_commits_of_pulls_keep_to_the_bounds_of_commits(node: Node) -> None:
    """A pull brings a commit without the checks that a request of its own gets."""
    positions = node.positions
    for group, topic, queue, offset in (
        ("g" * (MAX_GROUP + 1), "T", 0, 1), ("G", "t" * (MAX_TOPIC + 1), 0, 1),
        ("G", "T", 2**31, 1), ("G", "T", -1, 1), ("G", "T", 0, 2**63), ("G", "T", 0, -1),
    ):  # fmt: skip
        positions.commit_later(group, topic, queue, offset)
    assert not positions._pending and positions.dropped == 6
    answers: list[tuple[int, str | None]] = []
    positions.commit("g" * 300, "T", {0: 1}, lambda code, why: answers.append((code, why)))
    [(code, why)] = answers
    assert code == Answer.SYSTEM_ERROR and why and "300 characters" in why
    node.desk.run(ONE_WAY_MS)
    assert node.records == 0


@pytest.mark.parametrize("first_fails", [False, True])
def test_the_rest_of_a_large_commit_never_replaces_a_newer_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, first_fails: bool
) -> None:
    """It is written in parts; another client's commit of the group delays the first of them."""
    commits, refused = node.desk.door.parts.commits, [True] if first_fails else []
    begin = commits.begin

    def begin_later(*given: Any) -> bool:
        return False if refused and refused.pop() else begin(*given)

    monkeypatch.setattr(commits, "begin", begin_later)
    node.backend.transfer.hold = True
    answers: list[int] = []
    count = 2 * QUEUES_MAX + 1
    node.positions.commit(
        "G", "T", dict.fromkeys(range(count), 5), lambda code, why: answers.append(code)
    )
    node.desk.run()
    assert [node.position(queue) for queue in (0, count - 1)] == [5, 5], "also what waits"
    node.commit(9, count - 1, one_way=True)
    assert node.position(count - 1) == 9
    for _ in range(6):
        assert not answers or node.positions._count == 0
        node.desk.run(ONE_WAY_MS)
        node.backend.transfer.end_all()
        node.desk.run()
    assert answers == [0] and node.position(count - 1) == 9
    assert node.position(0) == node.position(count - 2) == 5 and node.positions._count == 0


def test_a_large_commit_is_refused_once_if_a_part_of_it_fails(node: Node) -> None:
    node.backend.transfer.hold = True
    answers: list[int] = []
    node.positions.commit(
        "G", "T", dict.fromkeys(range(2 * QUEUES_MAX), 5), lambda code, why: answers.append(code)
    )
    node.desk.run()
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run(ONE_WAY_MS)
    assert answers == [Answer.SYSTEM_ERROR]
    node.backend.transfer.end_all()
    node.desk.run(ONE_WAY_MS)
    assert answers == [Answer.SYSTEM_ERROR] and node.positions._count == 0
