"""Build a store's queues and key index anew, or verify them, with the tasks on Spark.

The work itself is in hastore/store/rebuild. Driver and executors open the store by the same path:
on a cluster it is on a file system that all of them mount.
"""

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyspark.sql import SparkSession

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL, shared_as
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.running import check_session, run_tasks
from hastore.store.rebuild.layout import Sizes, find_sizes
from hastore.store.rebuild.rebuild import (
    RANGE_BYTES,
    Built,
    How,
    check_output,
    check_store,
    rebuild_in_place,
    rebuild_to,
    rebuild_to_verify,
)

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class IndexOptions:
    """What to build, and where.

    Without `output` the files are put in place in the store. `verify` compares and writes nothing
    to the store. Sizes that are None are the store's own, or the defaults of RocketMQ and hastore.
    `work` is the folder for the files that `verify` compares with, by default a new one in the
    system's folder for temporary files.
    """

    path: str
    output: str | None = None
    verify: bool = False
    work: str | None = None
    index: bool = True
    units: int | None = None
    slots: int | None = None
    entries: int | None = None
    delay_levels: str | None = None  # in RocketMQ's form, as in `store.message_delay_level`
    range_bytes: int = RANGE_BYTES


@dataclass(frozen=True)
class IndexSummary:
    """What the job did; `difference` is the first one that `verify` found."""

    store: str
    output: str | None
    verified: bool
    difference: str | None
    first_offset: int
    end_offset: int
    records: int
    queues: int
    batch_queues: int
    units: int
    keys: int
    index_files: int
    kept_queues: int
    refused_queues: tuple[str, ...]
    delay_levels: str  # the delays in the units of delayed messages
    delays_from: str  # "option", "store" or "default"
    seconds: float


def run_index(
    spark: SparkSession, options: IndexOptions, progress: JobProgress | None = None
) -> IndexSummary:
    """Build or verify the queues and the key index of a store.

    Raises UsageError, StoreInUseError if a node has the store open, CorruptRecordError for damage
    in the middle of the log, StoreFullError, StoreError. After an error the store is as it was.
    """
    began_ms = SYSTEM_CLOCK.monotonic_ms()
    check_session(spark)
    _check(options)  # the functions that do the work check the folders
    sizes = _sizes(options)

    def runner(
        name: str, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        return run_tasks(spark, name, function, tasks)

    how = How(
        runner, progress or JobProgress(), range_bytes=options.range_bytes, index=options.index
    )
    difference = None
    if options.verify:
        work = options.work or f"{tempfile.gettempdir()}/hastore-verify-{uuid.uuid4().hex}"
        built, found = rebuild_to_verify(REAL, options.path, work, sizes, how)
        difference = None if found is None else found.text
    elif options.output is not None:
        built = rebuild_to(REAL, options.path, options.output, sizes, how)
    else:
        # Whoever reads the store goes on reading it (store.group_read).
        kept = "hastore" if REAL.is_dir(f"{options.path}/hastore") else "commitlog"
        fs = shared_as(f"{options.path}/{kept}")
        built = rebuild_in_place(fs, options.path, sizes, how)
    return _summary(options, built, sizes, difference, SYSTEM_CLOCK.monotonic_ms() - began_ms)


def check_index(options: IndexOptions) -> None:
    """Check what needs no Spark. Raises UsageError, StoreError."""
    _check(options)
    if options.output is not None:
        check_output(REAL, options.output)
    in_place = not options.verify and options.output is None
    check_store(REAL, options.path, in_place=in_place, index=options.index)
    _sizes(options)


def _check(options: IndexOptions) -> None:
    if options.verify and options.output is not None:
        raise UsageError("give either --verify or --output")
    if options.work is not None and not options.verify:
        raise UsageError("--work is only for --verify")
    if options.work is not None and os.path.isdir(options.work) and os.listdir(options.work):
        raise UsageError(f"--work {options.work}: the folder is not empty; name a new one")


def _sizes(options: IndexOptions) -> Sizes:
    """Return the sizes of the files, and the delays. Raises UsageError."""
    return find_sizes(
        REAL, options.path, units=options.units, slots=options.slots, entries=options.entries,
        delay_levels=options.delay_levels,
    )  # fmt: skip


def _summary(
    options: IndexOptions, built: Built, sizes: Sizes, difference: str | None, spent_ms: float
) -> IndexSummary:
    return IndexSummary(
        store=options.path,
        output=options.output,
        verified=options.verify,
        difference=difference,
        first_offset=built.first_offset,
        end_offset=built.end_offset,
        records=built.records,
        queues=built.queues,
        batch_queues=built.batch_queues,
        units=built.units,
        keys=built.keys,
        index_files=built.index_files,
        kept_queues=built.kept_queues,
        refused_queues=built.refused,
        delay_levels=sizes.delay_levels,
        delays_from=sizes.delays_from,
        seconds=round(spent_ms / 1000, 3),
    )
