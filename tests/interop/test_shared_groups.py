"""Two Java consumers that read in order and two Python consumers in one group.

They join one by one, the master moves, a Python process and a JVM are killed. Each message is
delivered at least once, in the order of its queue; and no queue has two owners. That is measured at
the node: its log has each lock, each lock that was given back, and who has made each commit.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from hastore import Consumer, Producer
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import decode_commit
from tests.interop.rocketmq_clients import Clients, HastoreSite
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Node, wait_until

pytestmark = [pytest.mark.full, pytest.mark.slow("waits for the locks of members that were killed")]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOPIC, GROUP = "Shared", "shared"
QUEUES = 8
LIMIT_S = 200.0  # a lock of a member that was killed ends after 60 s, with a new master after 65
STORE = {"commitlog_file_size": "16MiB", "consume_queue_units": 3000}
TOLERANCE_MS = 30.0  # between the store's wall clock, in ms, and the clock of the deliveries


class Delivery(NamedTuple):
    """A message that a member got: at a monotonic time in ms."""

    ms: float
    queue: int
    number: int
    member: str


class Load:
    """Puts numbered messages into each queue, from one thread."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._go = threading.Event()
        self._stops = False
        self._idle = threading.Event()
        self.sent = [0] * QUEUES
        self._thread = threading.Thread(target=self._run)
        self._go.set()
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._addresses, delivery_timeout_s=120.0) as producer:
            while not self._stops:
                if not self._go.is_set():
                    assert producer.flush(120.0)
                    self._idle.set()
                self._go.wait()
                self._idle.clear()
                for queue in range(QUEUES):
                    body = b"%d:%d" % (queue, self.sent[queue])
                    producer.send(TOPIC, body, queue=queue)
                    self.sent[queue] += 1
                time.sleep(0.02)
            assert producer.flush(120.0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Send nothing within the block; what was sent is stored."""
        self._go.clear()
        assert self._idle.wait(130.0)
        yield
        self._idle.clear()
        self._go.set()

    def stop(self) -> None:
        self._stops = True
        self._go.set()
        self._thread.join(130.0)
        assert not self._thread.is_alive()


class PythonMember:
    """A consumer of hastore in a process."""

    def __init__(self, group: Group, folder: pathlib.Path, name: str) -> None:
        self._path = folder / f"{name}.txt"
        addresses = ",".join(group.bootstrap)
        arguments = [addresses, TOPIC, GROUP, str(self._path)]
        self._errors = open(folder / f"{name}.err", "wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.shared_member", *arguments],
            cwd=ROOT, stderr=self._errors,
        )  # fmt: skip
        wait_until(lambda: self._lines(), LIMIT_S, "it has begun")
        self.id = self._lines()[0]

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        text = self._path.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def seen(self) -> list[Delivery]:
        return [delivery(*line.split(), self.id) for line in self._lines()[1:]]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._errors.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT_S) == 0


class JavaMember:
    """A push consumer of RocketMQ that reads in order, in a JVM."""

    def __init__(self, jvm: Clients, site: HastoreSite) -> None:
        self.jvm = jvm
        self._name = jvm.push(site, GROUP, TOPIC, orderly=True, compact=True)
        self._seen: list[Delivery] | None = None
        self.id = f"@client-{jvm.process.pid}-"  # a part of it

    def seen(self) -> list[Delivery]:
        if self._seen is not None:
            return self._seen
        found = self.jvm.call("push.numbers", name=self._name)
        return [delivery(body, ms, self.id) for body, ms in found]

    def kill(self) -> None:
        self._seen = self.seen()
        self.jvm.kill()


def delivery(body: str, ms: str | float, member: str) -> Delivery:
    queue, number = body.split(":")
    return Delivery(float(ms), int(queue), int(number), member)


Member = PythonMember | JavaMember


class Change(NamedTuple):
    """The owner of a queue from a place in the log on: None if it was given back."""

    stored_ms: int
    queue: int
    holder: str | None


class Owners:
    """Reads the node's log: the owners of the queues, and who has committed."""

    def __init__(self, addresses: list[str]) -> None:
        self._reader = Consumer(POSITIONS_TOPIC, addresses, queues=[0], on_lost="common")
        self.holders: dict[int, str] = {}
        self.changes: list[Change] = []
        self.commits = 0

    def read(self) -> dict[int, str]:
        """Read on; fail if a member has committed a queue that was not its own there."""
        while messages := self._reader.poll(500, 0.2):
            for message in messages:
                body = decode_commit(message.body)
                if (body.group, body.topic) == (GROUP, TOPIC):
                    at_ms = message.store_timestamp_ms
                    for queue, holder in body.locks.items():
                        if self.holders.get(queue) != holder:
                            self.changes.append(Change(at_ms, queue, holder))
                        self.holders[queue] = holder
                    for queue, holder in body.released.items():
                        if self.holders.get(queue) == holder:
                            del self.holders[queue]
                            self.changes.append(Change(at_ms, queue, None))
                    if body.member:
                        self.commits += 1
                        for queue in body.positions:
                            assert self.holders.get(queue) == body.member, (queue, body)
        return self.holders

    def shares(self, *members: Member) -> list[int]:
        """Return how many queues each member has."""
        held = list(self.read().values())
        return [sum(one.id in holder for holder in held) for one in members]

    def wait_shares(self, members: list[Member], *sizes: int) -> float:
        """Wait until the members have so many queues; return the seconds."""
        begun = time.monotonic()
        wait_until(
            lambda: sorted(self.shares(*members)) == sorted(sizes), LIMIT_S,
            lambda: f"{sizes}: {self.holders}",
        )  # fmt: skip
        return time.monotonic() - begun

    def close(self) -> None:
        self._reader.close()


def all_of(members: list[Member]) -> list[Delivery]:
    return [each for one in members for each in one.seen()]


def wait_delivered(load: Load, members: list[Member]) -> None:
    """Wait until everything that was sent was delivered."""

    def missing() -> int:
        found = {(one.queue, one.number) for one in all_of(members)}
        return sum(load.sent) - len(found)

    wait_until(lambda: missing() == 0, LIMIT_S, lambda: f"{missing()} are missing")


def judge(load: Load, members: list[Member], owners: Owners) -> str:
    """Check that each queue was delivered in order, by its owner at the time."""
    owners.read()
    to_wall_ms = time.time_ns() / 1e6 - time.monotonic_ns() / 1e6
    again = 0
    for queue in range(QUEUES):
        got = sorted(one for one in all_of(members) if one.queue == queue)
        nexts = 0
        for one in got:
            if one.number == nexts:
                nexts += 1
            else:
                assert one.number < nexts, f"{one} came before {queue}:{nexts}"
                again += 1
        assert nexts == load.sent[queue]
        changes = [one for one in owners.changes if one.queue == queue]
        for one in got:
            wall_ms = one.ms + to_wall_ms
            held = [
                change.holder for change, after in zip(changes, [*changes[1:], None], strict=True)
                if change.stored_ms - TOLERANCE_MS <= wall_ms
                and (after is None or wall_ms <= after.stored_ms + TOLERANCE_MS)
            ]  # fmt: skip
            assert any(holder and one.member in holder for holder in held), (one, changes)
    return f"{sum(load.sent)} messages, {again} again, {owners.commits} commits of Python's members"


def flip(group: Group, site: HastoreSite) -> None:
    """Let another node be the master: the roles change, or the leader is killed and comes back."""
    old = site.writable()
    if isinstance(group, DLedgerGroup):
        old.kill()
        site.writable(old.number)
        old.start("serve")
        return
    new: Node = group[old.number % 3 + 1]
    old.edit_role("SLAVE")
    new.edit_role("SYNC_MASTER")
    assert site.writable(old.number).number == new.number


@pytest.mark.parametrize("mode", ["classic", pytest.param("dledger", marks=pytest.mark.long)])
def test_a_group_of_java_and_python(
    tmp_path: pathlib.Path, make_jvm: Callable[..., Clients], mode: str
) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    group = (Group if mode == "classic" else DLedgerGroup)(folder, 3, store=STORE)
    with contextlib.ExitStack() as ends:
        ends.enter_context(group)
        site = HastoreSite(group.start(), mode)
        make_topic(site)
        load = Load(group.bootstrap)
        ends.callback(load.stop)
        owners = Owners(group.bootstrap)
        ends.callback(owners.close)

        def python(name: str) -> PythonMember:
            member = PythonMember(group, tmp_path, name)
            ends.callback(member.kill)
            return member

        def java(name: str, version: str) -> JavaMember:
            return JavaMember(make_jvm(name, version), site)

        times = {}
        members: list[Member] = [java("java-1", "5.3.3")]
        times["Java alone"] = owners.wait_shares(members, 8)
        members.append(first := python("python-1"))
        times["and Python"] = owners.wait_shares(members, 4, 4)
        members.append(second := java("java-2", "4.9.8"))
        times["two of Java"] = owners.wait_shares(members, 2, 3, 3)
        members.append(python("python-2"))
        times["two of each"] = owners.wait_shares(members, 2, 2, 2, 2)
        before = dict(owners.read())
        flip(group, site)
        wait_sent(load, 200)
        assert owners.read() == before, "the new master knows the owners"
        first.kill()
        times["Python is killed"] = owners.wait_shares(
            [one for one in members if one is not first], 2, 3, 3
        )
        with load.held():  # what a JVM has seen is asked of it before it is killed
            wait_delivered(load, members)
            second.kill()
        left = [one for one in members if one not in (first, second)]
        times["Java is killed"] = owners.wait_shares(left, 4, 4)
        members.append(python("python-3"))
        times["Python joins"] = owners.wait_shares([*left, members[-1]], 2, 3, 3)
        wait_sent(load, 200)
        load.stop()
        wait_delivered(load, members)
        print(f"{mode}: {judge(load, members, owners)}")
        print({what: f"{seconds:.1f} s" for what, seconds in times.items()})
        for one in members:
            if isinstance(one, PythonMember) and one is not first:
                one.stop()
        assert os.path.getsize(tmp_path / "python-1.err") < 10_000


def make_topic(site: HastoreSite) -> None:
    from hastore import Admin

    with Admin(site.group.bootstrap, timeout_s=60.0) as admin:
        admin.create_topic(TOPIC, queues=QUEUES)


def wait_sent(load: Load, more: int) -> None:
    """Wait until so many more messages were sent."""
    until = sum(load.sent) + more
    wait_until(lambda: sum(load.sent) >= until, LIMIT_S, lambda: str(load.sent))
