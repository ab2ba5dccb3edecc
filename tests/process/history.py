"""Record what producers saw, and check whether the final log explains it.

Appends return their offset. So the history is linearizable if the offsets are unique and in
real-time order, and the final log has the same bytes at these offsets. A put without an answer is
`unknown`: it may be in the log once, never twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hastore.errors import (
    DurabilityError,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
    UnreachableError,
)
from tests.process.stores import Found

ACKED, UNKNOWN, REFUSED = "acked", "unknown", "refused"


@dataclass(slots=True)
class Put:
    """One send; times in ns of the monotonic clock; `outcome` is None until there is an answer."""

    topic: str
    body: bytes
    key: str | None
    began_ns: int
    ended_ns: int | None = None
    outcome: str | None = None
    level: str = ""
    offset: int | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    epoch: int = 0
    error: str = ""

    @property
    def durable(self) -> bool:
        """Whether the reply states more than one copy, so that no single failure may lose it."""
        return self.outcome == ACKED and self.level.startswith(("SYNC", "QUORUM"))


@dataclass
class Recorder:
    """The puts of all producers. Thread-safe."""

    puts: list[Put] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, producer: Any, topic: str, body: bytes, key: str | None = None) -> Future[Any]:
        """Send and record a message; exceptions of `send` are recorded and raised."""
        put = Put(topic, body, key, time.monotonic_ns())
        with self._lock:
            self.puts.append(put)
        try:
            future: Future[Any] = producer.send(topic, body, key=key)
        except Exception as error:
            _settle(put, error)
            raise
        future.add_done_callback(lambda done: _ended(put, done))
        return future

    def count(self, outcome: str) -> int:
        """Return the number of puts with this outcome."""
        with self._lock:
            return sum(put.outcome == outcome for put in self.puts)

    def acked_since(self, began_ns: int) -> bool:
        """Return whether a put that began at `began_ns` or later is acknowledged durably."""
        return self.first_ack_ns(began_ns) is not None

    def first_ack_ns(self, began_ns: int) -> int | None:
        """Return the time of the first durable acknowledgement of a put begun since `began_ns`."""
        first: int | None = None
        with self._lock:
            for put in reversed(self.puts):
                if put.began_ns < began_ns:
                    break
                if put.durable and put.ended_ns is not None:
                    first = put.ended_ns if first is None else min(first, put.ended_ns)
        return first


def _ended(put: Put, done: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        _settle(put, error)
        return
    result = done.result()
    put.level, put.offset, put.epoch = result.level, result.offset, result.epoch
    put.queue_id, put.queue_offset = result.queue_id, result.queue_offset
    put.outcome, put.ended_ns = ACKED, time.monotonic_ns()


def _settle(put: Put, error: BaseException) -> None:
    put.error = f"{type(error).__name__}: {error}"
    # UnreachableError comes from `send` itself: it found no master to ask for the queues.
    certain = isinstance(error, NotStoredError | MessageIllegalError | UnreachableError)
    assert certain or isinstance(error, OutcomeUnknown | DurabilityError), put.error
    put.outcome, put.ended_ns = REFUSED if certain else UNKNOWN, time.monotonic_ns()


def check(
    puts: Sequence[Put],
    records: Sequence[Found],
    *,
    rescued: Iterable[Found] = (),
    epochs: Sequence[tuple[int, int, int]] = (),
    reads: Iterable[tuple[int, bytes]] = (),
) -> list[str]:
    """Return the violations; an empty list if the log's records explain the history.

    `rescued`: records that were cut off and archived, which a master may have acknowledged alone.
    `epochs`: (epoch, start offset, api port of its node), ascending. `reads`: (offset, body) of the
    messages that a reader got under a synchronous master.
    """
    wrong = [*_check_log(records), *_check_epochs(records, epochs)]
    by_body: dict[bytes, list[Found]] = {}
    for found in records:
        by_body.setdefault(found.body, []).append(found)
    archived = {found.body for found in rescued}
    sent = {put.body for put in puts}
    if len(sent) != len(puts):
        wrong.append("the test sent one body twice")
    wrong += [f"phantom at {f.offset}" for f in records if f.body not in sent]
    for put in puts:
        wrong += _check_put(put, by_body.get(put.body, []), archived)
    wrong += _check_order(puts, by_body)
    at = {found.offset: found.body for found in records}
    for offset, body in reads:
        if at.get(offset) != body:
            wrong.append(f"a reader got a message that is not in the log, at {offset}")
    return wrong


def _check_log(records: Sequence[Found]) -> list[str]:
    wrong = []
    end: int | None = None
    queues: dict[tuple[str, int], int] = {}
    sequences: set[tuple[str, str]] = set()
    for found in records:
        if end is not None and found.offset < end:
            wrong.append(f"the record at {found.offset} begins before {end}")
        end = found.offset + found.size
        queue = (found.topic, found.queue_id)
        if found.queue_offset != queues.get(queue, 0):
            wrong.append(f"queue {queue}: {found.queue_offset} after {queues.get(queue, 0)}")
        queues[queue] = found.queue_offset + 1
        if "HS_SEQ" in found.properties:
            sequence = (found.properties.get("HS_PID", ""), found.properties["HS_SEQ"])
            if sequence in sequences:
                wrong.append(f"sequence {sequence} is stored twice, again at {found.offset}")
            sequences.add(sequence)
    return wrong


def _check_epochs(records: Sequence[Found], epochs: Sequence[tuple[int, int, int]]) -> list[str]:
    """Check that each record was stored by the node of its epoch."""
    wrong = []
    for before, after in zip(epochs, epochs[1:], strict=False):
        if after[0] <= before[0] or after[1] < before[1]:
            wrong.append(f"the history goes back: {before}, {after}")
    place = 0
    for found in records:
        while place + 1 < len(epochs) and epochs[place + 1][1] <= found.offset:
            place += 1
        if epochs and found.store_port != epochs[place][2]:
            wrong.append(f"the record at {found.offset} is not of epoch {epochs[place][0]}")
    return wrong


def _check_put(put: Put, found: list[Found], archived: set[bytes]) -> list[str]:
    what = f"{put.outcome} put of {put.topic}/{put.key}"
    if put.outcome is None:
        return [f"{what}: has no outcome"]
    if len(found) > 1:
        return [f"{what}: is in the log {len(found)} times"]
    if put.outcome == REFUSED:
        return [f"{what}: is in the log at {found[0].offset} ({put.error})"] if found else []
    if put.outcome == UNKNOWN:
        return []
    if not found:
        if put.durable or put.body not in archived:
            return [f"{what}: acknowledged at {put.offset} ({put.level}), not in the log"]
        return []
    one = found[0]
    claimed = (put.offset, put.topic, put.queue_id, put.queue_offset)
    if claimed != (one.offset, one.topic, one.queue_id, one.queue_offset):
        return [f"{what}: acknowledged as {claimed}, is at {one.offset}/{one.queue_offset}"]
    if one.properties.get("KEYS") != put.key:
        return [f"{what}: another key at {one.offset}"]
    return []


def _check_order(puts: Sequence[Put], by_body: dict[bytes, list[Found]]) -> list[str]:
    """Check that puts acknowledged before a put began are before it, in no later epoch."""
    events: list[tuple[int, int, Put]] = []
    for put in puts:
        if put.outcome in (ACKED, UNKNOWN) and put.body in by_body:
            events.append((put.began_ns, 1, put))
            if put.outcome == ACKED and put.ended_ns is not None:
                events.append((put.ended_ns, 0, put))
    wrong = []
    bound = epoch = -1
    # At equal times the end counts as later: this makes the check weaker, never too strict.
    for _, is_begin, put in sorted(events, key=lambda event: (event[0], -event[1])):
        offset = by_body[put.body][0].offset
        if is_begin:
            if offset <= bound:
                wrong.append(f"order: the put at {offset} began after that at {bound} had ended")
            if put.outcome == ACKED and put.epoch < epoch:
                wrong.append(f"an acknowledgement of epoch {put.epoch} after one of {epoch}")
        else:
            bound, epoch = max(bound, offset), max(epoch, put.epoch)
    return wrong
