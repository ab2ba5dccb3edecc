"""LOCK_BATCH_MQ and UNLOCK_BATCH_MQ (41, 42): the locks of consumers that read in order.

The rules are in queue_locks.py. This module reads the records before the first lock of an epoch,
appends records and proofs, and answers when they are confirmed. A request that cannot be decided
now is answered with code 2: the consumer believes on in the locks that it was given before. If
nothing was stored because slaves are missing, as right after a promotion, it is tried again soon
(`RemotingRequest.answer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from hastore.errors import HastoreError, Status
from hastore.protocol.api import Put, PutDone
from hastore.protocol.committed_positions import CommitBody
from hastore.protocol.remoting import Answer, Code, encode_body
from hastore.server.api.commit_records import commit_record
from hastore.server.remoting.door import (
    Door,
    Handler,
    RemotingRefusal,
    RemotingRequest,
    signer_of,
)
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.queue_locks import (
    CONFIRM_MS,
    LASTS_MS,
    PROOF_MS,
    Claims,
    Queue,
    QueueLocks,
)

MAX_BODY_BYTES = 256 * 1024
MAX_QUEUES = 1_024  # of one request
MAX_WAITING_BYTES = 32 * 1024 * 1024  # of memory, estimated, for all requests without an answer
_REQUEST_BYTES = 2_048  # of a request without its body
_COST = 4  # bytes of memory for each byte of a body: the queues in it, and the bytes
MAX_NAME = 255
MAX_TOPIC = 512
LOOK_MS = 5_000.0  # so often it is looked whether this node leads
NOT_DECIDED = "the locks cannot be decided now"


class _Why(NamedTuple):
    """Why something is not confirmed: `code` says whether nothing was stored, for now."""

    text: str
    code: Answer = Answer.SYSTEM_BUSY


Then = Callable[[_Why | None], None]  # None: it is confirmed


class _Queue(msgspec.Struct):
    topic: str
    queueId: int
    brokerName: str = ""


class _Asked(msgspec.Struct):
    consumerGroup: str
    clientId: str
    mqSet: list[_Queue] | None = None


_Act = Callable[[RemotingRequest, _Asked], None]
# Nothing was stored: there is no master, or it lacks slaves.
_FOR_NOW = frozenset({Status.SERVICE_NOT_AVAILABLE, Status.SLAVE_NOT_AVAILABLE})


class LockRequests:
    """The handlers of locks, of one node."""

    def __init__(
        self,
        door: Door,
        positions: GroupPositions,
        is_queue: Callable[[Queue], bool] = lambda _queue: True,
    ) -> None:
        """Prepare; `positions` reads the records. Other queues than `is_queue` have no locks."""
        self._is_queue = is_queue
        self._door = door
        self._clock = door.parts.clock
        self._backend = door.parts.backend
        self._table = door.parts.positions
        self._positions = positions
        self.locks = QueueLocks()
        self._since: tuple[int, float] | None = None  # (epoch, since when this node leads it)
        self._beginning = False
        self._waiting: list[tuple[RemotingRequest, _Asked, _Act]] = []
        self._memory = 0  # of all requests without an answer, estimated
        self._provers: list[Then] = []  # who waits for the proof that is under way
        self.written = 0  # records
        door.problems_of.append(self.locks.problems)
        door.at(self._clock.monotonic_ms() + LOOK_MS, self._look)

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {Code.LOCK_BATCH_MQ: self.lock, Code.UNLOCK_BATCH_MQ: self.unlock}

    def lock(self, request: RemotingRequest) -> None:
        """Give a consumer the locks that it may have."""
        self._take(request, self._decide)

    def unlock(self, request: RemotingRequest) -> None:
        """End a consumer's locks."""
        self._take(request, self._release)

    def _take(self, request: RemotingRequest, act: _Act) -> None:
        """Act on a request, once the records are read; its memory counts until it is answered."""
        asked = _decode(request)
        leads = self._leads()
        if self._memory + _cost(request) > MAX_WAITING_BYTES:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, f"{NOT_DECIDED}: too many requests wait")
        self._memory += _cost(request)
        if leads:
            act(request, asked)
        else:
            self._waiting.append((request, asked, act))
            self._begin(asked)

    def _answer(
        self, request: RemotingRequest, code: int, body: bytes = b"", remark: str | None = None
    ) -> None:
        self._memory -= _cost(request)
        request.answer(code, body=body, remark=remark)

    def _refuse(self, request: RemotingRequest, why: _Why) -> None:
        self._answer(request, why.code, remark=f"{NOT_DECIDED}: {why.text}")

    # -- as the master of a new epoch

    def _leads(self) -> bool:
        """Whether the locks of this epoch are known; raises RemotingRefusal on another node."""
        reason = self._backend.writable_reason()
        if reason is not None:
            raise RemotingRefusal(Answer.SERVICE_NOT_AVAILABLE, reason)
        epoch = self._backend.epoch()
        if self._since is None or self._since[0] != epoch:
            self._since = epoch, self._clock.monotonic_ms()
            self.locks.end()
        return self.locks.epoch == epoch

    def _look(self) -> None:
        """Note since when this node leads, though nobody asks: old locks end the sooner."""
        with contextlib.suppress(RemotingRefusal):
            self._leads()
        self.locks.tidy(self._clock.monotonic_ms())
        self._door.at(self._clock.monotonic_ms() + LOOK_MS, self._look)

    def _begin(self, asked: _Asked) -> None:
        """Read all records of earlier epochs: those before one that this epoch has confirmed."""
        if self._beginning or self._since is None:
            return
        self._beginning = True
        epoch, since_ms = self._since
        appended_ms = self._clock.monotonic_ms()

        def confirmed(offset: int, why: _Why | None) -> None:
            if why is not None:
                self._give_up(why)
                return
            self._door.parts.commits.note_confirmed(offset)
            try:
                self._positions.when_read(partial(read, offset))
            except RemotingRefusal as refusal:
                self._give_up(_Why(refusal.remark))

        def read(offset: int, failure: Exception | None) -> None:
            if failure is not None:
                why = self._door.parts.failures.note("reading the locks", failure)[1]
                self._give_up(_Why(why))
            elif not self._table.has_read(offset) or self._backend.epoch() != epoch:
                self._give_up(_Why("the log has changed meanwhile"))
            else:
                self._read_records(epoch, since_ms)
                self.locks.prove(appended_ms)
                self._go_on()

        topic = asked.mqSet[0].topic if asked.mqSet else asked.consumerGroup
        self._append(CommitBody(asked.consumerGroup, topic, {}), epoch, confirmed)

    def _read_records(self, epoch: int, since_ms: float) -> None:
        recorded = self._table.locks
        recorded.forget_older(LASTS_MS)
        complete = not recorded.lacks_within(LASTS_MS)
        self.locks.begin(epoch, recorded, since_ms, complete=complete)

    def _go_on(self) -> None:
        self._beginning = False
        waiting, self._waiting = self._waiting, []
        for request, asked, act in waiting:
            try:
                if self._leads():
                    act(request, asked)
                else:
                    self._refuse(request, _Why("this node may not be the master any more"))
            except RemotingRefusal as refusal:
                self._answer(request, refusal.code, remark=refusal.remark)

    def _give_up(self, why: _Why) -> None:
        self._beginning = False
        waiting, self._waiting = self._waiting, []
        for request, _, _ in waiting:
            self._refuse(request, why)

    # -- decisions

    def _decide(self, request: RemotingRequest, asked: _Asked) -> None:
        group, client, now = asked.consumerGroup, asked.clientId, self._clock.monotonic_ms()
        epoch = self.locks.epoch
        # Of RocketMQ's consumers only those that read in order ask; another node forwards theirs.
        in_order = request.connection is None or request.connection.remoting
        meter = None if request.connection is None else request.connection.meter
        may_add = meter is None or meter.may_record(now)
        owner = signer_of(request) or None
        wish = self.locks.ask(
            group, client, _queues(asked), now, request.came_ms, in_order=in_order,
            owner=owner, may_add=may_add, is_queue=self._is_queue,
        )  # fmt: skip
        claims = {**wish.renewed, **wish.new}
        if meter is not None and wish.new:
            meter.record(len(request.frame.body), now)
        if not claims and wish.lacks:
            self._refuse(request, _Why("there is no room for more locks"))
            return
        if not claims and not may_add and asked.mqSet:
            assert meter is not None
            self._refuse(request, _Why(meter.why(owner or "")))
            return

        def then(why: _Why | None) -> None:
            if why is None and (self.locks.epoch != epoch or not self._is_proved()):
                why = _Why("this node may not be the master any more")
            if why is not None:
                self._refuse(request, why)
                return
            granted = self.locks.grant(group, claims, self._clock.monotonic_ms())
            self._answer(request, Answer.SUCCESS, _granted(asked, set(granted)))

        if wish.new:
            self._record(group, client, wish.new, then)
        elif not claims:
            self._answer(request, Answer.SUCCESS, _granted(asked, set()))
        elif self.locks.is_proved(now):
            then(None)
        else:
            self._prove(group, client, wish.renewed, then)

    def _release(self, request: RemotingRequest, asked: _Asked) -> None:
        """End locks. A record says so to the next master, which would keep them for the client."""
        group, client, epoch = asked.consumerGroup, asked.clientId, self.locks.epoch
        assert epoch is not None
        ended = self.locks.release(group, client, _queues(asked), request.came_ms)
        for topic, queues in _by_topic(ended).items():
            released = dict.fromkeys(queues, client)
            body = CommitBody(group, topic, {}, released=released)
            self._append(body, epoch, lambda _offset, _why: None)  # lost: the next master waits
        self._answer(request, Answer.SUCCESS)

    def _is_proved(self) -> bool:
        return self.locks.is_proved(self._clock.monotonic_ms())

    def _prove(self, group: str, client: str, claims: Claims, then: Then) -> None:
        """Let `then` wait for a proof; one record is the proof for all who wait."""
        self._provers.append(then)
        if len(self._provers) > 1:
            return

        def proved(why: _Why | None) -> None:
            provers, self._provers = self._provers, []
            for each in provers:
                each(why)

        self._record(group, client, dict(islice(claims.items(), 1)), proved)

    def _record(self, group: str, client: str, claims: Claims, then: Then) -> None:
        """Append records that a consumer holds these locks; `then` follows when all are there."""
        epoch, appended_ms = self.locks.epoch, self._clock.monotonic_ms()
        assert epoch is not None
        by_topic = _by_topic(claims)
        missing = len(by_topic)
        problem: _Why | None = None

        def confirmed(_offset: int, why: _Why | None) -> None:
            nonlocal missing, problem
            missing -= 1
            problem = why or problem
            if missing:
                return
            if problem is None and self.locks.epoch == epoch:
                self.locks.settle(group, claims, appended_ms)
                self.locks.prove(appended_ms)
            then(problem)

        for topic, locks in by_topic.items():
            body = CommitBody(group, topic, {}, {}, dict.fromkeys(locks, client))
            self._append(body, epoch, confirmed)

    def _append(
        self, body: CommitBody, epoch: int, then: Callable[[int, _Why | None], None]
    ) -> None:
        """Append a record; `then` gets its offset once it is confirmed, or why it is not."""
        self.written += 1

        def respond(done: PutDone) -> None:
            if done.status is Status.PUT_OK and done.offsets and done.epoch == epoch:
                then(done.offsets[0], None)
                return
            code = Answer.SERVICE_NOT_AVAILABLE if done.status in _FOR_NOW else Answer.SYSTEM_BUSY
            then(-1, _Why(done.reason or done.status.value, code))

        try:
            record = commit_record(body, self._clock.wall_ms())
        except HastoreError as failure:
            then(-1, _Why(str(failure), Answer.SYSTEM_ERROR))
            return
        put = Put(0, None, False, int(min(CONFIRM_MS, PROOF_MS)))
        self._door.parts.puts.admit_own_record(put, record, respond)


def _cost(request: RemotingRequest) -> int:
    return _REQUEST_BYTES + _COST * len(request.frame.body)


def _by_topic(queues: Iterable[Queue]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, queue in queues:
        found.setdefault(topic, []).append(queue)
    return found


def _decode(request: RemotingRequest) -> _Asked:
    body = request.frame.body
    if len(body) > MAX_BODY_BYTES:
        text = f"a request for locks of {len(body)} bytes; at most {MAX_BODY_BYTES}"
        raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, f"no request for locks: {failure}") from failure
    queues = asked.mqSet or []
    if len(queues) > MAX_QUEUES:
        text = f"a request for the locks of {len(queues)} queues; at most {MAX_QUEUES}"
        raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
    names = ((asked.consumerGroup, MAX_NAME), (asked.clientId, MAX_NAME))
    for name, most in (*names, *((queue.topic, MAX_TOPIC) for queue in queues)):
        if not 1 <= len(name) <= most:
            text = f"a request for locks with a name of {len(name)} characters; 1 to {most}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        if "\x01" in name or "\x02" in name:  # no record could hold it: nobody would get a lock
            text = f"a request for locks with the name {name[:40]!r}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
    for queue in queues:
        if not 0 <= queue.queueId < 2**31:
            text = f"a request for the lock of queue {queue.queueId}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
    return asked


def _queues(asked: _Asked) -> list[Queue]:
    return [(queue.topic, queue.queueId) for queue in asked.mqSet or ()]


def _granted(asked: _Asked, granted: set[Queue]) -> bytes:
    found: list[Any] = [
        {"brokerName": queue.brokerName, "queueId": queue.queueId, "topic": queue.topic}
        for queue in asked.mqSet or ()
        if (queue.topic, queue.queueId) in granted
    ]
    return encode_body({"lockOKMQSet": found})
