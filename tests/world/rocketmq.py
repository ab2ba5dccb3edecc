"""RocketMQ's clients: a producer, and two consumers that read in order, by locks of queues.

They do what Java's clients do over the wire: routes from any node, SEND_OK as the acknowledgement,
a send that failed again with the same UNIQ_KEY, heartbeats, the list of a group's members, queues
shared by it, locks that are believed in for 30 s, pulls and commits at the master. They have a
topic and a group of their own.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hastore.errors import ProtocolError
from hastore.protocol.remoting import Answer, Code, Frame, RemotingWire, encode_frame
from hastore.record.codec import decode_record
from tests.world import sockets
from tests.world.clients import ClientHost
from tests.world.history import Log, Place, Sent, named
from tests.world.scheduler import world

TOPIC = "rocketmq"
GROUP = "in order"
QUEUES = 2
ATTEMPTS = 3
ANSWER_S = 3.0
BELIEF_S = 30.0  # Java: rocketmq.client.rebalance.lockMaxLiveTime
BEAT_S = 2.0  # Java: 30 s
SHARE_S = 1.0  # Java: 20 s, for a rebalance and for the locks
_SUBSCRIBES = 0x4  # of a pull's flags
_WRITE = 2  # of a topic's rights
_ID = re.compile(rb"([{,])(\d+):")
_STORED = (Answer.FLUSH_DISK_TIMEOUT, Answer.SLAVE_NOT_AVAILABLE, Answer.FLUSH_SLAVE_TIMEOUT)


class NoAnswer(Exception):
    """A node did not answer, or not with what was asked for."""


@dataclass
class Book:
    """What the clients sent, were told and got."""

    attempts: Counter[bytes] = field(default_factory=Counter)  # of each message
    acked: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)  # queue, offsets
    got: dict[Place, bytes] = field(default_factory=dict)  # by the group's members
    committed: dict[int, int] = field(default_factory=dict)
    beliefs: dict[int, dict[str, float]] = field(default_factory=dict)  # queue: member: until
    grants: int = 0
    moved: list[str] = field(default_factory=list)  # pulls that were sent to another place
    skipped: set[Place] = field(default_factory=set)  # what they were sent past by these

    def believe(self, queue: int, member: str) -> list[str]:
        """Note that a member was given a lock; return what is wrong about it."""
        now, known = world().now, self.beliefs.setdefault(queue, {})
        others = [f"{who} until {until:.2f}" for who, until in known.items()
                  if who != member and until > now]  # fmt: skip
        known[member] = now + BELIEF_S
        self.grants += 1
        return [f"{member} got the lock of queue {queue}, which has {other}" for other in others]

    def give_up(self, queue: int, member: str) -> None:
        self.beliefs.get(queue, {}).pop(member, None)

    def end(self, member: str) -> None:
        """Note that a member's process has ended."""
        for queue in self.beliefs:
            self.give_up(queue, member)

    def counts(self) -> dict[str, int]:
        return {"acknowledged": len(self.acked), "got": len(self.got), "locks": self.grants,
                "commits": len(self.committed)}  # fmt: skip

    def unread(self, start: int) -> list[bytes]:
        """Return what was acknowledged, is in a log from `start` on, and nobody has got."""
        return [
            body for body, (queue, queue_offset, offset) in self.acked.items()
            if offset >= start and (queue, queue_offset) not in self.got
        ]  # fmt: skip

    def wrong(self, log: Log, *, retention: bool) -> list[str]:
        """Return what is wrong at the end of a walk in which nothing may be lost."""
        there: dict[Place, bytes] = {}
        counts: Counter[bytes] = Counter()
        for record in log.records():
            if record.topic == TOPIC:
                there[record.queue_id, record.queue_offset] = record.body
                counts[record.body] += 1
        found = [
            f"{body[:40]!r} is stored {count} times, sent {self.attempts[body]} times"
            for body, count in counts.items() if count > self.attempts[body]
        ]  # fmt: skip
        for body, (queue, queue_offset, offset) in self.acked.items():
            if there.get((queue, queue_offset)) != body and not (retention and offset < log.start):
                found.append(
                    f"{named(body)} was SEND_OK at {queue}/{queue_offset}, there is "
                    f"{there.get((queue, queue_offset), b'nothing')[:40]!r}"
                )
        first = {queue: min((o for q, o in there if q == queue), default=0) for queue, _ in there}
        for place, body in self.got.items():
            gone = retention and place[1] < first.get(place[0], 1 << 62)
            if there.get(place) != body and not gone:
                found.append(f"a member got {body[:40]!r} at {place}, which is not there")
        # The log of this node may begin before that of the master that sent a member on.
        seen = self.got.keys() | (self.skipped if retention else set())
        for queue, position in self.committed.items():
            missed = [o for q, o in there if q == queue and o < position and (q, o) not in seen]
            if missed:
                found.append(f"committed {position} of queue {queue} without {missed[:5]}")
        if not retention:
            found += self.moved
        return found


def _nodes_of(route: bytes) -> dict[str, str]:
    """Return the addresses of the broker that takes messages, by broker id, which has no quotes."""
    told = json.loads(_ID.sub(rb'\1"\2":', route))
    takes = {one["brokerName"] for one in told["queueDatas"] if one["perm"] & _WRITE}
    for broker in told["brokerDatas"]:
        if broker["brokerName"] in takes:
            found: dict[str, str] = broker["brokerAddrs"]
            return found
    return {}


class RocketHost(ClientHost):
    """A host with a client of RocketMQ's."""

    book: Book

    def work(self) -> None:
        self._links: dict[str, tuple[sockets.Socket, RemotingWire]] = {}
        self._opaque = 0
        self._nodes: list[str] = []  # of the last route
        self._master: str | None = None
        self.be()
        for link, _ in self._links.values():
            link.close()

    @abstractmethod
    def be(self) -> None:
        """Be the client until `stopping` is set."""

    def ask(self, node: str, code: int, fields: dict[str, Any], body: bytes = b"") -> Frame:
        """Return the answer of a node; raises NoAnswer, also if it takes longer than ANSWER_S."""
        self._opaque += 1
        given = {name: str(value) for name, value in fields.items()}
        frame = Frame(code, self._opaque, 0, given, body, language="JAVA", version=479)
        limit = self.world.now + ANSWER_S
        try:
            if node not in self._links:
                host, _, port = node.rpartition(":")
                made = sockets.create_connection((host, int(port)), ANSWER_S)
                self._links[node] = made, RemotingWire()
            link, wire = self._links[node]
            link.sendall(encode_frame(frame))
            while (left := limit - self.world.now) > 0:
                link.settimeout(left)
                data = link.recv(65_536)
                if not data:
                    raise NoAnswer(f"{node} has closed the connection")
                for each in wire.receive(data):
                    if each.is_answer and each.opaque == self._opaque and self.world.now < limit:
                        return each
                if wire.failure is not None:
                    self.history.violate(f"{self.name}: {node} sent {wire.failure}")
                    raise NoAnswer(str(wire.failure))
        except (OSError, ProtocolError) as failure:
            self._drop(node)
            raise NoAnswer(f"{node}: {failure}") from failure
        except NoAnswer:
            self._drop(node)
            raise
        self._drop(node)
        raise NoAnswer(f"{node} did not answer in {ANSWER_S:.0f} s")

    def _drop(self, node: str) -> None:
        link = self._links.pop(node, None)
        if link is not None:
            link[0].close()

    def find_master(self) -> str:
        """Return the master of the topic's route, asked of the nodes in any order."""
        known = [each.removeprefix("tcp://") for each in self.boot]
        for node in self.chance.sample(known, len(known)):
            try:
                answer = self.ask(node, Code.GET_ROUTEINFO_BY_TOPIC, {"topic": TOPIC})
            except NoAnswer:
                continue
            if answer.code == Answer.TOPIC_NOT_EXIST:  # Java's producer takes TBW102's route
                self._nodes, self._master = known, node
                continue
            if answer.code == Answer.SUCCESS:
                nodes = _nodes_of(answer.body)
                if "0" in nodes:
                    self._nodes, self._master = list(nodes.values()), nodes["0"]
                    return nodes["0"]
        if self._master is None:
            raise NoAnswer("no node has a route")
        return self._master


class RocketProducer(RocketHost):
    """Sends one message after the other, each up to ATTEMPTS times, as `send` in Java does."""

    sends = True
    rate_s = 0.3

    def be(self) -> None:
        number = 0
        while not self.stopping:
            self.pause(self.rate_s)
            number += 1
            body = Sent(self.name, self.run_number, number).body
            queue = self.chance.randrange(QUEUES)
            for _ in range(ATTEMPTS):
                self.book.attempts[body] += 1
                if self._send(body, queue, f"{self.run_name}.{number}"):
                    break

    def _send(self, body: bytes, queue: int, unique: str) -> bool:
        """Send once; return whether the call ends with that."""
        fields = {
            "a": "producers", "b": TOPIC, "c": "TBW102", "d": QUEUES, "e": queue, "f": 0,
            "g": int(self.world.now * 1e3), "h": 0, "j": 0, "k": "false", "m": "false",
            "i": f"UNIQ_KEY\x01{unique}\x02WAIT\x01true\x02",
        }  # fmt: skip
        try:
            answer = self.ask(self.find_master(), Code.SEND_MESSAGE_V2, fields, body)
        except NoAnswer:
            return False
        if answer.code != Answer.SUCCESS:
            return answer.code in _STORED
        told = answer.fields
        place = int(told["queueId"]), int(told["queueOffset"])
        offset = int(told["msgId"][-16:], 16)
        if place[1] < 0:
            self.history.violate(f"{self.name}: SEND_OK without a queue offset: {told}")
        self.book.acked[body] = (*place, offset)
        return True


class RocketMember(RocketHost):
    """A consumer that reads in order (MessageListenerOrderly in Java)."""

    def kill(self) -> None:
        self.book.end(self.run_name)
        super().kill()

    def be(self) -> None:
        self._mine: set[int] = set()
        self._until: dict[int, float] = {}  # the queues whose lock it believes in
        self._at: dict[int, int] = {}
        beaten = shared = -1e9
        while not self.stopping:
            try:
                if self.world.now - beaten > BEAT_S:
                    self.find_master()
                    self._beat()
                    beaten = self.world.now
                if self.world.now - shared > SHARE_S:
                    shared = self.world.now
                    self._share()
                for queue in sorted(self._mine):
                    self._read(queue)
            except NoAnswer:
                beaten = -1e9
                self.pause(0.5)
            self.pause(0.15)
        for queue in sorted(self._mine):
            self._give_up(queue)

    def _beat(self) -> None:
        """Tell all nodes who this is."""
        subscription = {
            "topic": TOPIC, "subString": "*", "subVersion": 1, "expressionType": "TAG",
            "classFilterMode": False, "codeSet": [], "tagsSet": [],
        }  # fmt: skip
        group = {
            "groupName": GROUP, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "unitMode": False,
            "subscriptionDataSet": [subscription],
        }  # fmt: skip
        beat = {"clientID": self.run_name, "producerDataSet": [], "consumerDataSet": [group]}
        for node in self._nodes:
            try:
                self.ask(node, Code.HEART_BEAT, {}, json.dumps(beat).encode())
            except NoAnswer:
                if node == self._master:
                    raise

    def _of_master(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Frame:
        if self._master is None:
            raise NoAnswer("no master is known")
        return self.ask(self._master, code, fields, body)

    def _share(self) -> None:
        """Take this member's share of the queues, and ask for their locks."""
        answer = self._of_master(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP})
        if answer.code != Answer.SUCCESS:
            return
        members = sorted(json.loads(answer.body)["consumerIdList"])
        mine = {
            queue for queue in range(QUEUES)
            if self.run_name in members and members[queue % len(members)] == self.run_name
        }  # fmt: skip
        for queue in self._mine - mine:
            self._give_up(queue)
        self._mine = mine
        if not mine:
            return
        answer = self._of_master(Code.LOCK_BATCH_MQ, {}, self._named(mine))
        if answer.code != Answer.SUCCESS:
            return
        granted = {one["queueId"] for one in json.loads(answer.body)["lockOKMQSet"]}
        for queue in mine - granted:
            self._lose(queue)
        for queue in mine & granted:
            for problem in self.book.believe(queue, self.run_name):
                if self.history.strict:
                    self.history.violate(problem)
            if self._until.get(queue, 0.0) < self.world.now:
                self._at.pop(queue, None)
            self._until[queue] = self.world.now + BELIEF_S

    def _named(self, queues: set[int]) -> bytes:
        wanted = [{"brokerName": "g", "queueId": queue, "topic": TOPIC} for queue in queues]
        asked = {"clientId": self.run_name, "consumerGroup": GROUP, "mqSet": wanted}
        return json.dumps(asked | {"onlyThisBroker": False}).encode()

    def _lose(self, queue: int) -> None:
        self._until.pop(queue, None)
        self._at.pop(queue, None)
        self.book.give_up(queue, self.run_name)

    def _give_up(self, queue: int) -> None:
        self._lose(queue)
        try:
            self._of_master(Code.UNLOCK_BATCH_MQ, {}, self._named({queue}))
        except NoAnswer:
            pass

    def _read(self, queue: int) -> None:
        """Pull, consume and commit, as long as the lock is believed in."""
        if self._until.get(queue, 0.0) <= self.world.now:
            return
        about = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue}
        if queue not in self._at:
            answer = self._of_master(Code.QUERY_CONSUMER_OFFSET, about)
            if answer.code not in (Answer.SUCCESS, Answer.QUERY_NOT_FOUND):
                raise NoAnswer(answer.remark or "")
            self._at[queue] = int(answer.fields.get("offset", 0))
        answer = self._of_master(Code.PULL_MESSAGE, about | {
            "queueOffset": self._at[queue], "maxMsgNums": 16, "sysFlag": _SUBSCRIBES,
            "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*", "subVersion": 1,
            "expressionType": "TAG",
        })  # fmt: skip
        if answer.code == Answer.PULL_OFFSET_MOVED:
            after = int(answer.fields["nextBeginOffset"])
            before = self._at[queue]
            self.book.moved.append(f"{self.name}: queue {queue}, {before} to {after}")
            self.book.skipped.update((queue, one) for one in range(before, after))
            self._at[queue] = after
        elif answer.code == Answer.SUCCESS:
            self._consume(queue, answer.body)
        else:
            return
        answer = self._of_master(
            Code.UPDATE_CONSUMER_OFFSET, about | {"commitOffset": self._at[queue]}
        )
        if answer.code == Answer.SUCCESS:
            known = self.book.committed
            known[queue] = max(known.get(queue, 0), self._at[queue])

    def _consume(self, queue: int, records: bytes) -> None:
        at = 0
        while at < len(records) and self._until[queue] > self.world.now:
            record = decode_record(records, at)
            at += record.size
            place = queue, record.queue_offset
            if self.book.got.setdefault(place, record.body) != record.body and self.history.strict:
                self.history.violate(f"{self.name} got {record.body[:40]!r} at {place}, too")
            self._at[queue] = record.queue_offset + 1
