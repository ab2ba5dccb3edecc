"""The ends of transactions that producers of hastore's ask for, by the client API's EndTransaction.

`Transactions` ends them as it does those of RocketMQ's producers. The answer says more: a PutDone,
which comes once what ends the transaction is confirmed as the request asks. That of a commit has
the place of the message in its own topic, unless the transaction had ended before.

    PUT_OK                     it has ended so, now or before
    refusals, FLUSH_*_TIMEOUT  as those of a put; the client asks again
    TIMEOUT                    it is not known; the client asks again
    MESSAGE_ILLEGAL            it has not, and never will: no such half message, another group or
                               message, or it ended otherwise
    FORBIDDEN                  the identity may not produce to the message's topic

A producer asks again when it got no answer, perhaps another master. So before it is told that the
transaction has ended, `look_up` reads whether the half message at the offset is its own at all: a
failover may have cut it, and another one may be there now. A transaction of which replay does not
remember how it ended, it looks for among the messages with the half message's UNIQ_KEY and
PGROUP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hastore.errors import CorruptRecordError
from hastore.protocol.api import EndTransaction, Failed, Put, PutDone, Status
from hastore.record.codec import Record, decode_record
from hastore.record.delays import real_place
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.properties import find_property
from hastore.record.transactions import (
    ASIDE_TOPIC,
    FLAG_COMMIT,
    HALF_TOPIC,
    Ended,
    group_of,
    identity_in,
)
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.queries import MAX_FOUND_BYTES, Answer, Steps
from hastore.server.api.server import ApiParts
from hastore.server.remoting.door import OwnRequest, without_place

_FOUND_MAX = 64  # messages with one UNIQ_KEY in one topic
_ALL_MS = 2**63 - 1
_DAMAGED = "how the transaction has ended is not known: a message is damaged here, at offset"


class Looked(NamedTuple):
    """What `look_up` found: the topic of the half message, and how its transaction ended.

    `topic` is empty if the half message is not the one that was meant, and `reason` says why.
    """

    topic: str
    ended: Ended | None
    reason: str = ""


def look_up(backend: ApiBackend, asked: EndTransaction, ended: Ended | None) -> Steps:
    """Return the steps that find out what became of a half message that is not open any more.

    `ended` is how replay says that the transaction at its offset has ended, None if it does not
    know. The answer is a Looked.
    """

    def steps(is_late: Callable[[], bool]) -> Iterator[Answer | None]:
        store = backend.store
        raw = None
        if store.min_offset <= asked.offset < store.max_offset:
            raw = store.reader.record_bytes(asked.offset)
            if raw is None and store.reader.is_damaged(asked.offset):
                store.reader.note_damage(asked.offset)
                yield Failed(0, Status.TIMEOUT.value, f"{_DAMAGED} {asked.offset}"), None
                return
        half = None if raw is None else decode_record(raw)
        if half is None or not _is_meant(half, asked):
            reason = (
                f"no half message of this transaction is at offset {asked.offset}: it was cut by a"
                " failover, removed by retention, or never stored"
            )
            yield Looked("", None, reason), None
            return
        topic, _ = real_place(half.properties)
        meant = identity_in(half.properties)
        found, unique = ended, _unique(half)  # `asked` may have the message's id instead
        if found is None and not unique:  # of a broker's log that was taken over
            reason = f"how the transaction at offset {asked.offset} has ended is not remembered"
            yield Failed(0, Status.TIMEOUT.value, reason), None
            return
        for name in (topic, ASIDE_TOPIC):
            if found is not None:
                break
            search = store.reader.search_key(
                name, unique, max_messages=_FOUND_MAX, begin_ms=0, end_ms=_ALL_MS,
                limit_offset=store.dispatched_offset, max_bytes=MAX_FOUND_BYTES,
            )  # fmt: skip
            while not search.ended and not is_late():
                search.step()
                yield None
            if search.unreadable:
                yield Failed(0, Status.TIMEOUT.value, f"{_DAMAGED} {search.unreadable[0]}"), None
                return
            if not search.ended or search.cut_ms is not None:
                yield Failed(0, "BUSY", "the search for the transaction was cut short"), None
                return
            for one in search.found.values():
                record = decode_record(one)
                named = record.prepared_transaction_offset
                if not named and name == ASIDE_TOPIC:  # by a broker of RocketMQ
                    named = asked.offset
                if _unique(record) != unique or named < asked.offset:
                    continue  # of an earlier transaction with this id
                whose = identity_in(record.properties)
                if whose.group != meant.group:
                    continue  # of another producer's with this id
                if name == ASIDE_TOPIC and whose.topic != meant.topic:
                    continue
                if name == ASIDE_TOPIC:
                    found = Ended.SET_ASIDE
                elif record.sys_flag & FLAG_ROLLBACK == FLAG_COMMIT:
                    found = Ended.COMMITTED
        # Replay has read its half message, and what is neither open nor appended was rolled back.
        yield Looked(topic, found or Ended.ROLLED_BACK), None

    return steps


def _is_meant(half: Record, asked: EndTransaction) -> bool:
    """Whether a record is the half message that a client means."""
    try:
        return (
            half.topic == HALF_TOPIC
            and half.queue_offset == asked.queue_offset
            and group_of(half) == asked.group
            and asked.unique in (_unique(half), half.message_id)
        )
    except CorruptRecordError:
        return False


def _unique(record: Record) -> str:
    raw = find_property(record.properties, b"UNIQ_KEY") or b""
    return raw.decode("utf-8", "surrogateescape")


class OwnEnd(OwnRequest):
    """An EndTransaction of a client, with what `Transactions` asks of a request."""

    asked: EndTransaction

    def __init__(
        self,
        parts: ApiParts,
        connection: Connection,
        request: EndTransaction,
        came_ms: float,
        may_send: Callable[[str], bool],
    ) -> None:
        """Take a request; `may_send` says whether its client may send to a topic."""
        super().__init__(parts, connection, request, came_ms)
        self.may_send = may_send
        self.put = Put(request.rid, request.acks, request.sync_flush, request.timeout_ms)

    def has_ended(self, otherwise: str = "") -> None:
        """Answer that it has ended so before, or `otherwise`; once that is confirmed as asked.

        What is not confirmed a failover may cut: then the transaction is open again.
        """

        def ended_before(done: PutDone) -> None:
            status, reason = done.status, done.reason
            if status is Status.PUT_OK and otherwise:
                status, reason = Status.MESSAGE_ILLEGAL, otherwise
            self.done(PutDone(0, status, done.epoch, done.level, reason=reason))

        self._parts.puts.confirm_log(self.put, ended_before, self.came_ms)

    def done(self, done: PutDone) -> None:
        """Answer with the outcome of what ends the transaction."""
        status = done.status if done.statuses is None else done.statuses[0]
        if not (self.asked.commit and status.is_stored):  # a rollback has no place to speak of
            done = without_place(done)
        super().done(done)
