"""The deduplication window: the latest sequence numbers of each producer, with their offsets.

A producer numbers its messages (record/properties.py). The master adds the records of each put, and
replay adds all records of the log that no put has added, both in the log's order. So every node
recognises a retry, even if the first attempt went to another master.

The window holds at least the last 1024 numbers of each of 4096 producers: of those that wrote last,
as long as these are not more within an hour; else the owner with most of them has fewer. The
greatest number that has left it is the floor. A number at or below the floor that is not in the
window may be stored already, so its put is refused.

Of 61440 more producers, the idle ones, the window holds less: the floor and the last number. If one
of the last 1024 numbers is missing, it holds the numbers after the gap too, so that the missing
number can still be put. A task of Spark's sink that is repeated late needs no more
(spark/sink/__init__.py): it asks how far its producer came. A producer becomes idle only after its
records are confirmed, so that no cut removes the numbers that the window has dropped.

If a cut removes all the numbers that the window holds of a producer, its floor is in doubt: numbers
up to the floor may be cut too. The window then says so until 1024 later numbers are in the log.

Puts call this module under the log's lock. Replay, housekeeping, retention and cuts call it from
other threads. `_guard` protects the producers, `_saving` the snapshot. `_saving` is taken first.

The snapshot, `<root>/hastore/idempotence`, spares a start from reading the whole log:
    magic "HSIW" 4 | version 4 | end offset 8 | producers 4
    each: id length 2, id | floor 8 | count 4 | count x (sequence 8) | count x (offset 8)
    each whose floor is in doubt: its number 4, from 0 on
    CRC-32 (of all before) 4
A node that does not know of doubt reads the producers, and leaves the rest.
"""

import enum
import heapq
import itertools
import struct
import sys
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.record.properties import PID_MARK, owner_of, producer_of
from hastore.store.append.results import ProducerProgress, PutResult
from hastore.store.derived.contract import Dispatched, RecordColumns
from hastore.store.state.crc_frame import FILE_BYTES_MAX, CrcFrame

WINDOW = 1024  # sequence numbers of each producer
# If there are more producers, one becomes idle, or, while its records are not confirmed, once there
# are twice as many: the one that wrote least recently, of all if that was an hour ago, else of the
# owner with most. If too many are idle, one is dropped: of the owner with most, the one that became
# idle first. So no identity makes the node forget the few producers of another one, and producers
# that have ended, as each run of a program leaves one, take no window from those that write.
# The windows take at most 256 MiB, mostly 128, and the idle ones 64 MiB and what Python needs for
# their objects, about 0.5 kB each.
_MAX_PRODUCERS = 4096
_QUIET_MS = 3_600_000.0  # longer than a put is repeated, but by a task of Spark
_MAX_IDLE = 61_440
_MAX_IDLE_NUMBERS = 1 << 22
# No put waits long while many producers become idle, or for a snapshot: the parts of nearly all
# idle producers are ready, and puts go on between a few producers and the next ones.
_IDLE_STEP = 16  # producers that become idle in one call
_DUMP_STEP = 64  # producers that a snapshot copies in one step
_PACKED_NUMBERS = 16
_NAME_BYTES = 128  # of an idle producer, in general less
_HEAD_BYTES = 32  # of a producer in a snapshot, without its name and numbers
_SNAPSHOT_STEP_BYTES = 16 << 20  # log bytes between snapshots; a start after a crash rereads them
_FRAME = CrcFrame(b"HSIW", 1)
_HEAD = struct.Struct(">qI")
_PRODUCER = struct.Struct(">qI")
_LENGTH = struct.Struct(">H")
_NUMBER = struct.Struct(">I")


class UnheldNumber(enum.Enum):
    """What is known of a sequence number that the window does not hold."""

    NEW = "not seen"
    FORGOTTEN = "older than the window"


class ProducerWindow:
    """The latest records of one producer in the log's order: `sequences[i]` is at `offsets[i]`."""

    __slots__ = (
        "doubtful", "floor", "offsets", "owner", "packed", "sequences", "top", "wrote_ms",
    )  # fmt: skip

    def __init__(self, owner: bytes) -> None:
        self.owner = owner  # the beginning of its ids; b"" if they belong to no identity
        self.wrote_ms = 0.0  # when its last record was added, by the monotonic clock
        self.sequences = array("q")
        self.offsets = array("q")
        self.floor = -1  # the greatest sequence number that has left the window
        self.doubtful = False  # a cut may have removed numbers up to the floor
        self.top = -1  # the greatest sequence number in the log
        self.packed = b""  # its part of the snapshot, while it is idle

    def parts(self, producer: bytes) -> tuple[bytes, ...]:
        """Return the producer's part of the snapshot, in parts."""
        return (
            _LENGTH.pack(len(producer)),
            producer,
            _PRODUCER.pack(self.floor, len(self.sequences)),
            _big_endian(self.sequences).tobytes(),
            _big_endian(self.offsets).tobytes(),
        )

    def copy(self) -> "ProducerWindow":
        """Return a copy that later records do not change; without what may leave the window."""
        self.trim()
        copied = ProducerWindow(self.owner)
        copied.floor, copied.doubtful, copied.packed = self.floor, self.doubtful, self.packed
        if not self.packed:
            copied.sequences, copied.offsets = self.sequences[:], self.offsets[:]
        return copied

    def pack(self, producer: bytes) -> None:
        """Keep the producer's part of the snapshot, if it is small, until a number is added."""
        small = len(self.sequences) <= _PACKED_NUMBERS
        self.packed = b"".join(self.parts(producer)) if small else b""

    def add(self, sequence: int, offset: int) -> None:
        """Add the next record."""
        self.sequences.append(sequence)
        self.offsets.append(offset)
        self.top = max(self.top, sequence)
        if len(self.sequences) >= 2 * WINDOW:
            self.trim()

    def extend(self, sequences: Sequence[int], offsets: Sequence[int]) -> None:
        """Add many records, with the same result as `add` for each."""
        top = max(sequences)
        if top > self.top:
            self.top = top
        at = 0
        while len(self.sequences) + len(sequences) - at >= 2 * WINDOW:
            stop = at + 2 * WINDOW - len(self.sequences)
            self.sequences.extend(sequences[at:stop])
            self.offsets.extend(offsets[at:stop])
            self.trim()
            at = stop
        self.sequences.extend(sequences[at:] if at else sequences)
        self.offsets.extend(offsets[at:] if at else offsets)

    def trim(self) -> None:
        """Drop all but the last `WINDOW` records."""
        gone = len(self.sequences) - WINDOW
        if gone > 0:
            greatest = max(self.sequences[:gone])
            if greatest > self.floor:
                self.floor = greatest
                self.doubtful = False  # so many later numbers are in the log
            del self.sequences[:gone]
            del self.offsets[:gone]

    def compact(self) -> None:
        """Drop all records but the last, and those after the first missing number."""
        self.trim()
        before, keep = self.floor, len(self.sequences) - 1
        for place, sequence in enumerate(self.sequences):
            if sequence != before + 1:
                keep = place
                break
            before = sequence
        if keep > 0:
            self.floor = max(self.floor, max(self.sequences[:keep]))
        # New arrays: a deletion would leave the old ones as large as they were.
        self.sequences = array("q", self.sequences[max(keep, 0) :])
        self.offsets = array("q", self.offsets[max(keep, 0) :])

    def cut(self, log_end: int) -> None:
        """Forget records at or beyond `log_end`."""
        keep = len(self.offsets)
        while keep and self.offsets[keep - 1] >= log_end:
            keep -= 1
        del self.sequences[keep:]
        del self.offsets[keep:]
        self.doubtful |= not keep and self.floor >= 0
        self.top = max(self.floor, max(self.sequences, default=-1))

    def find(self, sequence: int) -> int | None:
        """Return the offset of a sequence number; None if the window does not hold it."""
        if sequence > self.top:
            return None
        try:
            return self.offsets[self.sequences.index(sequence)]
        except ValueError:
            return None


class _Sizes:
    """A size for each owner; finds an owner with the greatest. O(log n), spread over the calls."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        # Of each owner at least one entry is not below its size: one that shrinks stays as it was.
        self._heap: list[tuple[int, bytes]] = []

    def grow(self, owner: bytes, change: int) -> None:
        """Add `change`, which may be negative, to an owner's size."""
        size = self._sizes.get(owner, 0) + change
        if size:
            self._sizes[owner] = size
        else:
            self._sizes.pop(owner, None)
        if change > 0:
            heapq.heappush(self._heap, (-size, owner))
            if len(self._heap) > 2 * len(self._sizes) + 64:
                self._heap = [(-each, name) for name, each in self._sizes.items()]
                heapq.heapify(self._heap)

    def largest(self) -> tuple[bytes, int]:
        """Return an owner with the greatest size, and that size; there must be one."""
        while True:
            said, owner = self._heap[0]
            size = self._sizes.get(owner, 0)
            if size == -said:
                return owner, size
            if size:
                heapq.heapreplace(self._heap, (-size, owner))
            else:
                heapq.heappop(self._heap)


class _ByOwner:
    """The names of producers, by whose they are, and of each owner in their order.

    The producers whose ids belong to no identity have one owner together, b"".
    """

    def __init__(self) -> None:
        self._names: dict[bytes, OrderedDict[bytes, None]] = {}
        self._sizes = _Sizes()

    def add(self, producer: bytes, owner: bytes) -> None:
        """Add a producer as its owner's last one."""
        self._names.setdefault(owner, OrderedDict())[producer] = None
        self._sizes.grow(owner, 1)

    def move_to_end(self, producer: bytes, owner: bytes) -> None:
        """Make a producer its owner's last one."""
        self._names[owner].move_to_end(producer)

    def remove(self, producer: bytes, owner: bytes) -> None:
        """Remove a producer."""
        names = self._names[owner]
        del names[producer]
        if not names:
            del self._names[owner]
        self._sizes.grow(owner, -1)

    def first(self, owner: bytes) -> bytes:
        """Return an owner's first producer."""
        return next(iter(self._names[owner]))

    def of_largest(self) -> list[bytes]:
        """Return the first two producers of an owner with most; none if no owner has two."""
        owner, size = self._sizes.largest()
        return [*itertools.islice(self._names[owner], 2)] if size > 1 else []


class DedupWindow:
    """The windows of all producers; a Dispatcher. Thread-safe."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        confirmed: Callable[[], int] = lambda: 1 << 63,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`confirmed` returns the offset below which no cut removes records."""
        self._fs = fs
        self._confirmed = confirmed
        self._clock = clock
        self._path = f"{root}/hastore/idempotence"
        self._guard = threading.Lock()
        self._saving = threading.RLock()
        self._producers: OrderedDict[bytes, ProducerWindow] = OrderedDict()
        self._idle: OrderedDict[bytes, ProducerWindow] = OrderedDict()
        self._forget_owners()
        # While a snapshot is made: those that are not in it yet, and copies of the ones among them
        # that have changed since it began.
        self._waiting: set[ProducerWindow] = set()
        self._copies: dict[ProducerWindow, ProducerWindow] = {}
        self.end_offset = 0  # all records below it were added
        self._snapshot_end = 0
        self._snapshot_step = _SNAPSHOT_STEP_BYTES

    def __len__(self) -> int:
        return len(self._producers) + len(self._idle)

    def _look_up(self, producer: bytes) -> ProducerWindow | None:
        return self._producers.get(producer) or self._idle.get(producer)

    def is_new(self, producer: tuple[bytes, int]) -> bool:
        """Whether a sequence number is above all that its producer has used; takes no lock.

        True for nearly every record. The answer is exact only while no other thread adds records.
        During a put no other thread does: the put has the log's lock, and `end_offset` is the log's
        end, so replay has nothing to add.
        """
        known = self._producers.get(producer[0]) or self._idle.get(producer[0])
        return known is None or producer[1] > known.top

    def find(self, producer: bytes, sequence: int) -> int | UnheldNumber:
        """Return the offset of the record with this sequence number, or an UnheldNumber."""
        with self._guard:
            known = self._look_up(producer)
            if known is None or sequence > known.top:
                return UnheldNumber.NEW
            offset = known.find(sequence)
            if offset is not None:
                return offset
            return UnheldNumber.FORGOTTEN if sequence <= known.floor else UnheldNumber.NEW

    def progress(self, producer: bytes) -> ProducerProgress:
        """Return how far a producer came in the log up to `end_offset`."""
        with self._guard:
            known = self._look_up(producer)
            if known is None:
                return ProducerProgress(None, None)
            forgotten = None if known.floor < 0 else known.floor
            last = max(known.sequences, default=None)
            if known.doubtful and (last is None or last < known.floor + WINDOW):
                last = None
            return ProducerProgress(last, forgotten)

    def add_all(self, fresh: Mapping[tuple[bytes, int], PutResult], end_offset: int) -> None:
        """Add the records of a put by their results; the log now ends at `end_offset`."""
        with self._guard:
            for (producer, sequence), result in fresh.items():
                if result.offset is not None and result.offset >= self.end_offset:
                    self._window_of(producer).add(sequence, result.offset)
            self.end_offset = max(self.end_offset, end_offset)

    def top(self, producer: bytes) -> int:
        """Return a producer's greatest sequence number, -1 for a new one; exact if `is_new` is."""
        known = self._look_up(producer)
        return -1 if known is None else known.top

    def add_runs(
        self, runs: Iterable[tuple[bytes, Sequence[int], Sequence[int]]], end_offset: int
    ) -> None:
        """Add the records of a put by producer; the log now ends at `end_offset`.

        Each run is (producer, sequence numbers, offsets). Its numbers rise, and are above all that
        the producer has used.
        """
        with self._guard:
            for producer, sequences, offsets in runs:
                if offsets[0] < self.end_offset:  # replay was faster, and has added some already
                    taken = bisect_left(offsets, self.end_offset)
                    sequences, offsets = sequences[taken:], offsets[taken:]
                    if not sequences:
                        continue
                self._window_of(producer).extend(sequences, offsets)
            self.end_offset = max(self.end_offset, end_offset)

    def advance(self, end_offset: int) -> None:
        """Set the end: every record below `end_offset` was added."""
        self.end_offset = end_offset

    def _window_of(self, producer: bytes) -> ProducerWindow:
        """Return a producer's window (a new one if it has none), and make it the most recent."""
        known = self._producers.get(producer)
        if known is not None:
            self._producers.move_to_end(producer)
            self._owners.move_to_end(producer, known.owner)
            known.wrote_ms = self._clock.monotonic_ms()
            self._before_change(known)
            return known
        known = self._idle.get(producer)
        if known is None:
            known = ProducerWindow(owner_of(producer))
        else:
            self._before_change(known)
            self._drop_idle(producer)
            known.packed = b""
        self._keep(producer, known)
        return known

    def _keep(self, producer: bytes, known: ProducerWindow) -> None:
        """Add a producer as the most recent; others may become idle, or be dropped."""
        known.wrote_ms = now_ms = self._clock.monotonic_ms()
        self._producers[producer] = known
        self._owners.add(producer, known.owner)
        for _ in range(_IDLE_STEP):
            if len(self._producers) <= _MAX_PRODUCERS:
                break
            # The record of the second producer begins where that of the first ends, or later.
            first, second = itertools.islice(self._producers, 2)
            if self._producers[first].wrote_ms > now_ms - _QUIET_MS:
                first, second = self._owners.of_largest() or (first, second)
            offsets = self._producers[second].offsets
            at = offsets[-1] if offsets else 0
            if second == producer:  # its record is not added yet
                at = max(at, self.end_offset)
            if at > self._confirmed() and len(self._producers) <= 2 * _MAX_PRODUCERS:
                break
            self._make_idle(first, self._producers.pop(first))
        while len(self._idle) > _MAX_IDLE:
            names = self._idle_owners.of_largest()
            self._drop_idle(names[0] if names else next(iter(self._idle)))
        while self._idle_numbers > _MAX_IDLE_NUMBERS:
            owner, _ = self._idle_sizes.largest()
            self._drop_idle(self._idle_owners.first(owner))

    def _make_idle(self, producer: bytes, known: ProducerWindow) -> None:
        """Make a producer idle."""
        self._owners.remove(producer, known.owner)
        self._before_change(known)
        self._add_idle(producer, known)

    def _add_idle(self, producer: bytes, known: ProducerWindow) -> None:
        known.compact()
        known.pack(producer)
        self._idle[producer] = known
        self._count_idle(producer, known)

    def _count_idle(self, producer: bytes, known: ProducerWindow) -> None:
        numbers = len(known.sequences)
        self._idle_owners.add(producer, known.owner)
        self._idle_sizes.grow(known.owner, numbers)
        self._idle_numbers += numbers

    def _drop_idle(self, producer: bytes) -> None:
        known = self._idle.pop(producer)
        numbers = len(known.sequences)
        self._idle_owners.remove(producer, known.owner)
        self._idle_sizes.grow(known.owner, -numbers)
        self._idle_numbers -= numbers

    def _before_change(self, known: ProducerWindow) -> None:
        """Copy a producer for the snapshot that is being made, which shall not have the change."""
        if known in self._waiting:
            self._waiting.discard(known)
            self._copies[known] = known.copy()

    # -- replay -----------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the snapshot; returns the offset up to which it covers the log, 0 without one."""
        del synced  # the snapshot is replaced durably, and holds its own end
        with self._guard:
            self._clear()
            self.end_offset = self._snapshot_end = 0
            raw = read_or_empty(self._fs, self._path, FILE_BYTES_MAX)
            if not self._restore(raw):
                return 0
            self._snapshot_end = self.end_offset
            stale = self.end_offset > offset
            if stale:
                self._cut(offset)
        if stale:  # the snapshot must not name records that were cut
            self.save()
        return self.end_offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Add the records of replay, without those that a put has added."""
        with self._guard:
            if isinstance(batch, RecordColumns) and self._add_columns(batch):
                return
            if batch and batch[-1].end_offset > self.end_offset:
                self._add_each(batch)

    def _add_each(self, batch: Sequence[Dispatched]) -> None:
        """Add records one by one; consecutive records of a producer are added together."""
        end, producer = self.end_offset, b""
        sequences: list[int] = []
        offsets: list[int] = []
        for record in batch:
            properties = record[8]
            if record[0] < end or PID_MARK not in properties:
                continue
            try:
                found = producer_of(properties)
            except ValueError:  # RocketMQ stores any HS_PID and HS_SEQ
                continue
            if found is None:
                continue
            if found[0] != producer:
                if sequences:
                    self._window_of(producer).extend(sequences, offsets)
                producer, sequences, offsets = found[0], [], []
            sequences.append(found[1])
            offsets.append(record[0])
        if sequences:
            self._window_of(producer).extend(sequences, offsets)
        self.end_offset = batch[-1].end_offset

    def _add_columns(self, batch: RecordColumns) -> bool:
        """Add a batch by producer; False if its records must be added one by one."""
        if batch.end_offset <= self.end_offset:
            return True
        if batch.start_offset < self.end_offset:
            return False
        runs = batch.producer_runs()
        if len(self._producers) + len(runs) > _MAX_PRODUCERS:
            return False  # a producer becomes idle, and the order of the records decides which one
        for run in runs:
            self._window_of(run.producer).extend(run.sequences, run.offsets)
        self.end_offset = batch.end_offset
        return True

    def truncate(self, log_end: int) -> None:
        """Forget records at or beyond `log_end`, durably."""
        with self._saving:
            with self._guard:
                if self.end_offset > log_end:
                    self._cut(log_end)
                stale = self._snapshot_end > log_end
            if stale:
                self.save()

    def _cut(self, log_end: int) -> None:
        for producers in (self._producers, self._idle):
            for producer, known in list(producers.items()):
                held = len(known.sequences)
                known.cut(log_end)
                if not known.sequences and known.floor < 0:
                    del producers[producer]
                elif known.packed and len(known.sequences) < held:
                    known.pack(producer)
        self._forget_owners()
        for producer, known in self._producers.items():
            self._owners.add(producer, known.owner)
        for producer, known in self._idle.items():
            self._count_idle(producer, known)
        self.end_offset = min(self.end_offset, log_end)

    def flush(self) -> None:
        """Write a snapshot if the log has grown enough since the last one. Raises OSError."""
        if self.end_offset - self._snapshot_end >= self._snapshot_step:
            self.save()

    def reset(self) -> None:
        """Forget everything, durably."""
        with self._saving:
            with self._guard:
                self._clear()
                self.end_offset = 0
            self.save()

    def _clear(self) -> None:
        self._producers.clear()
        self._idle.clear()
        self._forget_owners()

    def _forget_owners(self) -> None:
        self._owners, self._idle_owners = _ByOwner(), _ByOwner()
        self._idle_sizes = _Sizes()  # how many numbers the window holds of the idle ones
        self._idle_numbers = 0

    def delete_before(self, min_offset: int) -> None:
        """Keep everything: a retry is recognised even after retention removed its record."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    # -- snapshot ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the snapshot, durably and atomically. Raises OSError."""
        with self._saving:  # housekeeping, retention and cuts share one temporary file
            raw, end = self._dump()
            self._fs.replace_bytes(self._path, raw)
            self._snapshot_end = end
            self._snapshot_step = max(_SNAPSHOT_STEP_BYTES, 4 * len(raw))

    def save_before(self, min_offset: int) -> None:
        """Write the snapshot if the present one ends before `min_offset`. Raises OSError.

        Retention is about to remove the log below `min_offset`, so a start could not read it again.
        """
        if self._snapshot_end < min_offset:
            self.save()

    def snapshot_bytes(self) -> int:
        """Return about how large a snapshot would be now, rather too large."""
        with self._guard:
            numbers = sum(len(known.sequences) for known in self._producers.values())
            numbers += self._idle_numbers
            names = sum(map(len, self._producers)) + _NAME_BYTES * len(self._idle)
            return 4096 + names + _HEAD_BYTES * len(self) + 16 * numbers

    def _dump(self) -> tuple[bytes, int]:
        """Return a snapshot and its end: the window as it is at the call, though puts go on.

        The caller holds `_saving`, so only new records change the window meanwhile.
        """
        with self._guard:
            end = self.end_offset
            names = [*self._idle, *self._producers]
            everyone = [*self._idle.values(), *self._producers.values()]
            self._waiting = set(everyone)
        parts = [_HEAD.pack(end, len(everyone))]
        doubtful: list[int] = []
        try:
            for at in range(0, len(everyone), _DUMP_STEP):
                step = self._take(everyone[at : at + _DUMP_STEP])
                for number, known in enumerate(step, at):
                    # Bytes, also of one part: the interpreter lets go of its lock to join them.
                    parts.append(known.packed or b"".join(known.parts(names[number])))
                    if known.doubtful:
                        doubtful.append(number)
        finally:
            with self._guard:
                self._waiting, self._copies = set(), {}
        return _FRAME.pack(*parts, *map(_NUMBER.pack, doubtful)), end

    def _take(self, step: list[ProducerWindow]) -> list[ProducerWindow]:
        """Return producers as they were when the snapshot began."""
        with self._guard:
            for known in step:
                self._before_change(known)
            return [self._copies.pop(known) for known in step]

    def _restore(self, raw: bytes) -> bool:
        found = _FRAME.read(raw, _read_snapshot)
        if found is None:
            return False
        end, restored = found
        idle = max(0, len(restored) - _MAX_PRODUCERS)  # these come first
        for producer, known in restored[:idle]:
            self._add_idle(producer, known)
        for producer, known in restored[idle:]:
            self._keep(producer, known)
        self.end_offset = end
        return True


def _read_snapshot(content: memoryview) -> tuple[int, list[tuple[bytes, ProducerWindow]]]:
    """Return a snapshot's end and its producers; raises what `CrcFrame.read` takes for damage."""
    end, count = _HEAD.unpack_from(content)
    at = _HEAD.size
    restored: list[tuple[bytes, ProducerWindow]] = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(content, at)
        producer = bytes(content[at + 2 : at + 2 + length])
        at += 2 + length
        known = ProducerWindow(owner_of(producer))
        known.floor, entries = _PRODUCER.unpack_from(content, at)
        at += _PRODUCER.size
        for part in (known.sequences, known.offsets):
            part.frombytes(content[at : at + 8 * entries])
            at += 8 * entries
        if at > len(content):
            raise ValueError("the numbers of a producer are cut off")
        known.sequences = _big_endian(known.sequences)
        known.offsets = _big_endian(known.offsets)
        known.top = max(known.floor, max(known.sequences, default=-1))
        # Only a cut leaves no number, also of a node that does not know of doubt.
        known.doubtful = not known.sequences
        restored.append((producer, known))
    for (number,) in _NUMBER.iter_unpack(content[at:]):
        restored[number][1].doubtful = True
    return end, restored


def _big_endian(values: "array[int]") -> "array[int]":
    """Swap native and big-endian byte order; a second call swaps back."""
    swapped = array("q", values)
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped
