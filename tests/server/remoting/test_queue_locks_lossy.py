"""Locks of queues where failovers lose records, confirmations come late, and requests wait."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import pytest

from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.committed_positions import RecordedLocks
from hastore.protocol.remoting import JSON, Answer, Code, Frame
from hastore.server.api.commit_records import read_commit_records
from tests.api_fakes import FakeBackend, FakeStore
from tests.server.remoting.test_queue_locks import Beliefs, Node, body

TIME_OUT_MS = 3_000.0  # a client waits so long for an answer
CLIENTS = ("c0", "c1", "c2")
QUEUES = range(3)


def holder(recorded: RecordedLocks, queue: int) -> str | None:
    """Return who holds a queue's lock by the records."""
    lock = dict(recorded.items()).get(("G", "T"), {}).get(queue)
    return None if lock is None else lock.holder


class Asked(NamedTuple):
    """A request for locks that has no answer yet."""

    node: LossyNode
    opaque: int
    who: str
    sent_ms: float


class Sent(NamedTuple):
    """A request that is held somewhere, until a node carries it out."""

    due_ms: float
    node: LossyNode
    frame: Frame
    sent_ms: float


class LossyNode(Node):
    """A node with a log of its own, of which `in_sync` bytes are those of the present master.

    What is confirmed to it was appended before it was superseded; it may learn of it later.
    """

    def __init__(self, backend: FakeBackend, now_ms: float) -> None:
        backend.transfer.hold = True
        super().__init__(backend, now_ms)
        self.in_sync: int | None = None  # None: it is the master

    def confirm(self, most: int) -> int:
        """Confirm the first records that wait, `most` at most; return where they end."""
        waiting, end = self.backend.transfer.waiting, 0
        while waiting and most and (self.in_sync is None or waiting[0][0] <= self.in_sync):
            end, _, _, done = waiting.pop(0)
            done(Outcome.CONFIRMED, self.backend.transfer.level)
            most -= 1
        if end:
            self.backend.transfer.after_done()
        return end


class LossyWorld(Beliefs):
    """Masters, of which each begins with its predecessor's log as far as it was confirmed.

    A superseded one goes on without knowing. A consumer does not believe an answer to what it
    asked before it gave the queue back. Whatever it sends may wait on its way.
    """

    belief_ms = 57_000.0  # from the answer on; the lock lives for 60 s from before the answer on

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.epoch = 65_537
        self.confirmed = 0  # what no failover loses
        self.given_back: dict[tuple[str, int], float] = {}  # when it sent that
        self.sent: list[Sent] = []
        self.asked: list[Asked] = []
        self.told: list[tuple[float, Asked, list[int]]] = []  # answers that are under way
        self.opaques = 0
        self.actor = CLIENTS[0], [0, 1]
        self.nodes = [LossyNode(self.backend_over(FakeBackend().store, 0), self.now_ms)]

    def backend_over(self, store: FakeStore, end: int) -> FakeBackend:
        """Return a master's backend, with the beginning of another one's log."""
        backend = FakeBackend(1, epoch=self.epoch)
        own = backend.store
        own.log = store.log[:end]
        own.starts = {start for start in store.starts if start < end}
        own.units = {
            queue: [unit for unit in units if unit[0] < end] for queue, units in store.units.items()
        }
        return backend

    def elect(self) -> None:
        """Make a new node the master; of what is not confirmed it has any part."""
        old = self.nodes[-1]
        store = old.backend.store
        end = self.rng.choice(
            [*(at for at in sorted(store.starts) if at >= self.confirmed), store.max_offset]
        )
        old.in_sync = self.confirmed = end
        self.epoch += 65_536
        self.nodes.append(LossyNode(self.backend_over(store, end), self.now_ms))

    def step(self) -> None:
        self.now_ms += self.rng.choice((1, 100, 1_000, 3_000))
        action = self.rng.random()
        if self.rng.random() < 0.5:  # else the same one acts again
            self.actor = self.rng.choice(CLIENTS), self.rng.sample(QUEUES, 2)
        who, queues = self.actor
        if action < 0.7:
            self.send(who, queues, Code.LOCK_BATCH_MQ)
        elif action < 0.85:
            for queue in queues:
                self.belief.get(queue, {}).pop(who, None)
                self.given_back[who, queue] = self.now_ms
            self.send(who, queues, Code.UNLOCK_BATCH_MQ)
        elif action < 0.86:
            self.elect()
        for node in self.nodes[-3:]:
            node.desk.clock.now_ms = self.now_ms
            if self.rng.random() < 0.6:
                end = node.confirm(self.rng.randrange(1, 3))
                if node is self.nodes[-1]:
                    self.confirmed = max(self.confirmed, end)
        self.arrive()
        for node in self.nodes[-3:]:
            node.desk.run()
        self.hear()

    def send(self, who: str, queues: list[int], code: int) -> None:
        node = self.nodes[-1] if self.rng.random() < 0.7 else self.rng.choice(self.nodes[-3:])
        self.opaques += 1
        frame = Frame(code, self.opaques, 0, {}, body(who, *queues), None, "JAVA", 479, JSON)
        due_ms = self.now_ms + self.rng.choice((0, 0, 0, 1_000, 2_800))
        self.sent.append(Sent(due_ms, node, frame, self.now_ms))
        if code == Code.LOCK_BATCH_MQ:
            self.asked.append(Asked(node, self.opaques, who, self.now_ms))

    def arrive(self) -> None:
        due = [one for one in self.sent if one.due_ms <= self.now_ms]
        self.sent = [one for one in self.sent if one.due_ms > self.now_ms]
        for _, node, frame, sent_ms in due:
            node.desk.door.receive(node.client, frame, sent_ms)  # type: ignore[arg-type]

    def hear(self) -> None:
        """Let consumers believe what they are told in time."""
        left = []
        for one in self.asked:
            answer = one.node.client.answers.pop(one.opaque, None)
            if answer is None:
                left.append(one)
            elif answer.code == Answer.SUCCESS:
                given = [each["queueId"] for each in json.loads(answer.body)["lockOKMQSet"]]
                for queue in given:
                    if self.still_wants(one, queue):
                        self.assert_recorded(one, queue)
                due_ms = self.now_ms + self.rng.choice((0, 0, 500, 2_000))
                self.told.append((due_ms, one, given))
        self.asked = left
        told, self.told = self.told, []
        for due_ms, one, given in told:
            if due_ms > self.now_ms:
                self.told.append((due_ms, one, given))
            elif self.now_ms <= one.sent_ms + TIME_OUT_MS:
                for queue in given:
                    if self.still_wants(one, queue):
                        self.believe(queue, one.who)
                        if self.rng.random() < 0.05:  # as soon as somebody relies on a lock
                            self.elect()

    def still_wants(self, one: Asked, queue: int) -> bool:
        """Whether a consumer has not given a queue back since it asked for it."""
        return self.given_back.get((one.who, queue), -1.0) < one.sent_ms

    def assert_recorded(self, one: Asked, queue: int) -> None:
        """A lock was given: wherever a failover may cut the log, it names the holder."""
        in_sync, store = one.node.in_sync, one.node.backend.store
        surely = self.confirmed if in_sync is None else in_sync
        recorded, holders = RecordedLocks(), []
        for record, found in read_commit_records(bytes(store.log[:in_sync])):
            if record.physical_offset >= surely:
                holders.append(holder(recorded, queue))
            if found is not None:
                recorded.apply(found, 0)
        holders.append(holder(recorded, queue))
        assert set(holders) == {one.who}, (
            f"{one.who} got queue {queue} at {self.now_ms}, a log may name {holders}"
        )


@pytest.mark.parametrize("walk", range(20))
def test_failovers_that_lose_records_never_give_a_lock_twice(walk: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    world = LossyWorld(random.Random(seed))
    for _ in range(400):
        world.step()
    assert world.grants > 10, "it gives locks at all"
