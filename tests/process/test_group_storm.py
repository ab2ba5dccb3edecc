"""64 consumers of one group that come, stay and go at once, while their master is killed.

The consumers are bare frames that do what Java's clients do: a heartbeat to every node at each
connect, at each notification a question to a node by chance for the members, and RocketMQ's own
way to share out the queues. They share them out anew only when a node tells them to, or after an
answer that is none. The seed is printed; HASTORE_STORM_SEED repeats the choices.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest

from hastore.protocol.remoting import JSON, Code, Frame, RemotingWire, encode_frame
from hastore.server.remoting.group_requests import GAP_MS, GAP_OF_ONE_MS
from tests.process.harness import Group, Node
from tests.server.remoting.test_groups import java

pytestmark = pytest.mark.full
SEED = int(os.environ.get("HASTORE_STORM_SEED", "0")) or random.SystemRandom().getrandbits(32)
MEMBERS = 64
QUEUES = 128
LIMIT_S = 180.0
QUIET_S = 3.0  # nothing is told for so long: it is over
REBALANCE_S = 0.2  # between two looks of a consumer for its share
RETRY_S = 2.0  # after an answer that is none
RECONNECT_S = 0.3


class Link:
    """A consumer's connection to a node."""

    def __init__(self, member: Member, node: Node) -> None:
        self.member = member
        self.node = node
        self.wire = RemotingWire()
        self.sock = socket.create_connection(node_address(node), 60.0)

    def send(self, code: int, fields: dict[str, str], body: bytes = b"") -> None:
        frame = Frame(code, int(code), 0, fields, body, language="JAVA", version=479, kind=JSON)
        self.sock.sendall(encode_frame(frame))


class Member:
    """A consumer: what it knows of its group, and what it will do next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.links: dict[int, Link] = {}
        self.again_s: dict[int, float] = {}  # when to connect to a node again
        self.ids: list[str] = []
        self.look_s: float | None = None  # when it looks for its share
        self.looked_s = 0.0
        self.told: Counter[int] = Counter()  # notifications, by node
        self.smallest = MEMBERS  # of the lists of ids that it was given

    def share(self) -> set[int]:
        """Return its queues, as RocketMQ's AllocateMessageQueueAveragely."""
        if self.name not in self.ids:
            return set()
        index, count = self.ids.index(self.name), len(self.ids)
        rest = QUEUES % count
        size = QUEUES // count + (index < rest)
        first = index * size + (0 if index < rest else rest)
        return set(range(first, first + size))


class Crowd:
    """All consumers, in one thread."""

    def __init__(self, nodes: list[Node], chance: random.Random) -> None:
        self.nodes = nodes
        self.members: list[Member] = []
        self.failed = 0  # questions without a list as their answer
        self.last_told_s = 0.0
        self._numbers = itertools.count()
        self._chance = chance
        self._selector = selectors.DefaultSelector()

    def join(self, count: int) -> None:
        """Let so many consumers start at once."""
        for _ in range(count):
            member = Member(f"c{next(self._numbers):03}")
            self.members.append(member)
            for node in self.nodes:
                self._connect(member, node)
            member.look_s = time.monotonic()

    def leave(self, members: list[Member], *, politely: bool) -> None:
        """Let consumers end, with a word to every node or without one."""
        for member in members:
            for link in member.links.values():
                if politely:
                    fields = {"clientID": member.name, "consumerGroup": "G"}
                    link.send(Code.UNREGISTER_CLIENT, fields)
                self._selector.unregister(link.sock)
                link.sock.close()
            self.members.remove(member)

    def pump(self, until: Callable[[], bool]) -> None:
        """Let everybody act until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not until():
            assert time.monotonic() < deadline, f"seed {SEED}: {self.state()}"
            for key, _ in self._selector.select(0.02):
                self._read(key.data)
            now = time.monotonic()
            for member in self.members:
                self._act(member, now)

    def settle(self) -> None:
        """Wait until nobody is told anything any more, and everybody has its share."""
        self.last_told_s = time.monotonic()
        self.pump(
            lambda: (
                time.monotonic() - self.last_told_s > QUIET_S
                and all(one.look_s is None for one in self.members)
                and all(len(one.links) == len(self.nodes) for one in self.members)
            )
        )

    def state(self) -> str:
        sizes = Counter(len(one.ids) for one in self.members)
        return f"lists of {dict(sizes)}, {self.failed} questions in vain, told {self.told()}"

    def told(self) -> int:
        return sum(one.told.total() for one in self.members)

    def close(self) -> None:
        self.leave(list(self.members), politely=False)
        self._selector.close()

    def _connect(self, member: Member, node: Node) -> None:
        try:
            link = Link(member, node)
            link.send(Code.HEART_BEAT, {}, java(member.name))
        except OSError:
            member.again_s[node.number] = time.monotonic() + RECONNECT_S
            return
        member.links[node.number] = link
        member.again_s.pop(node.number, None)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> None:
        member, number = link.member, link.node.number
        try:
            data = link.sock.recv(65_536)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(link.sock)
            link.sock.close()
            del member.links[number]
            # They find out one after the other: with their next request to the node.
            member.again_s[number] = time.monotonic() + self._chance.random() * 3
            return
        now = time.monotonic()
        for frame in link.wire.receive(data):
            if frame.code == Code.NOTIFY_CONSUMER_IDS_CHANGED and not frame.is_answer:
                member.told[number] += 1
                self.last_told_s = now
                member.look_s = min(member.look_s or now, now)
            elif frame.opaque == Code.GET_CONSUMER_LIST_BY_GROUP and frame.code == 0:
                member.ids = list(json.loads(frame.body)["consumerIdList"])
                member.smallest = min(member.smallest, len(member.ids))
            elif frame.opaque == Code.GET_CONSUMER_LIST_BY_GROUP:
                self.failed += 1
                member.look_s = now + RETRY_S
            elif frame.opaque == Code.HEART_BEAT:
                assert frame.code == 0, frame.remark
                member.look_s = min(member.look_s or now, now)

    def _act(self, member: Member, now: float) -> None:
        for node in self.nodes:
            if member.again_s.get(node.number, now + 1) <= now and node.running:
                self._connect(member, node)
        if member.look_s is not None and max(member.look_s, member.looked_s + REBALANCE_S) <= now:
            link = self._chance.choice(list(member.links.values()))
            member.look_s, member.looked_s = None, now
            link.send(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})


def node_address(node: Node) -> tuple[str, int]:
    host, _, port = node.api.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def check(crowd: Crowd, what: str, begun_s: float, told: int) -> None:
    """Each queue has one owner, and the notifications kept to their rounds."""
    owners = Counter(queue for member in crowd.members for queue in member.share())
    assert owners == dict.fromkeys(range(QUEUES), 1), f"seed {SEED}, {what}: {crowd.state()}"
    most = len(crowd.members)
    lasted_s = max(0.0, crowd.last_told_s - begun_s)
    rounds = 2 + lasted_s * 1_000 / max(GAP_MS, GAP_OF_ONE_MS * most)
    now = crowd.told() - told
    print(f"{what}: told {now} times in {lasted_s:.1f} s, {crowd.failed} questions in vain")
    assert now <= len(crowd.nodes) * MEMBERS * rounds, f"seed {SEED}, {what}: {now} notifications"


@pytest.mark.slow("waits until 64 consumers are told nothing any more, four times")
def test_64_consumers_share_the_queues_whatever_happens(tmp_path: pathlib.Path) -> None:
    print(f"HASTORE_STORM_SEED={SEED}")
    with Group(tmp_path, 3) as group:
        group.start()
        crowd = Crowd(list(group), random.Random(SEED))
        try:
            begun_s = time.monotonic()
            crowd.join(MEMBERS)
            crowd.settle()
            check(crowd, "all come", begun_s, 0)

            for member in crowd.members:
                assert len(member.ids) == MEMBERS
                member.smallest = MEMBERS
            begun_s, told = time.monotonic(), crowd.told()
            group[1].kill()
            group[1].edit_role("SLAVE")
            group[2].edit_role("SYNC_MASTER")
            group[1].start()
            group[2].wait_writable()
            crowd.settle()
            check(crowd, "the master is killed", begun_s, told)
            assert {member.smallest for member in crowd.members} == {MEMBERS}, (
                f"seed {SEED}: {crowd.state()}: the members were the same all the time"
            )

            begun_s = time.monotonic()
            crowd.leave(crowd.members[MEMBERS // 4 :: 2], politely=True)
            crowd.leave(crowd.members[: MEMBERS // 4], politely=False)
            told = crowd.told()
            crowd.settle()
            check(crowd, "most go", begun_s, told)

            begun_s, told = time.monotonic(), crowd.told()
            group[2].kill()
            group[2].edit_role("SLAVE")
            group[3].edit_role("SYNC_MASTER")
            crowd.join(MEMBERS - len(crowd.members))
            group[2].start()
            group[3].wait_writable()
            crowd.settle()
            check(crowd, "all come while the master is killed", begun_s, told)
        finally:
            crowd.close()
