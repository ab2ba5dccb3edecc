"""The job `audit`: cut the common range into tasks, compare them on Spark, sum up the results.

It runs in the driver. `Summary` is what the command prints, by --json too.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hastore.client.security import named_file
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import HastoreError, UsageError
from hastore.pipeline.audit.difference import Difference, size_of
from hastore.pipeline.audit.sides import RANGE_BYTES, ROCKETMQ, Extent, Missing
from hastore.pipeline.audit.task import (
    Task,
    TaskResult,
    check_side,
    extent_of,
    open_side,
    run_task,
)
from hastore.pipeline.progress import JobProgress
from hastore.record.hashes import ALGORITHMS, DEFAULT_ALGORITHM, new_digest
from hastore.record.layout import FLAG_IPV6, HEADER_SIZES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class NotCompared:
    """A range that was not compared."""

    start: int
    end: int
    why: str


@dataclass
class Summary:
    """The result of an audit. Offsets are bytes of the log; ranges are half-open."""

    a: Extent
    b: Extent
    algorithm: str
    start: int  # compared from here
    end: int  # up to here
    equal: bool  # no difference was found
    complete: bool  # everything in [start, end) that both sides still have was compared
    bytes: int = 0  # compared on each side
    ranges: int = 0
    seconds: float = 0.0  # without the start of Spark
    mb_per_s: float = 0.0  # a side; 1 MB is 10^6 bytes
    digest: str | None = None  # of all ranges' digests in order; None unless all of it is equal
    equal_until: int = 0  # everything before this offset is equal
    differing_ranges: int = 0
    differing: list[tuple[int, int]] = field(default_factory=list)  # the first 100 of them
    first: Difference | None = None
    ignored_bytes: int = 0  # in blanks, where they mean nothing
    not_compared: list[NotCompared] = field(default_factory=list)


def ranges_outside(
    a: Extent, b: Extent, start: int, end: int, asked: tuple[bool, bool]
) -> list[NotCompared]:
    """Return what lies outside of the compared range [start, end), and why.

    `asked` says whether the caller gave its start and its end.
    """
    found = []
    for side, other in ((a, b), (b, a)):
        if side.min_offset < start and not asked[0]:
            why = f"only {side.where} has it: the log of {other.where} begins at {other.min_offset}"
            found.append(NotCompared(side.min_offset, start, why))
    for side, other in ((a, b), (b, a)):
        if side.max_offset <= end or asked[1]:
            continue
        if side.end_offset > end:
            why = f"beyond the {other.end_is} of {other.where}, {other.end_offset}"
        else:
            why = f"at {side.where}, beyond its {side.end_is}"
        found.append(NotCompared(end, side.max_offset, why))
    return found


TASK_BYTES_MIN = 128 * 1024 * 1024
TASK_BYTES_MAX = 1024 * 1024 * 1024
TASKS_OF_A_CORE = 2  # 128 MiB take a core 0.03 s: more tasks would cost more than they share out
LISTED_MAX = 100  # ranges that differ, listed in the summary

Runner = Callable[[Sequence[Task]], Any]  # a generator of (task, result)


def audit(
    spark: SparkSession,
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    algorithm: str = DEFAULT_ALGORITHM,
    start: int | None = None,
    end: int | None = None,
    stop_at_first: bool = False,
    progress: JobProgress | None = None,
) -> Summary:
    """Compare the logs of two stores or nodes: each a store's folder, or tcp://HOST:PORT.

    Compares [start, end) as far as both sides have it: by default all that both have, up to the
    confirmed offset of a running node. With `stop_at_first` the audit ends once the first
    difference is certain. Raises UsageError for wrong arguments, UnreachableError if a node does
    not answer, StoreError if a store cannot be read, HastoreError if there is nothing to compare.
    """
    from hastore.pipeline.running import check_session, run_tasks

    check_session(spark)
    cores = spark.sparkContext.defaultParallelism
    runner = partial(run_tasks, spark, "audit", run_task)
    return compare(
        a, b, runner, cores, algorithm=algorithm, start=start, end=end,
        stop_at_first=stop_at_first, progress=progress or JobProgress(),
    )  # fmt: skip


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    runner: Runner,
    cores: int,
    *,
    algorithm: str = DEFAULT_ALGORITHM,
    start: int | None = None,
    end: int | None = None,
    stop_at_first: bool = False,
    progress: JobProgress,
) -> Summary:
    """Do the work of `audit` with any runner of tasks."""
    _check_arguments(algorithm, start, end)
    sides = extent_of(os.fspath(a)), extent_of(os.fspath(b))
    begin, stop = common_range(*sides, start, end)
    if end is None:
        stop = beyond_torn_record(*sides, stop, algorithm)
    tasks = cut_tasks(*sides, begin, stop, algorithm, cores)
    summary = Summary(*sides, algorithm, begin, stop, equal=True, complete=True, equal_until=begin)
    summary.not_compared = ranges_outside(*sides, begin, stop, (start is not None, end is not None))
    collected = _Collected(summary, progress)
    begun_ms = SYSTEM_CLOCK.monotonic_ms()
    progress.begin("audit", stop - begin, "bytes")
    try:
        with contextlib.closing(runner(tasks)) as results:
            for task, found in results:
                collected.add_result(task, found)
                progress.advance(task.end - task.start)
                if stop_at_first and collected.first_is_certain:
                    break
    except HastoreError as error:
        error.args = (f"{error}; {collected.reached()}", *error.args[1:])
        raise
    summary.seconds = (SYSTEM_CLOCK.monotonic_ms() - begun_ms) / 1000.0
    collected.finish()
    return summary


def check_audit(
    a: str, b: str, *, algorithm: str = DEFAULT_ALGORITHM, start: int | None, end: int | None
) -> None:
    """Check what needs no Spark and no scan of a log.

    Raises UsageError, StoreError, UnreachableError.
    """
    _check_arguments(algorithm, start, end)
    for where in (a, b):
        check_side(where)


def _check_arguments(algorithm: str, start: int | None, end: int | None) -> None:
    if algorithm not in ALGORITHMS:
        raise UsageError(f"{algorithm!r} is no digest; the digests are {', '.join(ALGORITHMS)}")
    if start is not None and end is not None and start >= end:
        raise UsageError(f"--from {start} is not below --to {end}")


def common_range(a: Extent, b: Extent, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the range to compare. Raises UsageError, HastoreError if it would be empty."""
    low, high = max(a.min_offset, b.min_offset), min(a.end_offset, b.end_offset)
    have = (
        f"{a.where} has [{a.min_offset}, {a.end_offset}), up to its {a.end_is}; "
        f"{b.where} has [{b.min_offset}, {b.end_offset}), up to its {b.end_is}"
    )
    for name, given in (("--from", start), ("--to", end)):
        if given is not None and not low <= given <= high:
            raise UsageError(f"{name} {given} is not in what both sides have: {have}")
    begin, stop = low if start is None else start, high if end is None else end
    empty = a.min_offset == a.max_offset and b.min_offset == b.max_offset
    if begin >= stop and not empty:
        raise HastoreError(f"nothing to compare: {have}")
    return begin, max(begin, stop)


def beyond_torn_record(a: Extent, b: Extent, end: int, algorithm: str) -> int:
    """Return where to end if the log of a RocketMQ store ends in a damaged record.

    Such a store has no limits: its last whole record ends it. If it goes on with bytes that are no
    record, they are either the first part of a record that is being copied, or damage. The other
    side's record decides: damage is compared, so that it is found.
    """
    short, long = (a, b) if a.end_offset <= b.end_offset else (b, a)
    if short.kind != ROCKETMQ or short.end_offset == long.end_offset or end != short.end_offset:
        return end
    with open_side(short, algorithm) as one, open_side(long, algorithm) as other:
        front = other.read(end, min(end + HEADER_SIZES[FLAG_IPV6], long.end_offset))
        if isinstance(front, Missing):
            return end
        stop = min(end + size_of(front), long.end_offset)
        theirs, own = other.read(end, stop), one.read(end, stop)
    if isinstance(own, Missing) or isinstance(theirs, Missing):
        return end
    written = own.rstrip(b"\0")
    return end if theirs.startswith(written) else stop


def cut_tasks(a: Extent, b: Extent, start: int, end: int, algorithm: str, cores: int) -> list[Task]:
    """Cut [start, end) into tasks, which begin at multiples of RANGE_BYTES.

    If there are more tasks than cores, each core gets the same number, as far as ranges allow: else
    some would wait for the last tasks.
    """
    base = start - start % RANGE_BYTES
    total = end - base
    count = min(cores * TASKS_OF_A_CORE, -(-total // TASK_BYTES_MIN))
    count = max(count, -(-total // TASK_BYTES_MAX), 1)
    if count > cores:
        count = -(-count // cores) * cores
    size = -(-total // (count * RANGE_BYTES)) * RANGE_BYTES
    tasks, security = [], named_file()
    while start < end:
        stop = min(end, base + size)
        tasks.append(Task(a, b, start, stop, algorithm, security))
        start = base = stop
    return tasks


class _Collected:
    """Put the tasks' results together, in the order of the log, whichever ends first."""

    def __init__(self, summary: Summary, progress: JobProgress) -> None:
        self._summary = summary
        self._progress = progress
        self._early: list[tuple[int, int, TaskResult]] = []  # a heap: (start, end, result)
        self._next = summary.start
        self._digest = new_digest(summary.algorithm)
        self._equal = True  # all of [start, _next) is equal, and was compared
        self._certain = True  # `equal_until` still moves
        self._skipped_bytes = 0

    @property
    def first_is_certain(self) -> bool:
        """Whether the first difference is known: all before it was compared."""
        return self._summary.first is not None

    def add_result(self, task: Task, found: TaskResult) -> None:
        """Add the result of a task, in any order of the tasks."""
        heapq.heappush(self._early, (task.start, task.end, found))
        while self._early and self._early[0][0] == self._next:
            _, self._next, following = heapq.heappop(self._early)
            self._add_in_order(following)
        self._progress.keep(self.reached())

    def reached(self) -> str:
        """Say up to where both sides are equal, and how to go on from there."""
        summary = self._summary
        if summary.first is not None:
            return f"the first difference is in the {summary.first.item} at {summary.first.offset}"
        at = summary.equal_until
        if at == summary.start:
            return "nothing was compared to its end yet"
        return f"all is equal in [{summary.start}, {at}); --from {at} continues there"

    def finish(self) -> None:
        """Complete the summary after the last task."""
        summary = self._summary
        while self._early:  # the audit ended at the first difference
            self._add_in_order(heapq.heappop(self._early)[2])
        summary.equal = not summary.differing_ranges
        compared = self._next - summary.start - self._skipped_bytes
        summary.bytes = max(0, compared)
        if summary.seconds:
            summary.mb_per_s = round(summary.bytes / summary.seconds / 1e6, 1)
        summary.complete = summary.complete and self._next >= summary.end
        if self._equal and self._next >= summary.end:
            summary.digest = self._digest.digest().hex()
        summary.differing = summary.differing[:LISTED_MAX]

    def _add_in_order(self, found: TaskResult) -> None:
        summary = self._summary
        summary.ranges += found.ranges
        summary.differing_ranges += len(found.differing)
        if len(summary.differing) < LISTED_MAX:
            summary.differing += found.differing
        summary.ignored_bytes += found.ignored_bytes
        for each in found.skipped:
            summary.not_compared.append(NotCompared(each.start, each.end, each.why))
            summary.complete = summary.complete and not each.cut
            self._skipped_bytes += each.end - each.start
        if summary.first is None:
            summary.first = found.first
        if found.differing or found.skipped or found.ignored_bytes:
            self._equal = False
        if self._certain:
            ends = [each.start for each in found.skipped if each.cut]
            ends += [found.first.byte] if found.first is not None else []
            self._certain = not ends
            summary.equal_until = min(ends, default=self._next)
        self._digest.update(memoryview(found.digests))
