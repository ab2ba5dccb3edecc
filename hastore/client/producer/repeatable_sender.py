"""Send numbered records of a writer that may be repeated from its beginning, such as a Spark task.

All attempts of one writer have the same producer id, and give the same number to the same record.
`begin` asks the master how far earlier attempts came; the attempt then goes on from there. Two
attempts may run at the same time. docs/client-protocol.md ("Idempotence") has the rules:

1. Number n is put only when all numbers up to n - WINDOW + 1 are confirmed (`_wait_room`).
2. An attempt begins after `forgotten`, and at the latest with number `last` - WINDOW + 2. By rule 1
   all numbers before are confirmed, so no failover cuts them. It puts the numbers up to `last`
   again: the node stores those that were cut or refused, and confirms the others.
3. If it must begin later than rule 2 says, because the node has forgotten the numbers before, it
   puts one record first. If the epoch has changed since the answer, the attempt ends.

A record of an earlier attempt that is put again must be the same record. A few are compared with
the stored ones (`_compare`), before any later record is put: a writer whose records come in another
order, or are others, is noticed before it stores any.

The sender has no thread: the caller's thread drives the SendCore, and waits only in `put` and
`finish`. So a task whose process is killed leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hastore.client.arguments import BATCH_BYTES, Acks, make_options
from hastore.client.connections.bootstrap import host_and_port, numeric_targets
from hastore.client.connections.requester import (
    FOR_NOW,
    Answer,
    Requester,
    RequestNotKnown,
    Steps,
    expect,
)
from hastore.client.lifecycle import Lifecycle, describe
from hastore.client.messages import SendResult, Status
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.preparer import own_host
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.window import Entry, Window
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    MessageIllegalError,
    NotAuthenticatedError,
    OutcomeUnknown,
    UnreachableError,
    UsageError,
)
from hastore.protocol import api
from hastore.record.codec import NO_HOST, Host, Record, decode_record
from hastore.record.layout import header_struct
from hastore.record.properties import producer_of

log = logging.getLogger(__name__)

_SIZE = header_struct("size")
_SPAN = api.WINDOW - 1  # numbers from the oldest unconfirmed one to the newest
_RETRY_S = 0.05
ANSWER_S = 5.0  # a master that says nothing for so long may be gone; doubled each time
_ANSWER_S_MAX = 60.0
_SAMPLES = 4  # records of earlier attempts to compare


class _PutRecords(NamedTuple):
    """Records under way, with consecutive numbers."""

    first: int
    records: int
    topic: str
    payload: bytes
    future: SendFuture[list[SendResult]]

    @property
    def end(self) -> int:
        return self.first + self.records


class RecordsDifferError(UsageError):
    """An earlier attempt has stored another record under this number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"an earlier attempt has stored another record as number {number}")
        self.number = number


class RepeatableSender:
    """Send the records of one attempt; used by one thread.

    Call `begin` once, `put` for records in the order of their numbers, then `finish`.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        producer_id: str,
        *,
        acks: Acks = None,
        sync_flush: bool = False,
        delivery_timeout_s: float = 120.0,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; raises UsageError for wrong arguments, ConfigError for files."""
        self._options = make_options(
            acks, sync_flush, 0.0, BATCH_BYTES, api.WINDOW, delivery_timeout_s, True
        )
        self._producer_id = producer_id
        self._timeout_s = delivery_timeout_s
        self._clock = clock
        self._requester = Requester(addresses, clock, security)
        self._lifecycle = Lifecycle(
            describe("RepeatableSender", addresses), self._requester.abandon
        )
        self._lifecycle.watch(self, self._requester.drop)
        self._window = Window(api.WINDOW)
        requester = self._requester
        rids = iter(requester.next_rid, -1)  # shared, so that no late reply is taken for another
        self._core = SendCore(
            self._options, self._window, requester.transport, requester.cluster, rids
        )
        self._chunks: deque[_PutRecords] = deque()
        self._epoch_at_begin: int | None = None  # set while rule 3 applies
        self._samples: dict[int, tuple[bytes, int | None]] = {}  # number -> record, offset
        self._sampled: frozenset[int] = frozenset()  # empty once they have been compared
        self._known_end = 0  # the first number behind those of earlier attempts, while sampled
        self.start = 0  # numbers before are stored: `put` leaves them out
        self.last_known: int | None = None  # the greatest number that was stored at the beginning

    def queues_of(self, topic: str) -> int:
        """Return how many queues a topic has for messages without one.

        Raises UnreachableError if no master answers and the map has no room for the topic.
        """
        core, cluster, clock = self._core, self._requester.cluster, self._clock
        if not cluster.knows_queues(topic):  # the core asks: records may be under way
            expires = clock.monotonic_ms() + self._options.delivery_timeout_ms
            core.want_queues(topic)
            self._drive(
                lambda: (
                    cluster.knows_queues(topic)
                    or core.refused is not None
                    or clock.monotonic_ms() >= expires
                )
            )
            if core.refused is not None:
                raise NotAuthenticatedError(core.refused)
            if not cluster.knows_queues(topic):
                raise UnreachableError(
                    f"no master said how many queues topic {topic} has: {cluster.reason()}"
                )
        return cluster.queues_of(topic)

    @property
    def unconfirmed(self) -> tuple[int, int] | None:
        """The oldest records under way, or those that failed: the first number and their end."""
        return (self._chunks[0].first, self._chunks[0].end) if self._chunks else None

    def born_host(self) -> Host:
        """Return this machine's address in a connection to the master, without a port."""
        master = self._requester.cluster.master
        return NO_HOST if master is None else own_host(numeric_targets(*host_and_port(master)))

    def reach(self, timeout_s: float) -> None:
        """Wait until a node has answered; raises UnreachableError if none does in this time."""
        self._requester.run_steps(self._requester.survey(timeout_s))

    def begin(self, first: int) -> int:
        """Return the number to begin with: `first`, or a greater one if others are stored.

        Raises UnreachableError if no master answers in time, and ClientError if the master cannot
        tell which of the numbers from `first` on are stored.
        """
        known = self._ask()
        self._resume(known, first)
        self._window.next_seq = self._window.base_seq = self.start
        self._core.master_found = True
        return self.start

    def put(self, topic: str, payload: bytes, first: int, count: int) -> None:
        """Send records with the numbers [first, first + count); waits until there is room.

        Numbers before `start` are left out. Raises what earlier records failed with, and
        RecordsDifferError if an earlier attempt has stored other records.
        """
        if first + count <= self.start:
            return
        if first < self.start:
            payload = _without(payload, self.start - first)
            count -= self.start - first
            first = self.start
        if self._epoch_at_begin is not None:
            size = _SIZE.unpack_from(payload)[0]
            self._admit(topic, payload[:size], first, 1)
            self._drain()
            if count == 1:
                return
            payload, first, count = payload[size:], first + 1, count - 1
        known = max(0, self._known_end - first)
        if self._sampled and known < count:
            rest = _without(payload, known)
            if known:
                self._admit(topic, payload[: len(payload) - len(rest)], first, known)
            self._drain()
            self._compare_samples()
            payload, first, count = rest, first + known, count - known
        self._admit(topic, payload, first, count)

    def finish(self) -> None:
        """Wait until all records are confirmed, and compare some with those of earlier attempts.

        Raises what they failed with, and RecordsDifferError if an earlier attempt has stored other
        records.
        """
        self._drain()
        self._compare_samples()

    def close(self) -> None:
        """Close the connections; records under way may or may not be stored."""
        if self._lifecycle.close():
            self._requester.close()

    # -- where to begin

    def _ask(self) -> api.ProducerKnown:
        """Ask the master how far this producer came; raises UnreachableError or ClientError."""
        try:
            reply, _ = self._ask_master(lambda rid: api.AskProducer(rid, self._producer_id))
        except (UnreachableError, RequestNotKnown) as failure:
            raise type(failure)(
                f"the master did not say which rows are stored already: {failure}"
            ) from failure
        return expect(api.ProducerKnown, reply)

    def _ask_master(self, make: Callable[[int], api.Request]) -> Answer:
        """Ask the master; look for another one if it is gone, silent, or not ready.

        Raises UnreachableError if none answers in time.
        """
        requester = self._requester
        deadline = requester.deadline(self._timeout_s)
        answer_s = ANSWER_S
        while True:
            left = requester.left_s(deadline)
            requester.run_steps(self._find_master(left))
            master = requester.cluster.master
            assert master is not None
            try:
                reply, payload = requester.run_steps(
                    requester.ask(master, make, min(left, answer_s), may_be_unknown=True)
                )
            except UnreachableError:
                if left <= answer_s:
                    raise
                answer_s = min(2.0 * answer_s, _ANSWER_S_MAX)  # it may be slow
                requester.cluster.lose()
                continue
            if isinstance(reply, api.Failed) and reply.status in FOR_NOW and left > 0.0:
                requester.cluster.lose()
                requester.transport.sleep(min(left, _RETRY_S))
                continue
            return reply, payload

    def _find_master(self, timeout_s: float) -> Steps[None]:
        """Ask the nodes for their maps until one is writable; raises UnreachableError if none is.

        Unlike `Requester.survey` it does not wait for the other nodes, of which one may be down.
        If the node is a superseded master, no harm is done (see above), and the core finds the
        other one.
        """
        requester = self._requester
        cluster, transport = requester.cluster, requester.transport
        deadline = requester.deadline(timeout_s)
        asked: set[str] = set()
        while cluster.master is None:
            left = requester.left_s(deadline)
            if cluster.refused is not None:
                raise NotAuthenticatedError(cluster.refused)
            if not left:
                raise UnreachableError(f"no writable master: {cluster.reason()}")
            for address in cluster.addresses:
                if address not in asked and transport.is_up(address):
                    transport.send(address, api.AskMap(requester.next_rid()))
                    asked.add(address)
            arrivals = yield min(left, _RETRY_S)
            if not arrivals:
                asked.clear()
            asked -= {arrival.address for arrival in arrivals if arrival.reply is None}

    def _resume(self, known: api.ProducerKnown, first: int) -> None:
        """Set where to go on, by rules 2 and 3; numbers before `first` are none of this attempt."""
        last = -1 if known.last is None else known.last
        forgotten = -1 if known.forgotten is None else known.forgotten
        if forgotten >= max(first, last):
            raise ClientError(
                "the master cannot tell which rows are stored: a failover has cut rows that were "
                "acknowledged by the old master alone (acks=1)"
            )
        usual = max(first, last - _SPAN + 1)
        self.start = max(usual, forgotten + 1)
        self._epoch_at_begin = known.epoch if self.start > usual else None
        self.last_known = known.last if last >= first else None
        if last >= self.start:
            step = max(1, (last - self.start) // (_SAMPLES - 1))
            self._sampled = frozenset((*range(self.start, last, step), last))
            self._known_end = last + 1

    def _overtaken(self, failure: MessageIllegalError) -> None:
        """Go on behind another attempt that is so far ahead that this one's numbers are forgotten.

        Raises the failure if this is not its cause.
        """
        for chunk in self._chunks:  # `_ask` would take replies from the core
            self._drive(chunk.future.done)
        oldest = self._chunks[0].first
        known = self._ask()
        if known.forgotten is None or known.forgotten < oldest:
            raise failure
        self._resume(known, oldest)
        waiting, self._chunks = self._chunks, deque()
        for chunk in waiting:
            self.put(chunk.topic, chunk.payload, chunk.first, chunk.records)

    # -- sending

    def _admit(self, topic: str, payload: bytes, first: int, count: int) -> None:
        self._wait_room(first + count)
        if first < self.start:  # another attempt has overtaken this one meanwhile
            if first + count <= self.start:
                return
            payload, count = _without(payload, self.start - first), first + count - self.start
            first = self.start
        future: SendFuture[list[SendResult]] = SendFuture()
        now = self._clock.monotonic_ms()
        expires = now + self._options.delivery_timeout_ms
        self._window.admit(Entry(first, count, topic, payload, future, True, now, expires))
        self._chunks.append(_PutRecords(first, count, topic, payload, future))
        self._core.run_once(now)

    def _wait_room(self, end: int) -> None:
        """Wait until rule 1 allows the numbers before `end`; raises what a record failed with."""
        self._settle()
        while self._chunks and end - self._chunks[0].first > _SPAN:
            self._drive(self._chunks[0].future.done)
            self._settle()

    def _drain(self) -> None:
        while self._chunks:
            self._drive(self._chunks[0].future.done)
            self._settle()

    def _settle(self) -> None:
        """Drop the confirmed chunks, up to the first that is under way; raises a failure."""
        while self._chunks and self._chunks[0].future.done():
            chunk = self._chunks[0]
            try:
                results = chunk.future.result()
            except MessageIllegalError as failure:
                self._overtaken(failure)
                continue
            self._chunks.popleft()
            if self._epoch_at_begin is not None:
                self._check_epoch(results)
            self._take_samples(chunk, results)

    def _check_epoch(self, results: Sequence[SendResult]) -> None:
        """End the attempt if the master has changed since it said where to begin (rule 3)."""
        if results[0].epoch not in (0, self._epoch_at_begin):
            raise OutcomeUnknown(
                "the master changed while the task was finding out which rows are stored; repeat "
                "the task"
            )
        self._epoch_at_begin = None

    def _drive(self, is_done: Callable[[], bool]) -> None:
        """Run the core until `is_done()`."""
        core, clock = self._core, self._clock
        core.run_once(clock.monotonic_ms())
        while not is_done():
            self._requester.transport.sleep(core.sleep_s(clock.monotonic_ms()))
            core.run_once(clock.monotonic_ms())

    # -- comparing

    def _take_samples(self, chunk: _PutRecords, results: Sequence[SendResult]) -> None:
        for number in self._sampled:
            if chunk.first <= number < chunk.end:
                place = number - chunk.first
                record = _without(chunk.payload, place)
                size = _SIZE.unpack_from(record)[0]
                self._samples[number] = record[:size], results[place].offset

    def _compare_samples(self) -> None:
        samples, self._samples, self._sampled = self._samples, {}, frozenset()
        for number, (record, offset) in samples.items():
            if offset is not None:
                self._compare(number, decode_record(record), offset)

    def _compare(self, number: int, own: Record, offset: int) -> None:
        reply, payload = self._ask_master(lambda rid: api.FindOffset(rid, offset))
        skipped = (Status.FORBIDDEN, CorruptRecordError.__name__)
        if isinstance(reply, api.Failed) and reply.status in skipped:
            log.warning("rows of earlier attempts are not compared: %s", reply.reason)
            return
        if not expect(api.Found, reply).count:
            return  # removed by retention, or not readable yet
        stored = decode_record(payload)
        if producer_of(stored.properties) != producer_of(own.properties):
            return  # a failover has cut the record since, as with acks=1
        if (own.topic, own.body, own.properties) != (stored.topic, stored.body, stored.properties):
            raise RecordsDifferError(number)


def _without(payload: bytes, count: int) -> bytes:
    """Return a payload without its first `count` records."""
    at = 0
    for _ in range(count):
        at += _SIZE.unpack_from(payload, at)[0]
    return payload[at:]
