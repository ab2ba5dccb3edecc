"""Read messages of an open store: by queue offset (pull), by physical offset, by key and by time.

The threads of the API, of replication and of retention call this module. They take no lock of the
log or of replay: a reader pins the file that it reads, so retention removes the file's name but not
its bytes. The key index holds its own lock during each step of a search.
"""

import enum
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import add
from typing import Any

from hastore.clock import Clock
from hastore.errors import CorruptRecordError, NotCachedError, StoreError
from hastore.fs.filesystem import File, is_cached, without_waiting
from hastore.record.bulk_check import Places, count_valid, is_placed
from hastore.record.codec import Record, check_record, decode_record, find_parts, stated_time_ms
from hastore.record.layout import (
    BLANK_SIZE,
    MIN_RECORD_SIZE,
    V1_MAGIC,
    V2_MAGIC,
    header_struct,
    store_at,
)
from hastore.record.properties import keys_of, offsets_taken
from hastore.store.derived.consume_queue import (
    ARRAYS_FROM_UNITS,
    UNIT_BYTES,
    ConsumeQueueTable,
    TaggedSelection,
    UnitSelection,
    few_units,
)
from hastore.store.derived.contract import time_window
from hastore.store.derived.key_index import KeyIndex, KeyWalk
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE, first_where
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.record_walk import store_timestamp_ms
from hastore.store.state.time_falls import Falls

STEP = 256  # entries of the index in one step of a search by key
STEPS_MAX = 1_000_000  # entries that one search looks at
READS_MAX = 10_000  # records that one search reads, and compares with the key
READ_BYTES_MAX = 64 * 1024 * 1024  # of them
_HEAD = header_struct("size", "magic", "physical_offset")
_UNITS_AT_ONCE = 1024
_UNITS_MAX = 32_768  # in one pull
_MISPLACED_MAX, _MISPLACED_TOLD = 1000, 3  # queues that are kept, and that the status names
_LONG_AGO_MS = -(2**63)  # before every time
COLD_MS = 20.0  # after this time of cold reads, a pull returns the records read so far
_FEWER = 8  # if the disk cannot read a pull's records, an eighth of them is tried
_VIEWS_AT_ONCE = 256  # views of a map; 700 new objects would start Python's garbage collector
_GAP_BYTES = 16 * 1024  # the largest gap between two records that one cold read covers
_READ_BYTES = 1 << 20  # the largest cold read, unless a single range is longer
# For less, a pread costs less than to ask whether the page cache has the bytes; for more, the
# question takes over 0.1 ms.
_ASKED_BYTES = range(64 * 1024, 64 * 1024 * 1024)

log = logging.getLogger(__name__)


class PullStatus(enum.Enum):
    """How a pull ended."""

    FOUND = "FOUND"
    NO_NEW = "NO_NEW"
    NO_MATCH = "NO_MATCH"  # no record seen has one of the tags; others follow
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_TOO_LARGE = "OFFSET_TOO_LARGE"
    NO_SUCH_QUEUE = "NO_SUCH_QUEUE"


@dataclass(slots=True)
class PullResult:
    """Records as stored, one after the other, and the queue offset for the next pull."""

    status: PullStatus
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    records: bytes = b""
    count: int = 0
    last_offset: int | None = None  # physical, of the last record
    sizes: Any = field(default_factory=list)  # of the records: a list or, for many, a numpy array
    needs_offset: int | None = None  # with NO_NEW: where the next record ends, if it is there


class MessageReader:
    """The reading side of a store that is open in this process; thread-safe."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueueTable,
        index: KeyIndex,
        clock: Clock,
        falls: Callable[[], Falls] = Falls,
        on_damage: Callable[[int], None] = lambda _offset: None,
        on_wrong: Callable[[int], None] = lambda _offset: None,
    ) -> None:
        """Prepare; `falls()` returns where the log's store times fall (`first_late`).

        `on_damage(offset)` is called in the thread that meets a damaged record; `on_wrong(offset)`,
        if no CRC shows the damage.
        """
        self._on_damage = on_damage
        self._on_wrong = on_wrong
        self._falls = falls
        self._log = log
        self._queues = queues
        self._index = index
        self._clock = clock
        # By queue: a queue offset at which a pull met another place's record, and what to say.
        self._misplaced: dict[tuple[str, int], tuple[int, str]] = {}

    @staticmethod
    def without_waiting() -> AbstractContextManager[None]:
        """Let the reads of this thread take only what is in memory, within a `with`.

        Else they raise NotCachedError. What is read through maps is in memory, or taken to be so.
        """
        return without_waiting()

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_messages: int,
        max_bytes: int,
        limit_offset: int,
        check_bodies: bool = True,
        codes: frozenset[int] | None = None,
    ) -> PullResult:
        """Read records of a queue that end at or below `limit_offset`.

        With `codes`, only those whose tag has such a hash (TaggedSelection): the next queue offset
        is behind the others that were looked at. An inner batch is returned whatever its tags.

        The first record is returned even if it is larger than `max_bytes`. If the disk is slow,
        fewer records are returned. If a record is damaged or unreadable, only the records before it
        are returned. If that record is the first, raises CorruptRecordError or OSError; in a thread
        that must not wait for the disk, NotCachedError. Without `check_bodies`, the CRCs of the
        bodies may be wrong.
        """
        if codes is None:
            found = self.pull_few(topic, queue_id, queue_offset, max_messages, max_bytes,
                                  limit_offset)  # fmt: skip
            if found is not None:
                return found
        known = self._queues.queue_range(topic, queue_id)
        if known is None:
            return PullResult(PullStatus.NO_SUCH_QUEUE, 0, 0, 0)
        low, high = known
        if queue_offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high)
        if queue_offset >= high:
            status = PullStatus.NO_NEW if queue_offset == high else PullStatus.OFFSET_TOO_LARGE
            return PullResult(status, high, low, high)
        wanted = max(1, min(max_messages, _UNITS_MAX))
        limit = min(limit_offset, self._log.max_offset)
        if codes is None or self._queues.get_batch(topic, queue_id) is not None:
            chosen = UnitSelection(wanted, max_bytes, limit)
            self._select(chosen, topic, queue_id, queue_offset, high)
        else:
            chosen = self._select_tagged(
                TaggedSelection(wanted, max_bytes, limit, codes, queue_offset),
                topic, queue_id, high,
            )  # fmt: skip
        if not chosen.count:
            return _without_records(chosen, queue_offset, low, high)
        begin = self._queues.begin_of(topic)  # asked last: it counts for all that was chosen
        try:
            records = None if chosen.offsets[0] < begin else self._read_records(chosen)
        except OSError:
            if chosen.count == 1:
                self._on_damage(int(chosen.offsets[0]))
                raise
            return self.pull(  # the disk may be able to read the first records
                topic, queue_id, queue_offset, max_messages=max(1, chosen.count // _FEWER),
                max_bytes=max_bytes, limit_offset=limit, check_bodies=check_bodies, codes=codes,
            )  # fmt: skip
        if records is None:
            kept = self._first_kept(topic, queue_id, begin, chosen.first + 1)
            kept = max(low, min(kept, high))
            return PullResult(PullStatus.OFFSET_TOO_SMALL, kept, kept, high)
        return self._found(chosen, records, topic, queue_id, low, high, check_bodies)

    def pull_few(
        self, topic: str, queue_id: int, at: int, max_messages: int, max_bytes: int, limit: int
    ) -> PullResult | None:  # fmt: skip
        """Return what `pull` returns, in two thirds of its time: in the plain case of most pulls.

        All that is wanted, or left in the queue, is readable, fits, lies in one file of the log,
        was written by this process, and is valid. Otherwise returns None: `pull` looks again.
        """
        log, queue = self._log, self._queues.single(topic, queue_id)
        if queue is None or max_messages >= ARRAYS_FROM_UNITS:
            return None
        low, high, wanted = queue.min_queue_offset, queue.max_queue_offset, max(1, max_messages)
        if not low <= at < high:
            return None
        limit = min(limit, log.max_offset)
        raw = queue.files.read(at, wanted)
        columns = few_units(raw)
        if columns is None:
            return None
        offsets, sizes = columns
        count, begin = len(sizes), offsets[0]
        file = log.queue.find(begin)
        opened = None if file is None else file.opened  # pins the file
        if (
            file is None
            or opened is None
            or (count < wanted and at + count < high)
            or sum(sizes) > max_bytes
            or begin < max(self._queues.begin_of(topic), log.cold_end, log.min_offset)
            or log.fenced
        ):
            return None
        (_, view), start = opened, file.start
        places = [offset - start for offset in offsets]
        ends = list(map(add, places, sizes))
        if max(ends) > min(file.end, limit) - start or min(places) < places[0]:
            return None
        records = b"".join([view[place:end] for place, end in zip(places, ends, strict=True)])
        belong = Places(_raw_name(topic), queue_id, range(at, at + count))
        if count_valid(records, offsets, sizes, belong) < count:
            return None
        if self._misplaced:
            self._note_placed(topic, queue_id, at, at + count)
        return PullResult(
            PullStatus.FOUND, at + count, low, high, records, count, offsets[-1], sizes
        )

    def _found(
        self, chosen: UnitSelection, records: bytes, topic: str, queue_id: int,
        low: int, high: int, check_bodies: bool,
    ) -> PullResult:  # fmt: skip
        """Return the result of a pull that has read records: those before the first damage."""
        is_batched = self._queues.get_batch(topic, queue_id) is not None
        queue_offsets = None if is_batched else chosen.queue_offsets
        places = Places(_raw_name(topic), queue_id, queue_offsets)
        count = count_valid(records, chosen.offsets, chosen.sizes, places, bodies=check_bodies)
        if self._log.fenced:
            count = min(count, self._count_unfenced(chosen))
        if count < chosen.count:
            problem = self._note_unfit(chosen, records, count, places, topic)
            if not count:
                raise CorruptRecordError(problem)
            records = records[: int(sum(chosen.sizes[:count]))]
        last = count - 1
        following = int(chosen.queue_offsets[last]) + 1
        if self._misplaced:
            self._note_placed(topic, queue_id, int(chosen.queue_offsets[0]), following)
        if is_batched:
            record = decode_record(records, int(sum(chosen.sizes[:last])))
            following += offsets_taken(record.sys_flag, record.properties) - 1
        elif isinstance(chosen, TaggedSelection) and count == chosen.count:
            following = chosen.following
        return PullResult(
            PullStatus.FOUND, following, low, high, records, count, int(chosen.offsets[last]),
            chosen.sizes[:count],
        )  # fmt: skip

    def _note_unfit(
        self, chosen: UnitSelection, records: bytes, number: int, places: Places, topic: str
    ) -> str:
        """Tell of record `number`, which a pull must not return; returns what is wrong with it."""
        offset, size = int(chosen.offsets[number]), int(chosen.sizes[number])
        at = int(sum(chosen.sizes[:number]))
        is_valid = check_record(records, at, min(at + size, len(records)), offset) == size
        if not is_valid or is_placed(records, at, at + size, places, number):
            self._on_damage(offset)
            return f"the record at offset {offset} is damaged; see `hastore log verify`"
        # It may be the header that is damaged, which has no CRC: other nodes know.
        self._on_wrong(offset)
        key, place = (topic, places.queue_id), int(chosen.queue_offsets[number])
        problem = (
            f"queue {places.queue_id} of topic {topic!r:.80} names the record at offset {offset} as"
            f" its {place}, which is of another place: pulls end there, and nobody gets that record"
            " by mistake. If it is not mended by itself, the file of the queue is damaged: stop the"
            " node, remove hastore/replay in its store, and start it: it builds its queues anew"
        )
        if key in self._misplaced or len(self._misplaced) < _MISPLACED_MAX:
            if key not in self._misplaced:
                log.error("%s", problem)
            self._misplaced[key] = place, problem
        return problem

    def _note_placed(self, topic: str, queue_id: int, first: int, following: int) -> None:
        """End what was told of a queue, if its records [first, following) were returned."""
        place, _ = self._misplaced.get((topic, queue_id), (-1, ""))
        if first <= place < following:
            del self._misplaced[topic, queue_id]

    @property
    def problems(self) -> list[str]:
        """What is wrong with queues, as pulls have met it and not found mended since."""
        return [problem for _, problem in list(self._misplaced.values())[:_MISPLACED_TOLD]]

    def _count_unfenced(self, chosen: UnitSelection) -> int:
        """Return how many records come before the first one in a damaged range."""
        for number, (offset, size) in enumerate(zip(chosen.offsets, chosen.sizes, strict=True)):
            if self._is_fenced(int(offset), int(size)):
                return number
        return int(chosen.count)

    def _is_fenced(self, offset: int, size: int) -> bool:
        """Whether a record lies in a range that is known to be damaged."""
        return any(start < offset + size and offset < end for start, end in self._log.fenced)

    def _select(self, chosen: UnitSelection, topic: str, queue_id: int, at: int, high: int) -> None:
        """Choose units from queue offset `at` on, and skip holes in the queue."""
        queues = self._queues
        if queues.get_batch(topic, queue_id) is not None:
            found = queues.read(topic, queue_id, at, chosen.max_messages)
            chosen.select_units((unit[0], unit[1:]) for unit in found)
            return
        queue = queues.get(topic, queue_id)
        while queue is not None and at < high:
            raw = queue.files.read(at, min(chosen.max_messages, _UNITS_AT_ONCE))
            units = len(raw) // UNIT_BYTES
            if not units:  # whole files are missing, or retention removed one
                at = next((start for start in queue.files.starts if start > at), high)
            elif not chosen.select_raw(raw[: units * UNIT_BYTES], at):
                return
            else:
                at += units

    def _select_tagged(
        self, chosen: TaggedSelection, topic: str, queue_id: int, high: int
    ) -> UnitSelection:
        """Choose units with one of the wanted tags, and skip holes in the queue."""
        queue = self._queues.get(topic, queue_id)
        at_once = chosen.max_messages  # usually they are these; the next ones are sought faster
        while queue is not None and (at := chosen.following) < high:
            raw = queue.files.read(at, min(at_once, _UNITS_AT_ONCE, high - at))
            units = len(raw) // UNIT_BYTES
            if not units:  # whole files are missing, or retention removed one
                chosen.following = next((start for start in queue.files.starts if start > at), high)
            elif not chosen.select_raw(raw[: units * UNIT_BYTES], at):
                break
            at_once = _UNITS_AT_ONCE
        return chosen

    def _timer(self) -> Callable[[], bool]:
        """Return a function that tells whether COLD_MS have passed since this call."""
        clock = self._clock
        until_ms = clock.monotonic_ms() + COLD_MS
        return lambda: clock.monotonic_ms() >= until_ms

    def _first_kept(self, topic: str, queue_id: int, begin: int, otherwise: int) -> int:
        """Return the first queue offset whose record is in the log from `begin` on.

        It is at least `otherwise`.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return otherwise
        return max(otherwise, queue.files.first_at(max(begin, self._log.min_offset)))

    def _read_records(self, chosen: UnitSelection) -> bytes | None:
        """Return the selected records' bytes; None when retention removed the first one.

        If the disk is slow, the last records are left out, so that other clients need not wait.
        """
        log = self._log
        late: Callable[[], bool] | None = None
        if chosen.offsets[0] < log.min_offset:
            return None
        begins, ends = chosen.runs()
        pieces: list[bytes | memoryview] = []
        at, count = 0, len(begins)
        while at < count:
            file = log.queue.find(begins[at])
            try:
                if file is None:
                    raise log.gone(begins[at], f"the file of offset {begins[at]}")
                opened, view = file.opened or log.pin(file)
            except StoreError:
                if begins[0] < log.min_offset:  # retention removed it meanwhile
                    return None
                raise
            stop = count  # the end of the ranges in this file
            if begins[-1] >= file.end:
                stop = max(at + 1, bisect_left(begins, file.end, at))
            start = file.start
            first, behind = begins[at] - start, ends[stop - 1] - start
            if begins[at] < log.cold_end and not _may_map(view, first, behind):
                late = late or self._timer()
                try:
                    found, whole = _read_cold(opened, start, begins[at:stop], ends[at:stop], late)
                except NotCachedError:
                    if not pieces:
                        raise
                    break
                pieces += found
                if not whole or (stop < count and late()):
                    break
            else:
                for low in range(at, stop, _VIEWS_AT_ONCE):
                    high = min(low + _VIEWS_AT_ONCE, stop)
                    views = [
                        view[begin - start : end - start]
                        for begin, end in zip(begins[low:high], ends[low:high], strict=True)
                    ]
                    pieces.append(b"".join(views))
            at = stop
        return b"".join(pieces)

    def readable_range(
        self, topic: str, queue_id: int, limit_offset: int
    ) -> tuple[int, int] | None:
        """Return the first queue offset, and the next of the records that end at or below a limit.

        None if there is no such queue. Raises OSError, NotCachedError.
        """
        known = self._queues.queue_range(topic, queue_id)
        queue = self._queues.get(topic, queue_id)
        if known is None:
            return None
        low, high = known
        if queue is None or self._queues.get_batch(topic, queue_id) is not None:
            end = self._queues.end_before(topic, queue_id, limit_offset)
            before = self._queues.read(topic, queue_id, end - 1, 1) if end else []
            if before and before[0].offset < limit_offset < before[0].offset + before[0].size:
                end = before[0].queue_offset  # the limit is inside this record
            return low, max(low, min(high, end))

        def is_new(queue_offset: int) -> bool:
            offset, size = queue.files.place(queue_offset)
            return size != BLANK_UNIT_SIZE and offset + size > limit_offset

        if low < high and is_new(high - 1):
            high = first_where(low, high - 1, is_new)
        return low, high

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        """Return the size of the whole record at `offset`, or None if there is none.

        Only the header is checked, or with `check` the whole record, CRC included.
        """
        log = self._log
        if not log.min_offset <= offset < log.max_offset:
            return None
        with log.view(offset, MIN_RECORD_SIZE) as view:
            if len(view) < MIN_RECORD_SIZE:
                return None
            size, magic, physical = _HEAD.unpack_from(view)
        if magic not in (V1_MAGIC, V2_MAGIC) or physical != offset or size < MIN_RECORD_SIZE:
            return None
        left = log.file_size - offset % log.file_size
        fits: bool = size + BLANK_SIZE <= left and offset + size <= log.max_offset
        if fits and check:
            with log.view(offset, size) as view:
                fits = check_record(view, 0, len(view), offset) == size
        return int(size) if fits else None

    def after_blank(self, offset: int) -> int:
        """Return the start of the next file if a blank begins at `offset`, else `offset`."""
        log = self._log
        if not log.min_offset <= offset < log.max_offset:
            return offset
        left = log.file_size - offset % log.file_size
        with log.view(offset, BLANK_SIZE) as view:
            whole = len(view) == BLANK_SIZE
            return offset + (log.form.check_blank(view, 0, left) if whole else 0)

    def record_at(self, offset: int) -> Record | None:
        """Return the whole, valid record that begins at `offset`, or None if there is none."""
        raw = self.record_bytes(offset)
        return None if raw is None else decode_record(raw)

    def first_record(self) -> Record | None:
        """Return the first record of the log; None if it begins with none, or a damaged one."""
        return self.record_at(self._log.min_offset + self._log.form.lead)

    def search_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        limit_offset: int | None = None,
        max_bytes: int = 2**63 - 1,
    ) -> "KeySearch":
        """Begin a search for the latest records with a key, stored in [begin_ms, end_ms].

        Only records that end at or below `limit_offset` count (None: all), up to `max_messages`,
        and up to `max_bytes` of them, but at least one.
        """
        limit = self._log.max_offset if limit_offset is None else limit_offset

        def begin() -> KeyWalk:
            end = self._index.end_offset  # before the falls, which are known up to there
            window = time_window(begin_ms, end_ms, self._falls().all, self._log.min_offset, end)
            return self._index.walk(topic, key, window)

        return KeySearch(self, self._index, begin, topic, key, limit, max_messages, max_bytes)

    @property
    def last_keyed(self) -> tuple[int, int]:
        """When the last record with a key was stored, and its offset; zeros without one."""
        return self._index.last_update

    def query_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
    ) -> list[int]:
        """Return physical offsets of the records with a key, the latest first.

        The search has the bounds of a KeySearch, so older records may be missing.
        """
        search = self.search_key(
            topic, key, max_messages=max_messages, begin_ms=begin_ms, end_ms=end_ms
        )
        while not search.ended:
            search.step()
        return list(search.found)

    def record_bytes(self, offset: int, size: int | None = None) -> bytes | None:
        """Return the whole, valid record that begins at `offset`, or None if there is none.

        With its `size`, as a queue has it, the log is read once instead of twice.
        """
        if self._log.fenced and self._is_fenced(offset, 1):
            return None
        if size and self.is_in_log(offset):
            with self._log.view(offset, size) as view:
                if check_record(view, 0, len(view), offset) == size:
                    return bytes(view)
        size = self.record_size(offset)
        if size is None:
            return None
        with self._log.view(offset, size) as view:
            return bytes(view) if check_record(view, 0, len(view), offset) == size else None

    def is_damaged(self, offset: int) -> bool:
        """Whether a record that `record_bytes` does not return is there, as far as is known.

        For offsets that a client names: its header is there, or the damage was found before.
        """
        return self.is_in_log(offset) and (
            self._is_fenced(offset, 1) or self.record_size(offset) is not None
        )

    def is_in_log(self, offset: int) -> bool:
        """Whether an offset is one of the log's: neither removed, nor cut, nor yet to come."""
        return self._log.min_offset <= offset < self._log.max_offset

    def note_damage(self, offset: int) -> None:
        """Let the record that begins at an offset be repaired: it is there, but cannot be read.

        For offsets that the store itself knows: those that a client names cost a look at the log.
        """
        self._on_damage(offset)

    def note_wrong(self, offset: int) -> None:
        """Let the record that begins at an offset be compared with other nodes' and repaired.

        It is valid as far as its CRC goes, but this node would not have stored it as it is.
        """
        self._on_wrong(offset)

    def queue_offset_by_time(
        self,
        topic: str,
        queue_id: int,
        timestamp_ms: int,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> int:
        """Return the queue offset of the first message stored at or after a time.

        That is so also if store times fall, because a clock was set back: no message stored at or
        after the time lies before it. Returns the queue's end if there is no such message, and 0 if
        there is no such queue. Once `is_spent()` is true, it ends the search, and returns that
        offset or one before it.
        """
        found = self._queues.find_by_time(
            topic, queue_id, timestamp_ms, self._time_of, self._falls(), is_spent
        )
        return 0 if found is None else found

    def _time_of(self, offset: int) -> int | None:
        """Return as `stored_ms` does, but None for no time: zeros were read in its place.

        A record that is gone is older than any time.
        """
        stored = self.stored_ms(offset)
        if stored is None:
            return None if self.is_in_log(offset) else _LONG_AGO_MS
        return stored if stored > 0 else None

    def stored_ms(self, offset: int) -> int | None:
        """Return when the record at an offset was stored; None if it is gone, or has no header.

        Raises OSError.
        """
        if not self.is_in_log(offset):
            return None
        try:
            return store_timestamp_ms(self._log, offset)
        except StoreError:  # retention removed it
            return None


class KeySearch:
    """A search by key under way: `step` does a small part of it, until `ended`.

    The index finds hashes, so each record that it names is read and compared: a record of another
    key or topic does not count as found. After STEPS_MAX entries of the index, or READS_MAX records
    or READ_BYTES_MAX bytes of them, the search is cut short.
    """

    def __init__(
        self,
        reader: MessageReader,
        index: KeyIndex,
        begin: Callable[[], KeyWalk],
        topic: str,
        key: str,
        limit: int,
        max_messages: int,
        max_bytes: int,
    ) -> None:
        """Prepare; MessageReader.search_key explains most arguments, `begin` starts a walk."""
        self._reader = reader
        self._index = index
        self._begin = begin
        self._walk = begin()
        self._topic = topic.encode("utf-8", "surrogateescape")
        self._key = key.encode("utf-8", "surrogateescape")
        self._limit = limit
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, int]] = deque()  # what the index named
        self._reads = 0
        self._read_bytes = 0
        self._found_bytes = 0
        self.found: dict[int, bytes] = {}  # by offset, the latest first
        # The search was cut short: older records may be missing, which lie below `cut_offset`. It
        # is None if the search has come to none below the limit.
        self.cut_ms: int | None = None
        self.cut_offset: int | None = None
        self._passed: int | None = None  # what the index names from here on was looked at
        # Offsets of records that the index names, and that are damaged: they may have the key.
        self.unreadable: list[int] = []
        self.ended = False

    def step(self) -> None:
        """Look at up to STEP entries of the index, or read one record that it named.

        Raises OSError or StoreError for what cannot be read.
        """
        if self._waiting:
            self._look_at(*self._waiting.popleft())
        elif self._walk.ended:
            self.ended = True
        elif self._walk.steps >= STEPS_MAX:
            self.cut_short()
        else:
            self._waiting.extend(self._index.walk_on(self._walk, STEP))
            if self._walk.stale:  # the log was cut, and what was found may be gone
                steps, self._walk = self._walk.steps, self._begin()
                self._walk.steps = steps
                self.found, self._found_bytes, self.unreadable = {}, 0, []
                self._passed = None

    def cut_short(self) -> None:
        """End the search here."""
        self._end_at(self._walk.latest_ms)

    def _end_at(self, latest_ms: int) -> None:
        self.cut_ms, self.ended = min(latest_ms, self._walk.window.end_ms), True
        self.cut_offset = self._passed

    def _look_at(self, offset: int, latest_ms: int) -> None:
        """Read a record that the index named, and keep it if it is wanted."""
        if offset >= self._limit or offset in self.found:
            return
        if not self._is_in_span(offset, latest_ms):
            self._passed = offset
            return
        if self._reads >= READS_MAX or self._read_bytes >= READ_BYTES_MAX:
            self._end_at(latest_ms)
            return
        raw = self._reader.record_bytes(offset)
        above, self._passed = self._passed, offset
        self._reads += 1
        self._read_bytes += MIN_RECORD_SIZE if raw is None else len(raw)
        if raw is None:
            if self._reader.is_in_log(offset) and offset not in self.unreadable:
                self._reader.note_damage(offset)
                self.unreadable.append(offset)
            return
        if offset + len(raw) > self._limit or not self._is_wanted(raw):
            return
        if self.found and self._found_bytes + len(raw) > self._max_bytes:
            self._passed = above
            stored_ms = stated_time_ms(raw, 0, len(raw), offset)
            assert stored_ms is not None  # the record is valid
            self._end_at(min(latest_ms, stored_ms))
            return
        self.found[offset] = raw
        self._found_bytes += len(raw)
        self.ended = len(self.found) >= self._max_messages

    def _is_in_span(self, offset: int, latest_ms: int) -> bool:
        """Whether a record may be in the span of time; of those near its ends a header is read."""
        window = self._walk.window
        if window.begin_ms + 999 <= latest_ms <= window.end_ms:
            return True
        stored_ms = self._reader.stored_ms(offset)
        return stored_ms is None or window.begin_ms <= stored_ms <= window.end_ms

    def _is_wanted(self, raw: bytes) -> bool:
        parts = find_parts(raw, 0, len(raw))
        assert parts is not None  # the record is valid
        _, _, _, flags, _, _, topic_at, topic_size, properties_at = parts
        at, window = store_at(flags), self._walk.window
        stored_ms = int.from_bytes(raw[at : at + 8], signed=True)
        return (
            window.begin_ms <= stored_ms <= window.end_ms
            and raw[topic_at : topic_at + topic_size] == self._topic
            and self._key in keys_of(raw[properties_at:])
        )


def _raw_name(topic: str) -> bytes:
    return topic.encode("utf-8", "surrogateescape")


def _without_records(chosen: UnitSelection, at: int, low: int, high: int) -> PullResult:
    """Return the result of a pull from queue offset `at` on that returns no record."""
    status, following = PullStatus.NO_NEW, max(chosen.first, at)
    if isinstance(chosen, TaggedSelection):
        following = chosen.following
        if chosen.beyond is None and following < high:
            status = PullStatus.NO_MATCH
    return PullResult(status, following, low, high, needs_offset=chosen.beyond)


def _may_map(view: memoryview, begin: int, end: int) -> bool:
    """Whether cold bytes [begin, end) of a file are better read through its map.

    A pread copies the gaps between records too, into new memory. So bytes in the page cache are
    read like hot ones.
    """
    return end - begin in _ASKED_BYTES and is_cached(view, begin, end)


def _read_cold(
    file: File,
    start: int,
    begins: Sequence[int],
    ends: Sequence[int],
    late: Callable[[], bool],
    gap_bytes: int = _GAP_BYTES,
) -> tuple[list[bytes | memoryview], bool]:
    """Read ranges of the file that begins at offset `start`.

    Ranges that lie close together are read by one pread. Also returns whether all ranges were read.
    If not, `late()` was true, or the file ends inside a range, or the rest is not in memory and
    this thread must not wait for it.
    """
    pieces: list[bytes | memoryview] = []
    at, count = 0, len(begins)
    while at < count:
        first, end, following = begins[at], ends[at], at + 1
        gaps = False
        while following < count:
            begin = begins[following]
            if not end <= begin <= end + gap_bytes or ends[following] > first + _READ_BYTES:
                break
            gaps = gaps or begin > end
            end = ends[following]
            following += 1
        try:
            raw = file.pread(end - first, first - start)
        except NotCachedError:
            if not pieces:
                raise
            return pieces, False
        except OSError:
            if not gaps:
                raise
            # The bad sector may lie in a gap: read the ranges without their gaps.
            ranges = begins[at:following], ends[at:following]
            found, whole = _read_cold(file, start, *ranges, late, 0)
            pieces += found
            if not whole:
                return pieces, False
            at = following
            continue
        if gaps:
            view = memoryview(raw)
            pieces += [view[begins[i] - first : ends[i] - first] for i in range(at, following)]
        else:
            pieces.append(raw)
        at = following
        if len(raw) < end - first or (at < count and late()):  # the file was cut, or time is up
            return pieces, False
    return pieces, True
