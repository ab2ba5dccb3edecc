"""Random histories of a group that keeps its promises: a small model of it takes the steps.

A master appends what producers send. At times it is alone, acknowledges by itself, and then fails:
the next master lacks that tail, and the old one archives it. Readers see what is confirmed; two
members share a group; an operator resets it; retention removes the beginning of the log.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hastore.history.rules import events as e
from hastore.history.rules.checker import Checker
from hastore.history.rules.findings import Report

TOPIC = "orders"
QUEUES = 3
HOSTS = {1: "127.0.0.1:10911", 2: "127.0.0.1:10921"}
SIZE = 100


@dataclass
class Message:
    """A message of a producer, from its send to its end."""

    producer: str
    number: int
    queue: int
    digest: str
    alone: bool  # it waits for the master only
    offset: int | None = None
    queue_offset: int = 0
    ended: bool = False


@dataclass
class Group:
    """The model; `lines` is its history."""

    rng: random.Random
    lines: list[e.Event] = field(default_factory=list)
    now: int = 1_000
    log: list[Message] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  # of the records of the log
    confirmed: int = 0  # records that readers may see
    epoch: int = 1 << 16 | 1
    lonely: bool = False
    open: dict[str, list[Message]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[tuple[str, int], int] = field(default_factory=dict)  # of readers
    committed: dict[int, int] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    archived: list[Message] = field(default_factory=list)
    ops: int = 0

    def tick(self) -> int:
        self.now += self.rng.randrange(1, 9)
        return self.now

    def op(self) -> int:
        self.ops += 1
        return self.ops

    def add(self, event: e.Event) -> None:
        self.lines.append(event)

    # -- producers

    def send(self) -> None:
        producer = self.rng.choice(("p1", "p2", "p3"))
        number = self.numbers.get(producer, 0)
        self.numbers[producer] = number + 1
        digest = e.digest_of(TOPIC, f"k{number}", f"{producer} {number}".encode())
        queue = self.rng.randrange(QUEUES)
        one = Message(producer, number, queue, digest, self.lonely)
        acks = "1" if self.lonely else "all"
        self.add(e.Send(producer, number, self.tick(), TOPIC, digest, acks=acks))
        self.open.setdefault(producer, []).append(one)

    def append(self) -> None:
        waiting = [each for each in self.open.values() if any(m.offset is None for m in each)]
        if not waiting:
            return
        one = next(m for m in self.rng.choice(waiting) if m.offset is None)
        one.offset = SIZE * len(self.log)
        one.queue_offset = sum(other.queue == one.queue for other in self.log)
        self.log.append(one)
        self.hosts.append(HOSTS[self.epoch & 0xFFFF])
        if not self.lonely:
            self.confirmed = len(self.log)

    def answer(self) -> None:
        ready = [
            m for each in self.open.values() for m in each
            if m.offset is not None and (m.alone or m.offset < SIZE * self.confirmed)
        ]  # fmt: skip
        if ready:
            one = self.rng.choice(ready)
            level = "MASTER_MEM" if one.alone else "SYNC_MEM(1)"
            self.add(e.Ok(one.producer, one.number, self.tick(), level, one.offset, one.queue,
                          one.queue_offset, self.epoch))  # fmt: skip
            one.ended = True
            self.open[one.producer].remove(one)

    def give_up(self) -> None:
        """End a send as unknown, or as refused if it is the last one and was not appended."""
        producer = self.rng.choice(sorted(self.open)) if self.open else ""
        each = self.open.get(producer, [])
        if not each:
            return
        one = each[-1] if self.rng.random() < 0.5 else each[0]
        if one.offset is None and self.rng.random() < 0.5:
            self.add(e.Fail(producer, one.number, self.tick(), "BUSY"))
        else:
            self.add(e.Info(producer, one.number, self.tick(), "TIMEOUT"))
        each.remove(one)

    # -- failures

    def fail(self) -> None:
        """Kill the master. What it had alone is gone, but for its archive."""
        master = self.epoch & 0xFFFF
        self.add(e.Fault(self.tick(), "kill", master))
        kept = self.rng.randrange(self.confirmed, len(self.log) + 1)
        cut, self.log = self.log[kept:], self.log[:kept]
        self.hosts = self.hosts[:kept]
        for one in cut:
            if not one.ended:
                one.offset = None  # its producer sends it again, if it still waits
            self.archived.append(one)
        # An acknowledged one may be below one that waits: the order of a producer is kept.
        self.lonely = False
        other = 3 - master
        self.epoch = (self.epoch >> 16) + 1 << 16 | other
        self.add(e.Epoch(self.epoch, SIZE * kept, other, HOSTS[other]))
        self.confirmed = kept
        self.add(e.Fault(self.tick(), "start", master))

    def settle(self) -> None:
        """End all sends, as the end of a test does."""
        while any(self.open.values()):
            self.append()
            self.answer()

    # -- consumers

    def available(self, queue: int) -> list[Message]:
        return [one for one in self.log[: self.confirmed] if one.queue == queue]

    def seen(self, messages: Iterable[Message]) -> list[e.Seen]:
        return [
            e.Seen(m.queue_offset, m.offset, m.digest, None, m.producer, m.number)
            for m in messages if m.offset is not None
        ]  # fmt: skip

    def read(self, client: str, queue: int) -> None:
        place = self.places.setdefault((client, queue), 0)
        found = self.available(queue)[place : place + self.rng.randrange(1, 6)]
        if found:
            began, t = self.tick(), self.tick()
            self.add(e.Read(client, began, t, TOPIC, queue, self.seen(found)))
            self.places[client, queue] = place + len(found)

    def read_plain(self) -> None:
        self.read("reader", self.rng.randrange(QUEUES))

    def read_shared(self) -> None:
        queue = self.rng.randrange(QUEUES)
        owner = self.owner.get(queue)
        if owner is None or self.rng.random() < 0.1:
            if owner is not None:
                self.commit(owner, queue)
                self.add(e.Revoked(owner, self.tick(), TOPIC, queue))
            owner = self.owner[queue] = "m2" if owner == "m1" else "m1"
            self.add(e.Assigned(owner, self.tick(), TOPIC, queue))
            self.places[owner, queue] = self.committed.get(queue, 0)
        self.read(owner, queue)
        if self.rng.random() < 0.3:
            self.commit(owner, queue)

    def commit(self, client: str, queue: int, *, back: bool = False) -> None:
        place = self.places.get((client, queue), 0)
        op = 1_000_000 + self.op()
        places = [e.Place(TOPIC, queue, place)]
        self.add(e.Commit(client, op, self.tick(), "billing", places, back))
        self.add(e.Ok(client, op, self.tick()))
        self.committed[queue] = place

    def ask(self) -> None:
        began = self.tick()
        places = [e.Place(TOPIC, queue, self.committed.get(queue)) for queue in range(QUEUES)]
        self.add(e.Position("admin", began, self.tick(), "billing", places, current=True))

    def seek(self) -> None:
        queue = self.rng.randrange(QUEUES)
        owner = self.owner.get(queue)
        if owner is not None and self.places.get((owner, queue), 0):
            self.add(e.Seek(owner, self.tick(), TOPIC, queue))
            self.places[owner, queue] -= 1
            self.commit(owner, queue, back=True)

    # -- the end

    def finish(self, begin: int) -> None:
        """Say what the log has from record `begin` on, and what jobs got of it."""
        for client in (*sorted(self.open), "reader", "m1", "m2"):
            self.add(e.Closed(client, self.tick()))
        rows = list(zip(self.log, self.hosts, strict=True))[begin:]
        self.add(e.Log(SIZE * begin, SIZE * len(self.log), archives=True))
        for one, host in rows:
            assert one.offset is not None
            self.add(e.Record(one.offset, SIZE, TOPIC, one.queue, one.queue_offset, one.digest,
                              one.producer, one.number, host))  # fmt: skip
        for one in self.archived:
            self.add(e.Rescued(one.offset or 0, one.digest))
        for queue in range(QUEUES):
            known = [one for one, _ in rows if one.queue == queue]
            known = known[len(known) // 3 : -1] or known
            digest = e.range_digest((one.queue_offset, one.digest) for one in known)
            first, end = known[0].queue_offset, known[-1].queue_offset + 1
            self.add(e.Range("spark", self.tick(), TOPIC, queue, first, end, len(known), digest))


def healthy(seed: int, steps: int = 500, *, retention: bool = True) -> list[e.Event]:
    """Return the history of one random walk of `steps` steps."""
    rng = random.Random(seed)
    group = Group(rng)
    group.add(e.Header(nodes=2))
    group.add(e.Epoch(group.epoch, 0, 1, HOSTS[1]))
    group.add(e.Consumer("reader", 0))
    for member in ("m1", "m2"):
        group.add(e.Consumer(member, 0, "billing", shared=True))
    usual = (*[group.send] * 8, *[group.append] * 8, *[group.answer] * 8, group.give_up)
    usual += (group.read_plain, group.read_plain, group.read_shared, group.read_shared)
    usual += (group.ask, group.seek)
    for step in range(steps):
        if step and step % (steps // 4) == 0:
            group.settle()
            group.lonely = True
            for _ in range(20):
                rng.choice((group.send, group.append, group.append, group.answer))()
            for _ in range(3):
                group.answer()
            group.fail()
        else:
            rng.choice(usual)()
    group.settle()
    for queue in range(QUEUES):
        group.read_shared()
        group.read("reader", queue)
    group.ask()
    group.finish(len(group.log) // 5 if retention else 0)
    return group.lines


def check(lines: Iterable[e.Event], *expect: str) -> Report:
    """Check a history; its lines count from 1."""
    checker = Checker()
    for number, event in enumerate(lines, 1):
        if isinstance(event, e.Header):
            checker.begin(event)
        else:
            checker.feed(event, number)  # type: ignore[arg-type]
    return checker.finish(expect)
