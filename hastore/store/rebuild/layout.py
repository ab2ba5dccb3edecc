"""What the steps of a rebuild share: sizes, ranges of the log, and the paths of the work folder.

    WORK/plan           the log that is being read, and the sizes of the files to build
    WORK/pieces/START   what the records of a range contribute: units of queues, keys (extract.py)
    WORK/done/NAME      the result of a task of the second step: which folder in parts/ counts
    WORK/parts/NAME.X   what attempt X of a task has built: some of the queues, or index files
    WORK/new/           the parts put together, as they are put in place in the store
    WORK/old/           what was in their place

A piece, a part or a result counts once it has its final name. The sizes of queue and index files
are those that were given, or as the store's own files show, or the defaults.
"""

import contextlib
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hastore.config.model import StoreConfig
from hastore.errors import StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import NO_ROOM, FileSystem, is_file_name, size_of
from hastore.record.delays import DELAYS_MS, format_levels, parse_levels
from hastore.store.derived.consume_queue import UNIT_BYTES
from hastore.store.derived.deliveries import read_delays
from hastore.store.derived.index_file import index_file_bytes
from hastore.store.derived.unit_files import queue_ids
from hastore.store.state.replay_progress import read_sizes

Task = TypeVar("Task")
Result = TypeVar("Result")

QUEUES, BATCH_QUEUES, INDEX = "consumequeue", "batchconsumequeue", "index"
KINDS = (INDEX, BATCH_QUEUES, QUEUES)  # in the order in which they are put in place
WORK_NAME = "rebuild.tmp"


class Runner(Protocol):
    """Runs a function on each of some tasks, on Spark or in this process."""

    def __call__(
        self, name: str, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result as the tasks end; raise what the function raises."""
        ...


class Steps(Protocol):
    """What a rebuild calls to show how far it is."""

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Begin a step of `total` units (None: unknown)."""
        ...

    def advance(self, amount: int) -> None:
        """Count units of the step as done."""
        ...

    def keep(self, text: str) -> None:
        """Say what remains when the rebuild is stopped now."""
        ...


def run_here(
    name: str, function: Callable[[Task], Result], tasks: Sequence[Task]
) -> Iterator[tuple[Task, Result]]:
    """Run the tasks one after the other in this process: a Runner."""
    del name
    for task in tasks:
        yield task, function(task)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the files to build, and the delays in their units, as in StoreConfig."""

    units: int  # of a consume queue file
    slots: int  # of an index file
    entries: int  # of an index file; entry 0 is unused
    delays_ms: tuple[int, ...] = DELAYS_MS  # of the levels of delayed messages
    delays_from: str = "default"  # or "store", "option"

    @property
    def delay_levels(self) -> str:
        """The delays in RocketMQ's form."""
        return format_levels(self.delays_ms)


@dataclass(frozen=True)
class RangeTask:
    """A range of one log file; a record belongs to the range in which it begins."""

    path: str  # of the log file
    file_start: int
    start: int
    end: int
    exact: bool  # a record or a blank begins at `start`; else the first record is searched
    limit: int  # no byte at or beyond this offset is read
    piece: str  # the file to write
    buckets: int
    keys: bool  # whether the keys are wanted too
    entries: bool = False  # whether the log has entries of DLedger
    delays_ms: tuple[int, ...] = DELAYS_MS


@dataclass(frozen=True)
class RangeResult:
    """What is known of a range after its records were read."""

    start: int
    first: int | None  # where its first record or blank begins; None if it has none
    end: int  # the end of its last record or blank; `start` if it has none
    is_whole: bool  # False if bytes follow that are neither a record nor a blank
    records: int
    keys: int
    last_record: int  # offset; -1 without a record
    last_key_record: int  # offset of the last record with a key; -1 without one
    last_store_ms: int
    buckets: tuple[int, ...]  # those that have data


def bucket_of(topic: str, queue_id: int, buckets: int) -> int:
    """Return the bucket of a queue: the second step builds the queues of a bucket in one task."""
    raw = topic.encode("utf-8", "surrogateescape")
    return zlib.crc32(b"%d/%b" % (queue_id, raw)) % buckets


def attempt(folder: str) -> str:
    """Return a folder name of its own for one attempt of a task: a lost attempt may still write."""
    return f"{folder}.{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn the OSError of a task into a StoreError, which Spark hands to the driver as it is."""
    try:
        yield
    except FileNotFoundError as gone:
        raise StoreError(
            f"{gone.filename} is gone: if retention has removed it meanwhile, run the job again;"
            " the store was not changed"
        ) from gone
    except OSError as failure:
        if failure.errno in NO_ROOM:
            raise StoreFullError(
                f"{failure.filename}: no room; free space on its file system. The store was not"
                " changed"
            ) from failure
        raise StoreError(f"{failure}; the store was not changed") from failure


_DEFAULTS = StoreConfig(root="")


def find_sizes(
    fs: FileSystem,
    root: str,
    *,
    units: int | None = None,
    slots: int | None = None,
    entries: int | None = None,
    delay_levels: str | None = None,
) -> Sizes:
    """Return the sizes and delays for a store; those that are given count before its own.

    Raises UsageError if the store's index files have a size that does not tell slots and entries,
    and for `delay_levels` that are none.
    """
    known = read_sizes(fs, f"{root}/hastore/replay")
    if known is not None:
        own_units, own_slots, own_entries = known
    else:
        own_units = _units_of(fs, root) or _DEFAULTS.consume_queue_units
        own_slots, own_entries = _DEFAULTS.index_slots, _DEFAULTS.index_entries
    noted, source = read_delays(fs, root), "store"
    if delay_levels is not None:
        noted, source = parse_levels(delay_levels), "option"
    delays = (DELAYS_MS, "default") if noted is None else (noted, source)
    sizes = Sizes(units or own_units, slots or own_slots, entries or own_entries, *delays)
    wanted = index_file_bytes(sizes.slots, sizes.entries)
    present = _index_size(fs, root)
    if present not in (None, 0, wanted) and slots is None and entries is None:
        raise UsageError(
            f"{root}/index: its files have {present} bytes, and not {wanted} as with"
            f" {sizes.slots} slots and {sizes.entries} entries; give --index-slots and"
            " --index-entries as the node or broker has them"
        )
    return sizes


def _units_of(fs: FileSystem, root: str) -> int | None:
    """Return how many units the first consume queue file that is found has."""
    for topic, queue_id in queue_ids(fs, root, QUEUES):
        folder = f"{root}/{QUEUES}/{topic}/{queue_id}"
        for name in filter(is_file_name, fs.list_dir(folder)):
            size = size_of(fs, f"{folder}/{name}")
            if size and size % UNIT_BYTES == 0:
                return size // UNIT_BYTES
    return None


def _index_size(fs: FileSystem, root: str) -> int | None:
    names = [name for name in fs.list_dir(f"{root}/{INDEX}") if name.isdigit()]
    return size_of(fs, f"{root}/{INDEX}/{names[0]}") if names else None
