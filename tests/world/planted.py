"""Mistakes to plant into the product, one at a time; the walks must catch each.

They are such as only whole nodes can have: in stores, queues, windows, clients, registry. Those in
the rules of replication are in tests/ha/planted.py and tests/dledger/planted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hastore.client.consumer.shared_core import SharedCore
from hastore.config.model import AckPoint, Flush, Mode, Role
from hastore.ha.rules.acks import AckTable
from hastore.protocol.api import Position
from hastore.protocol.remoting import Answer
from hastore.registry.node_registry import AssignedRole, NodeRegistry
from hastore.server.remoting import sends
from hastore.server.remoting.check_backs import CheckBacks
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.queue_locks import QueueLocks, Wish
from hastore.store import retention
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.derived.deliveries import Delivered, Deliveries
from hastore.store.log.flush import FlushService
from hastore.store.log.mapped_file_queue import MappedFile
from hastore.store.log_store import LogStore
from tests.world.events import KINDS, Event
from tests.world.machines import Shape
from tests.world.plans import Plan

Patch = tuple[Any, str, Any]
_ask = QueueLocks.ask


def syncs_nothing() -> list[Patch]:
    """The log's files are never synced."""
    return [(MappedFile, "sync", lambda self: None)]


def window_lost() -> list[Patch]:
    """A restart takes the snapshot of the deduplication window for read, and has nothing of it."""

    def load(self: DedupWindow, offset: int, synced: bool) -> int:
        del synced
        self._clear()
        self.end_offset = self._snapshot_end = offset
        return offset

    return [(DedupWindow, "load", load)]


def window_not_replayed() -> list[Patch]:
    """Replay leaves the deduplication window as it is, on slaves too."""

    def dispatch(self: DedupWindow, batch: Any) -> None:
        if batch:
            self.end_offset = max(self.end_offset, batch[-1].end_offset)

    return [(DedupWindow, "dispatch", dispatch)]


def offsets_from_zero() -> list[Patch]:
    """A restart forgets the next offset of each queue."""

    def load(self: QueueOffsetTable, offset: int, synced: bool) -> int:
        del synced
        self.reset()
        self.end_offset = offset
        return offset

    return [(QueueOffsetTable, "load", load)]


def readable_at_once() -> list[Patch]:
    """Readers get what is not confirmed."""
    set_limits = LogStore.set_limits

    def careless(self: LogStore, *, readable: int | None = None, **more: Any) -> None:
        if readable is not None:
            readable = max(readable, self.max_offset)
        set_limits(self, readable=readable, **more)

    return [(LogStore, "set_limits", careless)]


def confirmed_alone() -> list[Patch]:
    """The master confirms what only it has stored."""

    def confirm(self: AckTable, own_offset: int) -> int:
        self.confirmed_offset = max(self.confirmed_offset, own_offset)
        return self.confirmed_offset

    return [(AckTable, "confirm", confirm)]


def commits_ahead() -> list[Patch]:
    """A consumer commits a position behind messages that nobody has got."""
    commit = SharedCore._commit

    def ahead(self: SharedCore, places: Any, deadline: Any) -> Any:
        places = {name: Position(one.queue_offset + 3) for name, one in places.items()}
        return commit(self, places, deadline)

    return [(SharedCore, "_commit", ahead)]


def retention_takes_more() -> list[Patch]:
    """Retention removes what no limit says."""
    return [(retention, "expired_files", lambda log, *_: max(0, len(log.queue.files) - 2))]


def flushed_too_early() -> list[Patch]:
    """What is written counts as synced."""

    def flush(self: FlushService) -> int:
        target = self._log.max_offset
        self.flushed_offset = target
        self._on_flushed(target)
        return target

    return [(FlushService, "flush", flush)]


def restored_role_followed() -> list[Patch]:
    """A role counts that was read before another one: ZooKeeper was restored."""
    return [(NodeRegistry, "_is_outdated", lambda *_: False)]


def missing_role_is_slave() -> list[Patch]:
    """A node whose znode has gone writes it with the role of a slave, and follows it."""
    write_anew = NodeRegistry._write_anew

    def careless(self: NodeRegistry, session: Any, found: Any, why: str) -> None:
        if self._memory.data.role is not None:  # not the first start
            self.wanted = AssignedRole(Role.SLAVE)
            self.on_change()
        write_anew(self, session, found, why)

    return [(NodeRegistry, "_write_anew", careless)]


def deliveries_not_noted() -> list[Patch]:
    """Replay does not note which delayed messages were delivered."""

    def dispatch(self: Deliveries, batch: Any) -> None:
        if batch:
            self.state = Delivered(max(self.state.end, batch[-1].end_offset), self.state.places)

    return [(Deliveries, "dispatch", dispatch)]


def check_not_asked() -> list[Patch]:
    """Nobody is asked about a transaction that nobody has ended."""
    return [(CheckBacks, "_see", lambda *_: None)]


def locks_forgotten() -> list[Patch]:
    """A new master knows no lock of a queue that was given before."""
    read = LockRequests._read_records

    def careless(self: LockRequests, epoch: int, since_ms: float) -> None:
        self._table.locks.clear()
        read(self, epoch, since_ms)

    return [(LockRequests, "_read_records", careless)]


def timeouts_are_ok() -> list[Patch]:
    """RocketMQ's clients are told SEND_OK for what is stored, and not confirmed."""
    return [(sends, "_STORED", dict.fromkeys(sends._STORED, Answer.SUCCESS))]


def locks_for_all() -> list[Patch]:
    """Who asks for a queue's lock gets it."""

    def ask(self: QueueLocks, group: str, client: str, *rest: Any, **more: Any) -> Wish:
        for lock in self._locks.get(group, {}).values():
            lock.holder = client
        return _ask(self, group, client, *rest, **more)

    return [(QueueLocks, "ask", ask)]


Told = tuple[tuple[float, str, int, int, float], ...]  # when, kind, node, other node, for how long
_KILLS: Told = (
    (3.0, "delay", 0, 1, 12.0), *((at, "kill", 0, 1, 0.0) for at in (4.0, 6.5, 9.0, 11.5, 14.0)),
)  # fmt: skip
_FLIPS: Told = (
    (3.0, "delay", 0, 1, 12.0), (5.0, "kill", 0, 1, 0.0), (5.1, "promote", 1, 0, 0.0),
    (9.0, "kill", 1, 0, 0.0), (9.1, "promote", 0, 1, 0.0),
    (13.0, "kill", 0, 1, 0.0), (13.1, "promote", 1, 0, 0.0),
)  # fmt: skip
_ALL_KILLED: Told = (
    *((at, "delay", int(at) % 3, 1, 6.0) for at in (2.0, 3.0, 4.0)),
    *((at, "kill all", 0, 1, 0.0) for at in (4.0, 7.0, 10.0, 13.0)),
)
_CUT: Told = ((5.0, "partition", 0, 1, 8.0), (8.0, "promote", 1, 0, 0.0))
_POWER: Told = ((5.0, "power of all", 0, 1, 0.0), (10.0, "power of all", 0, 1, 0.0))
_CLIENTS: Told = ((5.0, "kill client", 0, 1, 1.0), (10.0, "kill client", 0, 1, 1.0))
_RESTORED: Told = (
    (3.0, "zookeeper restored", 0, 1, 6.0), (4.0, "promote", 1, 0, 0.0), (5.0, "demote", 0, 1, 0.0),
)  # fmt: skip
_KILLED_LATE: Told = tuple((at, "kill all", 0, 1, 0.0) for at in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0))
_EMPTIED: Told = ((5.0, "zookeeper emptied", 0, 1, 0.0),)

# name: (mode, what makes it, the walk that catches it). In mode classic node 0 begins as master.
BUGS: dict[str, tuple[Mode, Callable[[], list[Patch]], Told]] = {
    "syncs nothing": (Mode.CLASSIC, syncs_nothing, _POWER),
    "syncs nothing in mode dledger": (Mode.DLEDGER, syncs_nothing, _POWER),
    "flushed too early": (Mode.CLASSIC, flushed_too_early, _POWER),
    "window lost": (Mode.CLASSIC, window_lost, _KILLS),
    "window lost in mode dledger": (Mode.DLEDGER, window_lost, _ALL_KILLED),
    "window not replayed": (Mode.CLASSIC, window_not_replayed, _FLIPS),
    "offsets from zero": (Mode.CLASSIC, offsets_from_zero, _KILLS),
    "readable at once": (Mode.CLASSIC, readable_at_once, _CUT),
    "confirmed alone": (Mode.CLASSIC, confirmed_alone, _CUT),
    "commits ahead": (Mode.CLASSIC, commits_ahead, _CLIENTS),
    "restored role followed": (Mode.CLASSIC, restored_role_followed, _RESTORED),
    "missing role is slave": (Mode.CLASSIC, missing_role_is_slave, _EMPTIED),
    "deliveries not noted": (Mode.CLASSIC, deliveries_not_noted, _FLIPS),
    "locks forgotten": (Mode.CLASSIC, locks_forgotten, _KILLED_LATE),
    "check not asked": (Mode.DLEDGER, check_not_asked, _ALL_KILLED),
    "timeouts are ok": (Mode.CLASSIC, timeouts_are_ok, _CUT),
    "locks for all": (Mode.DLEDGER, locks_for_all, _CLIENTS),
    "retention takes more": (Mode.DLEDGER, retention_takes_more, _CLIENTS),
}
_LATER = {"deliveries not noted", "check not asked"}  # seen in delayed messages and transactions
_ROCKETMQ = {"timeouts are ok", "locks for all"}  # seen by RocketMQ's clients
# Of the first walk; of all others it is 0.
_SEEDS = {"window not replayed": 1, "syncs nothing": 1}
# A change of the product changes the walks: about one in ten then meets its mistake no more.
TRIES = 3


def plan_for(name: str, seed: int | None = None) -> Plan:
    """Return the walk that catches a mistake, or one that may."""
    seed = _SEEDS.get(name, 0) if seed is None else seed
    mode, _, told = BUGS[name]
    durable = told is _POWER
    shape = Shape(
        mode, nodes=2 if mode is Mode.CLASSIC else 3,
        ack_point=AckPoint.FLUSHED if durable else AckPoint.WRITTEN,
        flush=Flush.SYNC if durable or mode is Mode.DLEDGER else Flush.ASYNC,
        registry=any(KINDS[kind].registry for _, kind, *_ in told),
    )  # fmt: skip
    events = tuple(Event(*event, part=0.5) for event in told)
    return Plan(
        seed * shape.nodes, shape, ("tame",), 0.0, events,
        later=name in _LATER, rocketmq=name in _ROCKETMQ,
    )  # fmt: skip


def walks_for(name: str) -> list[Plan]:
    """Return walks of which one at least must catch a mistake."""
    first = _SEEDS.get(name, 0)
    return [plan_for(name, seed) for seed in range(first, first + TRIES)]


def plant(name: str) -> None:
    """Plant a mistake, for good: in a process that ends with its walk."""
    for place, attribute, value in BUGS[name][1]():
        setattr(place, attribute, value)
