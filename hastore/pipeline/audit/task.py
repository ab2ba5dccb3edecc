"""The work of one task: compare a part of two logs, and examine the first difference in it.

Tasks run in the executors' processes; each opens both sides of its own. What decides which kind a
side is stands here too: tcp://HOST:PORT is a running node, all else a store's folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hastore.pipeline.audit.difference import (
    UNKNOWN_BYTES,
    Difference,
    blank_size,
    describe_difference,
    describe_unknown,
    record_start,
    size_of,
)
from hastore.pipeline.audit.node_side import NodeSide, node_extent
from hastore.pipeline.audit.sides import (
    NODE,
    RANGE_BYTES,
    Extent,
    FolderSide,
    Missing,
    Side,
    covering,
    folder_extent,
    open_folder,
)
from hastore.record.layout import BLANK_SIZE, FLAG_IPV6, HEADER_SIZES
from hastore.record.log_format import ENTRY_HEADER_BYTES


def extent_of(where: str) -> Extent:
    """Return what a side has. Raises UsageError, StoreError, UnreachableError."""
    return node_extent(where) if "://" in where else folder_extent(where)


def check_side(where: str) -> None:
    """Look whether there is a log; scan none. Raises UsageError, StoreError, UnreachableError."""
    if "://" in where:
        node_extent(where)
    else:
        open_folder(where).close()


def open_side(given: Extent, algorithm: str, security: str | None = None) -> Side:
    """Open a side in the process of a task; `security` is the path of the client's file."""
    if given.kind == NODE:
        return NodeSide(given, algorithm, security)
    return FolderSide(given, algorithm)


SLOW = ("sha256",)  # digests that take longer than a comparison of the bytes
AHEAD = 3  # ranges whose digests are under way
COMPARED_BYTES = 64 * 1024  # a difference is narrowed down to so many bytes by digests
TRIES = 3  # if the bytes change while they are examined


@dataclass(frozen=True)
class Task:
    """A part [start, end) of both logs."""

    a: Extent
    b: Extent
    start: int
    end: int
    algorithm: str
    security: str | None = None  # the path of the client's file, which executors have too


@dataclass(frozen=True)
class Skipped:
    """A range that was not compared, and why."""

    start: int
    end: int
    why: str
    cut: bool = False  # the log was cut: bytes that both sides have were not compared


@dataclass
class TaskResult:
    """The outcome of a task."""

    ranges: int = 0
    digests: bytes = b""  # of the equal ranges, in order
    differing: list[tuple[int, int]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    ignored_bytes: int = 0  # in blanks, where they mean nothing
    first: Difference | None = None


def run_task(task: Task) -> TaskResult:
    """Compare a part of both logs. Raises HastoreError."""
    given = task.algorithm, task.security
    with open_side(task.a, *given) as a, open_side(task.b, *given) as b:
        return _Comparison(task, a, b).compare()


def cut_ranges(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [start, end), which end at multiples of RANGE_BYTES."""
    while start < end:
        stop = min(end, start - start % RANGE_BYTES + RANGE_BYTES)
        yield start, stop
        start = stop


class _Comparison:
    def __init__(self, task: Task, a: Side, b: Side) -> None:
        self._task = task
        self._a = a
        self._b = b
        self._found = TaskResult()
        self._digests_of: dict[int, bytes] = {}  # of the equal ranges, by their start

    def compare(self) -> TaskResult:
        mismatches: list[tuple[int, int]] = []
        ranges = list(cut_ranges(self._task.start, self._task.end))
        self._found.ranges = len(ranges)
        for (start, end), digest in zip(ranges, self._digests(ranges), strict=True):
            if digest is None:
                mismatches.append((start, end))
            elif isinstance(digest, bytes):
                self._digests_of[start] = digest
            elif digest.end < end:
                mismatches.append((digest.end, end))
        for start, end in mismatches:
            self._mismatch(start, end)
        # A range whose bytes have settled meanwhile was compared after later ones.
        self._found.digests = b"".join(self._digests_of[at] for at in sorted(self._digests_of))
        return self._found

    def _digests(self, ranges: list[tuple[int, int]]) -> Iterator[bytes | Skipped | None]:
        """Yield what `_finish_digests` returns for each range; AHEAD digests are under way."""
        a, b = self._a, self._b
        if isinstance(a, FolderSide) and isinstance(b, FolderSide) and self._task.algorithm in SLOW:
            for start, end in ranges:
                digest = a.digest_beside(b, start, end)
                yield self._skip(start, end, digest) if isinstance(digest, Missing) else digest
            return
        for start, end in ranges[:AHEAD]:
            self._begin_digests(start, end)
        for number, (start, end) in enumerate(ranges, AHEAD):
            yield self._finish_digests(start, end)
            if number < len(ranges):
                self._begin_digests(*ranges[number])

    def _begin_digests(self, start: int, end: int) -> None:
        self._a.begin(start, end)
        self._b.begin(start, end)

    def _finish_digests(self, start: int, end: int) -> bytes | Skipped | None:
        """Return the digest of the oldest range; None if the sides differ."""
        a, b = self._a.finish(), self._b.finish()
        for digest in (a, b):
            if isinstance(digest, Missing):
                return self._skip(start, end, digest)
        return a if isinstance(a, bytes) and a == b else None

    def _skip(self, start: int, end: int, missing: Missing) -> Skipped:
        """Note the part of a range that retention removed, or all of it after a cut."""
        cut = start >= missing.min_offset
        end = end if cut else min(end, missing.min_offset)
        skipped = Skipped(start, end, missing.reason(start), cut)
        self._found.skipped.append(skipped)
        return skipped

    # -- differences

    def _mismatch(self, start: int, end: int) -> None:
        """Decide what a range is whose digests differ, until the first difference is known."""
        found = self._found
        if found.first is not None:
            found.differing.append((start, end))
            return
        at = start
        for _ in range(TRIES):
            outcome = self._examine(at, end)
            while isinstance(outcome, int):  # a blank ends there
                at = outcome
                outcome = self._examine(at, end)
            if outcome is None:
                if at > start:
                    return  # only bytes of blanks differed
                self._begin_digests(start, end)
                digest = self._finish_digests(start, end)
                if isinstance(digest, bytes):
                    self._digests_of[start] = digest
                if digest is not None:
                    return
                continue
            if isinstance(outcome, Difference):
                lost = self._a.lost(start, end) or self._b.lost(start, end)
                if lost is None:
                    found.first = outcome
                    found.differing.append((start, end))
                    return
                outcome = lost
            self._skip(start, end, outcome)
            return
        why = "its bytes changed again and again while they were compared"
        found.skipped.append(Skipped(start, end, why, True))

    def _examine(self, start: int, end: int) -> Difference | Missing | int | None:
        """Return the first difference in a range; None if there is none (any more).

        Return the end of a blank if only bytes in it differ whose value means nothing.
        """
        byte = self._first_byte(start, end)
        if not isinstance(byte, int):
            return byte
        low = max(self._task.a.min_offset, self._task.b.min_offset)
        lost: list[Missing] = []

        def read(first: int, last: int) -> bytes | None:
            found = self._a.read(first, last)
            if isinstance(found, Missing):
                lost.append(found)
                return None
            return found

        begin = record_start(read, low, byte)
        if lost:
            return lost[0]
        where = self._a.where, self._b.where
        if begin is None:
            raws = self._both(byte, min(byte + UNKNOWN_BYTES, self._end))
            return raws if isinstance(raws, Missing) else describe_unknown(where, raws, byte)
        raws = self._both(begin, min(begin + HEADER_SIZES[FLAG_IPV6], self._end))
        if isinstance(raws, Missing):
            return raws
        blank = blank_size(raws[0])
        if blank is not None and blank == blank_size(raws[1]) and byte >= begin + BLANK_SIZE:
            after = min(begin + blank, end)
            self._found.ignored_bytes += after - byte
            return after
        size = max(*map(size_of, raws), byte + 1 - begin)
        raws = self._both(begin, min(begin + size, self._end))
        if isinstance(raws, Missing):
            return raws
        a, b = self._task.a, self._task.b
        files_differ = None not in (a.file_size, b.file_size) and a.file_size != b.file_size
        epochs = None
        if a.epochs and b.epochs:
            epochs = (
                covering(a.epochs, byte, byte + 1)[0][0], covering(b.epochs, byte, byte + 1)[0][0]
            )  # fmt: skip
        # In a log of entries, the header before a record says which side's record is right.
        head: bytes | Missing = b""
        if begin - low >= ENTRY_HEADER_BYTES:
            head = self._a.read(begin - ENTRY_HEADER_BYTES, begin)
        if isinstance(head, Missing):
            return head
        return describe_difference(where, raws, begin, byte, files_differ, epochs, head)

    @property
    def _end(self) -> int:
        """The end of what both sides can read."""
        return max(self._task.end, min(self._task.a.end_offset, self._task.b.end_offset))

    def _first_byte(self, start: int, end: int) -> int | Missing | None:
        """Return the first byte that differs; None if none does."""
        while end - start > COMPARED_BYTES:
            middle = (start + end) // 2
            self._begin_digests(start, middle)
            a, b = self._a.finish(), self._b.finish()
            for digest in (a, b):
                if isinstance(digest, Missing):
                    return digest
            if a == b:
                start = middle
            else:
                end = middle
        raws = self._both(start, end)
        if isinstance(raws, Missing):
            return raws
        for place, (one, other) in enumerate(zip(*raws, strict=True)):
            if one != other:
                return start + place
        return None

    def _both(self, start: int, end: int) -> tuple[bytes, bytes] | Missing:
        a, b = self._a.read(start, end), self._b.read(start, end)
        if isinstance(a, Missing):
            return a
        return b if isinstance(b, Missing) else (a, b)
