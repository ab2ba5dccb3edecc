"""Members that share queues, over a node without sockets, in virtual time.

The members are the real cores of consumers; a node is the real door with its locks and lists. What
lies between is a network that delays each message and ends connections, and a clock that the world
moves. A member may sleep (its process is stopped), be killed, leave, or come. The master changes,
and the former one may not notice it, nor may members that reach no other node.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hastore.client.connections import requester as requester_module
from hastore.client.connections.requester import Requester, Steps
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.consumer_core import make_read_options
from hastore.client.consumer.shared_core import SharedCore, make_shared_reading
from hastore.client.consumer.sharing import Event
from hastore.client.consumer.subscription import TopicQueue
from hastore.client.messages import Message
from hastore.errors import HastoreError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import api
from hastore.server.api.queries import answer_at_once
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.own_members import OwnMembers
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.subscriptions import Subscriptions
from tests.api_fakes import FakeBackend
from tests.server.api.kit import record
from tests.server.remoting.desk import Desk, VirtualClock
from tests.server.remoting.test_queue_locks import _Frozen

STEP_MS = 50.0
TOPICS = ("t", "u")
QUEUES = 4


class Wire:
    """A member's connection, as the node sees it; messages take their time."""

    remoting = False

    def __init__(self, node: Node, transport: VirtualTransport, number: int) -> None:
        self.node = node
        self.transport = transport
        self.ended = False
        self.joined = False
        self.proof = None
        self.meter = None
        self.peer = f"127.0.0.1:{number}"
        self.address = ("127.0.0.1", number)
        self.to_node: deque[tuple[float, api.Request]] = deque()
        self.to_member: deque[tuple[float, api.Reply, bytes]] = deque()

    def send(self, reply: api.Reply, payload: bytes = b"") -> None:
        """Send the member a reply."""
        if not self.ended:
            self.to_member.append((self._due(self.to_member), reply, payload))

    def take(self, request: api.Request) -> None:
        """Send the node a request."""
        self.to_node.append((self._due(self.to_node), request))

    def _due(self, before: Any) -> float:
        """Return when a message arrives: in order, some of them late."""
        world = self.node.world
        due = world.clock.now_ms + world.rng.choice(world.delays_ms)
        return max(due, before[-1][0]) if before else due


class _Replies:
    def send(
        self, connection: Wire, reply: api.Reply, payload: bytes | None = None, *,
        is_answer: bool = True,
    ) -> None:  # fmt: skip
        connection.send(reply, payload or b"")

    def has_room(self, _: Any) -> bool:
        return True


class Node:
    """A node: what decides, without a server. All nodes of a world have one log."""

    def __init__(self, world: World, number: int, epoch: int) -> None:
        self.world = world
        self.address = f"tcp://127.0.0.{number}:1"
        self.backend = FakeBackend(number, epoch=epoch)
        self.backend.store = world.store
        self.backend.nodes = {number: self.address}
        self.desk = Desk(self.backend)
        self.desk.clock = world.clock
        self.desk.replies = _Replies()
        self.desk.door = type(self.desk.door)(self.desk._parts(), None)
        door = self.desk.door
        groups = GroupRequests(door)
        positions = GroupPositions(door)
        self.locks = LockRequests(door, positions)
        for handlers in (groups, positions, self.locks):
            door.join(handlers.handlers())
        topics = TopicView(self.backend, auto_create=True)
        retries = Retries(door, topics, Subscriptions(door, topics))
        OwnMembers(door, groups, self.locks, positions, topics, retries)
        self.wires: list[Wire] = []
        self.commits: list[tuple[Wire, api.Commit]] = []

    def run(self) -> None:
        """Take what has arrived, and do what is due."""
        for wire in list(self.wires):
            if wire.ended:
                self.wires.remove(wire)
                connection: Any = wire
                self.desk.door.forget_ended([connection])
                continue
            while wire.to_node and wire.to_node[0][0] <= self.world.clock.now_ms:
                self._handle(wire, wire.to_node.popleft()[1])
        self.desk.run()
        commits, self.commits = self.commits, []
        for wire, request in commits:
            if not self._commit(wire, request):
                self.commits.append((wire, request))
        self.desk.run()

    def _handle(self, wire: Wire, request: Any) -> None:
        connection: Any = wire
        if isinstance(request, api.Sharing) or isinstance(request, api.Commit):
            self.desk.door.receive_member(
                connection, request, self.world.clock.now_ms,
                lambda commit: self.commits.append((wire, commit)),
            )  # fmt: skip
        elif isinstance(request, api.Pull):
            store = self.backend.store
            found = store.pull(
                request.topic, request.queue_id, request.position.queue_offset,
                max_messages=request.max_messages, max_bytes=request.max_bytes,
                limit_offset=store.readable_offset,
            )  # fmt: skip
            status = api.PullStatus(found.status.value)
            wire.send(
                api.Pulled(request.rid, status, found.next_queue_offset, 0, found.max_queue_offset,
                           found.count, [(1, 0)], None, found.last_offset),
                found.records,
            )  # fmt: skip
        else:
            wire.send(answer_at_once(self.backend, request))

    def _commit(self, wire: Wire, request: api.Commit) -> bool:
        """Take a commit; False if it must wait."""
        if not self.desk.has_read():
            return False

        def fail(status: str, reason: str) -> None:
            wire.send(api.Failed(request.rid, status, reason))

        def done(outcome: api.PutDone) -> None:
            wire.send(api.PutDone(request.rid, *_rest(outcome)))

        return self.desk.commits.begin(request, self.world.clock.now_ms, done, fail)


def _rest(outcome: api.PutDone) -> list[Any]:
    return [getattr(outcome, name) for name in api.PutDone.__struct_fields__[1:]]


class VirtualTransport:
    """A member's connections to the nodes of the world."""

    source = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._wires: dict[str, Wire] = {}
        self._news: list[Arrival] = []
        self.blocked: dict[str, float] = {}  # until when an address is out of reach

    @property
    def addresses(self) -> list[str]:
        return list(self._wires)

    def is_up(self, address: str) -> bool:
        wire = self._wires.get(address)
        return wire is not None and not wire.ended

    def heard_ms(self, _address: str) -> float:
        return 0.0

    def silence(self, _address: str) -> None:
        return None

    def open(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            node = self._world.nodes.get(address)
            if self.blocked.get(address, 0.0) > self._world.clock.now_ms:
                continue
            if not self.is_up(address) and node is not None:
                wire = Wire(node, self, self._world.next_number())
                node.wires.append(wire)
                self._wires[address] = wire
                self._news.append(Arrival(address, None))

    def send(self, address: str, request: api.Request, payload: bytes | None = None) -> bool:
        if not self.is_up(address):
            return False
        self._wires[address].take(api.decode_request(api.encode(request)))
        return True

    def collect(self) -> list[Arrival]:
        news, self._news = self._news, []
        for address, wire in self._wires.items():
            while wire.to_member and wire.to_member[0][0] <= self._world.clock.now_ms:
                _, reply, payload = wire.to_member.popleft()
                reply = api.decode_reply(api.encode(reply))
                news.append(Arrival(address, reply, payload))
        return news

    def cut(self, address: str) -> None:
        """End a connection; what was under way on it is lost."""
        wire = self._wires.get(address)
        if wire is not None and not wire.ended:
            wire.ended = True
            wire.to_member.clear()
            self._news.append(Arrival(address, None, up=False))

    def reconnect(self) -> None:
        """Open again what was cut."""
        self.open(self._wires)

    def close(self, linger_s: float = 0.0) -> None:
        for wire in self._wires.values():
            wire.ended = True

    def wake(self) -> None:
        """Nobody sleeps."""

    def abandon(self) -> None:
        """There are no descriptors."""


class Member:
    """An actor: polls, takes its time for what it gets, commits by itself."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        addresses = tuple(world.nodes)
        requester = Requester(addresses, world.clock, None)
        self.transport: VirtualTransport = requester.transport  # type: ignore[assignment]
        options = make_read_options(
            start="earliest", on_lost="earliest", read_from="master", max_bytes=4_096,
            prefetch_bytes=65_536, timeout_s=3.0, clock=world.clock,
        )  # fmt: skip
        auto_commit_s = world.rng.choice((0.0, 0.5, 5.0))
        reading = make_shared_reading(list(TOPICS), "g", None, None, auto_commit_s, options)
        self.core = SharedCore(requester, world.clock, reading)
        self.sleeps_until_ms = 0.0
        self.leaves = False
        self.gone = False
        self._steps: Steps[Any] | None = None
        self._wake_ms = 0.0
        self._started = False

    def owns(self, now_ms: float) -> list[TopicQueue]:
        """Return the queues in which this member believes now."""
        if self.gone:
            return []
        return [name for name, one in self.core.fetcher.mine.items() if one.lease_ms > now_ms]

    def run(self) -> None:
        """Go on until it waits, if it is awake."""
        now = self.world.clock.now_ms
        if self.gone or now < self.sleeps_until_ms:
            return
        self.transport.reconnect()
        arrivals = self.core.requester.collect()
        if self._steps is not None and not arrivals and now < self._wake_ms:
            return
        for _ in range(20):
            if self._steps is None:
                self.core.begin_call()
                self._steps, self._started = self._next(), False
            try:
                wait_s = self._steps.send(arrivals) if self._started else next(self._steps)
                self._started, arrivals = True, []
                self._wake_ms = now + wait_s * 1000.0
                if wait_s > 0.0:
                    return
            except StopIteration as end:
                self._end_call(end.value)
            except HastoreError as failure:
                self.world.note(type(failure).__name__)
                self.core.end_call()
                self._steps = None
            if self.gone or now < self.sleeps_until_ms:
                return

    def _next(self) -> Steps[Any]:
        if self.leaves:
            return self.core.leave(all_done=True)
        return self.core.poll(self.core.polling(self.world.rng.randint(1, 50), 1.0), first=True)

    def _end_call(self, result: list[Message] | Event | None) -> None:
        self.core.end_call()
        self._steps = None
        if self.leaves and result is None:
            self.end()
        elif isinstance(result, list):
            self.core.fetcher.undo = None
            for message in result:
                self.world.deliver(self, message)
            if result and self.world.rng.random() < 0.3:
                self.sleeps_until_ms = self.world.clock.now_ms + self.world.rng.choice((100, 2_000))
        elif isinstance(result, Event):
            self.world.note(result.kind)
            self.core.told(result)

    def end(self) -> None:
        """End the process."""
        self.gone = True
        self.core.requester.close()


class World:
    """Nodes over one log, members, and what was delivered to whom."""

    def __init__(self, seed: int, monkeypatch: Any) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.store = FakeBackend().store
        self.delays_ms = [1, 5, 20, 100]
        self.nodes: dict[str, Node] = {}
        self.members: list[Member] = []
        self.counts: dict[str, int] = {}
        self.nexts: dict[tuple[str, int], int] = {}  # of each queue: what comes first next
        self.again = 0
        self.sent: dict[tuple[str, int], int] = {}
        self._numbers = 50_000
        self._epoch = 65_537
        for number in (1, 2, 3):
            node = Node(self, number, self._epoch)
            self.nodes[node.address] = node
        self._lead(next(iter(self.nodes.values())))
        random_bits = "hastore.client.consumer.shared_core.secrets.randbits"
        monkeypatch.setattr(random_bits, self.rng.getrandbits)  # the order of ids is the seed's
        monkeypatch.setattr(
            requester_module, "make_transport",
            lambda addresses, _clock, _security: (list(addresses), self._transport(addresses)),
        )  # fmt: skip

    def _transport(self, addresses: Iterable[str]) -> VirtualTransport:
        transport = VirtualTransport(self)
        transport.open(addresses)
        return transport

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def note(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def master(self) -> Node:
        """The master of the latest epoch: a former one may still believe that it is one."""
        writable = [node for node in self.nodes.values() if node.backend.writable]
        return max(writable, key=lambda node: node.backend.epoch())

    def flip(self, *, hangs: bool = False) -> None:
        """Let another node be the master; with `hangs` the old one does not notice yet."""
        old = self.master
        new = self.rng.choice([one for one in self.nodes.values() if one is not old])
        self._lead(new, old if hangs else None)
        self.note("hang" if hangs else "flip")
        if hangs:  # some members reach only the old master
            until_ms = self.clock.now_ms + self.rng.choice((3_000, 70_000))
            for member in self.alive:
                if self.rng.random() < 0.5:
                    for address in self.nodes.keys() - {old.address}:
                        member.transport.cut(address)
                        member.transport.blocked[address] = until_ms

    def _lead(self, new: Node, hanging: Node | None = None) -> None:
        self._epoch += 65_536
        for node in self.nodes.values():
            backend = node.backend
            if node is hanging:  # its log is its own from now on, and nobody confirms it
                backend.store = _Frozen(self.store)
                backend.transfer.hold = True
                continue
            backend.writable = node is new
            backend.store = self.store
            backend.transfer.hold = False
            backend.transfer.end_all(Outcome.TERM_CHANGED)
            backend.master = new.backend.node
            backend.nodes = {one.backend.node: one.address for one in self.nodes.values()}
            backend.entries = [*backend.entries, (self._epoch, self.store.max_offset)]

    def put(self, count: int) -> None:
        """Store messages."""
        for _ in range(count):
            topic, queue = self.rng.choice(TOPICS), self.rng.randrange(QUEUES)
            number = self.sent.get((topic, queue), 0)
            self.store.put_encoded([record(topic, b"%d" % number, queue)])
            self.sent[topic, queue] = number + 1

    def deliver(self, member: Member, message: Message) -> None:
        """Note a message that a member got: by its owner, and in order."""
        name = TopicQueue(message.topic, message.queue_id)
        assert name in member.owns(self.clock.now_ms), (member.name, name)
        expected = self.nexts.get(name, 0)
        assert message.queue_offset <= expected, f"{name}: {message.queue_offset}, not {expected}"
        if message.queue_offset == expected:
            self.nexts[name] = expected + 1
        else:
            self.again += 1

    def step(self, ms: float = STEP_MS) -> None:
        """Let time pass."""
        self.clock.now_ms += ms
        for node in self.nodes.values():
            node.run()
        for member in list(self.members):
            member.run()
        self.check_owners()

    def check_owners(self) -> None:
        """No two members believe in one queue; the node knows the owner, too."""
        owners: dict[TopicQueue, str] = {}
        for member in self.members:
            for name in member.owns(self.clock.now_ms):
                other = owners.setdefault(name, member.name)
                assert other == member.name, f"{other} and {member.name} have {name}"
        locks = self.master.locks.locks
        if locks.epoch == self.master.backend.epoch():
            for member in self.members:
                for name in member.owns(self.clock.now_ms):
                    holder = locks.holder("g", (name.topic, name.queue_id), self.clock.now_ms)
                    assert holder == member.core.sharing.member, (member.name, name, holder)

    def add(self) -> Member:
        """Let a member come."""
        member = Member(self, f"m{len(self.members)}")
        self.members.append(member)
        return member

    @property
    def alive(self) -> list[Member]:
        return [one for one in self.members if not one.gone]

    def until(self, what: Callable[[], bool], limit_ms: float = 400_000.0) -> None:
        """Let time pass until something is so."""
        until_ms = self.clock.now_ms + limit_ms
        while not what():
            assert self.clock.now_ms < until_ms, self.state()
            self.step()

    def state(self) -> str:
        """Return what the members have."""
        return str({one.name: sorted(one.core.fetcher.mine) for one in self.alive})
