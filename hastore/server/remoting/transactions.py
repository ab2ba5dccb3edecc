"""The ends of transactions: 37, which commits or rolls back a half message, each once.

    37    END_TRANSACTION: find the open transaction, read its half message, append what ends it

A producer of hastore's asks for the same by the client API, and is answered (own_ends.py).

A commit appends the message under its own topic; a rollback lists the half message as ended
(record/transactions.py). Replay says which transactions are open (store/derived/transactions.py).
So a request waits until replay has reached its half message, and a new master ends nothing before
replay has reached the log's end as it was when its epoch began. What this master has appended, and
replay has not read yet, is in `Decisions`. So nothing is committed twice: a repeated request is
told how the transaction has ended, as far as that is known.

What ends a transaction must name what the answer to the send said: the half message's offset and
queue offset, its group, and the message's id. After a failover another half message may lie at the
offset of one that was cut.

    0        it has ended so, now or before; or the producer does not know yet (0), which is noted
    1        it has not: no such half message, another group or message, or it ended otherwise; or
             what ends it is in the master's log, and was not confirmed in time
    2, 14    nothing was done for now
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from hastore.config.model import RemotingConfig
from hastore.errors import CorruptRecordError, MessageIllegalError, NotCachedError, StoreError
from hastore.protocol.api import EndTransaction, Failed, Put, PutDone, Status
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import Record, decode_record
from hastore.record.delays import real_place
from hastore.record.properties import find_property
from hastore.record.transactions import (
    NAME_MAX,
    Ended,
    Half,
    build_ended,
    check_half,
    commit,
    group_of,
)
from hastore.server.api.backend import ApiBackend
from hastore.server.api.cold_reads import TOO_MANY
from hastore.server.api.connections import Connection
from hastore.server.api.queries import OwnQuery
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.own_ends import OwnEnd, look_up
from hastore.server.remoting.sends import ANSWER_MS
from hastore.store.append.results import DeliveriesIf, OwnIf, in_epoch

NOT_YET, COMMIT, ROLLBACK = 0, 8, 12
WAITING_MAX = 10_000  # requests that wait for replay
TICK_MS = 5.0
_HOW = {COMMIT: Ended.COMMITTED, ROLLBACK: Ended.ROLLED_BACK}
_LONG_MAX = 2**63 - 1
_REFUSED = {
    Status.SLAVE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,
    Status.SERVICE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,
    Status.FORBIDDEN: Answer.SERVICE_NOT_AVAILABLE,  # another epoch has begun
    Status.BUSY: Answer.SYSTEM_BUSY,
    Status.MESSAGE_ILLEGAL: Answer.SYSTEM_ERROR,  # as `_wrong` does
    Status.PROPERTIES_SIZE_EXCEEDED: Answer.SYSTEM_ERROR,
}
_LATE = "WAIT_QUORUM_ACK_TIMEOUT"
_NOT_YOURS = "the half message at offset {} is of a topic that is not yours"
Request = RemotingRequest | OwnEnd


class Decisions:
    """How this master has ended transactions that are still open for replay.

    They hold for one epoch. The API's lock is held in every call.
    """

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend
        self._epoch = 0  # 0: not ready in any
        self._begins: tuple[int, int] | None = None  # an epoch, and the log's end when it was seen
        # By offset: how, and the log's end once the outcome was known.
        self._made: dict[int, tuple[Ended, int | None]] = {}

    @property
    def epoch(self) -> int:
        """The epoch in which this node ends transactions."""
        return self._epoch

    def is_ready(self) -> bool:
        """Whether this node may end transactions, and knows which are open."""
        backend, store = self._backend, self._backend.store
        if backend.writable_reason() is not None:
            self._epoch, self._begins = 0, None
            return False
        epoch = backend.epoch()
        if epoch == self._epoch:
            return True
        # What ended transactions in earlier epochs lies before the log's end as it is seen now.
        # What does in this one is made here.
        if self._begins is None or self._begins[0] != epoch:
            self._begins = epoch, store.max_offset
        if store.dispatched_offset < self._begins[1]:
            return False
        self._epoch, self._begins = epoch, None
        self._made.clear()
        return True

    def refusal(self, epoch: int) -> Callable[[], str | None]:
        """Return why nothing of this epoch may be appended any more; called under the write gate.

        The caller knows that the epoch was open.
        """
        return in_epoch(self._backend.epoch, epoch)

    def find(self, half: Half, read: int) -> Ended | None:
        """Return how a transaction has ended that is still open for replay; None if it has not.

        `read` is how far replay had come at the latest when it was seen to be open: an outcome that
        lies before it has not ended the transaction.
        """
        for offset in half.offsets:
            how, settled = self._made.get(offset, (None, None))
            if how is not None and (settled is None or settled > read):
                return how
        return None

    def is_under_way(self, half: Half) -> bool:
        """Whether the outcome of what ends a transaction is not known yet."""
        made = [self._made.get(offset) for offset in half.offsets]
        return any(one is not None and one[1] is None for one in made)

    def make(self, half: Half, how: Ended) -> None:
        """Note that a transaction is about to end."""
        self._made[half.offset] = how, None
        if len(self._made) % 256 == 0:
            read = self._backend.store.dispatched_offset
            self._made = {
                offset: made
                for offset, made in self._made.items()
                if made[1] is None or made[1] > read
            }

    def settle(self, half: Half, *, undone: bool) -> None:
        """Note an outcome: nothing was appended, or else replay will tell what was."""
        made = self._made.pop(half.offset, None)
        if made is not None and not undone:
            self._made[half.offset] = made[0], self._backend.store.max_offset


class Wish(NamedTuple):
    """What a producer wants of a transaction."""

    offset: int
    place: int  # the queue offset
    how: int
    group: str
    ids: tuple[str, ...]  # the message's, as the producer knows it


class Transactions:
    """The handler of the ends of transactions; the API's lock is held in every call."""

    def __init__(
        self, door: Door, decisions: Decisions, hold_ms: int = RemotingConfig().hold_timeout_ms
    ) -> None:
        """Prepare; a request waits for `hold_ms` for replay and for a master."""
        self._door = door
        self._parts = door.parts
        self._clock = door.parts.clock
        self._decisions = decisions
        self._hold_ms = hold_ms
        self._wait = Put(0, None, timeout_ms=hold_ms + ANSWER_MS)
        self._waiting = 0
        self.committed = 0  # since the node's start
        self.rolled_back = 0

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {Code.END_TRANSACTION: self.end}

    def end(self, request: RemotingRequest) -> None:
        """End a transaction."""
        fields = request.frame.fields
        how = _number(fields, "commitOrRollback")
        if how not in (NOT_YET, COMMIT, ROLLBACK):
            raise _illegal(f"commitOrRollback={how} is none of {NOT_YET}, {COMMIT}, {ROLLBACK}")
        ids = tuple(id_ for name in ("msgId", "transactionId") if (id_ := fields.get(name)))
        group = fields.get("producerGroup", "")
        if not group or not ids:
            raise _illegal("producerGroup, or both of msgId and transactionId are missing")
        wish = Wish(
            _number(fields, "commitLogOffset"), _number(fields, "tranStateTableOffset"),
            how, group, ids,
        )  # fmt: skip
        self._decide(request, wish, None)

    def end_own(
        self, connection: Connection, asked: EndTransaction, came_ms: float
    ) -> None:
        """End a transaction for a producer of hastore's."""
        access = self._parts.access

        def may_send(topic: str) -> bool:
            return access is None or access.may_produce(connection, topic)

        request = OwnEnd(self._parts, connection, asked, came_ms, may_send)
        how = COMMIT if asked.commit else ROLLBACK
        self._go_on(
            request,
            Wish(asked.offset, asked.queue_offset, how, asked.group, (asked.unique,)),
            None,
        )

    def _decide(
        self, request: Request, wish: Wish, read: tuple[Half, bytes | None] | None
    ) -> None:
        """End a transaction; `read` has what another thread has read of its half message."""
        decisions, store = self._decisions, self._parts.backend.store
        if not decisions.is_ready():
            self._later(request, wish)
            return
        replayed = store.dispatched_offset  # first: replay goes on meanwhile
        half = store.transactions.find(wish.offset)
        if half is None:
            self._not_open(request, wish, replayed)
            return
        made = decisions.find(half, replayed)
        if made is not None:
            if not isinstance(request, OwnEnd):
                self._has_ended(request, wish, half, made)
            elif decisions.is_under_way(half):
                self._later(request, wish)  # its answer is about what is confirmed
            else:
                self._look_up(request, wish, made)
            return
        if read is not None and read[0].offset == half.offset:
            raw = read[1]
        else:
            try:
                with store.reader.without_waiting():
                    raw = store.reader.record_bytes(half.offset)
            except NotCachedError:
                self._read(request, wish, half)
                return
            except (StoreError, OSError) as failure:
                self._unreadable(request, half, failure)
                return
        if raw is None:
            if half.offset >= store.min_offset:
                text = f"the half message at offset {half.offset} is damaged"
                self._unreadable(request, half, CorruptRecordError(text))
                return
            raise _failed(f"the half message at offset {half.offset} is not in the log any more")
        try:
            record = decode_record(raw)
            check_half(half, record)
        except CorruptRecordError as failure:
            self._wrong(request, half, failure)
            return
        self._check(request, record, wish, half)
        if wish.how == NOT_YET:
            request.answer(Answer.SUCCESS)
        else:
            self._append(request, wish.how, half, raw)

    def _not_open(self, request: Request, wish: Wish, replayed: int) -> None:
        store = self._parts.backend.store
        ended = store.transactions.ended(wish.offset)
        if ended is not None and not isinstance(request, OwnEnd):
            self._has_ended(request, wish, *ended)
        elif replayed <= wish.offset < store.max_offset:
            self._later(request, wish)  # replay will have read it soon
        elif isinstance(request, OwnEnd):
            self._look_up(request, wish, None if ended is None else ended[1])
        else:
            raise _failed(
                f"no transaction is open at offset {wish.offset}: it has ended before, or its half"
                " message was cut by a failover, or never stored"
            )

    def _has_ended(self, request: Request, wish: Wish, half: Half, ended: Ended) -> None:
        """Answer how a transaction has ended, by what replay remembers of its half message."""
        group = wish.group.encode("utf-8", "surrogateescape")[:NAME_MAX]
        keys = [id_.encode("utf-8", "surrogateescape")[:NAME_MAX] for id_ in wish.ids]
        # Of the message's own id its offset is known, and not its host.
        own = f"{wish.offset:016X}"
        is_same = not half.key or half.key in keys or any(id_.endswith(own) for id_ in wish.ids)
        _check_meant(wish, half, of_group=half.group in (None, group), of_message=is_same)
        if wish.how == NOT_YET or _HOW[wish.how] is ended:
            request.answer(Answer.SUCCESS)
        else:
            raise _failed(f"the transaction was {ended.value} before: nothing was done")

    def _look_up(self, request: OwnEnd, wish: Wish, ended: Ended | None) -> None:
        """Tell a producer of hastore's how its transaction has ended, as far as that is known."""
        assert request.connection is not None

        def then(found: Any, _payload: bytes | None) -> None:
            if isinstance(found, Failed):
                if found.status in ("BUSY", "SERVICE_NOT_AVAILABLE"):
                    request.answer(Answer.SYSTEM_BUSY, remark=found.reason)
                else:
                    request.leave_open(found.reason)  # nothing was read that says how it has ended
            elif not found.topic:
                request.answer(Answer.SYSTEM_ERROR, remark=found.reason)
            elif not request.may_send(found.topic):
                refusal = request.forbidden(_NOT_YOURS.format(wish.offset))
                request.answer(refusal.code, remark=refusal.remark)
            elif found.ended is _HOW[wish.how]:
                request.has_ended()
            else:
                text = f"the transaction was {found.ended.value} before: nothing was done"
                request.has_ended(otherwise=text)

        steps = look_up(self._parts.backend, request.asked, ended)
        busy = self._parts.queries.accept_query(request.connection, OwnQuery(steps, then))
        if busy is not None:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, busy)

    def _check(self, request: Request, record: Record, wish: Wish, half: Half) -> None:
        """Refuse a request that means another half message than the one that was found."""
        group, (topic, _) = group_of(record), real_place(record.properties)
        gate, not_yours = self._door.gate, _NOT_YOURS.format(half.offset)
        if isinstance(request, OwnEnd):
            if not request.may_send(topic):
                raise request.forbidden(not_yours)
        elif gate is not None and not gate.may_send(request, topic):
            raise gate.forbidden(request, not_yours)
        unique = find_property(record.properties, b"UNIQ_KEY")
        known = {record.message_id}
        if unique is not None:
            known.add(unique.decode("utf-8", "surrogateescape"))
        is_same = not known.isdisjoint(wish.ids)
        _check_meant(wish, half, of_group=group == wish.group, of_message=is_same)

    # -- waiting -----------------------------------------------------------------------------------

    def _later(self, request: Request, wish: Wish) -> None:
        """Look again soon, unless the request has waited for its time."""
        backend, now = self._parts.backend, self._clock.monotonic_ms()
        reason = backend.writable_reason()
        hold_ms = request.put.timeout_ms if isinstance(request, OwnEnd) else self._hold_ms
        if reason is not None or now >= request.came_ms + hold_ms:
            remark = reason or "this node does not know yet which transactions are open"
            request.answer(Answer.SERVICE_NOT_AVAILABLE, remark=remark)
            return
        if self._waiting >= WAITING_MAX:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, f"{self._waiting} requests wait for replay")
        self._waiting += 1
        self._door.at(now + TICK_MS, partial(self._again, request, wish))

    def _again(self, request: Request, wish: Wish) -> None:
        self._waiting -= 1
        self._go_on(request, wish, None)

    def _read(self, request: Request, wish: Wish, half: Half) -> None:
        """Let another thread read a half message that is not in memory."""
        whom = request.connection if request.connection is not None else self
        read = partial(self._parts.backend.store.reader.record_bytes, half.offset)

        def done(result: bytes | Exception | None) -> None:
            self._door.later(partial(self._go_on, request, wish, (half, result)))

        if not self._parts.cold.accept(whom, read, done):
            raise RemotingRefusal(Answer.SYSTEM_BUSY, TOO_MANY)

    def _go_on(
        self,
        request: Request,
        wish: Wish,
        read: tuple[Half, bytes | Exception | None] | None,
    ) -> None:
        try:
            if read is not None and isinstance(read[1], Exception):
                self._unreadable(request, read[0], read[1])
            else:
                self._decide(request, wish, read)  # type: ignore[arg-type]
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)

    def _unreadable(self, request: Request, half: Half, failure: Exception) -> None:
        """Answer that a half message cannot be read now; its transaction stays open."""
        self._parts.backend.store.reader.note_damage(half.offset)
        self._leave_open(request, failure)

    def _wrong(self, request: Request, half: Half, failure: Exception) -> None:
        """Answer the same of one whose CRC is right, but whose properties are damaged."""
        self._parts.backend.store.reader.note_wrong(half.offset)
        text = f"the half message at offset {half.offset} is damaged: {failure}"
        self._leave_open(request, CorruptRecordError(text))

    def _leave_open(self, request: Request, failure: Exception) -> None:
        _, reason = self._parts.failures.note("a half message", failure)
        if isinstance(request, OwnEnd):
            request.leave_open(reason)  # the disk may recover, or a repair may help
        else:
            request.answer(Answer.SYSTEM_ERROR, remark=reason)

    # -- appending ---------------------------------------------------------------------------------

    def _append(self, request: Request, how: int, half: Half, raw: bytes) -> None:
        decisions, store = self._decisions, self._parts.backend.store
        refusal = decisions.refusal(decisions.epoch)
        guard: DeliveriesIf | OwnIf
        if how == COMMIT:
            try:
                made = commit(raw)
                queue_id = store.delivery_queue(made.topic, made.queue_id)
                if queue_id != made.queue_id:  # its topic has fewer queues by now
                    made = commit(raw, queue_id=queue_id)
            except (CorruptRecordError, MessageIllegalError) as failure:
                self._wrong(request, half, failure)
                return
            payload, guard = made.record, DeliveriesIf(refusal)
        else:
            now_ms, host = self._clock.wall_ms(), store.store_host
            payload = b"".join(build_ended(half.places, now_ms, host))
            guard = OwnIf(refusal)
        decisions.make(half, _HOW[how])
        respond = partial(self._answer, request, how, half)
        put = request.put if isinstance(request, OwnEnd) else self._wait
        self._parts.puts.admit_own_record(put, payload, respond, guard, request.came_ms)

    def _answer(self, request: Request, how: int, half: Half, done: PutDone) -> None:
        """Answer with the outcome of what ends a transaction."""
        status = done.statuses[0] if done.statuses is not None else done.status
        self._decisions.settle(half, undone=status in _REFUSED)
        if status in (Status.MESSAGE_ILLEGAL, Status.PROPERTIES_SIZE_EXCEEDED):
            self._wrong(request, half, MessageIllegalError(done.reason))  # it was accepted once
            return
        if isinstance(request, OwnEnd):
            self.committed += status.is_stored and how == COMMIT
            self.rolled_back += status.is_stored and how == ROLLBACK
            request.done(done)
            return
        if status in _REFUSED:
            remark = done.reason or f"{status}: nothing was stored"
            request.answer(_REFUSED[status], remark=remark)
            return
        if status.is_stored:
            self.committed += how == COMMIT
            self.rolled_back += how == ROLLBACK
        if status is Status.PUT_OK:
            request.answer(Answer.SUCCESS)
        elif status.is_stored:
            request.answer(Answer.SYSTEM_ERROR, remark=f"{status}: stored, but not confirmed")
        else:
            reason = done.reason or "whether the transaction has ended is unknown"
            request.leave_open(reason, is_late=reason.startswith(_LATE))


def _check_meant(wish: Wish, half: Half, *, of_group: bool, of_message: bool) -> None:
    """Refuse a request that does not mean this half message: its group, place and message."""
    if not of_group:
        raise _failed("The producer group wrong")
    places = dict([*half.earlier, (half.offset, half.place)])
    if places.get(wish.offset) != wish.place:
        raise _failed("The transaction state table offset wrong")
    if not of_message:
        raise _failed(
            f"another message's half message is at offset {wish.offset}: that of"
            f" {wish.ids[0][:40]} was cut by a failover"
        )


def _number(fields: dict[str, str], name: str) -> int:
    text = fields.get(name, "")
    try:
        number = int(text)
    except ValueError as failure:
        raise _illegal(f"the field {name} is missing, or no whole number") from failure
    if not 0 <= number <= _LONG_MAX:
        raise _illegal(f"{name}={text[:40]} is not from 0 to {_LONG_MAX}")
    return number


def _illegal(remark: str) -> RemotingRefusal:
    return RemotingRefusal(Answer.MESSAGE_ILLEGAL, remark)


def _failed(remark: str) -> RemotingRefusal:
    return RemotingRefusal(Answer.SYSTEM_ERROR, remark)
