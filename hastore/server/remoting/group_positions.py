"""The positions of RocketMQ's consumer groups: hastore's committed positions, gathered and written.

    14   QUERY_CONSUMER_OFFSET     where a group is in a queue
    15   UPDATE_CONSUMER_OFFSET    often one way: each consumer says it every 5 s, for each queue

Commits wait up to ONE_WAY_MS for others of the same group and topic, and become one record. What
does not differ from the position that is known costs no record. A commit whose client waits for an
answer is written at once, and answered when its record is confirmed as a message is. One that is
one way is best effort, as it is at RocketMQ: the client says it again.

A commit may go back: a consumer that closes, or mqadmin, moves a group where it says. A query sees
what was committed before it, also what is not written yet: the consumer that takes a queue over
asks right after the one that had it has committed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable

from hastore.errors import HastoreError, Status, UsageError
from hastore.protocol.api import Commit, Position, PutDone
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import decode_record
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, number

ONE_WAY_MS = 500.0  # how long a commit that is one way waits for others
RETRY_MS = 5.0  # until a commit is tried again while one of its group is under way
CONFIRM_MS = 3_000  # for a record to be confirmed
MAX_PENDING = 50_000  # positions that wait to be written
PAIRS_MAX = 128  # groups and topics at once
MAX_RATES = 10_000  # groups whose progress is counted
QUEUES_MAX = 512  # in a record
MAX_GROUP = 255
MAX_TOPIC = 512
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1
# RocketMQ sends a new group to the start of a queue whose first message is in memory, as it counts.
_IN_MEMORY = 0.4

Pair = tuple[str, str]  # group, topic
Then = Callable[[int, str | None], None]  # takes the answer's code and remark
Found = Callable[[int | None, Exception | None], None]


class _Batch:
    """The commits of a group in a topic that are not written yet."""

    __slots__ = ("offsets", "waiting")

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}  # by queue
        self.waiting: list[Then] = []

    def end(self, code: int, remark: str | None = None) -> None:
        """Answer all who wait."""
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            then(code, remark)


class _Rate:
    """How much a group's positions advance: messages in this minute, and in the one before."""

    __slots__ = ("before", "current", "minute")

    def __init__(self) -> None:
        self.minute, self.before, self.current = -1, 0, 0

    def add(self, count: int, now_ms: float) -> None:
        """Count messages."""
        self.turn(now_ms)
        self.current += count

    def turn(self, now_ms: float) -> None:
        """Begin another minute if it is time."""
        minute = int(now_ms // 60_000)
        if minute != self.minute:
            self.before = self.current if minute == self.minute + 1 else 0
            self.minute, self.current = minute, 0

    def per_s(self, now_ms: float) -> float:
        """Return the messages a second in the last minute, roughly."""
        self.turn(now_ms)
        return (self.before + self.current) / (60.0 + now_ms % 60_000 / 1_000)


class GroupPositions:
    """Gathers commits and answers queries; in the API's thread, with its lock."""

    def __init__(self, door: Door, memory_bytes: int | None = None) -> None:
        """Prepare; `memory_bytes`: of this machine."""
        self._door = door
        self._clock = door.parts.clock
        self._commits = door.parts.commits
        self._table = door.parts.positions
        self._backend = door.parts.backend
        self._memory_bytes = _physical_memory() if memory_bytes is None else memory_bytes
        self._pending: dict[Pair, _Batch] = {}
        self._going: dict[Pair, dict[int, int]] = {}  # written, without an outcome yet
        self._count = 0  # positions in `_pending`
        self._due: deque[tuple[float, Pair]] = deque()
        self._ready: dict[Pair, None] = {}
        self._retrying = False  # a timer will write what is ready
        self._armed = False
        self._reading = False
        self._rates: dict[str, _Rate] = {}
        self.written = 0  # records
        self.dropped = 0  # commits that were one way, for lack of room

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.QUERY_CONSUMER_OFFSET: self.query,
            Code.UPDATE_CONSUMER_OFFSET: self.update,
        }

    # -- requests

    def update(self, request: RemotingRequest) -> None:
        """Take a commit of one queue."""
        fields = request.frame.fields
        pair = _pair(fields)
        queue = number(fields, "queueId", 0, _INT_MAX)
        offset = number(fields, "commitOffset", 0, _LONG_MAX)
        if request.frame.is_one_way:
            self.commit_later(*pair, queue, offset)
            request.answer(Answer.SUCCESS)
        else:
            self.commit(*pair, {queue: offset}, lambda code, why: request.answer(code, remark=why))

    def query(self, request: RemotingRequest) -> None:
        """Answer with a group's position; for a new group 0 or 22, as RocketMQ does."""
        fields = request.frame.fields
        group, topic = _pair(fields)
        queue = number(fields, "queueId", 0, _INT_MAX)

        def then(offset: int | None, failure: Exception | None) -> None:
            if failure is not None:
                reason = self._door.parts.failures.note("a query of a position", failure)[1]
                request.answer(Answer.SYSTEM_ERROR, remark=reason)
                return
            elsewhere = self._backend.positions_elsewhere() if offset is None else None
            if elsewhere is not None:  # 0 or none would let the group begin anew
                text = f"{elsewhere} knows the positions of groups, and this node does not yet"
                request.answer(Answer.SYSTEM_ERROR, remark=text)
                return
            if offset is None and fields.get("setZeroIfNotFound") != "false":
                offset = self._first(topic, queue)
            if offset is None:
                text = f"the group {group[:80]!r} has no position in this queue"
                request.answer(Answer.QUERY_NOT_FOUND, remark=text)
            else:
                request.answer(Answer.SUCCESS, {"offset": str(offset)})

        self.find(group, topic, queue, then)

    # -- for other handlers

    def commit_later(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Commit a position without an answer, together with others; dropped for lack of room.

        It is dropped, too, if no commit with an answer could have these names or this position.
        """
        pair = group, topic
        if _excess(*pair) or not (0 <= queue <= _INT_MAX and 0 <= offset <= _LONG_MAX):
            self.dropped += 1
            return
        batch = self._pending.get(pair)
        if batch is None:
            if self._count >= MAX_PENDING:
                self.dropped += 1
                return
            batch = self._pending[pair] = _Batch()
            self._due.append((self._clock.monotonic_ms() + ONE_WAY_MS, pair))
            self._arm()
        if queue not in batch.offsets:
            if self._count >= MAX_PENDING:
                self.dropped += 1
                return
            self._count += 1
        batch.offsets[queue] = offset

    def commit(self, group: str, topic: str, offsets: dict[int, int], then: Then) -> None:
        """Commit positions; `then` gets the answer's code once they are confirmed, or not."""
        pair = group, topic
        excess = _excess(*pair)
        if excess is not None:
            then(Answer.SYSTEM_ERROR, excess)
            return
        if self._count + len(offsets) > MAX_PENDING:
            then(Answer.SYSTEM_BUSY, "too many positions wait to be written; try again")
            return
        batch = self._pending.get(pair)
        if batch is None:
            batch = self._pending[pair] = _Batch()
        self._count += sum(1 for queue in offsets if queue not in batch.offsets)
        batch.offsets.update(offsets)
        batch.waiting.append(then)
        self._flush([pair])

    def find(self, group: str, topic: str, queue: int, then: Found) -> None:
        """Let `then` have the position of a group in a queue, None if it has none, or an error."""
        pair = group, topic
        batch, going = self._pending.get(pair), self._going.get(pair)
        if batch is not None and queue in batch.offsets:
            then(batch.offsets[queue], None)
        elif going is not None and queue in going:
            then(going[queue], None)
        else:

            def read(failure: Exception | None) -> None:
                known = None if failure is not None else self.known(group, topic).get(queue)
                then(known, failure)

            self.when_read(read)

    def known(self, group: str, topic: str) -> dict[int, int]:
        """Return a group's positions in a topic by queue; call it from `when_read`."""
        pair = group, topic
        found = {
            queue: place.queue_offset for queue, place in self._commits.known(group, topic).items()
        }
        found.update(self._going.get(pair, {}))
        batch = self._pending.get(pair)
        if batch is not None:
            found.update(batch.offsets)
        return found

    def places(self, group: str, topic: str) -> dict[int, Position]:
        """Return what `known` does, as positions; call it from `when_read`."""
        places = self._commits.known(group, topic)
        for queue, offset in self.known(group, topic).items():
            if queue not in places or places[queue].queue_offset != offset:
                places[queue] = Position(offset)
        return places

    def supersede(self, group: str, topic: str, queues: Iterable[int]) -> None:
        """Drop what was said of queues before their owner commits, and is not written yet.

        It would move the group back afterwards. Who waits for an answer has its say, though.
        """
        batch = self._pending.get((group, topic))
        if batch is not None and not batch.waiting:
            for queue in queues:
                if batch.offsets.pop(queue, None) is not None:
                    self._count -= 1

    def pairs(self) -> set[Pair]:
        """Return each group with each topic in which it has positions; call it from `when_read`."""
        return {*self._table.pairs(), *self._going, *self._pending}

    def groups(self) -> set[str]:
        """Return each group with positions, as far as they were read."""
        return {group for group, _ in self.pairs()}

    def rate(self, group: str) -> float:
        """Return by how many messages a second a group's positions advanced in the last minute."""
        found = self._rates.get(group)
        return 0.0 if found is None else found.per_s(self._clock.monotonic_ms())

    def when_read(self, call: Callable[[Exception | None], None]) -> None:
        """Make a call once this node has read all positions up to its readable offset."""

        def guarded(failure: Exception | None) -> None:
            try:
                call(failure)
            except Exception as problem:  # that of one request; the others go on
                self._door.parts.failures.note("a RocketMQ request about positions", problem)

        if not self._commits.when_read(guarded):
            raise RemotingRefusal(Answer.SYSTEM_BUSY, "too many requests wait for positions")

    # -- writing

    def _arm(self) -> None:
        if self._due and not self._armed:
            self._armed = True
            self._door.at(self._due[0][0], self._tick)

    def _tick(self) -> None:
        self._armed = False
        now, due = self._clock.monotonic_ms(), []
        while self._due and self._due[0][0] <= now:
            due.append(self._due.popleft()[1])
        self._flush(due)
        self._arm()

    def _flush(self, pairs: Iterable[Pair]) -> None:
        self._ready.update(dict.fromkeys(pairs))
        if self._ready and not self._reading:
            self._reading = self._commits.when_read(self._read)
            if not self._reading:
                self._again()

    def _again(self) -> None:
        """Write what is ready once RETRY_MS are over: one timer serves all that waits."""
        if not self._retrying:
            self._retrying = True
            self._door.at(self._clock.monotonic_ms() + RETRY_MS, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self._flush(())

    def _read(self, failure: Exception | None) -> None:
        """Write what is ready; the table has caught up, or there is a failure."""
        self._reading = False
        waits = False
        for pair in list(self._ready)[:PAIRS_MAX]:
            try:
                if pair in self._going:
                    waits = True  # one of its commits is under way
                    continue
                del self._ready[pair]
                batch = self._take(pair)
                if batch is not None and failure is not None:
                    reason = self._door.parts.failures.note("a commit of positions", failure)[1]
                    batch.end(Answer.SYSTEM_ERROR, reason)
                elif batch is not None:
                    self._write(pair, batch)
            except Exception as problem:  # that of one group; the others go on
                self._door.parts.failures.note("a commit of positions", problem)
        if waits:
            self._again()
        elif self._ready and not self._retrying:
            self._flush(())

    def _take(self, pair: Pair) -> _Batch | None:
        batch = self._pending.pop(pair, None)
        if batch is not None:
            self._count -= len(batch.offsets)
        return batch

    def _put_back(self, pair: Pair, batch: _Batch) -> None:
        """Let a batch wait on, behind what was committed since."""
        later = self._pending.get(pair)
        if later is not None:
            self._count -= len(later.offsets)
            batch.offsets.update(later.offsets)
            batch.waiting += later.waiting
        self._pending[pair] = batch
        self._count += len(batch.offsets)
        self._ready[pair] = None
        self._again()

    def _write(self, pair: Pair, batch: _Batch) -> None:
        """Write what differs from the known positions; answer if nothing does."""
        known = self._commits.known(*pair)
        # Who waits for an answer gets a record of its own. A position that is equal to the known
        # one is no proof: later records that are not confirmed yet may move it elsewhere.
        changed = batch.offsets if batch.waiting else {
            queue: offset
            for queue, offset in batch.offsets.items()
            if self._differs(pair[1], queue, offset, known.get(queue))
        }  # fmt: skip
        if not changed:
            batch.end(Answer.SUCCESS)
            return
        part, written = changed, batch
        if len(changed) > QUEUES_MAX:
            part = dict(list(changed.items())[:QUEUES_MAX])
            written = self._leave_rest(pair, batch, changed, part)
        places = {queue: Position(offset) for queue, offset in part.items()}
        request = Commit(0, *pair, places, CONFIRM_MS, list(part))

        def done(outcome: PutDone) -> None:
            self._going.pop(pair, None)
            self._end(written, outcome)

        def fail(status: str, reason: str) -> None:
            self._going.pop(pair, None)
            code = Answer.SYSTEM_BUSY if status == "BUSY" else Answer.SYSTEM_ERROR
            written.end(code, reason)

        self._going[pair] = part
        try:
            if self._commits.begin(request, self._clock.monotonic_ms(), done, fail):
                self._count_progress(pair[0], part, known)
                self.written += 1
                return
        except (UsageError, HastoreError) as failure:
            fail(type(failure).__name__, str(failure))
            return
        del self._going[pair]
        if written is not batch:
            self._take(pair)  # the rest, in which nothing has come since
        self._put_back(pair, batch)

    def _leave_rest(
        self, pair: Pair, batch: _Batch, changed: dict[int, int], part: dict[int, int]
    ) -> _Batch:
        """Let what does not fit into a record wait on, where newer commits replace it.

        Return the batch of the part that is written. Who waits is answered once: with the rest, or
        as soon as a part fails.
        """
        waiting, first, rest = list(batch.waiting), _Batch(), _Batch()
        rest.offsets = {queue: place for queue, place in changed.items() if queue not in part}

        def tell(code: int, why: str | None) -> None:
            told = waiting[:]
            waiting.clear()
            for then in told:
                then(code, why)

        def part_done(code: int, why: str | None) -> None:
            if code != Answer.SUCCESS:
                tell(code, why)

        if waiting:
            first.waiting, rest.waiting = [part_done], [tell]
        self._put_back(pair, rest)
        return first

    def _count_progress(
        self, group: str, changed: dict[int, int], known: dict[int, Position]
    ) -> None:
        steps = [offset - known[queue].queue_offset for queue, offset in changed.items()
                 if queue in known]  # fmt: skip
        rate = self._rates.get(group)
        if rate is None:
            if len(self._rates) >= MAX_RATES:
                self._rates.clear()
            rate = self._rates[group] = _Rate()
        rate.add(sum(step for step in steps if step > 0), self._clock.monotonic_ms())

    def _differs(self, topic: str, queue: int, offset: int, known: Position | None) -> bool:
        if known is None or known.queue_offset != offset:
            return True
        return known.epoch is not None and not self._commits.is_there(topic, queue, known)

    def _end(self, batch: _Batch, outcome: PutDone) -> None:
        status = outcome.status
        if status is Status.PUT_OK:
            batch.end(Answer.SUCCESS)
        elif status is Status.SERVICE_NOT_AVAILABLE:
            batch.end(Answer.SERVICE_NOT_AVAILABLE, outcome.reason)
        elif status.is_stored or status is Status.TIMEOUT:
            why = outcome.reason or status.value
            batch.end(Answer.SYSTEM_ERROR, f"whether the position is kept is not known: {why}")
        else:
            batch.end(Answer.SYSTEM_BUSY, outcome.reason or status.value)

    # -- new groups

    def _first(self, topic: str, queue: int) -> int | None:
        """Return a queue's start if a new group begins there; None: the client asks further.

        It begins there if the queue has lost no message, and has none or the first of them is
        recent. RocketMQ answers 22 for an empty queue, so its clients miss what arrives between
        that answer and their question for the end of the queue.

        A topic that was deleted and made again has lost none if the log reaches back to the
        deletion; its queues start where they ended then.
        """
        store = self._backend.store
        start, end = store.queues.queue_range(topic, queue) or (0, 0)
        if start > 0 and store.queues.begin_of(topic) <= store.min_offset:
            return None
        reach = self._memory_bytes * _IN_MEMORY
        if start == end or store.max_offset - store.min_offset <= reach:
            return start
        try:
            with store.reader.without_waiting():
                pulled = store.reader.pull(
                    topic, queue, start, max_messages=1, max_bytes=1,
                    limit_offset=store.readable_offset, check_bodies=False,
                )  # fmt: skip
        except (HastoreError, OSError):  # it is on the disk only
            return None
        if not pulled.count:
            return start
        first = decode_record(pulled.records, 0).physical_offset
        return start if store.max_offset - first <= reach else None


def _pair(fields: dict[str, str]) -> Pair:
    group, topic = needed(fields, "consumerGroup"), needed(fields, "topic")
    excess = _excess(group, topic)
    if excess is not None:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, excess)
    return group, topic


def _excess(group: str, topic: str) -> str | None:
    """Return why no position is kept under these names; None if it can be."""
    if len(group) <= MAX_GROUP and len(topic) <= MAX_TOPIC:
        return None
    text = f"a group of {len(group)} characters and a topic of {len(topic)}"
    return f"{text}; at most {MAX_GROUP} and {MAX_TOPIC} are allowed"


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
