"""Committed positions: the latest of each group, and the commits of new ones.

    topic HASTORE_POSITIONS, queue 0; KEYS = the consumer group; body (JSON):
    {"group": G, "topic": T, "positions": {"<queue>": [queue_offset, epoch|null, offset|null]},
     "origins": {"<queue>": offset in the log of the commit that this one repeats},
     "locks": {"<queue>": client id}, "member": client id}

A commit is an ordinary put and is confirmed as one, so positions are as durable as messages.
Positions whose records retention would remove are written again (kept_positions.py), with
`origins`. Each node reads the topic up to its own readable offset (`PositionTable`), so slaves
answer too.

`CommitHandler` takes one commit at a time for each group and topic. If a commit is lower than the
group's position in any queue, the whole commit is refused, unless it names that queue in `back`.
Without this rule, two consumers of one group could move the position back and forth. A position
that a failover cut away is not compared. A commit of a `member` of a group that shares its queues
is refused as FENCED, unless that member has the locks of all its queues in this moment.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from hastore.clock import Clock
from hastore.ha.rules.epochs import EpochStarts, Standing, epoch_of
from hastore.protocol.api import (
    POSITION_BEHIND,
    POSITIONS_TOPIC,
    Commit,
    Position,
    Put,
    PutDone,
    Status,
)
from hastore.protocol.committed_positions import (
    MAX_GROUPS,
    MAX_TABLE_BYTES,
    READ_FACTOR,
    TAKEN_OVER,
    CommitBody,
    LocksRead,
    Pair,
    Place,
    PositionMap,
    RecordedLocks,
    with_kept,
)
from hastore.record.codec import Record
from hastore.server.api.backend import ApiBackend
from hastore.server.api.commit_records import (
    QUEUE,
    CommitReader,
    commit_record,
    read_commit_records,
)
from hastore.server.api.connections import Connection
from hastore.server.api.puts import PutHandler

_CHUNK_BYTES = 1024 * 1024
_CHUNK_COMMITS = 256  # read at once: some 2 ms of work, so that puts do not wait for more
MAX_CALLS = 10_000  # that wait until the table has caught up
_WARN_SHARE = 0.8  # of the pairs, or of their memory, that may have positions
_REMEDY = (
    "delete topics that nobody needs (`hastore topics delete`): their positions then make room;"
    " `hastore groups list` shows all, and programs that invent a new group at each start should"
    " use one name, or none"
)
_NO_LOCKS = "UsageError", "this node gives no locks of queues"


# Records with their commits, and the queue offset after them.
CommitsRead = tuple[list[tuple[Record, CommitBody | None]], int]
WhenRead = Callable[[Exception | None], None]


class NextRead(NamedTuple):
    """A read of the positions' topic. Any thread may `run` it, one at a time."""

    history: EpochStarts  # under which it is valid
    at: int  # the queue offset that it begins at
    run: Callable[[], CommitsRead | None]


class LastRead(NamedTuple):
    """The record that was read last: where, and what tells it from any other that may be there."""

    epoch: int
    offset: int
    queue_offset: int
    stored_ms: int
    crc32: int  # of its body

    @staticmethod
    def of(epoch: int, record: Record) -> LastRead:
        """Return what to keep of a record."""
        at, stored_ms = record.physical_offset, record.store_timestamp_ms
        return LastRead(epoch, at, record.queue_offset, stored_ms, zlib.crc32(record.body))


class TableRead(NamedTuple):
    """All that a PositionTable has read."""

    next: int
    last: LastRead
    positions: Mapping[Pair, Mapping[int, Place]]
    locks: LocksRead


class PositionTable:
    """The latest committed positions; the API's lock is held in every call."""

    def __init__(self, backend: ApiBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._latest = PositionMap()  # from the records read so far
        self._reader = CommitReader(clock, near_end=True)
        self._next = 0  # the next queue offset to read
        self._last: tuple[int, Record] | None = None  # its epoch, and the record read last
        self.commits = 0  # how many were read
        self.locks = RecordedLocks()  # the holders of queues' locks, by the records read so far
        self.warm = False  # all that could be read was read, and not forgotten since
        self.lent = False  # another thread runs a `next_read`: nobody else may meanwhile

    def record_of(self, commit: Commit) -> bytes:
        """Return a commit as a record."""
        places = {
            queue: (place.queue_offset, place.epoch, place.offset)
            for queue, place in commit.positions.items()
        }
        body = CommitBody(commit.group, commit.topic, places, member=commit.member or "")
        return commit_record(body, self._clock.wall_ms())

    def problem_of(self, commit: Commit) -> str | None:
        """Return why there is no room for the queues that a commit adds; None if there is.

        A full table first drops the positions in topics that were deleted.
        """
        group, topic = commit.group, commit.topic
        known = self._latest.find(group, topic)
        more = sum(1 for queue in commit.positions if queue not in known)
        if not more or self._latest.has_room(group, topic, more):
            return None
        if self._drop_deleted() and self._latest.has_room(group, topic, more):
            return None
        return (
            f"the groups of this node keep positions in as many topics as they may, {MAX_GROUPS:,}"
            f" pairs of group and topic or {MAX_TABLE_BYTES >> 20} MiB; {_REMEDY}"
        )

    def _drop_deleted(self) -> bool:
        return self._latest.drop_topics(self._backend.store.topic_table.gone()) > 0

    def problem(self) -> str | None:
        """Return that there is hardly room for more groups; None if there is. Any thread asks."""
        pairs, size = len(self._latest), self._latest.memory_bytes
        if max(pairs / MAX_GROUPS, size / MAX_TABLE_BYTES) < _WARN_SHARE:
            return None
        left = PositionMap(self._latest.copied())
        left.drop_topics(self._backend.store.topic_table.gone())
        pairs, size = len(left), left.memory_bytes
        if max(pairs / MAX_GROUPS, size / MAX_TABLE_BYTES) < _WARN_SHARE:
            return None  # the others are dropped once the room is needed
        return (
            f"the groups keep positions in {pairs:,} of {MAX_GROUPS:,} possible pairs of group and"
            f" topic, and {size >> 20} of {MAX_TABLE_BYTES >> 20} MiB: beyond that commits of new"
            f" groups are refused; {_REMEDY}"
        )

    def find(self, group: str, topic: str) -> dict[int, Position]:
        """Return the latest positions of a group in a topic, as far as `catch_up` has read."""
        # The kept positions are fetched after `catch_up` has read the log, so that none is missed:
        # retention keeps a position before it removes the record.
        kept = self._backend.kept_positions(group, topic)
        found = with_kept(kept, self._latest.find(group, topic), self._backend.store.min_offset)
        return {queue: place.position for queue, place in found.items()}

    def pairs(self) -> list[tuple[str, str]]:
        """Return each group with each topic in which it has positions, as far as was read."""
        return [pair for pair in self._latest if pair[0] != TAKEN_OVER]

    def snapshot(self) -> dict[tuple[str, str], Mapping[int, Place]]:
        """Return all positions that were read, without those kept by retention; any thread asks."""
        return {pair: at for pair, at in self._latest.copied().items() if pair[0] != TAKEN_OVER}

    def has_read(self, offset: int) -> bool:
        """Whether the record at an offset of the log has been read."""
        return self._last is not None and self._last[1].physical_offset >= offset

    def copied(self) -> TableRead | None:
        """Return all that was read, for `restore`; None if that is nothing."""
        if self._last is None:
            return None
        read = LastRead.of(*self._last)
        return TableRead(self._next, read, self._latest.copied(), self.locks.copied())

    def restore(self, read: TableRead) -> bool:
        """Go on from what an earlier process has read, if the log still has all of that.

        A log that has the record read last, in the same epoch, has all before it, too. The API's
        lock is not needed yet, and this may wait for the disk. Raises what that read raises.
        """
        store, last = self._backend.store, read.last
        history = self._backend.history()
        standing, _ = self._backend.standing(history, last.epoch, last.offset)
        if standing is not Standing.AGREED or last.offset < store.min_offset:
            return False
        record = store.reader.record_at(last.offset)
        if record is None or LastRead.of(epoch_of(history, last.offset), record) != last:
            return False
        self._next, self._last = read.next, (last.epoch, record)
        self._latest = PositionMap(read.positions)
        self.locks.restore(read.locks)
        return True

    def catch_up(self) -> bool:
        """Read some more commits; return whether the readable offset was reached.

        Raises NotCachedError if the bytes are on the disk only: let another thread run `next_read`.
        """
        read = self.next_read()
        if read is None:
            return True
        with self._backend.store.reader.without_waiting():
            pulled = read.run()
        return self.take(read, pulled)

    def next_read(self) -> NextRead | None:
        """Return what to read next, and how; None if there is nothing at all."""
        store = self._backend.store
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            self._forget()
            self.warm = True
            return None
        if not self._still_there(known):
            self._forget()
        if self._next < known[0]:  # retention has removed the records between
            self._next = known[0]
            self.locks.note_gap()
        run = partial(self._pull, self._next, store.readable_offset)
        return NextRead(self._backend.history(), self._next, run)

    def _pull(self, at: int, limit_offset: int) -> CommitsRead | None:
        pulled = self._reader.next(
            self._backend.store.reader, at,
            max_messages=_CHUNK_COMMITS, max_bytes=_CHUNK_BYTES, limit_offset=limit_offset,
        )  # fmt: skip
        return None if pulled is None else (list(read_commit_records(pulled[0])), pulled[1])

    def unread(self) -> int:
        """Return how many commits in the log are not read yet; those not confirmed count, too."""
        known = self._backend.store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        return 0 if known is None else max(0, known[1] - max(self._next, known[0]))

    def take(self, read: NextRead, pulled: CommitsRead | None) -> bool:
        """Take what a read gave; return whether the readable offset was reached."""
        if self._backend.history() != read.history:  # a failover may have cut the bytes just read
            return False
        if read.at != self._next:  # it was forgotten meanwhile what was read before
            return False
        if pulled is None:
            self.warm = True
            return True
        if not pulled[0]:  # a record is damaged, or retention was quicker
            self.locks.note_gap()
        self._read(read.history, pulled[0])
        self._next = pulled[1]
        return False

    def _forget(self) -> None:
        self._latest.clear()
        self.locks.clear()
        self._next = 0
        self._last = None
        self.warm = False

    def _still_there(self, known: tuple[int, int]) -> bool:
        """Whether the log still has the records that were read: a rewind may have cut them."""
        if self._next > known[1]:
            return False
        if self._last is None:
            return True
        (epoch, record), history = self._last, self._backend.history()
        standing, _ = self._backend.standing(history, epoch, record.physical_offset)
        return standing is Standing.AGREED

    def _read(self, history: EpochStarts, records: list[tuple[Record, CommitBody | None]]) -> None:
        self.commits += len(records)
        for record, body in records:
            offset, stored_ms = record.physical_offset, record.store_timestamp_ms
            self._last = (epoch_of(history, offset), record)
            self.locks.apply(body, stored_ms)
            if body is not None and not self._latest.apply_commit(body, offset):
                self._drop_deleted()  # as the master did before it took this commit
                self._latest.apply_commit(body, offset, READ_FACTOR)


class _Stored(NamedTuple):
    """The last commit of a group in a topic that was appended, perhaps unconfirmed."""

    epoch: int
    offset: int
    positions: dict[int, Position]


class CommitHandler:
    """Take commits; the API's lock is held in every call."""

    def __init__(
        self,
        backend: ApiBackend,
        positions: PositionTable,
        puts: PutHandler,
        answer: Callable[[Connection, PutDone], None],
        fail: Callable[[Connection, int, str, str], None],
        wake: Callable[[], None],
        clock: Clock,
        on_moved: Callable[[Connection, Commit, PutDone], None],
    ) -> None:
        """Prepare; `wake` makes the API's thread offer postponed commits again.

        `on_moved` is told of each commit that names queues whose position may move back.
        """
        self._backend = backend
        self._positions = positions
        self._puts = puts
        self._answer = answer
        self._fail = fail
        self._wake = wake
        self._clock = clock
        self._on_moved = on_moved
        self._under_way: set[tuple[str, str]] = set()
        self._postponed = False
        self._stored: dict[tuple[str, str], _Stored] = {}  # until _positions has read them
        self._calls: list[WhenRead] = []
        # Says why a member may not commit: a status and a reason. Set by who gives the locks.
        self.fence: Callable[[Commit], tuple[str, str] | None] = lambda _commit: _NO_LOCKS
        self.last_offset = 0  # start of the last commit confirmed on this node

    @property
    def has_calls(self) -> bool:
        """Whether something waits until the table has caught up."""
        return bool(self._calls)

    def when_read(self, call: WhenRead) -> bool:
        """Make a call once the table has caught up, or with why it cannot.

        Return False if too many calls wait already; this one is not made then.
        """
        if len(self._calls) >= MAX_CALLS:
            return False
        if not self._calls:
            self._wake()
        self._calls.append(call)
        return True

    def make_calls(self, failure: Exception | None = None) -> None:
        """Make the calls that wait: the table has caught up, or there is a failure."""
        calls, self._calls = self._calls, []
        for call in calls:
            call(failure)

    def note_confirmed(self, offset: int) -> None:
        """Note a record of the positions' topic that this node wrote and that is confirmed.

        From now on the table has caught up only if it has read this record.
        """
        self.last_offset = max(self.last_offset, offset)

    def known(self, group: str, topic: str) -> dict[int, Position]:
        """Return a group's positions once the table has caught up, unconfirmed ones included."""
        return {**self._positions.find(group, topic), **self._unread((group, topic))}

    def begin_commit(self, connection: Connection, request: Commit, came_ms: float) -> bool:
        """Take a commit; return False while an earlier one of its group and topic is under way.

        Call this after the table has caught up. The commit arrived at `came_ms`; it is refused if
        its timeout has passed since. Raises UsageError if the commit does not fit into a record.
        """
        answer = partial(self._answer, connection)
        if request.back and request.member is None:  # as `hastore groups reset`; a member never
            answer = partial(self._answer_moved, connection, request)
        return self.begin(request, came_ms, answer, partial(self._fail, connection, request.rid))

    def _answer_moved(self, connection: Connection, request: Commit, done: PutDone) -> None:
        """Answer a commit that may move positions back, and tell the audit log of it."""
        self._on_moved(connection, request, done)
        self._answer(connection, done)

    def begin(
        self,
        request: Commit,
        came_ms: float,
        answer: Callable[[PutDone], None],
        fail: Callable[[str, str], None],
    ) -> bool:
        """Take a commit, and call `answer` with its outcome or `fail` with status and reason."""
        name = request.group, request.topic
        if self._clock.monotonic_ms() > came_ms + request.timeout_ms:
            fail("BUSY", "an earlier commit of the group was under way for too long")
            return True
        if request.group == TAKEN_OVER:
            fail("MESSAGE_ILLEGAL", f"the group {TAKEN_OVER} is the node's own")
            return True
        if name in self._under_way:
            self._postponed = True
            return False
        no_room = self._positions.problem_of(request)
        if no_room is not None:
            fail("UsageError", no_room)
            return True
        if self._backend.writable_reason() is None:  # if not writable, the put below is refused
            fenced = self.fence(request) if request.member is not None else None
            behind = self._behind(request)
            if fenced is not None:
                fail(*fenced)
                return True
            if behind is not None:
                fail(POSITION_BEHIND, behind)
                return True
        record = self._positions.record_of(request)
        self._under_way.add(name)

        def respond(done: PutDone) -> None:
            self._under_way.discard(name)
            if self._postponed:
                self._postponed = False
                self._wake()
            if done.offsets and done.statuses is None and done.status.is_stored:
                known = self._unread(name)
                self._stored[name] = _Stored(
                    done.epoch, done.offsets[0], {**known, **request.positions}
                )
                if done.status is Status.PUT_OK:
                    self.note_confirmed(done.offsets[0])
            answer(done)

        put = Put(request.rid, None, False, request.timeout_ms)
        self._puts.admit_own_record(put, record, respond)
        return True

    def _behind(self, request: Commit) -> str | None:
        """Return where the group is, if a commit would move it back without `back`; else None."""
        known = self.known(request.group, request.topic)
        back = frozenset(request.back)  # a client's list may have 60,000 entries
        lower = [
            f"at {known[queue].queue_offset} in queue {queue}, the commit at {place.queue_offset}"
            for queue, place in sorted(request.positions.items())
            if queue in known
            and queue not in back
            and place.queue_offset < known[queue].queue_offset
            and self.is_there(request.topic, queue, known[queue])
        ]
        if not lower:
            return None
        more = f", and so in {len(lower) - 4} more queues" if len(lower) > 4 else ""
        return f"group {request.group!r} in topic {request.topic!r} is {'; '.join(lower[:4])}{more}"

    def _unread(self, name: tuple[str, str]) -> dict[int, Position]:
        """Return the last commit's positions if this log has it and the table has not read it."""
        stored = self._stored.get(name)
        if stored is None:
            return {}
        history = self._backend.history()
        standing, _ = self._backend.standing(history, stored.epoch, stored.offset)
        if standing is Standing.AGREED and not self._positions.has_read(stored.offset):
            return stored.positions
        del self._stored[name]
        return {}

    def is_there(self, topic: str, queue: int, place: Position) -> bool:
        """Whether a position belongs to this log."""
        store = self._backend.store
        if place.epoch is not None and place.offset is not None:
            history = self._backend.history()
            standing, _ = self._backend.standing(history, place.epoch, place.offset)
            return standing is Standing.AGREED
        known = store.queues.queue_range(topic, queue)
        return known is not None and place.queue_offset <= known[1]
