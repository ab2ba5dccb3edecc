"""Locks of queues: two consumers never believe in the same one, also over a failover."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import MAX_LOCKS, CommitBody, RecordedLocks
from hastore.protocol.remoting import JSON, ONE_WAY, Answer, Code, Frame
from hastore.security.identity import Quota
from hastore.server.api.quotas import Meter
from hastore.server.remoting import lock_requests, queue_locks
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.lock_requests import LOOK_MS, MAX_QUEUES, NOT_DECIDED, LockRequests
from hastore.server.remoting.queue_locks import LASTS_MS, LOCK_MS, PROOF_MS, REPEAT_MS, QueueLocks
from hastore.server.remoting.routes import TopicView
from tests.api_fakes import FakeBackend
from tests.server.remoting.desk import Desk, VirtualClient


class Node:
    """A node with its own process memory, over a log that may be another node's, too."""

    def __init__(self, backend: FakeBackend | None = None, now_ms: float = 1_000_000.0) -> None:
        self.backend = backend or FakeBackend()
        self.desk = Desk(self.backend)
        self.desk.clock.now_ms = now_ms
        positions = GroupPositions(self.desk.door)
        self.requests = LockRequests(self.desk.door, positions)
        self.desk.door.join(self.requests.handlers())
        self.client = self.desk.client()

    @property
    def records(self) -> int:
        return len(self.backend.store.units.get((POSITIONS_TOPIC, 0), ()))

    def send(self, who: str, *queues: int, code: int = Code.LOCK_BATCH_MQ) -> int:
        return self.client.send(code, {}, body(who, *queues))

    def lock(self, who: str, *queues: int) -> list[int] | None:
        """Ask for locks; None if it is not decided."""
        return granted(self.client, self.send_and_run(who, *queues))

    def send_and_run(self, who: str, *queues: int) -> int:
        opaque = self.send(who, *queues)
        self.desk.run()
        return opaque

    def unlock(self, who: str, *queues: int) -> None:
        assert self.client.ask(Code.UNLOCK_BATCH_MQ, {}, body(who, *queues)).code == 0


def body(who: str, *queues: int, topic: str = "T") -> bytes:
    wanted = [{"brokerName": "b", "queueId": queue, "topic": topic} for queue in queues]
    asked = {"clientId": who, "consumerGroup": "G", "mqSet": wanted, "onlyThisBroker": False}
    return json.dumps(asked).encode()


def granted(client: VirtualClient, opaque: int) -> list[int] | None:
    answer = client.answers.pop(opaque)
    if answer.code == Answer.SYSTEM_BUSY:
        return None
    assert answer.code == 0, answer.remark
    found = json.loads(answer.body)["lockOKMQSet"]
    assert all((one["brokerName"], one["topic"]) == ("b", "T") for one in found)
    return sorted(one["queueId"] for one in found)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_lock_has_one_holder_until_it_ends(node: Node) -> None:
    assert node.lock("x", 0, 1) == [0, 1]
    assert node.lock("y", 0, 1, 2) == [2]
    node.unlock("y", 0, 1)
    assert node.lock("y", 0) == [], "only its holder ends a lock"
    node.unlock("x", 0)
    assert node.lock("y", 0) == [0]
    node.desk.run(LOCK_MS - 1)
    assert node.lock("y", 1) == [] and node.lock("x", 1) == [1]
    node.desk.run(LOCK_MS)
    assert node.lock("y", 1) == [1] and node.lock("x", 1) == []


def test_renewals_cost_few_records(node: Node) -> None:
    for who in range(50):
        assert node.lock(f"c{who}", who) == [who]
    before = node.records
    for _ in range(15):  # 5 minutes
        for who in range(50):
            assert node.lock(f"c{who}", who) == [who]
        node.desk.run(20_000)
    assert node.records - before <= 15, "one proof for all renewals within 5 s"
    node.desk.run(0)
    for _ in range(int(REPEAT_MS / 20_000)):
        assert node.lock("c0", 0) == [0]
        node.desk.run(20_000)


def test_renewals_share_a_proof_that_is_under_way(node: Node) -> None:
    for who in ("x", "y"):
        assert node.lock(who, ord(who)) == [ord(who)]
    node.desk.run(20_000)
    node.backend.transfer.hold = True
    before = node.records
    opaques = [node.send_and_run(who, ord(who)) for who in ("x", "y")]
    assert node.records == before + 1 and not node.client.answers
    node.backend.transfer.end_all()
    node.desk.run()
    assert [granted(node.client, one) for one in opaques] == [[ord("x")], [ord("y")]]


def test_nothing_is_given_without_a_confirmed_record(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    node.backend.transfer.hold = True
    opaque = node.send_and_run("y", 1)
    assert not node.client.answers
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run()
    assert granted(node.client, opaque) is None
    node.desk.run(20_000)
    opaque = node.send_and_run("x", 0)
    assert not node.client.answers, "a renewal without a proof waits, too"
    node.backend.transfer.end_all(Outcome.TERM_CHANGED)
    node.desk.run()
    assert granted(node.client, opaque) is None
    node.backend.writable = False
    answer = node.client.ask(Code.LOCK_BATCH_MQ, {}, body("x", 0))
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE


def test_a_confirmation_that_comes_too_late_gives_nothing(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    node.backend.transfer.hold = True
    opaque = node.send_and_run("y", 1)
    node.desk.run(PROOF_MS + 1)  # the process was stopped, say
    node.backend.transfer.end_all()
    node.desk.run()
    assert granted(node.client, opaque) is None


def promoted(old: Node, node: int = 2) -> Node:
    """Return a new master over what the old one has in its log."""
    backend = FakeBackend(node)
    backend.store = old.backend.store
    old.backend.writable = False
    epoch = old.backend.epoch() + 65_536
    backend.entries = [*old.backend.entries, (epoch, backend.store.max_offset)]
    return Node(backend, old.desk.clock.now_ms)


def test_a_new_master_knows_who_may_believe_in_a_lock(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    node.desk.run(30_000)
    new = promoted(node)
    assert new.lock("y", 0, 1) == [1], "x may have asked the old master just now"
    assert new.lock("x", 0) == [0], "x itself goes on at once"
    other = promoted(new, 3)
    assert other.lock("y", 0) == []
    other.desk.run(LOCK_MS + PROOF_MS - 1)
    assert other.lock("y", 0) == []
    other.desk.run(1)
    assert other.lock("y", 0) == [0]


def test_the_same_node_in_a_new_epoch_begins_anew(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    node.backend.entries = [*node.backend.entries, (131_073, node.backend.store.max_offset)]
    assert node.lock("y", 0) == []
    node.desk.run(LOCK_MS)
    assert node.lock("y", 0) == [], "another node may have been the master meanwhile"


def test_a_log_that_is_too_short_gives_no_unknown_lock(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    new = promoted(node)
    new.desk.positions.locks.note_gap()
    assert new.lock("x", 0, 5) == [0]
    new.desk.run(LOCK_MS + PROOF_MS)
    assert new.lock("x", 5) == [5]


def test_a_damaged_record_may_have_been_a_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.lock("x", 0) == [0]
    assert node.lock("w", 1) == [1]
    new = promoted(node)
    reader = new.desk.positions._reader
    real = reader.next

    def next_commits(source: Any, at: int, **limits: int) -> tuple[bytes, int] | None:
        if at < 2:
            limits["max_messages"] = 1
        return (b"", 2) if at == 1 else real(source, at, **limits)

    monkeypatch.setattr(reader, "next", next_commits)
    assert new.lock("y", 0) == [], "the damaged record was a lock of x"
    assert new.lock("w", 1) == [1]
    new.desk.run(LOCK_MS + PROOF_MS)
    assert new.lock("y", 0) == [0]


def test_a_record_that_retention_removed_unread_may_have_been_a_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.lock("z", 7) == [7]
    new = promoted(node)
    while not new.desk.positions.catch_up():  # as a slave that shows positions
        pass
    node.backend.writable = True
    assert node.lock("x", 0) == [0]
    assert node.lock("x", 1) == [1]
    new.backend.entries = promoted(node).backend.entries
    first = node.records - 1
    monkeypatch.setattr(node.backend.store, "queue_range", lambda *_: (first, node.records))
    assert new.lock("y", 0) == [], "a lock of x was removed with its record"
    assert new.lock("x", 1) == [1]


def test_a_lock_that_nobody_asked_for_in_a_long_time_is_no_lock(node: Node) -> None:
    node.backend.store.wall_ms = node.desk.clock.wall_ms
    assert node.lock("x", 0) == [0]
    for _ in range(int(LASTS_MS / 20_000) + 1):
        node.desk.run(20_000)
        assert node.lock("z", 1) == [1], "each has a record, from which the time is known"
    new = promoted(node)
    assert new.lock("y", 0, 1) == [0]


def test_old_locks_end_though_nobody_asks_a_new_master_for_any(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    new = promoted(node)
    new.desk.run(LOOK_MS)
    new.desk.run(LOCK_MS + PROOF_MS)
    assert new.lock("y", 0) == [0]


@pytest.mark.parametrize("ahead_ms", [19 * 60_000, 120 * 86_400_000])
def test_a_new_master_whose_clock_is_ahead_knows_the_locks(node: Node, ahead_ms: int) -> None:
    """By minutes or by months: the machine's clock was set between the lock and the promotion."""
    assert node.lock("x", 0) == [0]
    new = promoted(node)
    wall = int(min(r.store_timestamp_ms for r in new.backend.store._records()))
    asked_ms = int(REPEAT_MS + LOCK_MS) - 1  # since the record, at most, while x may believe
    new.desk.clock.wall_ms = lambda: wall + asked_ms + ahead_ms  # type: ignore[method-assign]
    assert new.lock("y", 0) == []


def test_what_waits_for_the_records_is_answered(node: Node) -> None:
    node.backend.transfer.hold = True
    first, second = node.send_and_run("x", 0), node.send_and_run("y", 0)
    assert not node.client.answers
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run()
    assert granted(node.client, first) is None and granted(node.client, second) is None
    first, second = node.send_and_run("x", 0), node.send_and_run("y", 0)
    node.backend.transfer.hold = False
    node.backend.transfer.end_all()
    node.desk.run()
    assert granted(node.client, first) == [0] and granted(node.client, second) == []


@pytest.mark.parametrize("code", [Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ])
@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b"{}",
        b'{"consumerGroup":"","clientId":"c"}',
        b'{"consumerGroup":"g","clientId":"%b"}' % (b"c" * 256),
        b'{"consumerGroup":"a\\u0001b","clientId":"c"}',
        b'{"consumerGroup":"a\\u0002b","clientId":"c","mqSet":[{"topic":"t","queueId":1}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"t","queueId":-1}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"","queueId":1}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"t","queueId":"x"}]}',
        b'{"consumerGroup":"g","clientId":"c","mqSet":' + b"[" * 9_000,
        body("c", *range(MAX_QUEUES + 1)),
        body("c") + b" " * 300_000,
    ],
)
def test_bad_requests_have_one_clear_answer(node: Node, code: int, bad: bytes) -> None:
    answer = node.client.ask(code, {}, bad)
    assert answer.code == Answer.SYSTEM_ERROR and answer.remark and len(answer.remark) < 400
    assert node.records == 0
    assert node.lock("x", 0) == [0], "others are served"


def test_recorded_locks_are_bounded() -> None:
    recorded = RecordedLocks()
    queues = range(1_000)
    for number in range(MAX_LOCKS // 1_000 + 1):
        recorded.apply(CommitBody("g", f"t{number}", {}, {}, dict.fromkeys(queues, "c")), number)
    assert len(recorded) <= MAX_LOCKS
    assert recorded.lacks_within(LASTS_MS), "it says that it lacks some"
    locks = QueueLocks()
    locks.begin(1, recorded, 0.0, complete=False)
    assert locks.ask("g", "d", [("t0", 0)], 0.0, 0.0) == ({}, {}, False)
    assert list(locks.ask("g", "c", [(f"t{number}", 0)], 0.0, 0.0).new) == [(f"t{number}", 0)]


BELIEF_MS = 59_000.0  # the longest that a consumer may be configured to believe; Java: 30 s


class Beliefs:
    """What consumers believe: no two of them in the same lock."""

    belief_ms = BELIEF_MS

    def __init__(self) -> None:
        self.now_ms = 1_000_000.0
        self.grants = 0
        self.belief: dict[int, dict[str, float]] = {}  # queue -> consumer -> until

    def believe(self, queue: int, who: str) -> None:
        self.grants += 1
        beliefs = self.belief.setdefault(queue, {})
        for other, until_ms in beliefs.items():
            assert other == who or until_ms <= self.now_ms, (
                f"{who} got queue {queue} at {self.now_ms}, {other} believes until {until_ms}"
            )
        beliefs[who] = self.now_ms + self.belief_ms


class World(Beliefs):
    """Nodes over one log, of which one after the other is the master; and consumers.

    A node that was superseded may hang, and go on later without knowing. What it appends then is
    not confirmed any more: that is what epochs and promises see to.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.log = FakeBackend().store
        self.nodes: list[Node] = []
        self.epoch = 65_537
        self.asked: list[tuple[Node, int, str, float]] = []
        self.cut_off = ("", 0.0)  # a consumer that reaches only superseded masters, until when
        self.elect()

    def elect(self) -> None:
        """Make a new node the master; the old ones do not notice."""
        backend = FakeBackend(len(self.nodes) + 1)
        for old in self.nodes:
            old.backend.store = _Frozen(self.log)  # its log is its own from now on
            old.backend.transfer.hold = True
        backend.store = self.log
        self.epoch += 65_536
        backend.entries = [(self.epoch, self.log.max_offset)]
        backend.transfer.hold = True
        self.nodes.append(Node(backend, self.now_ms))
        self.cut_off = f"c{self.rng.randrange(3)}", self.now_ms + self.rng.choice((0, 90_000))

    def step(self) -> None:
        self.now_ms += self.rng.choice((1, 100, 1_000, 3_000))
        action = self.rng.random()
        who, queues = f"c{self.rng.randrange(3)}", self.rng.sample(range(3), 2)
        node = self.nodes[-1] if self.rng.random() < 0.7 else self.rng.choice(self.nodes)
        if who == self.cut_off[0] and self.now_ms < self.cut_off[1] and len(self.nodes) > 1:
            node = self.rng.choice(self.nodes[:-1])
        if action < 0.6:
            opaque = self.on(node).send(who, *queues)
            self.asked.append((node, opaque, who, self.now_ms))
        elif action < 0.7:
            for queue in queues:
                self.belief.get(queue, {}).pop(who, None)
            self.on(node).send(who, *queues, code=Code.UNLOCK_BATCH_MQ)
        elif action < 0.71:
            self.elect()
        current = self.nodes[-1]
        if self.rng.random() < 0.8:
            self.on(current).backend.transfer.end_all()
        if self.rng.random() < 0.8:
            self.on(node)
        for one in {id(node): node, id(current): current}.values():
            self.on(one).desk.run()
        self.hear()

    def on(self, node: Node) -> Node:
        node.desk.clock.now_ms = self.now_ms
        return node

    def hear(self) -> None:
        """Let consumers believe what they are told within their time-out of 3 s."""
        left = []
        for node, opaque, who, since_ms in self.asked:
            answer = node.client.answers.pop(opaque, None)
            if answer is None:
                left.append((node, opaque, who, since_ms))
            elif answer.code == 0 and self.now_ms <= since_ms + 3_000:
                for one in json.loads(answer.body)["lockOKMQSet"]:
                    self.believe(one["queueId"], who)
        self.asked = left


class _Frozen:
    """A superseded master's log: what it had, and no readers for what comes."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_encoded(self, payloads: Any, guards: Any = None) -> Any:
        copy = FakeBackend().store
        return copy.put_encoded(payloads)


@pytest.mark.parametrize("walk", range(30))
def test_random_failovers_never_give_a_lock_twice(walk: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    world = World(random.Random(seed))
    for _ in range(400):
        world.step()
    assert world.grants > 10


@pytest.mark.parametrize("seed", [468, 479, 970, 1248, 2591, 895366433])
def test_what_was_given_back_to_a_new_master_was_given_twice(seed: int) -> None:
    """With these seeds its holder then asked the former master, which still had a proof."""
    world = World(random.Random(seed))
    for _ in range(400):
        world.step()


def test_a_group_with_a_lock_of_rocketmq_s_consumes_in_order() -> None:
    locks = QueueLocks()
    locks.begin(1, RecordedLocks(), 0.0)
    assert not locks.is_in_order("g", 0.0)
    locks.ask("g", "client", [("T", 0)], 0.0, 0.0)
    assert locks.is_in_order("g", LOCK_MS - 1) and not locks.is_in_order("other", 0.0)
    assert not locks.is_in_order("g", LOCK_MS)
    locks.ask("g", "own", [("T", 0), ("T", 1)], LOCK_MS, LOCK_MS, in_order=False)
    assert locks.holder("g", ("T", 0), LOCK_MS) == "own" and not locks.is_in_order("g", LOCK_MS)
    locks.ask("g", "own", [("T", 1)], LOCK_MS, LOCK_MS)
    assert locks.is_in_order("g", LOCK_MS)


def test_a_new_master_gives_at_once_what_was_given_back(node: Node) -> None:
    assert node.lock("x", 0, 1, 2) == [0, 1, 2]
    node.unlock("x", 0, 2)
    assert node.lock("y", 2) == [2]
    node.unlock("x", 2)  # it is not x's any more
    new = promoted(node)
    assert new.lock("z", 0, 1, 2) == [0]
    assert new.lock("y", 2) == [2] and new.lock("x", 1) == [1]


def test_an_unlock_that_waited_for_the_records_counts_from_when_it_came(node: Node) -> None:
    """The client may have asked a superseded master since."""
    assert node.lock("x", 0) == [0]
    new = promoted(node)
    new.backend.transfer.hold = True
    opaque = new.send("x", 0, code=Code.UNLOCK_BATCH_MQ)
    new.desk.run(PROOF_MS + 1)
    assert opaque not in new.client.answers
    new.backend.transfer.hold = False
    new.backend.transfer.end_all()
    assert new.lock("y", 0) == [] and new.client.answers[opaque].code == 0
    new.unlock("x", 0)
    assert new.lock("y", 0) == [0]


def hangs(old: Node) -> Node:
    """Return a new master over an old one's log; the old one does not notice that it is none."""
    new = promoted(old)
    old.backend.writable = True
    old.backend.store = _Frozen(old.backend.store)
    old.backend.transfer.hold = True  # what it appends is not confirmed any more
    return new


def test_a_superseded_master_may_renew_what_was_given_back_to_the_new_one(node: Node) -> None:
    """Its proof lasts for PROOF_MS: so long, the new master ends no lock that it has found."""
    assert node.lock("x", 0) == [0]
    new = hangs(node)
    new.unlock("x", 0)
    node.desk.run(PROOF_MS)
    assert node.lock("x", 0) == [0], "its proof is just young enough"
    new.desk.run(PROOF_MS)
    assert new.lock("y", 0) == []
    third = promoted(new, 3)
    assert third.lock("y", 0) == [], "no record says that it was given back"
    new.backend.writable = True
    new.desk.run(LOCK_MS - 1)
    assert new.lock("y", 0) == []
    new.desk.run(1)
    assert new.lock("y", 0) == [0]


def test_a_new_master_ends_locks_once_no_former_one_can_renew_them(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    new = hangs(node)
    assert new.lock("z", 1, 2) == [1, 2]
    new.unlock("z", 1)
    assert new.lock("y", 1) == [1], "it was given by the new master, at the earliest"
    new.desk.run(PROOF_MS)
    new.unlock("x", 0)
    assert new.lock("y", 0) == []
    new.desk.run(1)
    node.desk.run(PROOF_MS + 1)
    opaque = node.send_and_run("x", 0)
    node.desk.run(PROOF_MS)
    assert opaque not in node.client.answers, "the former master lacks a proof"
    new.unlock("x", 0)
    assert new.lock("y", 0) == [0]


def confirm_first(node: Node) -> None:
    """Confirm the first record that waits, and no other one."""
    _, _, _, done = node.backend.transfer.waiting.pop(0)
    done(Outcome.CONFIRMED, node.backend.transfer.level)
    node.backend.transfer.after_done()
    node.desk.run()


def test_the_record_of_a_lock_that_was_given_back_gives_no_later_lock(node: Node) -> None:
    """A failover may keep the record of the unlock, and lose that of the later lock."""
    assert node.lock("x", 9) == [9]
    node.backend.transfer.hold = True
    first = node.send_and_run("x", 0)
    node.unlock("x", 0)
    second = node.send_and_run("x", 0)
    confirm_first(node)
    assert granted(node.client, first) == [], "it was given back since"
    third = node.send_and_run("x", 0)
    assert not node.client.answers, "neither has a confirmed record yet"
    node.backend.transfer.end_all()
    node.desk.run()
    assert granted(node.client, second) == [0] and granted(node.client, third) == [0]


def test_a_proof_from_before_an_unlock_gives_no_later_lock(node: Node) -> None:
    assert node.lock("x", 0) == [0]
    node.desk.run(20_000)
    node.backend.transfer.hold = True
    first = node.send_and_run("x", 0)
    node.unlock("x", 0)
    second = node.send_and_run("x", 0)
    confirm_first(node)
    assert granted(node.client, first) == [] and second not in node.client.answers
    node.backend.transfer.end_all()
    node.desk.run()
    assert granted(node.client, second) == [0]


def test_a_lock_that_was_another_ones_meanwhile_needs_its_own_record(node: Node) -> None:
    """A renewal waits for its proof; the lock ends, is given to y, given back, and asked for."""
    assert node.lock("x", 0) == [0]
    node.desk.run(LOCK_MS - 1)
    node.backend.transfer.hold = True
    first = node.send_and_run("x", 0)
    node.desk.run(1)
    node.send_and_run("y", 0)
    node.unlock("y", 0)
    node.send_and_run("x", 0)
    confirm_first(node)
    assert granted(node.client, first) == []
    assert node.requests.locks.holder("G", ("T", 0), node.desk.clock.now_ms) == "x"


def send_late(node: Node, ms: float, code: int, who: str, *queues: int) -> None:
    """Let a request arrive that came to a node `ms` ago, and waited, or was forwarded."""
    fields: dict[str, str] = {}
    frame = Frame(code, 1, ONE_WAY, fields, body(who, *queues), None, "JAVA", 479, JSON)
    client: Any = node.client
    node.desk.door.receive(client, frame, node.desk.clock.now_ms - ms)
    node.desk.run()


def test_an_unlock_that_comes_late_ends_no_lock_that_was_asked_for_since(node: Node) -> None:
    """It is one way: the client does not wait for it, and asks again, another node perhaps."""
    assert node.lock("x", 0, 1) == [0, 1]
    node.desk.run(2_000)
    assert node.lock("x", 0) == [0]
    send_late(node, 1_000, Code.UNLOCK_BATCH_MQ, "x", 0, 1)
    assert node.lock("y", 0, 1) == [1]
    send_late(node, 0, Code.UNLOCK_BATCH_MQ, "x", 0)
    assert node.lock("y", 0) == [0]


@pytest.mark.parametrize("is_new", [False, True])  # whether the records must be read first
def test_requests_that_wait_are_bounded_in_sum(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    assert node.lock("x", 0) == [0]
    monkeypatch.setattr(lock_requests, "MAX_WAITING_BYTES", 20_000)
    new = promoted(node) if is_new else node
    new.backend.transfer.hold = True
    opaques = [new.send_and_run(f"c{who}", *range(10 * who, 10 * who + 9)) for who in range(1, 21)]
    refused = [each for each in opaques if each in new.client.answers]
    assert 10 < len(refused) < 20
    assert "too many requests wait" in str(new.client.answers[refused[0]].remark)
    new.backend.transfer.hold = False
    for _ in range(3):
        new.backend.transfer.end_all()
        new.desk.run()
    assert set(opaques) == set(new.client.answers) and not new.requests._memory
    new.client.answers.clear()
    assert new.lock("x", 0) == [0], "there is room again"


def test_a_lock_that_lacks_slaves_is_tried_again(node: Node) -> None:
    """Code 14 says that nothing was stored: forwarding.py tries such a request again."""
    node.backend.can_confirm = lambda _: "no slave is in sync"  # type: ignore[method-assign]
    answer = node.client.ask(Code.LOCK_BATCH_MQ, {}, body("x", 0))
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE, answer
    assert not node.requests._memory


# -- the room for locks


def as_identity(client: VirtualClient, name: str) -> VirtualClient:
    client.proof = SimpleNamespace(identity=SimpleNamespace(name=name))
    return client


def test_an_identity_that_takes_all_locks_leaves_some_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer of another team got no queue, no error, and nothing said why."""
    monkeypatch.setattr(queue_locks, "MAX_LOCKS", 80)
    node = Node()
    hoarder, others = node.client, node.desk.client()
    as_identity(hoarder, "hoarder")
    as_identity(others, "others")
    assert node.lock("seed", 0) == [0] and node.desk.door.problems() == []
    assert node.lock("h", *range(1, 80)) == [*range(1, 40)]
    refused = node.client.ask(Code.LOCK_BATCH_MQ, {}, body("h", 50, 51))
    assert refused.code == Answer.SYSTEM_BUSY
    assert refused.remark == f"{NOT_DECIDED}: there is no room for more locks"
    (problem,) = node.desk.door.problems()
    assert problem.startswith("40 locks of queues are held, 40 by identity hoarder; at most 80")
    node.client = others
    assert node.lock("o", *range(40, 50)) == [*range(40, 50)]
    # What is held is renewed; what was given back, or has ended, makes room.
    node.client = hoarder
    assert node.lock("h", *range(1, 80)) == [*range(1, 40)]
    node.unlock("h", *range(1, 40))
    assert node.desk.door.problems() == []
    assert node.lock("h", 70) == [70]
    node.desk.run(2 * LOCK_MS)
    assert node.lock("h2", *range(60)) == [*range(40)]
    assert node.requests.locks.count == sum(node.requests.locks._owned.values()) == 40


def test_without_identities_all_the_room_is_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_locks, "MAX_LOCKS", 8)
    node = Node()
    assert node.lock("a", *range(10)) == [*range(8)]
    assert len(node.desk.door.problems()) == 1
    node.desk.run(2 * LOCK_MS)
    assert node.lock("b", *range(2, 12)) == [*range(2, 10)]


def test_looking_for_room_costs_no_more_than_a_look_in_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All locks were looked at for each queue that found no room: minutes of the API's thread."""
    monkeypatch.setattr(queue_locks, "MAX_LOCKS", 8)
    locks, looks, drop_ended = QueueLocks(), [], QueueLocks._drop_ended

    def look(self: QueueLocks, now_ms: float) -> None:
        looks.append(now_ms)
        drop_ended(self, now_ms)

    monkeypatch.setattr(QueueLocks, "_drop_ended", look)
    locks.begin(1, RecordedLocks(), 0.0)
    assert locks.ask("g", "c", [("T", number) for number in range(1_000)], 0.0, 0.0).lacks
    assert len(looks) == 1


def test_a_queue_that_its_topic_does_not_have_has_no_lock() -> None:
    backend = FakeBackend()
    desk = Desk(backend)
    topics = TopicView(backend, auto_create=False)
    count = topics.default_queues
    requests = LockRequests(
        desk.door, GroupPositions(desk.door), lambda one: one[1] < topics.count_for_locks(one[0])
    )
    desk.door.join(requests.handlers())
    client = desk.client()
    opaque = client.send(Code.LOCK_BATCH_MQ, {}, body("c", *range(count + 5)))
    desk.run()
    assert granted(client, opaque) == [*range(count)]
    assert client.ask(Code.LOCK_BATCH_MQ, {}, body("c", 0, 1, topic="%RETRY%G")).code == 0
    assert requests.locks.count == count + 1


def test_new_locks_count_against_the_quota_and_renewals_are_free() -> None:
    """An identity with a small quota wrote 1 MB/s into the log by Lock and Unlock in turn."""
    node = Node()
    as_identity(node.client, "quo").meter = Meter(Quota(requests_per_s=1, bytes_per_s=1024))
    assert node.lock("c", 0) == [0]
    for _ in range(20):
        assert node.lock("c", 0) == [0]
    for _ in range(20):  # what 20 s allow may come at once
        assert node.lock("c", 0, 1) == [0, 1]
        node.unlock("c", 1)
    before = node.records
    for _ in range(20):
        node.unlock("c", 0, 1)
        refused = node.client.ask(Code.LOCK_BATCH_MQ, {}, body("c", 0, 1))
        assert refused.code == Answer.SYSTEM_BUSY and "its quota" in (refused.remark or "")
    assert node.records <= before + 1
    node.desk.run(1_100)
    assert node.lock("c", 0, 1) == [0, 1]
