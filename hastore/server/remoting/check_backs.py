"""Check-backs: the master asks producers how their open transactions end, and sets old ones aside.

    39    CHECK_TRANSACTION_STATE: the node sends a half message to a producer of its group, which
          answers with an END_TRANSACTION (transactions.py)

A producer of hastore's is asked by the answer to its own request (check_polls.py). Of those of both
kinds that can be asked one is, at random.

A transaction is first asked for `remoting.transaction_timeout` after its half message was stored,
or as many seconds as the message's CHECK_IMMUNITY_TIME_IN_SECONDS says, then each
`remoting.transaction_check_interval`. A check counts, whether or not a producer of the group is
connected, as in RocketMQ; but on a node that does not serve RocketMQ's clients, only if one was
asked. After `remoting.transaction_check_max` of them the message goes to the
topic TRANS_CHECK_MAX_TIME_TOPIC; but not before the last of so many would be due.

How often a transaction was asked for is a record of the log (record/transactions.py), so a new
master goes on counting. It asks at once for what is older than the timeout.

The same timer lists committed half messages as ended, for RocketMQ: those that replay has found
committed, but not listed (`OpenTransactions.unsaid`).

Everything runs in the API's thread, with the API's lock.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from hastore.bounded_log import BoundedLines
from hastore.config.model import RemotingConfig
from hastore.errors import CorruptRecordError, MessageIllegalError, NotCachedError
from hastore.protocol.api import Put, PutDone, Status
from hastore.protocol.remoting import Code
from hastore.record.codec import Record
from hastore.record.delays import real_place
from hastore.record.properties import find_property
from hastore.record.transactions import (
    CHECKS_MAX,
    HALF_TOPIC,
    Ended,
    Half,
    as_asked,
    build_checks,
    build_ended,
    check_half,
    group_of,
    set_aside,
)
from hastore.server.api.connections import Connection
from hastore.server.remoting.check_polls import CheckPolls
from hastore.server.remoting.door import Door
from hastore.server.remoting.groups import Member
from hastore.server.remoting.transactions import Decisions
from hastore.store.append.results import DeliveriesIf, OwnIf

log = logging.getLogger(__name__)

TICK_MS = 1_000.0
AT_ONCE = 128  # transactions that one look asks for; the next look comes soon
AT_ONCE_BYTES = 4 << 20  # of their messages
SOON_MS = 20.0
READS_MAX = 64  # half messages that other threads read
UNSAID_AT_ONCE = 512
UNSAID_WAITING = 4_096  # half messages whose list is being appended


class Producers(Protocol):
    """Knows the members of producer groups: Membership."""

    def producers(self, group: str) -> Sequence[Member[Connection]]:
        """Return a producer group's members."""
        ...


class CheckBacks:
    """Asks for open transactions while this node is master."""

    def __init__(
        self,
        door: Door,
        decisions: Decisions,
        producers: Producers,
        config: RemotingConfig,
        group: str,
    ) -> None:
        """Prepare, and begin to look; `group` is the name of the node's group, the broker's."""
        self._door = door
        self._parts = door.parts
        self._clock = door.parts.clock
        self._decisions = decisions
        self._producers = producers
        self._timeout_ms = float(config.transaction_timeout_ms)
        self._interval_ms = float(config.transaction_check_interval_ms)
        self._checks_max = config.transaction_check_max
        self._group = group
        self.polls = CheckPolls(door)
        self._asked: list[tuple[int, int]] = []  # checks to count, of a node that only Python uses
        self._epoch = 0  # in which the rest is valid
        self._due: list[tuple[float, int]] = []  # a heap: monotonic ms, offset of the half message
        self._aside_ms: dict[int, float] = {}  # when those in the heap may be set aside
        self._counts: dict[int, int] = {}  # checks of those in the heap that this master has made
        self._newest = -1  # the offset of the last half message in the heap
        self._reads = 0
        self._saying: set[int] = set()  # queue offsets whose list is being appended
        self._put = Put(0, None, timeout_ms=config.hold_timeout_ms)
        self._warn = BoundedLines(log).write
        self.asked = 0  # since the node's start
        self.set_aside = 0
        door.at(self._clock.monotonic_ms() + TICK_MS, self._tick)

    def _tick(self) -> None:
        wait_ms = TICK_MS
        try:
            self.polls.look()
            if self._is_master():
                self._say_ended()  # whoever ends transactions, and whoever may be asked
                if self._door.is_open or len(self.polls):
                    wait_ms = self._look()
        finally:
            self._door.at(self._clock.monotonic_ms() + wait_ms, self._tick)

    def _is_master(self) -> bool:
        """Whether this node may append, and knows which transactions are open."""
        backend = self._parts.backend
        if not self._decisions.is_ready():
            self._epoch = 0
            return False
        if self._epoch != self._decisions.epoch:
            self._epoch, self._newest = self._decisions.epoch, -1
            self._due.clear()
            self._counts.clear()
            self._aside_ms.clear()
            self._saying.clear()
        return not backend.default_acks_all() or backend.can_confirm(False) is None

    def _look(self) -> float:
        """Ask for what is due; return the time until the next look."""
        now_ms = self._clock.monotonic_ms()
        self._see(now_ms)
        counts, self._asked = self._asked, []
        size, due = 0, self._due
        while due and due[0][0] <= now_ms:
            if len(counts) >= AT_ONCE or size >= AT_ONCE_BYTES or self._reads >= READS_MAX:
                self._count(counts)
                return SOON_MS
            _, offset = heapq.heappop(due)
            replayed = self._parts.backend.store.dispatched_offset
            half = self._parts.backend.store.transactions.find(offset)
            if half is None or half.offset != offset:
                self._counts.pop(offset, None)
                self._aside_ms.pop(offset, None)
                continue
            heapq.heappush(due, (now_ms + self._interval_ms, offset))
            if self._decisions.find(half, replayed) is not None:
                continue
            checks = max(half.checks, self._counts.get(offset, 0))
            if checks < self._checks_max or now_ms < self._aside_ms[offset]:
                checks += 1
                if self._door.is_open:
                    self._counts[offset] = checks
                    counts.append((offset, checks))
                size += self._read(half, partial(self._ask, half, checks))
            else:
                size += self._read(half, partial(self._set_aside, half, checks))
        self._count(counts)
        return TICK_MS

    def _see(self, now_ms: float) -> None:
        """Take the open transactions that are new."""
        wall_ms, newest = self._clock.wall_ms(), self._newest
        checks_ms = max(self._checks_max - 1, 0) * self._interval_ms
        for half in reversed(self._parts.backend.store.transactions.halves()):
            if half.offset <= newest:
                break
            wait_ms = self._timeout_ms if half.immunity_s is None else half.immunity_s * 1_000.0
            # At the latest when it has passed since this master has seen it, whatever clocks say.
            left_ms = half.stored_ms + wait_ms - wall_ms
            due_ms = now_ms + min(max(left_ms, 0.0), wait_ms)
            # Each new master asks at once: many of them one after the other use up no time.
            aside_ms = now_ms + min(left_ms, wait_ms) + checks_ms
            heapq.heappush(self._due, (due_ms, half.offset))
            self._aside_ms[half.offset] = aside_ms
            self._newest = max(self._newest, half.offset)

    def _read(self, half: Half, then: Callable[[bytes], None]) -> int:
        """Give a half message to `then`, perhaps later; return its size if it is known."""
        reader = self._parts.backend.store.reader

        def done(result: bytes | Exception | None) -> None:
            self._reads -= 1
            self._door.later(partial(self._go_on, half, then, result))

        try:
            with reader.without_waiting():
                raw = reader.record_bytes(half.offset)
        except NotCachedError:
            if self._parts.cold.accept(self, partial(reader.record_bytes, half.offset), done):
                self._reads += 1
            return 0
        except OSError as failure:
            self._go_on(half, then, failure)
            return 0
        self._go_on(half, then, raw)
        return 0 if raw is None else len(raw)

    def _go_on(
        self, half: Half, then: Callable[[bytes], None], result: bytes | Exception | None
    ) -> None:
        try:
            if result is None:
                raise CorruptRecordError("there is no record any more")
            if isinstance(result, Exception):
                raise result
            then(result)
        except (CorruptRecordError, MessageIllegalError, OSError) as failure:
            reader = self._parts.backend.store.reader
            (reader.note_wrong if isinstance(result, bytes) else reader.note_damage)(half.offset)
            self._warn("the open transaction at offset %d waits: %s", half.offset, failure)

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, half: Half, checks: int, raw: bytes) -> None:
        """Ask a producer of the group, if one is connected."""
        try:
            message, record = as_asked(raw)
            check_half(half, record)
        except (CorruptRecordError, MessageIllegalError):
            self._note_asked(half, checks)  # so that it is set aside if nothing repairs it
            raise
        gate, (topic, _) = self._door.gate, real_place(record.properties)
        group, access = group_of(record), self._parts.access

        def may_see(connection: Connection) -> bool:
            return access is None or access.may_produce(connection, topic)

        members = [
            one.key
            for one in self._producers.producers(group)
            if not one.key.ended and (gate is None or gate.may_be_asked(one.key, topic))
        ]
        pollers = self.polls.of(group, may_see)
        if not members and not pollers:
            return
        self.asked += 1
        self._note_asked(half, checks)
        chosen = random.randrange(len(members) + len(pollers))
        if chosen >= len(members):
            self.polls.give(pollers[chosen - len(members)], half, checks, message)
            return
        unique = _text(record, b"UNIQ_KEY") or record.message_id
        fields = {
            "topic": HALF_TOPIC,
            "commitLogOffset": str(half.offset),
            "tranStateTableOffset": str(half.place),
            "msgId": unique,
            "transactionId": unique,
            "offsetMsgId": record.message_id,
            "bname": self._group,
        }
        self._door.tell(members[chosen], Code.CHECK_TRANSACTION_STATE, fields, message)

    def _note_asked(self, half: Half, checks: int) -> None:
        """Let a check count, on a node where not each does."""
        if not self._door.is_open:
            self._counts[half.offset] = checks
            self._asked.append((half.offset, checks))

    def _count(self, counts: Sequence[tuple[int, int]]) -> None:
        """Write down how often transactions were asked for."""
        for at in range(0, len(counts), CHECKS_MAX):
            record = build_checks(counts[at : at + CHECKS_MAX], self._clock.wall_ms())
            # Not confirmed in time, or not stored at all: then it was asked for once more.
            self._append(record, self._own(), lambda _done: None)

    def _set_aside(self, half: Half, checks: int, raw: bytes) -> None:
        store = self._parts.backend.store
        replayed = store.dispatched_offset
        known = store.transactions.find(half.offset)
        if known is None or self._decisions.find(known, replayed) is not None:
            return  # it has ended while it was read
        record = set_aside(raw, checks)
        self._decisions.make(known, Ended.SET_ASIDE)

        def done(outcome: PutDone) -> None:
            status = outcome.statuses[0] if outcome.statuses is not None else outcome.status
            undone = not status.is_stored and status is not Status.TIMEOUT
            self._decisions.settle(known, undone=undone)
            if undone:
                self._warn("the open transaction at offset %d waits: %s %s",
                           half.offset, status, outcome.reason)  # fmt: skip
                return
            self.set_aside += 1
            log.warning(
                "the transaction of the half message at offset %d was not decided in %d checks: its"
                " message is in the topic TRANS_CHECK_MAX_TIME_TOPIC",
                half.offset, checks,
            )  # fmt: skip

        self._append(record, DeliveriesIf(self._decisions.refusal(self._epoch)), done)

    def _own(self) -> OwnIf:
        return OwnIf(self._decisions.refusal(self._epoch))

    def _append(
        self, record: bytes, guard: OwnIf | DeliveriesIf, done: Callable[[PutDone], None]
    ) -> None:
        self._parts.puts.admit_own_record(self._put, record, done, guard)

    # -- for RocketMQ ------------------------------------------------------------------------------

    def _say_ended(self) -> None:
        """List half messages as ended that are committed or set aside."""
        unsaid = self._parts.backend.store.transactions.unsaid()
        if self._saying:
            self._saying.intersection_update(unsaid)
        places = [place for place in unsaid if place not in self._saying]
        for at in range(0, min(len(places), UNSAID_WAITING), UNSAID_AT_ONCE):
            these = places[at : at + UNSAID_AT_ONCE]
            if len(self._saying) + len(these) > UNSAID_WAITING:
                break
            self._saying.update(these)

            def done(outcome: PutDone, these: Sequence[int] = these) -> None:
                of_each = outcome.statuses or [outcome.status]
                if any(not status.is_stored for status in of_each):
                    self._saying.difference_update(these)

            host = self._parts.backend.store.store_host
            records = build_ended(these, self._clock.wall_ms(), host)
            self._append(b"".join(records), self._own(), done)


def _text(record: Record, name: bytes) -> str:
    """Return a property; "" without it, or if it is no text, which no frame could carry."""
    value = find_property(record.properties, name) or b""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""
