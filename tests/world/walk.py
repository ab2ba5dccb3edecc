"""A walk: a group of whole nodes and its clients, events, then healing, and the checks.

`Plan` is all that a walk is; a seed draws one, and a plan repeats its walk bit for bit. After the
events everything is healed. Then the group must serve again, all logs must be equal, and the
history must be what was promised.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import Counter, deque
from typing import Any

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.config.model import Mode, Role
from hastore.errors import HastoreError
from tests.world import members
from tests.world import network as networks
from tests.world import scheduler as schedulers
from tests.world.clients import (
    GROUP,
    ClientHost,
    MemberHost,
    ProducerHost,
    RangeHost,
    ReaderHost,
)
from tests.world.events import KINDS, Event
from tests.world.history import (
    TOPIC,
    History,
    Log,
    Sent,
    Violation,
    check_logs,
    differences,
    named,
)
from tests.world.judged import Notes, judge
from tests.world.later import Database, LaterHost, wrong
from tests.world.machine_faults import FaultyMachine
from tests.world.machines import addresses, make_config
from tests.world.plans import EVENTS_S, Outcome, Plan
from tests.world.rocketmq import Book, RocketHost, RocketMember, RocketProducer
from tests.world.zookeeper import ZooKeeper

CHECKER = "the history checker"
HEAL_S = 240.0  # of virtual time, for the group to serve again


class Walk:
    """The world of one walk."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan = plan
        self.world = schedulers.Scheduler(plan.seed)
        schedulers.activate(self.world)
        self.network = networks.Network(self.world, plan.seed)
        networks.activate(self.network)
        if trace:
            self.world.trace = []
        self.history = History()
        self.judged: dict[str, int] = {}  # what the history checker has counted
        self.notes = Notes(plan.shape.mode, plan.shape.nodes)
        self.fired: Counter[str] = Counter()
        self.swaps: set[Event] = set()  # under which machines have each other's disk
        self.healing = False
        self.done = False
        shape, places = plan.shape, addresses(plan.shape.nodes)
        first = 1 + plan.seed % shape.nodes
        self.machines = []
        self.left: set[int] = set()  # the numbers of removed nodes, which never come back
        for n in addresses(shape.nodes + 1):
            role = None
            if shape.mode is Mode.CLASSIC:
                role = Role.SYNC_MASTER if n == first else Role.SLAVE
            self.machines.append(FaultyMachine(
                self.world, self.network, n,
                make_config(shape, n, role, places if n in places else addresses(n)), plan.seed,
            ))  # fmt: skip
        self.machines[-1].aside = True  # until it is added
        self.boot = [place.api for place in places.values()]
        self.clients = self._make_clients()
        self.later = self._make_later() if plan.later else None
        self.rocketmq = self._make_rocketmq() if plan.rocketmq else None
        self.operator = schedulers.Host(self.world, "operator", "127.0.2.1")
        self.network.join(self.operator)
        self.zookeeper: ZooKeeper | None = None
        if shape.registry:
            self.zookeeper = ZooKeeper(self.world, self.network)
            for machine in self.machines:
                machine.operator = self.operator

    def _make_clients(self) -> list[ClientHost]:
        makes: list[tuple[type[ClientHost], str, list[str]]] = [
            (ProducerHost, "p1", self.boot), (ProducerHost, "p2", self.boot),
            (MemberHost, "m1", self.boot), (MemberHost, "m2", self.boot),
            (RangeHost, "spark", self.boot),
            *((ReaderHost, f"r{n}", [api]) for n, api in enumerate(self.boot, 1)),
        ]  # fmt: skip
        return [
            make(self.world, self.network, name, f"127.0.1.{i}", self.history, self.notes, boot,
                 self.plan.seed)
            for i, (make, name, boot) in enumerate(makes, 1)
        ]

    def _make_later(self) -> LaterHost:
        made = LaterHost(
            self.world, self.network, "later", "127.0.1.99", self.history, self.notes, self.boot,
            self.plan.seed,
        )  # fmt: skip
        made.database = Database()
        self.clients.append(made)
        return made

    def _make_rocketmq(self) -> Book:
        book = Book()
        makes: list[tuple[type[RocketHost], str]] = [
            (RocketProducer, "jp"), (RocketMember, "j1"), (RocketMember, "j2")
        ]  # fmt: skip
        for i, (make, name) in enumerate(makes, 100):
            made = make(
                self.world, self.network, name, f"127.0.1.{i}", self.history, self.notes,
                self.boot, self.plan.seed,
            )  # fmt: skip
            made.book = book
            self.clients.append(made)
        return book

    def machine(self, index: int) -> FaultyMachine:
        return self.machines[index]

    def client(self, part: float) -> ClientHost:
        return self.clients[int(part * len(self.clients))]

    def start_client(self, client: ClientHost) -> None:
        if client.finished and not client.stopping:
            client.start()

    # -- the walk

    def run(self) -> list[str]:
        """Run the walk to its end; return what is wrong."""
        world = self.world
        world.preempts = self.plan.preempts
        if self.zookeeper is not None:
            self.zookeeper.start()
        for machine in self.machines:
            if not machine.aside:
                machine.start()
        for client in self.clients:
            client.start()
        world.after(1.0, self._supervise)
        for event in self.plan.events:
            world.after(event.at_s, self._begin, event)
        world.run(lambda: False, 2.0 + EVENTS_S)
        self._heal()
        world.spawn(self.operator, "operator", self._operate)
        if not world.run(lambda: self.done, HEAL_S):
            self.history.violate("the group does not serve again: " + self._states())
        return list(dict.fromkeys(self.history.problems)) + self.world.failures

    def _begin(self, event: Event) -> None:
        if self.healing:  # it comes in that very moment, and would not end
            return
        kind = KINDS[event.kind]
        if kind.group == "beyond" or (
            kind.group == "loss" and not set(self.plan.groups) & {"loss", "beyond"}
            and not self.plan.durable
        ):  # fmt: skip
            self.history.excuse()
        self.fired[event.kind] += 1
        kind.begin(self, event)
        if kind.end is not None:
            self.world.after(event.lasts_s, self._end, event)

    def _end(self, event: Event) -> None:
        end = KINDS[event.kind].end
        if end is not None and (not self.healing or event.kind == "swap disks"):
            end(self, event)

    def _supervise(self) -> None:
        """Start the nodes that have ended, as systemd does; restart those that ask for it."""
        for machine in self.machines:
            if machine.needs_restart and self.world.chance.random() < 0.3:
                machine.stop()
            if machine.problem is not None:
                self.history.refused_s = self.world.now
            if not machine.running and not machine.aside:
                machine.start()
        self.world.after(1.0, self._supervise)

    def _heal(self) -> None:
        self.healing = True
        network = self.network
        network.cut.clear()
        network.loss.clear()
        network.slow_s.clear()
        if self.zookeeper is not None:
            self.zookeeper.start()
        for host in (*self.machines, *self.clients):
            self.world.resume(host)
        for machine in self.machines:
            machine.disk.slow_s, machine.disk.full = 0.0, False
            machine.disk.failing.clear()
            machine.move_back()
            machine.retain(None)
        for client in self.clients:
            self.start_client(client)

    def _states(self) -> str:
        found = []
        for machine in self._group():
            node = machine.node
            why = machine.problem if node is None else node.backend.not_ready()
            found.append(f"{machine.name}: {why}")
        return "; ".join(found)

    def _contradict(self) -> bool:
        """Whether a node says that others have lost what it has: no node mends that by itself."""
        return any(
            "acknowledged messages may be lost" in problem
            for machine in self._group() if machine.node is not None
            for problem in machine.node.backend.status()["problems"]
        )  # fmt: skip

    def _is_refused(self) -> bool:
        """Whether a node says why it does not come back: its store is another one, say."""
        return any(
            machine.problem is not None
            or (machine.node is not None and machine.node.backend.not_ready() is not None)
            for machine in self._group()
        )

    # -- the end

    def _operate(self) -> None:
        """Bring the group back, stop the clients, and check."""
        if self.zookeeper is not None and self._has_new_orders():
            self.world.sleep(3.0)  # a node may learn of it only now
        begun, turn = self.world.now, 0
        while not self._serves():
            if self.plan.shape.mode is Mode.CLASSIC and self.world.now - begun > 20.0 * turn:
                self._promote_one(turn)
                turn += 1
                if turn == 3:
                    self._bring_back()
                self._repair_logs()
            if self._may_give_up(begun):
                self.done = True
                return
            self.world.sleep(1.0)
        if self.later is not None:
            self.later.quiet = True
            # What retention has removed never comes again, and is not asked for in the end.
            limit_s = 20.0 if self.fired["retention"] else 120.0
            self._wait(lambda: not self._due_later(), limit_s, 1.0)
        for client in self.clients:
            if client.sends:
                client.stopping = True
        self._wait(lambda: all(client.finished for client in self.clients if client.sends))
        self._wait(self._logs_equal)
        # The lock of a killed member lives for a minute.
        self._wait(lambda: not self._unread(), 150.0)
        for client in self.clients:
            client.stopping = True
        self._wait(lambda: all(client.finished for client in self.clients), 40.0)
        self._check_positions()
        if self.fired["rot in the log"]:
            self._wait(self._mended, 90.0)  # the scrubber begins a minute after the last start
        self._check()
        self.done = True

    def _has_new_orders(self) -> bool:
        """Whether a command has changed the role of a node a short while ago."""
        then = max(self.world.now - 20.0, 1.0)  # not the roles with which the nodes began
        return any(
            order.begun_s > then
            for machine in self.machines for order in machine.orders.given
        )  # fmt: skip

    def _wait(self, is_true: Any, limit_s: float = 60.0, each_s: float = 0.2) -> bool:
        end = self.world.now + limit_s
        while not is_true():
            if self.world.now > end:
                return False
            self.world.sleep(each_s)
        return True

    def _due_later(self) -> list[bytes]:
        """Return what must still be delivered to the topic of delayed messages."""
        assert self.later is not None
        if not self.later.idle:
            return [b"what is under way"]
        if not self.history.strict:
            return []
        for name, store in self._stores().items():
            with contextlib.suppress(Violation):  # it is damaged, and is being mended
                return self.later.database.due(Log.of(name, store))
        return [b"what cannot be read"]

    def _bring_back(self) -> None:
        """Start removed nodes, and name them in all files: the list in force may have them."""
        known = addresses(len(self.machines))
        back = [one for one in self.machines if not one.aside or one.number in self.left]
        for machine in back:
            machine.set_config(nodes={one.number: known[one.number] for one in back})
            if machine.aside:
                machine.demote()
                machine.start()

    def _repair_logs(self) -> None:
        """Do what nodes say that do not start, as bytes of their logs are damaged."""
        for machine in self.machines:
            if not machine.aside and "hastore log repair" in (machine.problem or ""):
                machine.repair_log()

    def _may_give_up(self, begun: float) -> bool:
        """Whether nodes that say why they do not start end the walk: beyond what is promised."""
        broken = [m for m in self.machines if m.problem is not None]
        loses = set(self.plan.groups) & {"loss", "beyond"}
        return bool(loses) and (bool(broken) or not self.history.strict) and (
            self.world.now - begun > 50.0
        )

    def _promote_one(self, turn: int) -> None:
        group = self._group()
        chosen = group[(self.plan.seed + turn) % len(group)]
        for machine in group:
            if machine is not chosen:
                machine.demote()
        forced = turn > 3 and self._too_few_are_clean()
        if forced and not self.plan.durable:
            self.history.excuse()  # they had it in memory, and each may have lost that
        chosen.promote(force_unclean=forced)

    def _too_few_are_clean(self) -> bool:
        """Whether nodes are unclean that say so after a fault that they cannot know to be harmless.

        Then the runbook ends with `hastore promote --force-unclean`.
        """
        causes = {"power", "power of the disk", "power of all", "write error", "sync error"}
        unclean = [m for m in self._group() if m.node is not None and m.node.state.data.unclean]
        return len(unclean) > 1 and any(self.fired[kind] for kind in causes)

    def _group(self) -> list[FaultyMachine]:
        """Return the machines of the group, of which nobody knows for a moment: all that run."""
        found = members.group_of(self)
        return [one for one in self.machines if not one.aside] if found is None else found

    def _stores(self) -> dict[str, Any]:
        return {
            machine.name: machine.node.backend.store
            for machine in self._group() if machine.node is not None
        }  # fmt: skip

    def _serves(self) -> bool:
        """Whether one node takes puts, and a new put is acknowledged."""
        group = self._group()
        nodes = [machine.node for machine in group if machine.node is not None]
        if len(nodes) < len(group) or any(n.failure is not None for n in nodes):
            return False
        if sum(node.backend.writable_reason() is None for node in nodes) != 1:
            return False
        body = f"operator/{self.world.switches}/1/".encode().ljust(40, b".")
        self.history.note_sent(body)
        name = f"operator.{self.world.switches}"
        producer = self.notes.producer(Producer(self.boot, delivery_timeout_s=4.0), name)
        try:
            self.history.note_acked(body, producer.send_sync(TOPIC, body, queue=0))
        except HastoreError:
            return False
        finally:
            producer.close(1.0)
        return True

    def _logs_equal(self) -> bool:
        stores = self._stores().values()
        ends = {store.max_offset for store in stores}
        return len(ends) == 1 and all(
            store.dispatched_offset == store.max_offset == store.confirmed_offset
            for store in stores
        )

    def _mended(self) -> bool:
        """Whether damaged bytes were replaced by another node's."""
        return not differences([Log.of(name, one) for name, one in self._stores().items()])

    def _unread(self) -> list[Sent]:
        """Return what is acknowledged and still there, but no member of its group has got."""
        start = max((store.min_offset for store in self._stores().values()), default=0)
        got = self.history.delivered
        found = [
            named(body) for body, result in self.history.acked.items()
            if result.queue_offset is not None and (result.offset or 0) >= start
            and (result.queue_id, result.queue_offset) not in got
        ]  # fmt: skip
        if self.rocketmq is not None:
            found += map(named, self.rocketmq.unread(start))
        return found

    def _check_positions(self) -> None:
        """Check that no position that the group has committed has gone back."""
        consumer: Any = self.notes.consumer(Consumer(TOPIC, self.boot, group=GROUP), "operator")
        try:
            found = {queue: place.queue_offset for queue, place in consumer.committed().items()}
        except HastoreError:
            return
        finally:
            consumer.close()
        for queue, position in self.history.committed.items():
            if self.history.strict and found.get(queue, 0) < position:
                self.history.violate(
                    f"the group's position of queue {queue} is {found.get(queue)}, was {position}"
                )

    def _check(self) -> None:
        if not self._wait(self._logs_equal):  # what the clients' ends have appended, too
            ends = {n: (s.max_offset, s.confirmed_offset) for n, s in self._stores().items()}
            if not self.history.strict and (
                len(set(ends.values())) == 1 or self._contradict() or self._is_refused()
            ):
                return  # replay has met damage that a master had, too; or nodes say what is wrong
            self.history.violate(f"the logs do not become equal: {ends}; {self._states()}")
            return
        if self.history.strict and self._contradict():
            self.history.violate(f"a node says that messages may be lost: {self._states()}")
        if not self.history.strict:  # rot in a header is not found: RocketMQ's CRC is of the body
            return
        logs = [Log.of(name, store) for name, store in self._stores().items()]
        if self.fired["rot in the log"]:  # what the one that begins last lacks may be rotten
            logs.sort(key=lambda one: -one.start)
        retention = self.fired["retention"] > 0
        if self.later is not None:
            with contextlib.suppress(Violation):  # `check_logs` says what
                self.history.problems += wrong(
                    self.later.database, logs[0], strict=self.history.strict, retention=retention
                )
        if self.rocketmq is not None:
            with contextlib.suppress(Violation):
                self.history.problems += self.rocketmq.wrong(logs[0], retention=retention)
        try:
            check_logs(self.history, logs, retention=retention)
            report = judge(self.notes, logs[0])
            self.history.problems += [f"{CHECKER}: {one}" for one in report.findings]
            self.judged = report.counts
        except Violation as torn:
            self.history.violate(str(torn))
        if unread := self._unread():
            self.history.violate(f"the group's members did not get {unread[:5]}")
        if self.history.lost_positions and not retention:
            self.history.violate(f"a position was lost: {self.history.lost_positions[0]}")


class Lines(logging.Handler):
    """Keep the last lines that the nodes log, with virtual time; `defects` are program errors."""

    def __init__(self, world: schedulers.Scheduler, most: int) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=most)
        self.defects: list[str] = []
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        failure = record.exc_info[1] if record.exc_info else None
        if failure is None and not self.lines.maxlen:
            return
        text = record.getMessage()
        if failure is not None:
            text += f" [{failure!r}]"
            if not isinstance(failure, HastoreError | OSError):
                trace = "".join(traceback.format_exception(failure)[-3:])
                self.defects.append(f"{self._world.host.name} logs {text}: {trace}")
        host = self._world.host.name
        self.lines.append(f"{self._world.now:8.3f} {host} {record.levelname} {text}")


def run_plan(plan: Plan, *, lines: int = 0, trace: bool = False) -> Outcome:
    """Run a walk in this process, whose modules have been replaced (install.py)."""
    walk = Walk(plan, trace=trace)
    handler = Lines(walk.world, lines)
    logger = logging.getLogger("hastore")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel("INFO")  # always: what a node does for a line takes time
    problems = walk.run() + handler.defects
    world = walk.world
    return Outcome(
        plan, problems, world.digest, world.now, world.switches, walk.fired,
        len(walk.history.acked), walk.history.reads, walk.judged,
        {} if walk.rocketmq is None else walk.rocketmq.counts(),
        [*handler.lines, *(world.trace or [])],
    )  # fmt: skip
