"""TakeOver: topics, groups and positions of a RocketMQ broker become records of the log, once.

    config/topics.json             --> records of HASTORE_TOPICS
    config/subscriptionGroup.json  --> the same, of the topics %RETRY%<group>
    config/consumerOffset.json     --> records of HASTORE_POSITIONS
        and delayOffset.json       --> records of HASTORE_QUEUES: where queues end of which the
                                       log has no message any more
                                   --> the mark: a position of MARK, whose queue offset is where
                                       the broker's log ends

The first master of a log that a broker wrote does so, from the files in its own store: a slave of
the broker keeps them there (server/broker_tables_service.py), or the operator copies them. Until it
is done, the node answers no question about positions: a group that asked too early would begin
anew.

**An old file never moves a group back.** Three rules see to that:

- The mark is the last record. It is in the log, so it survives what the log survives, and what cuts
  it off cuts off what was taken over. With it nobody looks at the files any more, on no node.
- What a record says that hastore itself has written since, by its place behind the broker's log,
  is newer than every file: a queue with such a position, a topic with such a record are left as
  they are. So whoever begins again after a crash in the middle repeats nothing that has changed.
- A position beyond the end of the broker's log is moved to this end, one below the log's begin to
  that: what the group has not seen, it gets.

**A queue never begins again.** Of a queue whose messages the broker's retention has removed the
log has nothing; the greatest position in it says that it went at least so far. Before the node
takes puts, the next message of such a queue is given that number, and then the log states it. From
0 on, the broker, if it gets the log back, would take new messages for old ones, and hide them.

Only the broker's log counts as "before": a log that was hastore's, then a broker's, and comes back
has marks and positions of hastore's first time in it. These are older than the broker's files.

**A topic is not begun anew** by a put of a client that knows RocketMQ only, with other queues and
rights than it had: for a moment after the promotion such puts wait for the broker's topics. So do
routes, on each node, since a client keeps one for 30 s: a slave waits until it has the mark. While
a node has nothing but the broker's log, its routes name no write twins.

A file that is damaged, or that this node may not read, is not passed over: then the positions wait,
puts go on, and `problems` says what to do. RocketMQ's own copy beside it (`.bak`) is read instead,
if there is one. They are read again once one of them has changed; what could not be read at all
also each AGAIN_MS, since a change of its rights shows in no time.

`read_offsets` says how far the broker had delivered its delayed messages: it notes for each level
which message it delivers next, in `config/delayOffset.json`. If that file lies in the store's
folder, in the same place, the first hastore master goes on from there
(store/derived/taken_delays.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from hastore.clock import Clock
from hastore.errors import CorruptRecordError, HastoreError, MessageIllegalError, Status, StoreError
from hastore.fs.filesystem import FileSystem
from hastore.ha.rules.epochs import CLASSIC_EPOCH, EpochStarts, classic_end
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import (
    TAKEN_OVER,
    CommitBody,
    Place,
    PositionMap,
    with_kept,
)
from hastore.record.delays import RETRY_PREFIX, SCHEDULE_TOPIC
from hastore.record.queue_ends import PART_BYTES, build_queue_ends
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.commit_records import QUEUE, CommitReader, commit_record, read_commits
from hastore.server.broker_tables import (
    DELAYS,
    GROUPS,
    MAX_BYTES,
    POSITIONS,
    TOPICS,
    Offsets,
    Pair,
    Table,
    config_of,
    named,
    read_delays,
    read_groups,
    read_positions,
    read_topics,
)
from hastore.store.append.results import Guards, OwnIf, PutResults, in_epoch
from hastore.store.log_store import LogStore

log = logging.getLogger(__name__)
T = TypeVar("T")

MARK = TAKEN_OVER  # the group and the topic of the position that is the mark
_FILES = (TOPICS.file, GROUPS.file, POSITIONS.file, DELAYS.file)
_IMPOSSIBLE = (Status.MESSAGE_ILLEGAL, Status.PROPERTIES_SIZE_EXCEEDED)  # whoever tries again
_QUEUES_A_RECORD = 512
_COPY = ".bak"  # behind the name of a file: as RocketMQ had it before
_PUT_BYTES = 64 * 1024  # per append, so that clients' puts get their turn
_CHUNK_BYTES = 256 * 1024
AGAIN_MS = 5_000.0
TOPICS_MS = 10_000.0  # after an epoch's begin puts wait no longer for the broker's topics
_REPLAY_S = 1.0
_PART_SHARE = 8  # of a log file: a record of a statement takes at most that
_END_MAX = 1 << 57  # no broker has put so many messages; a client may commit any position
DELAYS_FILE = DELAYS.file
_BYTES_MAX = 64 * 1024  # of delayOffset.json


class TakeOverBackend(Protocol):
    """What this needs of a node: NodeBackend."""

    def put_encoded(self, payloads: Sequence[bytes], guards: Guards | None = None) -> PutResults:
        """Append through the write gate."""
        ...

    def epoch(self) -> int:
        """Return the last epoch of the node's history."""
        ...

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the (epoch, start offset) entries, both rising."""
        ...


class _UnusableError(HastoreError):
    """A file cannot be taken over; `is_read`: it can be read, so it must change."""

    def __init__(self, text: str, *, is_read: bool) -> None:
        super().__init__(text)
        self.is_read = is_read


class _Tables(NamedTuple):
    """What the files say."""

    topics: dict[str, TopicConfig]
    positions: dict[Pair, Offsets]
    delays: dict[int, int]
    left_out: list[str]


class TakeOver:
    """Take over once per log; one thread calls `turn` and `look`, any what "any thread" says."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        store: LogStore,
        clock: Clock,
        *,
        open_epoch: Callable[[], int],
        kept: Callable[[str, str], Mapping[int, Place]],
    ) -> None:
        """Prepare; `open_epoch()` returns the epoch in which the node takes puts, 0 without one.

        `kept(group, topic)` returns the positions that retention has saved, by queue.
        """
        self._fs = fs
        self._root = root
        self._store = store
        self._clock = clock
        self._open_epoch = open_epoch
        self._kept = kept
        self._settled = 0  # the epoch in which nothing is left to take over
        self._looked = 0  # the last epoch in which `look` has looked
        self._opens_ms = float("-inf")  # when puts were about to be taken
        self._begins: tuple[int, int] | None = None  # an epoch, and the log's end when it was seen
        self._ends = 0  # the log's end once it was done; readers get it from there on
        self._follows_ms: float | None = None  # when this node first saw an epoch behind a broker's
        self._told = -1  # where the broker's log ends whose mark this node has replayed
        self._read_to = 0  # where it looks on for the mark, while it is not the master
        self._failed: tuple[int, ...] | None = None  # of what times the files are that are damaged
        self._again_ms = float("inf")  # and when they are read again, if that was what failed
        self.problem: str | None = None

    # -- any thread

    def waits(self, history: Callable[[], Sequence[tuple[int, int]]]) -> bool:
        """Whether this node is master and does not know its groups' positions yet."""
        epoch = self._open_epoch()
        if not epoch:
            return False
        if epoch != self._settled:
            return classic_end(history()) is not None and self._has_files()
        store = self._store
        return min(store.readable_offset, store.dispatched_offset) < self._ends

    def topics_wait(self, history: Callable[[], Sequence[tuple[int, int]]]) -> bool:
        """Whether this node is master and does not know the topics of the broker yet.

        It ends by itself soon after the promotion, also if a file is damaged: puts go on then.
        """
        epoch = self._open_epoch()
        return (
            bool(epoch)
            and epoch != self._settled
            and self.problem is None
            and self._clock.monotonic_ms() < self._opens_ms + TOPICS_MS
            and classic_end(history()) is not None
            and self._has_files()
        )

    def routes_wait(
        self, history: Callable[[], Sequence[tuple[int, int]]], *, knows_master: bool
    ) -> bool:
        """Whether this node, master or not, will know the topics of the broker in a moment.

        A slave knows them with the mark; like the master it waits for TOPICS_MS at most. `history`
        may still lack the epoch of the master that it knows.
        """
        if self._open_epoch():
            return self.topics_wait(history)
        starts = history()
        floor = classic_end(starts)
        if floor is None:
            return knows_master and not _has_own(starts) and self._may_be_told()
        return floor != self._told and self._may_be_told()

    def copies_broker(self, history: Callable[[], Sequence[tuple[int, int]]]) -> bool:
        """Whether this node has a broker's files, and its group has had no epoch of its own."""
        return not self._open_epoch() and not _has_own(history()) and self._has_files()

    def _may_be_told(self) -> bool:
        now = self._clock.monotonic_ms()
        if self._follows_ms is None:
            self._follows_ms = now
        return now < self._follows_ms + TOPICS_MS and self._has_files()

    def _has_files(self) -> bool:
        return any(self._fs.exists(f"{self._root}/{name}") for name in _FILES)

    # -- the thread that changes the role

    def begin_queues(self, history: EpochStarts) -> None:
        """Let puts go on in queues of which the log has nothing where the broker's files say.

        All of the log has been dispatched, and the node takes no puts yet. What keeps the files
        from being read `turn` says.
        """
        self._opens_ms = self._clock.monotonic_ms()
        ends: dict[tuple[str, int], int] = {}
        has_own = _has_own(history)
        floor = classic_end(history) if has_own else self._store.max_offset
        if floor is not None and self._has_files():
            with contextlib.suppress(_UnusableError, StoreError, OSError):
                if not has_own or not self.is_taken(floor):
                    ends = self._ends_without_records(self._read())
        self._store.begin_queues(ends)

    # -- the thread of the delayed messages

    def is_taken(self, floor: int, begin: int = 0) -> bool:
        """Whether the mark of a broker's log that ends at `floor` is in this log.

        All of it has been dispatched. The log is read from `floor` on up to the mark only: each new
        master asks this before anybody gets positions. Or from `begin` on, if it is not before
        that. Raises StoreError, OSError.
        """
        kept = self._kept(MARK, MARK)
        if QUEUE in kept and kept[QUEUE].queue_offset == floor:
            return True
        return any(
            body.group == MARK and floor in [place[0] for place in body.positions.values()]
            for body, _ in self._commits_of_log(max(floor, begin))
        )

    def look(self, backend: TakeOverBackend) -> None:
        """Find out whether all was taken over before, while this node can put nothing.

        It looks once in an epoch in which the node is master, so that groups have their positions
        though its slaves are away or its disk is full. Raises StoreError, OSError.
        """
        epoch, store = self._open_epoch(), self._store
        if not epoch:
            self._look_for_mark(backend)
        if not epoch or epoch in (self._settled, self._looked):
            return
        if self._begins is None or self._begins[0] != epoch:
            self._begins = epoch, store.max_offset
        if store.dispatched_offset < self._begins[1]:
            return
        floor = classic_end(backend.history())
        if floor is not None and self._has_files() and self.is_taken(floor):
            self._settle(epoch, 0)
        self._looked = epoch

    def _look_for_mark(self, backend: TakeOverBackend) -> None:
        """Find out whether this node, which is no master, has replayed what was taken over."""
        floor = classic_end(backend.history())
        if floor is None or floor == self._told or not self._may_be_told():
            return
        end = self._store.dispatched_offset
        if end <= floor:
            return
        if self.is_taken(floor, self._read_to):
            self._told = floor
        self._read_to = end

    def is_due(self, epoch: int) -> bool:
        """Whether `turn` may have something to do in an epoch: files may have been repaired."""
        if epoch == self._settled:
            return False
        if self._failed is None or self._failed != self._times():
            return True
        return self._clock.monotonic_ms() >= self._again_ms

    def turn(self, backend: TakeOverBackend, epoch: int) -> None:
        """Take over what the files say, if that was not done. All of the log has been dispatched.

        Raises StoreError, OSError, NotStoredError: call it again.
        """
        floor = classic_end(backend.history())
        if floor is None or not self._has_files():
            self._settle(epoch, 0)
            return
        if self.is_taken(floor):
            self._settle(epoch, 0)
            return
        times = self._times()
        try:
            tables = self._read()
        except _UnusableError as failure:
            again_ms = self._clock.monotonic_ms() + AGAIN_MS
            self._failed, self._again_ms = times, float("inf") if failure.is_read else again_ms
            if self.problem != str(failure):
                log.error("%s", failure)
            self.problem = str(failure)
            return
        store, ends = self._store, self._ends_without_records(tables)
        store.begin_queues(ends)  # if they could not be read before
        if not store.wait_dispatched(store.max_offset, _REPLAY_S):
            raise StoreError("the broker's tables are not taken over: replay is behind")
        ends = {key: after for key, after in ends.items() if self._is_unknown(*key)}
        known = PositionMap(bounded=False)
        for body, offset in self._commits_of_log(0):
            known.apply_commit(body, offset)
        topics, left_out = self._topic_records(tables.topics, floor)
        commits = self._commits(tables, known, ends, floor, left_out)
        mark = CommitBody(MARK, MARK, {QUEUE: (floor, None, None)})
        stated = self._statement(ends)
        records = [*topics, *stated, *self._records([*commits, mark], left_out)]
        self._append(backend, records, epoch, left_out)
        self._settle(epoch, self._store.max_offset)
        log.warning(
            "took over from a RocketMQ broker: the settings of %d topics and groups, and the"
            " positions of groups in %d topics%s",
            len(topics), len({(one.group, one.topic) for one in commits}),
            f"; left out: {named(left_out)}" if left_out else "",
        )  # fmt: skip

    def _settle(self, epoch: int, ends: int) -> None:
        self._ends, self._settled = ends, epoch
        self._failed = self.problem = None

    def _append(
        self,
        backend: TakeOverBackend,
        records: Sequence[bytes],
        epoch: int,
        left_out: list[str],
    ) -> None:
        guard = OwnIf(in_epoch(backend.epoch, epoch))
        for batch in _batches(records):
            for results in backend.put_encoded(batch, [guard] * len(batch)):
                for result in results:
                    if result.status in _IMPOSSIBLE:
                        left_out.append(f"a record: {result.reason}")
                    elif result.status is not Status.PUT_OK:
                        raise StoreError(f"the broker's tables are not taken over: {result}")

    # -- the files

    def _times(self) -> tuple[int, ...]:
        return tuple(
            self._time_of(f"{self._root}/{name}{end}") for name in _FILES for end in ("", _COPY)
        )

    def _time_of(self, path: str) -> int:
        try:
            return self._fs.modified_ms(path)
        except OSError:  # it is missing, or a link to nothing
            return 0

    def _read(self) -> _Tables:
        """Return what the files say; raises _UnusableError."""
        topics = self._parse(TOPICS, read_topics)
        groups = self._parse(GROUPS, read_groups)
        positions = self._parse(POSITIONS, read_positions)
        left_out = [text for one in (topics, groups, positions) if one for text in one.left_out]
        found = {config.name: config for config in (topics.found if topics else ())}
        for settings in groups.found if groups else ():
            name = RETRY_PREFIX + settings.group_name
            found[name] = config_of(settings, found.get(name))
        delays: dict[int, int] | None = None
        with contextlib.suppress(_UnusableError):  # the levels wait, and that is said
            delays = self._parse(DELAYS, read_delays)
        return _Tables(found, positions.found if positions else {}, delays or {}, left_out)

    def _parse(self, table: Table, read: Callable[[bytes], T]) -> T | None:
        """Return what a file says, or the copy beside it; None without a file."""
        path, failures, is_read = f"{self._root}/{table.file}", [], True
        for one in (path, f"{path}{_COPY}"):
            if self._fs.exists(one):
                try:
                    return read(self._fs.read_bytes(one, MAX_BYTES))
                except StoreError as why:
                    failures.append(f"{one} cannot be taken over: {why}")
                except OSError as why:
                    failures.append(f"{one} cannot be taken over: {why.strerror or why}")
                    is_read = False
        if not failures:
            return None
        raise _UnusableError(
            f"{'; '.join(failures)}. Consumer groups get no positions until the broker's file is"
            " there, and may be read by this node's user, or is removed, with its copy (.bak): then"
            " they begin anew",
            is_read=is_read,
        )

    # -- queues that the log has lost

    def _ends_without_records(self, tables: _Tables) -> dict[tuple[str, int], int]:
        """Return the ends, by topic and queue, of the queues of which the log has nothing."""
        ends = {(SCHEDULE_TOPIC, level - 1): offset for level, offset in tables.delays.items()}
        for (_, topic), offsets in tables.positions.items():
            if topic in tables.topics or self._store.topic_table.find(topic) is not None:
                for queue, offset in offsets.items():
                    ends[topic, queue] = max(offset, ends.get((topic, queue), 0))
        return {
            key: after
            for key, after in sorted(ends.items())
            if 0 < after < _END_MAX and self._is_unknown(*key)
        }

    def _is_unknown(self, topic: str, queue: int) -> bool:
        return self._store.queues.queue_range(topic, queue) is None

    def _statement(self, ends: Mapping[tuple[str, int], int]) -> list[bytes]:
        """Return records that state these ends, and let retention remove nothing more."""
        if not ends:
            return []
        queues, now_ms = [(*key, after) for key, after in ends.items()], self._clock.wall_ms()
        return build_queue_ends(
            queues, since=0, ident=now_ms, now_ms=now_ms,
            part_bytes=min(PART_BYTES, self._store.file_size // _PART_SHARE),
        )  # fmt: skip

    # -- what is newer in the log

    def _commits_of_log(self, begin: int) -> Iterator[tuple[CommitBody, int]]:
        """Yield the commits at or behind an offset of the log, each with its own offset."""
        store = self._store
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            return
        at, queue = known[0], store.queues.single(POSITIONS_TOPIC, QUEUE)
        if queue is not None:
            at = max(at, queue.files.first_at(begin))
        reader = CommitReader(self._clock, near_end=False)
        while (read := reader.next(
            store.reader, at,
            max_messages=4096, max_bytes=_CHUNK_BYTES, limit_offset=store.max_offset,
        )) is not None:  # fmt: skip
            for offset, body in read_commits(read[0]):
                if body is not None:
                    yield body, offset
            at = read[1]

    def _topic_records(
        self, topics: Mapping[str, TopicConfig], floor: int
    ) -> tuple[list[bytes], list[str]]:
        """Return the records of topics about which hastore has none, and which are left out."""
        table, now_ms = self._store.topic_table, self._clock.wall_ms()
        records, left_out = [], []
        for name, config in sorted(topics.items()):
            if table.origin_of(name) >= floor or table.recorded(name) == config:
                continue
            why = table.no_room_for(name)
            if why is None:
                records.append(build_change(TopicChange(config), now_ms))
            else:
                left_out.append(f"topic {name!r:.80}: {why}")
        return records, left_out

    def _commits(
        self,
        tables: _Tables,
        known: PositionMap,
        lost: Mapping[tuple[str, int], int],
        floor: int,
        left_out: list[str],
    ) -> list[CommitBody]:
        """Return the positions that no record of hastore's own is newer than."""
        left_out += tables.left_out
        found, room = [], PositionMap(known.entries)
        for (group, topic), offsets in sorted(tables.positions.items()):
            own = self._of_hastore(known.find(group, topic), self._kept(group, topic), floor)
            ends = {queue: self._end_of(topic, queue, lost, floor) for queue in offsets}
            if topic not in tables.topics and not any(end is not None for end in ends.values()):
                if self._store.topic_table.find(topic) is None:
                    left_out.append(f"group {group!r:.80}: there is no topic {topic!r:.80}")
                    continue
            places: dict[int, tuple[int, int | None, int | None]] = {
                queue: (_fit(offset, ends[queue]), None, None)
                for queue, offset in offsets.items()
                if queue not in own
            }
            if places and not room.has_room(group, topic, len(places)):
                left_out.append(f"group {group!r:.80}: too many groups keep positions")
                continue
            numbers = list(places)
            for at in range(0, len(numbers), _QUEUES_A_RECORD):
                part = {queue: places[queue] for queue in numbers[at : at + _QUEUES_A_RECORD]}
                found.append(CommitBody(group, topic, part))
                room.apply_commit(found[-1], floor)
        return found

    def _records(self, commits: Sequence[CommitBody], left_out: list[str]) -> list[bytes]:
        """Return the records of commits; a group whose name no record can have is left out."""
        now_ms, records = self._clock.wall_ms(), []
        for one in commits:
            try:
                records.append(commit_record(one, now_ms))
            except MessageIllegalError as failure:
                left_out.append(f"group {one.group!r:.80}: {failure}")
        return records

    def _of_hastore(
        self, found: Mapping[int, Place], kept: Mapping[int, Place], floor: int
    ) -> set[int]:
        """Return the queues whose position hastore itself has written behind the broker's log."""
        latest = with_kept(kept, found, self._store.min_offset)
        return {queue for queue, place in latest.items() if place.origin >= floor}

    def _end_of(
        self, topic: str, queue: int, lost: Mapping[tuple[str, int], int], floor: int
    ) -> tuple[int, int] | None:
        """Return the range of a queue in the broker's log; None if nothing says where it ends."""
        if (topic, queue) in lost:
            return lost[topic, queue], lost[topic, queue]
        queues = self._store.queues
        known = queues.queue_range(topic, queue)
        if known is None:
            return None
        return known[0], min(known[1], queues.end_before(topic, queue, floor))


def _has_own(history: EpochStarts) -> bool:
    return any(epoch != CLASSIC_EPOCH for epoch, _ in history)


def _fit(offset: int, known: tuple[int, int] | None) -> int:
    return 0 if known is None else min(max(offset, known[0]), known[1])


def _batches(records: Sequence[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for record in records:
        if batch and size + len(record) > _PUT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += len(record)
    if batch:
        yield batch


def read_offsets(fs: FileSystem, root: str) -> dict[int, int] | None:
    """Return the queue offset of each level that the broker delivers next; None without the file.

    Raises StoreError if it is damaged, OSError.
    """
    path = f"{root}/{DELAYS_FILE}"
    if not fs.exists(path):
        return None
    try:
        return read_delays(fs.read_bytes(path, _BYTES_MAX))
    except CorruptRecordError as failure:
        raise StoreError(
            f"{path}: {failure}: give the broker's file, or remove it, then the broker's delayed"
            " messages are never delivered; until then all of their levels wait"
        ) from failure
